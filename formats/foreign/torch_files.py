"""Single files of `torch.save`: the dict of a training script, a state dict alone, or a checkpoint of Lightning.

Every script has names of its own. What holds tensors by name is a model, what has `state` and `param_groups` is an
optimizer; names that most scripts use say which is which. Prefixes that wrappers of the model have added are removed.
Nothing is executed: an object of a class that is not known is left out by name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.foreign import WRAPPERS
from ckpt.formats.foreign.torch_save import EVERY_NAME, Described, read_values
from ckpt.formats.pieces import PiecedTensor
from ckpt.formats.registry import LIGHTNING, TORCH
from ckpt.formats.tensors import ByteReader

_VERSION = "pytorch-lightning_version"
_WRITTEN_AS = "2.0.0"  # the version whose form is written; Lightning migrates what later ones changed
_TAKEN = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", _VERSION)
_PRECISION = ("MixedPrecision", "MixedPrecisionPlugin", "native_amp_scaling_state")
_WHY = {
    "loops": "only the epoch and the steps are carried over from Lightning's loops",
    "callbacks": "state of Lightning's callbacks, which only they read",
    "hyper_parameters": "the arguments of your module: pass them again",
    "hparams_name": "the arguments of your module: pass them again",
    "datamodule_hyper_parameters": "the arguments of your data module: pass them again",
}
_OWN = "added by a module or a plugin of its own"


def is_lightning(found: Mapping[Any, Any]) -> bool:
    """Whether Lightning wrote what a file of `torch.save` holds."""
    return _VERSION in found and isinstance(found.get("state_dict"), dict)


def lightning_parts(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The state of every part. With several optimizers or schedulers, each has its number."""
    wrong = [key for key in ("optimizer_states", "lr_schedulers") if not isinstance(found.get(key) or [], list)]
    wrong += [] if all(isinstance(name, str) for name in found["state_dict"]) else ["state_dict"]
    if wrong:
        raise ConfigError(f"{where} is not a checkpoint as Lightning writes it: {', '.join(wrong)} can't be read.")
    read = {"model": found["state_dict"]}
    for key, kind in (("optimizer_states", "optimizer"), ("lr_schedulers", "scheduler")):
        states = found.get(key) or []
        read |= {f"{kind}.{number}" if len(states) > 1 else kind: state for number, state in enumerate(states)}
    scalers = [found[key] for key in _PRECISION if found.get(key)]
    return read | ({"scaler": scalers[0]} if scalers else {})


def lightning_counters(found: Mapping[str, Any]) -> dict[str, int]:
    values = {"epoch": _epochs(found), "step": found.get("global_step")}
    return {key: value for key, value in values.items() if type(value) is int and value >= 0}


def _epochs(found: Mapping[str, Any]) -> Any:
    """The epochs that were done. What is saved at the end of an epoch has the number of that epoch beside its model."""
    processed: Any = found.get("loops")
    for key in ("fit_loop", "epoch_progress", "current", "processed"):
        processed = processed.get(key) if isinstance(processed, dict) else None
    numbers = [number for number in (found.get("epoch"), processed) if type(number) is int]
    return max(numbers, default=None)


def lightning_left_out(found: Mapping[str, Any]) -> dict[str, str]:
    """What is not taken over, and why; an empty container is not worth a word."""
    return {str(key): _WHY.get(key, _OWN) for key, value in found.items()
            if key not in (*_TAKEN, *_PRECISION) and value is not None and not _is_empty(value)}  # fmt: skip


def _is_empty(value: Any) -> bool:
    return isinstance(value, dict | list | tuple) and not value


def lightning_document(
    model: Any, optimizers: list[Any], schedulers: list[Any], scaler: Any | None, *, epoch: int, step: int
) -> dict[str, Any]:
    """What Lightning's `Trainer.fit(ckpt_path=...)` and `load_from_checkpoint` read."""
    found = {
        "epoch": epoch,
        "global_step": step,
        _VERSION: _WRITTEN_AS,
        "state_dict": model,
        "loops": _loops(epoch, step),
        "callbacks": {},
        "optimizer_states": optimizers,
        "lr_schedulers": schedulers,
    }
    return found if scaler is None else {**found, _PRECISION[0]: scaler}


