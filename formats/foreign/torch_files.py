"""Single files of `torch.save`: what a training script keeps in a dict, or a state dict alone.

Every script has names of its own. What holds tensors by name is a model, what has `state` and `param_groups` is an
optimizer; names that most scripts use say which is which. Nothing is executed: an object of a class that is not known
is left out by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.foreign import lightning
from ckpt.formats.foreign.pickle_reader import EVERY_NAME, Described
from ckpt.formats.foreign.torch_save import read_values
from ckpt.formats.foreign.wrapper_prefixes import removed_words, unwrapped
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import LIGHTNING, TORCH
from ckpt.formats.transfers import ByteReader

RNG = "rng"
_ENDINGS = ("_state_dict", "_state", "_states", "_dict")
_NAMES = {
    "model": ("model", "state", "state_dict", "net", "network", "module", "weights", "params"),
    "optimizer": ("optimizer", "optim", "opt"),
    "scheduler": ("scheduler", "lr_scheduler", "lr_sched", "sched"),
    "scaler": ("scaler", "grad_scaler", "gradscaler", "amp"),
}
_NUMBERED = ("scheduler", "scaler", "custom")  # with a number or a name behind it, only ckpt calls something so
_STEPS = ("global_step", "step", "steps", "iteration", "iterations", "iter", "iter_num")  # of several, the first
_COUNTERS = {"epoch": "epoch", "batch": "batch", "samples": "samples", **dict.fromkeys(_STEPS, "step")}
_MOST = 1 << 53
_LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the pickle of a number, with which such a file begins


@dataclass(frozen=True, kw_only=True)
class SavedDict:
    """What a file holds: the state of parts by key, counters, generators; and what was left out, with the reasons."""

    origin: str = TORCH.name
    parts: Mapping[str, Any]
    counters: Mapping[str, int] = field(default_factory=dict)
    rng: Mapping[str, Any] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)  # `module.`, which all names of a model had


def read_file(reader: ByteReader, length: int, where: str) -> SavedDict:
    """What `torch.save`, or Lightning, wrote to a file. Tensors are `PiecedTensor`s, which are not read yet."""
    if not length:
        raise DamagedError(f"{where} is empty: it has 0 bytes.")
    if reader.read(0, min(length, len(_LEGACY))) == _LEGACY:
        raise ConfigError(
            f"{where} is in the form that torch.save had before PyTorch 1.6, which is not read. With PyTorch, load it "
            "with torch.load and save it again with torch.save."
        )
    found = read_values(reader, 0, length, where, EVERY_NAME)
    if isinstance(found, Described):
        raise ConfigError(
            f"{where} holds an object of {found.name}, which only the code it came from can read. Save "
            "its state_dict() instead."
        )
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds {_described(found)}, and no state of a training.")
    return sorted_out(found, where)


def sorted_out(found: Mapping[Any, Any], where: str, origin: str = TORCH.name) -> SavedDict:
    """What a dict holds, by the parts that a manager has."""
    saved = _of_lightning(found) if lightning.is_lightning(found) else _of_script(found, origin)
    if not saved.parts:
        raise ConfigError(f"{where} holds no model: it has {', '.join(map(str, list(found)[:10])) or 'nothing'}.")
    return saved


def _of_lightning(found: Mapping[str, Any]) -> SavedDict:
    parts = lightning.parts(found)
    prefixes, told = _prefixes({"model": parts["model"]})
    parts["model"] = _bare(parts["model"])
    skipped = lightning.left_out(found) | told
    return SavedDict(
        origin=LIGHTNING.name, parts=parts, counters=lightning.counters(found), skipped=skipped, prefixes=prefixes
    )


def _of_script(found: Mapping[Any, Any], origin: str) -> SavedDict:
    if _is_model(found):
        prefixes, told = _prefixes({"model": found})
        return SavedDict(origin=origin, parts={"model": _bare(found)}, skipped=told, prefixes=prefixes)
    found = _with_model_gathered(found)
    parts: dict[str, Any] = {}
    counters: dict[str, int] = {}
    skipped: dict[str, str] = {}
    rng: Mapping[str, Any] | None = None
    keys = _keys_of_parts(found)
    taken = _counters(found)
    for key, value in found.items():
        if key in keys:
            parts[keys[key]] = _bare(value) if _is_model(value) else value
        elif _is_counter(key, value):
            counter = _COUNTERS[key]
            counters[counter] = found[taken[counter]]
            if value != counters[counter]:
                skipped[key] = f"{value}: {taken[counter]} is taken for the {counter}, which is {counters[counter]}"
        elif key == RNG and isinstance(value, dict):
            rng = value
        else:
            skipped[str(key)] = f"{_described(value)}: a value of the script's own, which no part takes"
    prefixes, told = _prefixes({keys[key]: found[key] for key in keys if _is_model(found[key])})
    return SavedDict(origin=origin, parts=parts, counters=counters, rng=rng, skipped=skipped | told, prefixes=prefixes)


def _with_model_gathered(found: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The tensors that lie beside the other parts (`layers.0.weight`, as torchtitan has them) as the model."""
    tensors = {key: value for key, value in found.items() if isinstance(key, str) and isinstance(value, PiecedTensor)}
    known = any(_bare_name(key) in _NAMES["model"] for key in found)
    if known or not any("." in name for name in tensors):
        return found
    return {"model": tensors, **{key: value for key, value in found.items() if key not in tensors}}


