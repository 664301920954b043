"""One exception hierarchy: what a caller can catch, and nothing else.

Every message is a single line that names the field or the part and says what would be right.
Errors carry plain strings only, so they survive pickling between processes.
"""

from typing import ClassVar


def printable(text: str) -> str:
    """Text of unknown origin, made safe for a terminal or a log: control characters, line ends and marks of writing
    direction become escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """The same, with its lines kept."""
    return "\n".join(map(printable, text.split("\n")))


def one_line(said: object) -> str:
    """What an error or a program says, with single spaces between its words."""
    return " ".join(str(said).split())


class ArealError(Exception):
    """Base of every error that this package raises on purpose. Its text is safe to print."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(ArealError, ValueError):
    """A setting is wrong. The message starts with the dotted name of the field."""


class ModelError(ArealError, ValueError):
    """A model folder is missing, broken or of an architecture that is not supported."""


class StorageError(ArealError):
    """A storage location is unknown, unreachable or not writable, or what it holds is damaged."""


class TrackingError(ArealError):
    """The tracking server can't be reached or refuses what it is sent."""


class GenerationError(ArealError):
    """A generation server failed a request or can't be reached."""

    drop_reason: ClassVar[str] = "generation"  # of a group whose last try ended so


class ServerLostError(GenerationError):
    """A generation server can no longer be trusted: it died or failed a weight update."""


class RewardError(ArealError):
    """A verifier failed, which says nothing about the completion that it judged."""

    drop_reason: ClassVar[str] = "reward_failed"  # of a group whose last try ended so


class VerifierError(RewardError):
    """A verifier or an environment has a bug. The first line names it, with file and line; traceback, prompt and
    completion follow, indented."""


class RewardTimeoutError(RewardError):
    """A verifier took longer than it may."""

    drop_reason = "reward_timeout"


class RewardWorkerError(RewardError):
    """The process died in which a group was being scored."""

    drop_reason = "reward_worker_died"


class SessionLostError(RewardError):
    """The process that a group was suspended in is gone, with another group's work: nothing that this one has done."""


class RolloutLimitError(ArealError):
    """A rollout asks its policy for more than its context or its turns allow."""


class UserCodeError(ArealError):
    """A verifier or an environment has a bug that ends the run: another try would end the same."""


class LedgerError(ArealError):
    """A transition that the trajectory ledger does not allow."""


class TokenLedgerError(ArealError):
    """The token ledger does not balance: servers have sampled other tokens than its groups account for."""


class DivergenceError(ArealError):
    """A loss, a gradient or a log-probability is not finite."""


class ProcessError(ArealError):
    """A process of the run died, hung or never became ready, and its restarts are spent."""


class ProvisionError(ArealError):
    """Nodes could not be had, or given back; the message is the provisioner's."""


class RunFinished(ArealError):  # noqa: N818 - an ending, not a failure
    """The run has ended: no further batch will be served. The message is the reason."""
