"""Parts: managed objects, each with the way to capture its state and to restore it.

A part's state is a tree of values and tensors. To restore it, `check` first reports what does not fit, from a tree with
`SavedTensor`s in place of tensors. Then `restore` requests the tensors and says where each is read to. When the tensors
of all parts have been read, the function that `restore` returned loads the rest into the object.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import nn, optim
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, MultiplicativeLR, SequentialLR

from ckpt.errors import CkptError, StateError, UnsupportedError
from ckpt.formats.layout import Layout, Members
from ckpt.formats.sharded_tensors import empty_like, is_sharded, local_tensor
from ckpt.state.objects import Stateful
from ckpt.state.unwrap import clean_name, gradients, is_engine, is_fsdp1, is_instance, unwrap


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint that has not been read.

    `equals(other, place)` reads what the live tensor `place` holds of this one and of another, and compares them.
    `unsharded`: it was a plain tensor, though its parameter was sharded.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    equals: Callable[[SavedTensor, Any], bool] = field(compare=False, repr=False)
    unsharded: bool = False


Place = Callable[[SavedTensor], Any]  # the tensor to read a saved one into; None: new memory, LEFT: do not read it
LEFT: Final[Any] = object()
WHOLE_PART: Final = "\0whole part"  # the key of a misfit that concerns the part itself: no state has a NUL in a key
TIED_HERE: Final = "with which it is tied here"  # of names of one tensor that have several values in a checkpoint
HOOKS: Final = "comm_hooks"  # the key of DDP's communication hooks
ENGINE: Final = "deepspeed"  # that of an engine


class Read(Protocol):
    """Requests a part's tensors. Returns a function that gives the tree, once the tensors have been read.

    `live`: the places are tensors of live objects. Nothing is read into them before everything has been verified on
    every rank.
    """

    def __call__(self, place: Place | None = None, *, live: bool = False) -> Callable[[], Any]: ...


_log = logging.getLogger("ckpt")


class Caveats:
    """A manager's warnings, each given once, by the main rank. What the report of a resume has named is not repeated.

    `lasting` are those that apply to its checkpoints. A resume from one names them in `Restored.approximated`.
    """

    def __init__(self, *, aloud: bool) -> None:
        self.lasting: dict[str, str] = {}
        self._aloud = aloud
        self._given: set[str] = set()
        self._approximated: dict[str, str] = {}

    def resumed(self, approximated: dict[str, str]) -> None:
        """A checkpoint was loaded: later findings are added to `approximated`, which its `Restored` holds."""
        self._approximated = approximated
        self.lasting.clear()

    def tell(self, key: str, text: str, *, what: str = "") -> None:
        """Warn, once for each key, on the rank whose manager is `aloud`. `what` introduces the text."""
        if key in self._given or text in self._approximated.values():
            return
        self._given.add(key)
        if self._aloud:
            _log.warning("%s%s", what, text)

    def differs(self, key: str, text: str) -> None:
        """Warn that the resumed run differs from an uninterrupted one."""
        self.tell(f"differs/{key}", text)
        self._approximated.setdefault(key, text)

    def note(self, key: str, text: str) -> None:
        """Note that a resume from later checkpoints will not be exact. The warning is given at the next save."""
        self.lasting.setdefault(key, text)

    def tell_lasting(self) -> None:
        for key, text in self.lasting.items():
            self.tell(f"lasting/{key}", text)


@dataclass
class Notes:
    """Remarks of a restore: what was skipped and why, what is approximate, what was resharded."""

    skipped: dict[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    resharded: dict[str, str] = field(default_factory=dict)


def has_state(value: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


@dataclass(frozen=True)
class Replication:
    """Which plain tensors of a part are known to be replicated, by name. All others are compared in full at every save,
    and each rank keeps a copy of its own until then."""

    equal: frozenset[str] = frozenset()  # equal on every rank: compared by their fingerprints
    broadcast: frozenset[str] = frozenset()  # overwritten by rank 0's before they are used: never compared
    all_equal: bool = False
    of_main: bool = False  # only rank 0's state counts, as the object itself declares: never compared

    def is_equal(self, name: str) -> bool:
        return self.all_equal or name in self.equal

    def is_uncertain(self, name: str) -> bool:
        return not (self.of_main or self.is_equal(name) or name in self.broadcast)

    def distrusted(self) -> Replication:
        """The same, where some of what should be equal was found to differ: none of it counts as equal any more."""
        return replace(self, equal=frozenset(), all_equal=False)


UNKNOWN = Replication()


class Part(Protocol):
    """A managed object."""

    key: str
    same_class: bool  # whether a saved state fits only an object of the same class
    can_be_sharded: bool  # whether every rank has it, so that each may write a shard
    is_collective: ClassVar[bool]  # whether every rank must ask it for names and state, and set them, at the same time

    @property
    def kind(self) -> str:
        """The class of the object."""

    @property
    def other_kinds(self) -> tuple[str, ...]:
        """Further classes whose state fits."""

    def capture(self) -> Any:
        """The state as a tree of values and live tensors."""

    def frozen(self) -> frozenset[str]:
        """The names of tensors that training does not change."""

    def about(self, state: Any) -> dict[str, Any]:
        """JSON that other tools need to rebuild the object, beside its state."""

    def is_sharded(self) -> bool:
        """Whether its tensors are sharded over the ranks."""

    def layouts(self, members: Members) -> frozenset[Layout]:
        """The layouts of its sharded tensors over these ranks; empty if every rank has all of them in full."""

    def replication(self, state: Any, members: Members) -> Replication:
        """Which plain tensors of a captured state are equal on each of these ranks by construction."""

    def names(self) -> frozenset[str] | None:
        """The names by which its state may be divided over the ranks; None if it may not."""

    def share(self, state: Any, elsewhere: Collection[str]) -> Any:
        """A saved state, as JSON, without the names that only other ranks have."""

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        """Of tensors that differed between the ranks that saved them: the keys whose state fits no other ranks, each
        with the tensor's name. For the rest, rank 0's value is an acceptable approximation."""

    def check(self, saved: Any) -> dict[str, str]:
        """What of a saved state does not fit, and why, by key; under `WHOLE_PART` if none of it does.

        Changes nothing.
        """

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        """Request a saved state, except what is `unfit`. The returned function loads it, once it has been read."""


class OwnPart(Part, Protocol):
    """State that every rank has of its own, and saves to its own file."""

    for_any_ranks: bool  # whether a rank restores it where another number of ranks has saved it

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        """The checkpoint has none for this rank: note the consequence, or raise if `strict` forbids it."""

    def of_other_ranks(self, saved_by: int) -> Mapping[str, OwnPart]:
        """Parts that load what another number of ranks saved, by their keys; none if that cannot be divided anew."""


class UnshardedPart:
    """Defaults of a part that is saved in full by a single rank."""

    @property
    def other_kinds(self) -> tuple[str, ...]:
        return ()

    for_any_ranks: bool = False
    is_collective: ClassVar[bool] = False

    def of_other_ranks(self, saved_by: int) -> Mapping[str, OwnPart]:
        return {}

    def frozen(self) -> frozenset[str]:
        return frozenset()

    def is_sharded(self) -> bool:
        return False

    def layouts(self, members: Members) -> frozenset[Layout]:
        return frozenset()

    def about(self, state: Any) -> dict[str, Any]:
        return {}

    def replication(self, state: Any, members: Members) -> Replication:
        return UNKNOWN

    def names(self) -> frozenset[str] | None:
        return None

    def share(self, state: Any, elsewhere: Collection[str]) -> Any:
        return state

    def tied_to_ranks(self, names: Collection[str]) -> dict[str, str]:
        return {}


@dataclass
class GradientsPart(UnshardedPart):
    """Gradients of an unfinished accumulation window. Every rank has its own."""

    key: str
    models: Mapping[str, nn.Module]
    same_class: bool = False
    can_be_sharded: bool = False
    kind: str = "gradients"
    of: frozenset[int] | None = None  # identities of the parameters whose gradients are saved; all if None

    def capture(self) -> dict[str, Any]:
        if any(is_fsdp1(model) for model in self.models.values()):
            raise UnsupportedError(
                f"{self.key}: ckpt can't save gradients under FSDP 1, which does not expose them per parameter. Use "
                "fully_shard."
            )
        if any(is_engine(model) for model in self.models.values()):
            raise UnsupportedError(
                f"{self.key}: ckpt can't save gradients under DeepSpeed, which does not expose them. Leave out "
                "saving=ckpt.SaveOptions(gradients=True)."
            )
        return {key: _local(gradients(unwrap(model), self.of)) for key, model in self.models.items()}

    def check(self, saved: Any) -> dict[str, str]:
        return {}  # a gradient fits where its parameter does

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        return lambda: self._load(values())

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        notes.approximated["gradients"] = f"{why}: the accumulation window starts over"

    def _load(self, values: Any) -> None:
        for key, model in self.models.items():
            module = unwrap(model)
            found = values.get(key, {})
            for name, parameter in module.named_parameters():
                gradient = found.get(clean_name(module, name))
                parameter.grad = None if gradient is None else _as_gradient(gradient, parameter)


def _local(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: local_tensor(tensor) for name, tensor in tensors.items()}


def _as_gradient(gradient: torch.Tensor, parameter: nn.Parameter) -> Any:
    if not is_sharded(parameter):
        return gradient.to(parameter.device)
    sharded = empty_like(parameter, gradient.dtype)
    local_tensor(sharded).copy_(gradient)
    return sharded


@dataclass
class ObjectPart(UnshardedPart):
    """An object with `state_dict` and `load_state_dict`: schedulers, scalers, and the user's own."""

    key: str
    value: Stateful
    same_class: bool = False
    can_be_sharded: bool = False
    chunked: bool = False  # each item of a list in its state has a file of its own

    @property
    def kind(self) -> str:
        return type(self._first).__name__

    @property
    def _first(self) -> Stateful:
        joined: Any = self.value
        first: Stateful = joined.objects[0] if is_instance(joined, "ckpt.state.joined.JoinedState") else joined
        return first

    def capture(self) -> Any:
        return self.value.state_dict()

    def replication(self, state: Any, members: Members) -> Replication:
        return Replication(of_main=getattr(self.value, "of_main_rank", False) is True)

    def check(self, saved: Any) -> dict[str, str]:
        problem = problem_with(self._first, saved)  # of other objects than PyTorch's, only they themselves know
        return {WHOLE_PART: problem} if problem else {}

    def restore(self, saved: Any, read: Read, unfit: Mapping[str, str], notes: Notes) -> Callable[[], None]:
        values = read()
        return lambda: self.value.load_state_dict(values())


