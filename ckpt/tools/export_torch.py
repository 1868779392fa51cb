"""Write portable state as one file: of `torch.save`, as a script would, or as Lightning's Trainer does."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.formats.foreign import lightning
from ckpt.formats.foreign.torch_files import RNG
from ckpt.formats.foreign.torch_write import write_file
from ckpt.load.accelerate_state import kind_of
from ckpt.tools.portable_state import Outcome, PortableState, plain_generators, position_of

_LOADER = "the position in the data, which only ckpt and Accelerate continue from"
_LIGHTNING = "Lightning keeps no such part: load it yourself"


def export_torch(state: PortableState, path: Path, advance: Callable[[int], None]) -> Outcome:
    """Write a dict with the state of each part, `epoch`, `step` and the generators of the main rank."""
    tree, skipped = whole_tree(state)
    write_file(os.fspath(path), tree, advance)
    return tuple(key for key in (*state.parts, RNG) if key in tree), skipped


def whole_tree(state: PortableState, *, numbered: bool = True) -> tuple[dict[str, Any], dict[str, str]]:
    """All parts in one dict, and what is left out. Optimizers go by number, or by name where names are known."""
    skipped = dict.fromkeys(state.of_kind("dataloader"), _LOADER)
    tree: dict[str, Any] = {}
    for key in state.parts:
        if key not in skipped:
            is_optimizer = kind_of(key) == "optimizer" and (numbered or not state.has_names(key))
            tree[key] = state.numbered(key) if is_optimizer else state.tree(key)
    for counter, value in state.progress.to_json().items():
        if counter not in tree:
            tree[counter] = value
        elif value:
            skipped[f"progress: {counter}"] = f"{value}: a part has this name"
    rng = state.generators(0)
    if rng is not None:
        tree[RNG] = plain_generators(rng)
    if state.world_size > 1 and rng is not None:
        skipped["rng of other ranks"] = f"one file has those of the main rank; {state.world_size} ranks saved theirs"
    return tree, skipped | left_of_ranks(state)


def left_of_ranks(state: PortableState) -> dict[str, str]:
    """What ranks keep that no other format has a place for."""
    if state.own_state is None:
        return {}
    own = state.rank_state(0)
    found = dict.fromkeys(own.get("values", {}), "a plain value that was registered: only ckpt keeps it")
    found |= dict.fromkeys(own.get("generators", {}), "a generator that was registered: only ckpt keeps it")
    return found | ({"loaders": _LOADER} if own.get("loaders") else {})


def export_lightning(state: PortableState, path: Path, advance: Callable[[int], None]) -> Outcome:
    """Write what `Trainer.fit(ckpt_path=...)` continues from, at the beginning of the epoch."""
    model = state.the_model()
    optimizers, schedulers = (sorted(state.of_kind(kind), key=position_of) for kind in ("optimizer", "scheduler"))
    scalers = state.of_kind("scaler")[:1]
    document = lightning.document(
        state.tree(model),
        [state.numbered(key) for key in optimizers],
        [state.tree(key) for key in schedulers],
        state.tree(scalers[0]) if scalers else None,
        epoch=state.progress.epoch,
        step=state.progress.step,
    )
    write_file(os.fspath(path), document, advance)
    taken = (model, *optimizers, *schedulers, *scalers)
    skipped = {key: _LIGHTNING for key in state.parts if key not in taken} | left_of_ranks(state)
    if state.own_state is not None:
        skipped["rng"] = "Lightning keeps no random generators"
    if state.progress.batch:
        skipped["progress"] = (
            f"epoch {state.progress.epoch} begins anew: {state.progress.batch} batches of it were done"
        )
    return taken, skipped
