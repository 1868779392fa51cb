"""Everything that ckpt raises on purpose.

CkptError
├── ConfigError            an option, name or URL that cannot be used (also a ValueError)
│   └── SchemeError        a URL whose scheme no storage serves
├── StateError             the live objects and a checkpoint do not fit together
│   ├── UnsupportedError   a value that cannot be held in a checkpoint, named by its path
│   ├── MismatchError      missing or unexpected keys, other shapes, other dtypes
│   └── MetricError        a metric that cannot be ranked
├── CheckpointError        something is wrong with a checkpoint
│   ├── MissingError       there is none by that name (also a LookupError)
│   ├── DamagedError       uncommitted, truncated, altered, or a file is missing
│   │   └── UntrustedError not signed by a key that is trusted, or altered since
│   └── VersionError       written by a newer ckpt
├── StorageError           bytes could not be read or written (also an OSError)
│   ├── AbsentError        no such key
│   ├── TruncatedError     an object ends before the bytes that were asked for
│   ├── DeniedError        the storage knows who asks, and refuses; or does not know
│   ├── FullError          no space left, or a quota or size limit reached
│   ├── LockedError        somebody else holds it
│   ├── NotDurableError    it was written, but may not outlive a crash
│   ├── ConflictError      somebody else has written it meanwhile
│   └── TransientError     may well work if tried again
└── RanksError             ranks did not answer in time, or disagree

Preempted (a SystemExit)   training was told to stop; the state has been saved
"""

from __future__ import annotations

from ckpt.shown import sentence, shown


class CkptError(Exception):
    """The base class of every error that ckpt raises on purpose. Its message is escaped, and holds no secret."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(sentence(arg) if isinstance(arg, str) else arg for arg in args))


class ConfigError(CkptError, ValueError):
    """An option, a name or a URL that cannot be used."""


class SchemeError(ConfigError):
    """A URL whose scheme no storage serves."""


class StateError(CkptError):
    """The live objects and a checkpoint do not fit together."""


class UnsupportedError(StateError):
    """A value that a checkpoint cannot hold. `problems` names every one by its path."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(map(shown, problems))


class MismatchError(StateError):
    """A checkpoint does not fit the live objects. `problems` lists every difference."""

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(map(shown, problems))


class MetricError(StateError):
    """ckpt can't rank checkpoints by this metric: it is NaN, or no checkpoint has it."""


class CheckpointError(CkptError):
    """Something is wrong with a checkpoint."""


class MissingError(CheckpointError, LookupError):
    """There is no checkpoint by that name, or none at all."""


class DamagedError(CheckpointError):
    """A checkpoint was never committed, or is truncated, altered or lacks a file."""


class UntrustedError(DamagedError):
    """No trusted key has signed a checkpoint although you require that, or it was altered after it was signed."""


class VersionError(CheckpointError):
    """A checkpoint in a format newer than this ckpt reads."""


class StorageError(CkptError, OSError):
    """Bytes could not be read or written."""


class AbsentError(StorageError):
    """There is nothing under that key."""


class TruncatedError(StorageError):
    """An object is shorter than the range of bytes that was asked for."""


class DeniedError(StorageError):
    """The credentials, or the permissions of a file, are missing, wrong, or do not allow it."""


class FullError(StorageError):
    """No space is left, or a quota or a file size limit is reached."""


class LockedError(StorageError):
    """Another process, or another manager in this one, holds it."""


class NotDurableError(StorageError):
    """It was written and can be read, but the storage could not confirm that it would survive a crash."""


class ConflictError(StorageError):
    """Somebody else wrote it in the meantime. What they wrote stays."""


class TransientError(StorageError):
    """It may work if you try again."""


def shows_damage(error: BaseException) -> bool:
    """True if an error proves that a checkpoint is damaged: bytes that differ, or are not there.

    Every other error of a storage (no permission, a failing disk, too many open files, no answer) says only that the
    checkpoint could not be read. It may be intact: it must neither be skipped nor be removed.
    """
    return isinstance(error, DamagedError | AbsentError | TruncatedError)


class RanksError(CkptError):
    """Some ranks did not answer within the deadline, or ranks disagree about what to do."""


class Preempted(SystemExit):
    """Training was told to stop (SIGTERM), and ckpt has saved its state.

    It ends the loop and the process with the exit status that a scheduler expects of a terminated job.
    """