@dataclass
class RankObjectPart(ObjectPart):
    """An object that every rank saves, and restores, for itself, whatever the number of ranks (`per_rank=True`)."""

    for_any_ranks: bool = True

    @property
    def name(self) -> str:
        """The name that it was registered under: the key has this rank's number after it."""
        return self.key.rpartition("-")[0]

    def missed(self, why: str, notes: Notes, *, strict: bool) -> None:
        notes.approximated[self.name] = f"{why}: this rank is new, and its {self.kind} keeps the state that it has"


@contextmanager
def naming_part(key: str) -> Iterator[None]:
    """Turns an error of a managed object, of whatever class, into a `StateError` that names its part."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        raise StateError(f"{key} could not load its state: {type(error).__name__}: {error}") from error


class Unmarked:
    """Parameters that `ckpt.mark_sharded` has not marked: each is what it is."""

    def __bool__(self) -> bool:
        return False

    def has(self, parameter: Any) -> bool:
        return False

    def whole(self, parameter: Any) -> Any:
        """A marked parameter as the DTensor that it is a shard of; any other as it is."""
        return parameter

    def state_like(self, parameter: Any, key: Any) -> Any:
        """A tensor with the shape and the sharding of the parameter's state under a key."""
        return parameter

    def like(self, parameter: Any, value: Any, key: Any = None) -> Any:
        """State of a parameter: of a marked one, what has its shape, or is factored, is a shard as the parameter is."""
        return value

    def in_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A model's state with marked parameters as DTensors; one under several names is one object."""
        return dict(state)


