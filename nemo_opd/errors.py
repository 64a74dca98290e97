"""The errors a user can cause. Each is also the matching builtin, so `except ValueError` keeps working.

A message says what is wrong (with the key and the value), why, and what to do about it.
All of them survive pickling, because workers raise them in other processes.
"""


class OPDError(Exception):
    """Base of every error raised on purpose by nemo_opd."""


class ConfigError(OPDError, ValueError):
    """A key, a value or a combination of values that cannot work."""


class DataError(OPDError, ValueError):
    """Training or validation data that cannot be read or used."""


class ModelError(OPDError, ValueError):
    """A model folder or tokenizer that cannot be loaded or does not fit its role."""


class AlignmentError(OPDError, ValueError):
    """Token ids or tokenizers that cannot be aligned."""


class ProjectionError(OPDError, ValueError):
    """A projection matrix that is malformed or belongs to another pair of tokenizers."""


class HandoffError(OPDError, RuntimeError):
    """A teacher's output that could not be handed to the student."""


class SenderGoneError(HandoffError):
    """A teacher's output of which the process has ended, whose own error says why."""


class RolloutError(OPDError, RuntimeError):
    """A rollout engine, a reward or an environment that does not do its part."""


class EndpointError(OPDError, RuntimeError):
    """A server that does not answer for a teacher, or otherwise than it should."""


class CheckpointError(OPDError, RuntimeError):
    """A checkpoint that is incomplete, unreadable or of another run."""


class DamagedError(CheckpointError):
    """A checkpoint of which a file is missing, or not as it was written."""


class StorageError(OPDError, OSError):
    """A file that cannot be written: a full disk, a quota, permissions."""


class HubError(OPDError, RuntimeError):
    """A model that could not be pushed to the Hugging Face Hub; its folder is as it was."""


class CallbackError(OPDError, RuntimeError):
    """An exception in a user's callback; the traceback is a note of this one."""


class NotFiniteError(OPDError, FloatingPointError):
    """Training that has produced NaN or infinity."""


class ClusterError(OPDError, RuntimeError):
    """Resources that are not there, or a worker that died."""


class WorkerError(ClusterError):
    """An exception inside a worker, with its group and rank; the traceback, if there is one, is a note of this one."""

    def __init__(self, group: str, rank: int, error: str, traceback: str) -> None:
        super().__init__(group, rank, error, traceback)
        self.group = group
        self.rank = rank
        self.error = error
        self.traceback = traceback
        if traceback:
            self.add_note(traceback)

    def __str__(self) -> str:
        return f"{self.group} rank {self.rank} failed: {self.error}"