def _keys_of_parts(found: Mapping[Any, Any]) -> dict[Any, str]:
    """The key that a manager has for each entry which is the state of a part."""
    kinds = {key: kind for key, value in found.items() if (kind := _kind(key, value))}
    keys: dict[Any, str] = {}
    for kind in dict.fromkeys(kinds.values()):
        mine = [key for key, other in kinds.items() if other == kind]
        main = _main(kind, mine)
        if main is not None:
            keys[main] = kind
        for key in mine:
            if key != main:  # beside the model, others are the script's own
                own = main is not None or key.startswith(f"{kind}.")  # as ckpt writes the second of several
                keys[key] = _unused(key if own else f"{kind}.{key}", {*keys.values(), *kinds.values()})
    return {key: keys[key] for key in kinds}


def _main(kind: str, keys: list[str]) -> str | None:
    """Of several entries of a kind, the one that most scripts would mean: `model` before `net`; None if none is."""
    known = [key for key in keys if _bare_name(key) in _NAMES.get(kind, ())]
    if not known:
        return keys[0] if len(keys) == 1 and kind in _NAMES else None
    return min(known, key=lambda key: (key != kind, _NAMES[kind].index(_bare_name(key))))


def _unused(name: str, taken: Collection[str]) -> str:
    """The name, or one like it: two entries must not become one part."""
    while name in taken:
        name += "_"
    return name


def _counters(found: Mapping[Any, Any]) -> dict[str, str]:
    """The entry that each counter is taken from."""
    there = [key for key in _COUNTERS if key in found and _is_counter(key, found[key])]
    return {_COUNTERS[key]: key for key in reversed(there)}


def _kind(key: Any, value: Any) -> str | None:
    """`model` or another kind of part, or None: names alone do not make a part, except of small states."""
    if not isinstance(key, str) or not isinstance(value, dict) or _unknown_classes(value):
        return None
    first, _, number = key.partition(".")
    if number and first in _NUMBERED:
        return first
    if _is_model(value):
        return "model"
    if {"state", "param_groups"} <= value.keys():
        return "optimizer"
    return next((kind for kind in ("scheduler", "scaler") if _bare_name(key) in _NAMES[kind]), None)


def is_name_of_part(key: Any) -> bool:
    """Whether scripts call a model, an optimizer or the like by this name."""
    return any(_bare_name(key) in names for names in _NAMES.values())


def _bare_name(key: Any) -> str:
    name = str(key).lower()
    ending = next((ending for ending in _ENDINGS if name.endswith(ending) and name != ending[1:]), "")
    return name.removesuffix(ending)


def _is_model(value: Mapping[Any, Any]) -> bool:
    """Tensors by name; modules may have added state of another kind."""
    if not all(isinstance(name, str) for name in value):
        return False
    others = [item for name, item in value.items() if not isinstance(item, PiecedTensor)]
    named = all(name.endswith("_extra_state") for name, item in value.items() if not isinstance(item, PiecedTensor))
    return len(others) < len(value) and named


def _prefixes(models: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, str]]:
    """The prefix that wrappers gave to all names of each model; and what is left out of names, with the reason."""
    prefixes: dict[str, str] = {}
    told: dict[str, str] = {}
    for part, tensors in models.items():
        prefix, inside = removed_words(tensors)
        prefixes |= {part: prefix} if prefix else {}
        for word in (*([prefix] if prefix else []), *inside):
            told[f"{word!r} in the names of {part}"] = "a wrapper of the model adds it: names are written without it"
    return prefixes, told


def _bare(tensors: Mapping[str, Any]) -> dict[str, Any]:
    names = unwrapped(tensors)
    return {names[name]: tensor for name, tensor in tensors.items()}


def _is_counter(key: Any, value: Any) -> bool:
    return key in _COUNTERS and type(value) is int and 0 <= value < _MOST


def _described(value: Any) -> str:
    if classes := sorted(_unknown_classes(value)):
        return f"an object of {', '.join(classes[:3])}, which is not built"
    return "a tensor" if isinstance(value, PiecedTensor) else f"a {type(value).__name__}"


def _unknown_classes(value: Any) -> set[str]:
    """The classes of the objects in a value that are not plain data."""
    return {found.name for found in _walk([value])}


def _walk(values: Iterable[Any]) -> Iterator[Described]:
    for value in values:
        if isinstance(value, Described):
            yield value
        elif isinstance(value, dict):
            yield from _walk(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            yield from _walk(value)
