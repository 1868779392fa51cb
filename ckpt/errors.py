"""Everything that ckpt raises on purpose.

CkptError
├── ConfigError            An option, a name or a URL is invalid (also a ValueError)
│   └── SchemeError        ckpt has no storage for the scheme of a URL
├── StateError             the live objects and a checkpoint don't match
│   ├── UnsupportedError   a checkpoint can't hold a value
│   ├── MismatchError      keys are missing or unexpected; shapes or dtypes differ
│   └── MetricError        ckpt can't rank checkpoints by a metric
├── CheckpointError        something is wrong with a checkpoint
│   ├── MissingError       no checkpoint has that name (also a LookupError)
│   ├── DamagedError       uncommitted, truncated, altered, or a file is missing
│   │   └── UntrustedError no trusted key has signed it, or somebody altered it afterwards
│   └── VersionError       a newer ckpt wrote it
├── StorageError           ckpt could not read or write data (also an OSError)
│   ├── AbsentError        the object does not exist
│   ├── TruncatedError     an object lacks some of the bytes that ckpt asked for
│   ├── DeniedError        no permission, or no credentials
│   ├── FullError          no space is left, or a quota or size limit is reached
│   ├── LockedError        another run or process holds the lock
│   ├── NotDurableError    it was written, but may not survive a crash
│   ├── ConflictError      somebody else wrote it in the meantime
│   └── TransientError     it may work if you try again
└── RanksError             ranks did not answer in time, or disagree

Preempted (a SystemExit)   a signal ended training; ckpt has saved the state
"""

from __future__ import annotations

from ckpt.shown import sentence, shown


class CkptError(Exception):
    """The base class of every error that ckpt raises on purpose. The message contains no secrets, so it is safe to
    print."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(sentence(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(CkptError, ValueError):
    """An option, a name or a URL is invalid."""


class SchemeError(ConfigError):
    """A URL has a scheme that ckpt does not support, such as `ftp://`."""


class StateError(CkptError):
    """The live objects and a checkpoint don't match."""


class UnsupportedError(StateError):
    """The state has values that a checkpoint can't hold; `problems` lists them by their paths."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(map(shown, problems))


class MismatchError(StateError):
    """A checkpoint does not fit the live objects. `problems` lists every difference."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(map(shown, problems))


class MetricError(StateError):
    """ckpt can't rank checkpoints by the chosen metric: it is NaN, or no checkpoint has it."""


class CheckpointError(CkptError):
    """A checkpoint is missing, damaged, not trusted, or too new for this version of ckpt."""


class MissingError(CheckpointError, LookupError):
    """No checkpoint has the requested name, or there is no checkpoint at all."""


class DamagedError(CheckpointError):
    """A checkpoint was never committed, is truncated or altered, or lacks a file."""


class UntrustedError(DamagedError):
    """You require a signature, but no trusted key has signed this checkpoint, or somebody altered it after it was
    signed."""


class VersionError(CheckpointError):
    """A newer version of ckpt wrote this checkpoint, in a format that this version can't read."""


class StorageError(CkptError, OSError):
    """ckpt could not read or write data."""


class AbsentError(StorageError):
    """The object that ckpt asked for does not exist."""


class TruncatedError(StorageError):
    """A stored file is too short: it ends before the last byte that ckpt asked for."""


class DeniedError(StorageError):
    """The storage refused a request: the credentials are missing or wrong, or lack a permission."""


class FullError(StorageError):
    """The storage has no space left, or you have reached a quota or a limit on file sizes."""


class LockedError(StorageError):
    """Another process, or another manager in this process, holds the lock on a root or a file."""


class NotDurableError(StorageError):
    """The storage wrote a file, but could not confirm that the file would survive a crash."""


class ConflictError(StorageError):
    """Another process has written the same object, and ckpt did not overwrite it."""


class TransientError(StorageError):
    """The storage failed temporarily: the same call may work if you try again."""


def shows_damage(error: BaseException) -> bool:
    """True if an error proves that a checkpoint is damaged: bytes that differ, or are not there.

    Every other error of a storage (no permission, a failing disk, too many open files, no answer) says only that the
    checkpoint could not be read. It may be intact: it must neither be skipped nor be removed.
    """
    return isinstance(error, DamagedError | AbsentError | TruncatedError)


class RanksError(CkptError):
    """Some ranks did not answer within the deadline, or the ranks made different calls."""


class Preempted(SystemExit):
    """A signal (SIGTERM) ended training, and ckpt has saved the state.

    This exception ends the loop and the process, with the exit status that a scheduler expects after SIGTERM.
    """
