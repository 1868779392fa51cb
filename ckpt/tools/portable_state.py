"""The state of a training as every format is converted from and to: parts, counters, the state of each rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.data.progress import Progress
from ckpt.errors import ConfigError
from ckpt.export.save_model import ADAPTER_CONFIG, CONFIG
from ckpt.formats.checks import damage_reported
from ckpt.formats.native.documents import Decoder, refuse
from ckpt.formats.pieces import PiecedTensor
from ckpt.load.accelerate_state import CUSTOM, ForeignPart, encoded_part, kind_of
from ckpt.load.rank_state import check_rank_state
from ckpt.state.objects import KINDS, is_part_name
from ckpt.state.optimizer import by_name, by_number, nameless
from ckpt.state.registry import RESERVED
from ckpt.util.checked_json import parse_json

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


_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")
_LONGEST = 100  # a file is named after it


def with_part_names(found: PortableState) -> PortableState:
    """The same state under names that a manager can register and a file can have. Those that changed are told."""
    names: dict[str, str] = {key: key for key in found.parts if _is_usable(key)}
    for key in found.parts:
        if key not in names:
            names[key] = _usable(key, names.values())
    told = {
        new: f"{key!r} in the source, which cannot name a part: register it as {new!r}"
        for key, new in names.items()
        if new != key
    }
    parts = {names[key]: part for key, part in found.parts.items()}
    return replace(found, parts=parts, approximated={**found.approximated, **told})


def _is_usable(key: str) -> bool:
    head = key.partition(".")[0]
    free = head in (*KINDS, CUSTOM) if "." in key else key in KINDS
    return all(map(is_part_name, key.split("."))) and len(key) <= _LONGEST and (free or head not in RESERVED)


def _usable(key: str, taken: Collection[str]) -> str:
    stem = ".".join(_UNUSABLE.sub("_", word) or "_" for word in key[: _LONGEST // 2].split("."))
    flat = stem.replace(".", "_")
    tries = (stem, flat, *(f"{flat}_{number}" for number in range(1, len(taken) + 2)))
    return next(name for name in tries if name not in taken and _is_usable(name))


_GENERATION = "generation_config.json"
ADAPTER_ALONE = (
    "an adapter of PEFT, by the names of its file: the model that it adapts is not in the source, and a manager of the "
    "adapted model cannot resume from it. ckpt.load_model loads the source itself"
)
NO_CONFIG = "the source has none, and from_pretrained needs it: save the model's config beside it"


def about_model(beside: Mapping[str, Callable[[], bytes]], names: Iterable[str]) -> dict[str, Any]:
    """The description of a model, as a checkpoint of ours holds it, from the files beside its tensors."""
    if is_adapter(beside):
        adapter = {"config": _fields(ADAPTER_CONFIG, beside), "tensors": {name: name for name in names}}
        return {"adapters": {"default": adapter}}
    found = {"config": CONFIG, "generation_config": _GENERATION} if CONFIG in beside else {}
    return {key: _fields(path, beside) for key, path in found.items() if path in beside}


def is_adapter(beside: Iterable[str]) -> bool:
    return ADAPTER_CONFIG in beside and CONFIG not in beside


def files_left(beside: Iterable[str], kept: Mapping[str, Any]) -> dict[str, str]:
    """The files beside a model that only `hf` keeps; `kept` is what a checkpoint of ours has of them."""
    inside = {CONFIG, _GENERATION, ADAPTER_CONFIG} if kept else set()
    left = sorted(path for path in beside if path not in inside)
    return {", ".join(left): "beside the model: only hf keeps such files"} if left else {}


def _fields(path: str, beside: Mapping[str, Callable[[], bytes]]) -> dict[str, Any]:
    try:
        found = parse_json(beside[path]())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, and no configuration.")
    return found
