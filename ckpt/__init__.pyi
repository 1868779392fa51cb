"""The public names of ckpt, and where each is defined: for type checkers, and for the lazy imports of `__init__.py`."""

from ckpt.data.progress import Progress as Progress
from ckpt.errors import AbsentError as AbsentError
from ckpt.errors import CheckpointError as CheckpointError
from ckpt.errors import CkptError as CkptError
from ckpt.errors import ConfigError as ConfigError
from ckpt.errors import ConflictError as ConflictError
from ckpt.errors import DamagedError as DamagedError
from ckpt.errors import DeniedError as DeniedError
from ckpt.errors import FullError as FullError
from ckpt.errors import LockedError as LockedError
from ckpt.errors import MetricError as MetricError
from ckpt.errors import MismatchError as MismatchError
from ckpt.errors import MissingError as MissingError
from ckpt.errors import NotDurableError as NotDurableError
from ckpt.errors import Preempted as Preempted
from ckpt.errors import RanksError as RanksError
from ckpt.errors import SchemeError as SchemeError
from ckpt.errors import StateError as StateError
from ckpt.errors import StorageError as StorageError
from ckpt.errors import TransientError as TransientError
from ckpt.errors import TruncatedError as TruncatedError
from ckpt.errors import UnsupportedError as UnsupportedError
from ckpt.errors import VersionError as VersionError
from ckpt.export.load_model import load_model as load_model
from ckpt.export.merge import merge as merge
from ckpt.export.push import push_to_hub as push_to_hub
from ckpt.load.restored import Restored as Restored
from ckpt.manager import StateManager as StateManager
from ckpt.options import Mirror as Mirror
from ckpt.options import RankOptions as RankOptions
from ckpt.options import SaveOptions as SaveOptions
from ckpt.root.catalog import Checkpoint as Checkpoint
from ckpt.root.catalog import list_checkpoints as list_checkpoints
from ckpt.root.retention import Keep as Keep
from ckpt.root.verify import verify as verify
from ckpt.tools.convert import Converted as Converted
from ckpt.tools.convert import convert as convert
from ckpt.tools.diff import Diff as Diff
from ckpt.tools.diff import Difference as Difference
from ckpt.tools.diff import diff as diff
from ckpt.tools.prune import Pruned as Pruned
from ckpt.tools.prune import prune as prune
from ckpt.tools.pull import pull as pull

__all__: list[str]
from ckpt.version import __version__ as __version__
