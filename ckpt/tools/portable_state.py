"""The state of a training as every format is converted from and to: parts, counters, the state of each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import ConfigError
from ckpt.formats.damage import damage_reported
from ckpt.formats.native.json_values import Decoder, refuse
from ckpt.formats.pieces import PiecedTensor
from ckpt.load.accelerate_state import ForeignPart, encoded_part, kind_of
from ckpt.load.rank_state import check_rank_state
from ckpt.state.optimizer import by_name, by_number, nameless

_OPTIMIZER = "state of an optimizer"
Outcome = tuple[tuple[str, ...], dict[str, str]]  # the parts that were written; what was not, with the reasons


@dataclass(frozen=True, kw_only=True)
class PortableState:
    """What a save holds, whoever wrote it. Tensors are read when they are written.

    `approximated` and `skipped` say what is not exact, and what was left out when it was read. `own_state` gives the
    state of a rank; a format that has none leaves it out. `beside` are other files: a configuration, a tokenizer.
    `about` describes the only model: its configuration, or its adapters.
    """

    origin: str
    name: str
    parts: Mapping[str, ForeignPart]
    progress: Progress = field(default_factory=Progress)
    world_size: int = 1
    approximated: Mapping[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    own_state: Callable[[int], dict[str, Any]] | None = None
    beside: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def written(self) -> tuple[str, ...]:
        return (*self.parts, "rng") if self.generators(0) is not None else tuple(self.parts)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """A rank's own state, as a manager saves it. What is approximated, a manager says again when it loads it."""
        if self.own_state is not None:
            return self.own_state(rank)
        state = {"generators": {}, "loaders": {}, "source": {}, "lacking": dict(self.approximated)}
        return check_rank_state(state, self.origin)

    def generators(self, rank: int) -> dict[str, Any] | None:
        """The global random generators of a rank. None where the format keeps none."""
        return self.own_state(rank).get("rng") if self.own_state else None

    def of_kind(self, kind: str) -> list[str]:
        """The keys of the parts of a kind: `model`, or `model.0` and `model.1`."""
        return [key for key in self.parts if kind_of(key) == kind]

    def tree(self, key: str) -> Any:
        """The state of a part, with `PiecedTensor`s where tensors are; tensors of special kinds are read."""
        part = self.parts[key]
        return _LazyDecoder(part.tensors.__getitem__, f"{self.name}: {key}").decode(part.values)

    def numbered(self, key: str) -> Any:
        """The state of an optimizer as torch's `state_dict` has it: parameters by number."""
        values = self.tree(key)
        if not _is_of_torch(values):
            return values
        with damage_reported(f"{self.name}: {key}", _OPTIMIZER):
            return by_number(values)

    def has_names(self, key: str) -> bool:
        """Whether the parameters of an optimizer are known by name: many formats number them."""
        values = self.tree(key)
        if not _is_of_torch(values):
            return True
        with damage_reported(f"{self.name}: {key}", _OPTIMIZER):
            names = [str(name) for group in values["param_groups"] for name in group["params"]]
            return not any(name.startswith(nameless("")) for name in names)

    def size(self, key: str) -> int:
        """The bytes of a part's tensors."""
        part = self.parts[key]
        sizes = ((dtype.itemsize, shape) for dtype, shape in map(part.about, part.tensors))
        return sum(itemsize * _elements(shape) for itemsize, shape in sizes)

    def the_model(self) -> str:
        """The key of the only model, for formats that hold one."""
        keys = self.of_kind("model")
        if len(keys) != 1:
            named = f"{len(keys)} models ({', '.join(keys)})" if keys else "no model"
            raise ConfigError(f"{self.name} has {named}, and this format holds one.")
        return keys[0]


class _LazyDecoder(Decoder):
    """Leaves tensors where they are; those of special kinds, and arrays of NumPy, are read."""

    def _numpy(self, tag: str, inner: Mapping[str, Any], depth: int) -> Any:
        return self._reading()._numpy(tag, inner, depth)

    def _packed(self, inner: Mapping[str, Any], depth: int) -> Any:
        return self._reading()._packed(inner, depth)

    def _reading(self) -> Decoder:
        return Decoder(lambda name: _read(self.tensor(name)), self.where)


def position_of(key: str) -> int:
    """The number at the end of a key, by which parts of a kind are ordered; 0 if there is none."""
    number = key.rpartition(".")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0


def plain_generators(rng: Mapping[str, Any]) -> dict[str, Any]:
    """The states of generators without arrays of NumPy, which `torch.load(weights_only=True)` would refuse."""
    numpy = rng.get("numpy")
    if numpy is None:
        return dict(rng)
    inner = {**numpy["state"], "key": [int(word) for word in numpy["state"]["key"]], "pos": int(numpy["state"]["pos"])}
    return {**rng, "numpy": {**numpy, "state": inner}}


def _read(tensor: Any) -> Any:
    return tensor.read(tensor.box) if isinstance(tensor, PiecedTensor) else tensor


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def encoded(trees: Mapping[str, Any], where: str) -> dict[str, ForeignPart]:
    """The parts of these states. The error names every value that a checkpoint cannot hold."""
    problems: list[str] = []
    named = {key: _named(tree, where) if kind_of(key) == "optimizer" else tree for key, tree in trees.items()}
    found = {key: encoded_part(key, tree, problems) for key, tree in named.items()}
    refuse(problems)
    return found


def _named(tree: Any, where: str) -> Any:
    """The state of an optimizer by parameter name; numbers become keys of their own."""
    if not _is_of_torch(tree):
        return tree
    with damage_reported(where, _OPTIMIZER):
        return by_name(tree)


def _is_of_torch(tree: Any) -> bool:
    """Whether it is the state of an optimizer of torch; others are kept as they are."""
    return isinstance(tree, dict) and {"state", "param_groups"} <= tree.keys()
