"""The exception hierarchy of this package.

Every message is a single line that names the field or the component, and says what would be correct. Errors carry only
strings, so they can be pickled between processes.
"""

from typing import ClassVar


def printable(text: str) -> str:
    """Make untrusted text safe for a terminal or a log.
    Escapes control characters, line ends and text-direction marks."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """Like `printable`, but keep line ends."""
    return "\n".join(map(printable, text.split("\n")))


def one_line(text: object) -> str:
    """The text of an error or a program's output on one line, with single spaces."""
    return " ".join(str(text).split())


class ArealError(Exception):
    """Base of all errors that this package raises on purpose. Its text is safe to print."""

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class ConfigError(ArealError, ValueError):
    """A setting is wrong. The message starts with the dotted name of the field."""


class ModelError(ArealError, ValueError):
    """A model folder is missing, broken or of an unsupported architecture."""


class StorageError(ArealError):
    """A storage location is unknown, unreachable or not writable, or its contents are damaged."""


class TrackingError(ArealError):
    """The tracking server is unreachable or rejects data."""


class GenerationError(ArealError):
    """A generation server failed a request or is unreachable."""

    drop_reason: ClassVar[str] = "generation"  # drop reason of a group whose last try failed like this


class ServerLostError(GenerationError):
    """A generation server can't be trusted any more: it died, or a weight update failed."""


class RewardError(ArealError):
    """A verifier failed, which says nothing about the completion."""

    drop_reason: ClassVar[str] = "reward_failed"  # drop reason of a group whose last try failed like this


class VerifierError(RewardError):
    """A verifier or an environment has a bug. The first line names it, with file and line.
    Indented lines with traceback, prompt and completion follow."""


class RewardTimeoutError(RewardError):
    """A verifier exceeded its time limit."""

    drop_reason = "reward_timeout"


class RewardWorkerError(RewardError):
    """The process that was scoring a group died."""

    drop_reason = "reward_worker_died"


class SessionLostError(RewardError):
    """The process of a suspended group died because of another group's work."""


class RolloutLimitError(ArealError):
    """A rollout requests more context or turns from its policy than allowed."""


class UserCodeError(ArealError):
    """A verifier or an environment has a bug that ends the run, because another try would fail equally."""


class LedgerError(ArealError):
    """A forbidden state transition in the trajectory ledger."""


class TokenLedgerError(ArealError):
    """The token ledger does not balance: the servers' token count differs from that of the groups."""


class DivergenceError(ArealError):
    """A loss, a gradient or a log-probability is not finite."""


class ProcessError(ArealError):
    """A process of the run died, hung or never became ready, and its restarts are spent."""


class ProvisionError(ArealError):
    """Nodes could not be created or released; the message is the provisioner's."""


class RunFinished(ArealError):  # noqa: N818 - an ending, not a failure
    """The run has ended, so no more batches are served. The message is the reason."""