def marks_in(models: Iterable[nn.Module]) -> Unmarked:
    """What `ckpt.mark_sharded` says about the parameters of models. Who has called it has imported its module."""
    module = sys.modules.get("ckpt.state.marked_shards")
    found: Unmarked = Unmarked() if module is None else module.MarkedShards(models)
    return found


# -- states that PyTorch's optimizers, schedulers and scalers would not accept: found before live tensors change -------

_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_WITH_STEPS = (  # these look for it in the first state that they are given
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop,
)  # fmt: skip
_LISTS = {
    LambdaLR: "lr_lambdas",
    MultiplicativeLR: "lr_lambdas",
    SequentialLR: "_schedulers",
    ChainedScheduler: "_schedulers",
}


def problem_with(live: Any, saved: Any) -> str:
    """Why a scheduler or scaler cannot have this state; empty if it can, or is none of PyTorch's own."""
    if type(live).__name__ == "AcceleratedScheduler":
        live = live.scheduler  # which it passes its state on to
    if not isinstance(live, LRScheduler | ChainedScheduler | GradScaler) or not _loads_as_torch_does(live):
        return ""
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        return f"no state of a {type(live).__name__}"
    if isinstance(live, GradScaler):
        odd = [key for key in _SCALER if not isinstance(saved.get(key), int | float)] if saved else []
    else:
        lists = [key for kind, key in _LISTS.items() if isinstance(live, kind)]
        odd = [key for key in lists if not isinstance(saved.get(key), list | tuple)]
    return f"no state of a {type(live).__name__}: {', '.join(odd)} missing or of another kind" if odd else ""


def unusable_states(live: Any, saved: Mapping[str, Any]) -> dict[str, str]:
    """Which states of parameters an optimizer cannot have, and why; none if it is not of PyTorch's own kinds."""
    if not isinstance(live, optim.Optimizer) or not str(type(live).__module__).startswith("torch.optim"):
        return {}
    unfit = {}
    for name, state in saved.items():
        if not isinstance(state, Mapping):
            unfit[f"state.{name}"] = f"no state of {type(live).__name__}"
        elif isinstance(live, _WITH_STEPS) and "step" not in state:
            unfit[f"state.{name}"] = f"no state of {type(live).__name__}: step is missing"
    return unfit


def _loads_as_torch_does(live: Any) -> bool:
    """Whether its class has not a `load_state_dict` of its own, which may accept anything."""
    return str(type(live).load_state_dict.__module__).startswith("torch.")
