"""What a cloud holds of runs that no state of Terraform has: it was made and never entered one, or it was removed.

`flows.provision.aws` is the one for AWS; another cloud has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

NODE = "aws_instance"  # kind of what is a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Something that there is of a run."""

    kind: str  # as Terraform calls it: aws_instance
    id: str  # as Terraform has it in its states
    run: str
    role: str | None = None  # of a node
    since: float | None = None  # when it was made, in seconds since 1970; None: nobody knows
    near: bool = False  # it is in the network that `control` has made, whatever other stores the account has

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.id

    def __str__(self) -> str:
        return f"{self.kind} {self.id}"


class Cloud(Protocol):
    """Raises ProvisionError."""

    def found(self, run: str | None = None) -> list[Found]:
        """What there is of a run, or of all of them, nodes first. What is about to be gone is left out."""
        ...

    def end(self, found: Iterable[Found], confirm: Callable[[], None]) -> None:
        """End these, in an order in which that can be done, and wait until they are gone. What is gone is fine. Before
        each of them, and while it waits, `confirm` is called, which raises once this process may do so no more."""
        ...
