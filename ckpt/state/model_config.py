"""The configuration of a Transformers or PEFT model as JSON, from which other tools rebuild it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_FSDP2 = "FSDP"  # the prefix that `fully_shard` puts before a class name


def describe(module: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """The configuration or the adapters of an unwrapped model with these tensor names; empty for other models."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.PeftModel):
        return {"adapters": _adapters(module, names)}
    configuration = sys.modules.get("transformers.configuration_utils")
    config = getattr(module, "config", None)
    if configuration is None or not isinstance(config, configuration.PretrainedConfig):
        return {}
    fields = {**json.loads(config.to_json_string()), "architectures": [type(module).__name__.removeprefix(_FSDP2)]}
    base = {"base": config.name_or_path} if getattr(config, "name_or_path", "") else {}
    return {"config": fields, **base, **_generation(module)}


def _generation(module: Any) -> dict[str, Any]:
    config = getattr(module, "generation_config", None)
    return {} if config is None else {"generation_config": json.loads(config.to_json_string())}


_known: WeakKeyDictionary[nn.Module, tuple[object, dict[str, Any]]] = WeakKeyDictionary()


def _adapters(module: Any, names: Sequence[str]) -> dict[str, Any]:
    """All adapters. Cached until something changes: PEFT takes a tenth of a second for it."""
    key = (tuple(names), repr(module.peft_config))
    if module not in _known or _known[module][0] != key:
        _known[module] = key, {name: _adapter(module, name, names) for name in module.peft_config}
    return _known[module][1]


def _adapter(module: Any, adapter: str, names: Sequence[str]) -> dict[str, Any]:
    """The configuration of an adapter, and its tensors: names in its file, with the names in the model.

    PEFT itself selects and renames them, here applied to empty tensors, whose identities lead back to the names in the
    model. A tensor that PEFT creates has no name in the model.
    """
    from peft import get_peft_model_state_dict

    outlines = {name: torch.empty(0, device="meta") for name in names}
    known = {id(outline): name for name, outline in outlines.items()}
    config = module.peft_config[adapter]
    # "auto" would ask the Hub during a save whether the vocabulary has grown
    embeddings = _targets_embeddings(config)
    kept = get_peft_model_state_dict(module, outlines, adapter, save_embedding_layers=embeddings)
    tensors = {name: known.get(id(outline)) for name, outline in kept.items()}
    return {"config": _adapter_config(module, config), "tensors": tensors}


def _adapter_config(module: Any, config: Any) -> dict[str, Any]:
    """As `PeftModel.save_pretrained` writes it, with sorted sets."""
    config = copy.copy(config)
    config.inference_mode = True
    base = module.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    fields = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    if config.task_type is None:
        base_class = type(base)
        fields["auto_mapping"] = {
            "base_model_class": base_class.__name__.removeprefix(_FSDP2),
            "parent_library": base_class.__module__,
        }
    plain: dict[str, Any] = json.loads(json.dumps(fields, default=str))
    return plain


def _targets_embeddings(config: Any) -> bool:
    from peft.utils.constants import EMBEDDING_LAYER_NAMES

    targets = getattr(config, "target_modules", None) or ()
    return not isinstance(targets, str) and any(name in targets for name in EMBEDDING_LAYER_NAMES)
