"""What is known of a model besides its tensors: its configuration, or that it is an adapter of another model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.errors import ConfigError
from ckpt.export.save_model import ADAPTER_CONFIG, CONFIG
from ckpt.util.checked_json import parse_json

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
