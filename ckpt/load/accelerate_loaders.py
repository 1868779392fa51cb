"""Where loaders were, by the `dl_state_dict.bin` that Accelerate writes with `use_stateful_dataloader=True`.

The state is one of torchdata's StatefulDataLoader. It becomes a position as ckpt itself saves them, so that the next
pass continues there, and so that the saves after it know where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

from ckpt.data.cursor import reads_per_batch
from ckpt.data.loader_info import goes_by_index, keeper_of, only_counts, size_of
from ckpt.errors import DamagedError
from ckpt.load.reader import CheckpointReader
from ckpt.ranks.group import Ranks
from ckpt.state import samplers
from ckpt.state.parts import Notes
from ckpt.util.checked_json import is_count

_IN_ORDER = (SequentialSampler, BatchSampler)
_UNSAID = "what {origin} saved does not say where every loader was"


def foreign_positions(
    reader: CheckpointReader, loaders: Mapping[str, Any], ranks: Ranks, notes: Notes
) -> dict[str, dict[str, Any]]:
    """The positions of loaders that another tool has saved; of the others, and of what is not exact, a note each."""
    positions = {}
    for key, loader in loaders.items():
        notes.skipped.pop(key, None)
        state = _state(reader, key) if key in reader.parts else None
        done, finished = _progress(state, f"{reader.manifest.name}: {key}") if state is not None else (None, False)
        why = _why_not(reader, loader, ranks, done=done)
        if why:
            skipped = "those that were done" if done is None else done
            notes.approximated[key] = (
                f"its epoch begins anew, because {why}. For the middle of it call "
                f"accelerator.skip_first_batches(loader, {skipped})"
            )
        elif done and not finished:  # at the end of an epoch such a loader begins the next one
            positions[key] = {"batches": done, "world_size": ranks.world_size, "state": state}
            if remark := _order(loader, state, done):
                notes.approximated[key] = remark
    return positions


def _state(reader: CheckpointReader, key: str) -> Any:
    """A loader's state, with its tensors read."""
    read = reader.ask(key)
    reader.read_new()
    return read()


def _progress(state: Any, where: str) -> tuple[int | None, bool]:
    """How many batches were handed out, and whether the epoch was over. With workers, it is counted in two places."""
    if not isinstance(state, Mapping):
        raise DamagedError(f"{where} is not the state of a loader.")
    done = state.get("_num_yielded")
    if done is None and isinstance(snapshot := state.get("_snapshot"), Mapping):
        counts = (snapshot.get("_snapshot_step"), state.get("_steps_since_snapshot"))
        done = sum(counts) if all(map(is_count, counts)) else None  # type: ignore[arg-type]
    return (done if is_count(done) else None), state.get("_iterator_finished") is True


def _why_not(reader: CheckpointReader, loader: Any, ranks: Ranks, *, done: int | None) -> str | None:
    """Why a position cannot be taken over, if it cannot."""
    if done is None:
        return _UNSAID.format(origin=reader.manifest.origin)
    if reader.manifest.world_size != ranks.world_size:
        return f"{reader.manifest.world_size} ranks saved it, and {ranks.world_size} load it"
    if ranks.world_size > 1 and reads_per_batch(loader, ranks.rank) != 1:
        return "rank 0 reads for all ranks, and each of them has written this one file"
    size = size_of(loader)
    if size is not None and done > size:
        return f"it says that {done} batches were done, and the loader has {size}"
    base = samplers.reader(loader)
    if not goes_by_index(base) and keeper_of(base) is not base:
        return "the loader keeps no state of its own here, or its stream's state drops samples"
    return None


def _order(loader: Any, state: Any, done: int) -> str | None:
    """What is not said of the order of the epoch, of which `done` batches are skipped."""
    if only_counts(state):
        return (
            f"{done} batches of a stream without a state are read again, and skipped: as torchdata counted them, which "
            "is too many if that run had itself been resumed in this epoch"
        )
    if not goes_by_index(samplers.reader(loader)):
        return None  # the state has it
    drawn = [sampler for sampler in samplers.samplers(loader) if not _keeps_order(sampler)]
    if not drawn:
        return None
    if any(hasattr(sampler, "initial_seed") for sampler in drawn):
        return (
            f"{done} batches are skipped in the order of epoch {loader.iteration}: which one it was is not saved. Call "
            "loader.set_epoch(epoch) before the loop if it was another"
        )
    return (
        f"{done} batches are skipped, of an order that {type(drawn[-1]).__name__} draws anew: what it was is not "
        "saved. With use_seedable_sampler=True it would be the same"
    )


def _keeps_order(sampler: Any) -> bool:
    ours = type(sampler).__module__.startswith("accelerate.") and not hasattr(sampler, "initial_seed")
    return type(sampler) in _IN_ORDER or ours