def _loops(epoch: int, step: int) -> dict[str, Any]:
    """The progress of Lightning's loops at the beginning of an epoch, after so many steps of the optimizer."""
    none = {"ready": 0, "completed": 0}
    steps = {"total": {"ready": step, "completed": step}, "current": dict(none)}
    batches = {"total": _counts(step), "current": _counts(0), "is_last_batch": False}
    optimizer = {"step": steps, "zero_grad": {"total": {**steps["total"], "started": step},
                                              "current": {**none, "started": 0}}}  # fmt: skip
    other = {"state_dict": {}, "batch_progress": {**batches, "total": _counts(0)}}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": step},
        "epoch_loop.batch_progress": batches,
        "epoch_loop.scheduler_progress": {"total": dict(none), "current": dict(none)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {"optimizer": optimizer},
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": steps,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": other["batch_progress"],
        "epoch_progress": {"total": _counts(epoch), "current": _counts(epoch)},
    }
    names = ("validate_loop", "test_loop", "predict_loop")
    predicted = {"total": _counts(0), "current": _counts(0)}  # without a last batch
    others = {name: {**other, "batch_progress": predicted} if name == names[2] else other for name in names}
    return {"fit_loop": fit, **others}


def _counts(number: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "completed", "started", "processed"), number)


_REPEATED = re.compile(r"(?:module\.)*")  # added by DistributedDataParallel


def unwrapped(names: Iterable[str], *, outside: bool = True) -> dict[str, str]:
    """The bare name for each name. `module.` is removed only if all names begin with it: a model may use it itself.

    `outside`: whether it is removed at all.
    """
    bare = {name: _without_inner(name) for name in names}
    if bare and outside:
        length = min(_length_outside(name) for name in bare.values())
        bare = {name: stripped[length:] for name, stripped in bare.items()}
    _check_distinct(bare)
    return bare


def removed_words(names: Iterable[str]) -> tuple[str, list[str]]:
    """What `unwrapped` removes: the prefix of all names, such as `module.`, and the words inside of some."""
    listed = list(names)
    bare = [_without_inner(name) for name in listed]
    length = min(map(_length_outside, bare), default=0)
    inside = [word for word in WRAPPERS if any(word in name.split(".") for name in listed)]
    return (bare[0][:length] if bare else ""), inside


def _length_outside(name: str) -> int:
    found = _REPEATED.match(name)
    return found.end() if found else 0


def _without_inner(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in WRAPPERS)


def _check_distinct(bare: dict[str, str]) -> None:
    wrapped = defaultdict(list)
    for name, stripped in bare.items():
        wrapped[stripped].append(name)
    doubled = [" and ".join(names) for names in wrapped.values() if len(names) > 1]
    if doubled:
        raise ConfigError(
            f"when ckpt removes the prefixes of wrappers, some names become the same: {'; '.join(doubled)}."
        )


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
        raise DamagedError(f"the file {where} is empty.")
    if reader.read(0, min(length, len(_LEGACY))) == _LEGACY:
        raise ConfigError(
            f"{where} has the format that torch.save used before PyTorch 1.6, which ckpt can't read. Load the file "
            "with torch.load, and save it again with torch.save."
        )
    found = read_values(reader, 0, length, where, EVERY_NAME)
    if isinstance(found, Described):
        raise ConfigError(
            f"{where} holds a {found.name} object, which only the code that wrote it can read. Save the "
            "object's state_dict() instead."
        )
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds {_described(found)}, not the state of a training run.")
    return sorted_out(found, where)


def sorted_out(found: Mapping[Any, Any], where: str, origin: str = TORCH.name) -> SavedDict:
    """What a dict holds, by the parts that a manager has."""
    saved = _of_lightning(found, where) if is_lightning(found) else _of_script(found, origin)
    if not saved.parts:
        raise ConfigError(f"{where} holds no model, only {', '.join(map(str, list(found)[:10])) or 'an empty dict'}.")
    return saved


def _of_lightning(found: Mapping[str, Any], where: str) -> SavedDict:
    parts = lightning_parts(found, where)
    prefixes, told = _prefixes({"model": parts["model"]})
    parts["model"] = _bare(parts["model"])
    skipped = lightning_left_out(found) | told
    return SavedDict(
        origin=LIGHTNING.name, parts=parts, counters=lightning_counters(found), skipped=skipped, prefixes=prefixes
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
