"""What every rank of `benchmarks.ranks` does: it trains, saves, counts, and is killed, frozen or resumed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckpt
from benchmarks.scale import Model
from benchmarks.shared.counted_objects import SharedObjects
from benchmarks.shared.forked_ranks import memory
from benchmarks.shared.measure import peak
from ckpt.formats.sharded_tensors import is_sharded, local_tensor
from ckpt.ranks.store_and_heartbeats import TimedStore
from ckpt.ranks.store_group import StoreGroup
from ckpt.storage.base import ANY, Buffer
from ckpt.storage.object_storage import ObjectStorage
from tests.helpers.pipelines import WAYS

FSDP, PIPELINES, PLAIN = "FSDP 2", "pipelines of 8 stages, FSDP 2 in each", "the simulation's model"
FIRST, NEXT, RESUME, AFTER = "first save", "next save", "resume", "save after it"
TIMEOUT = 600.0  # nobody is lost there
_WIDTH = 512  # small: all that is here, hundreds of ranks have
TENSORS = 100  # of the simulation's model


class Training:
    """A model and its optimizer as this rank has them."""

    def __init__(self, kind: str, seed: int) -> None:
        self.model: nn.Module
        self.optimizer: torch.optim.Optimizer | None = None
        if kind == FSDP:
            torch.manual_seed(seed)
            self.model = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH))
            fully_shard(self.model)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self._step: Callable[[int], object] = self._whole_step
        elif kind == PIPELINES:
            job = WAYS["pp8-fsdp"](seed)
            (self.model,), (self.optimizer,) = job.parts, job.optimizers
            self._step = job.step
        else:
            self.model = Model(dist.get_world_size(), TENSORS)
            self._step = lambda _: None

    def _whole_step(self, number: int) -> None:
        assert self.optimizer is not None
        self.optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 2 * _WIDTH).reshape(2, _WIDTH) * (1 + number)
        self.model(inputs).pow(2).mean().backward()
        self.optimizer.step()

    def step(self, number: int) -> None:
        """A real one: forward, backward, and the collectives of all ranks."""
        self._step(number)
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def local_state(self) -> dict[str, tuple[bool, bytes]]:
        """By name: whether this rank has a part of the tensor only, and the bytes that it has."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        found: dict[str, Any] = {name: parameter.detach() for parameter, name in names.items()}
        for parameter, values in (self.optimizer.state if self.optimizer else {}).items():
            found |= {f"{names[parameter]}/{key}": value for key, value in values.items()}
        return {name: (is_sharded(value), _bytes(value)) for name, value in found.items()}


def _bytes(tensor: torch.Tensor) -> bytes:
    held = local_tensor(tensor) if is_sharded(tensor) else tensor
    return held.detach().contiguous().numpy().tobytes()


class Counts:
    """What this rank sends to the storage and to the store of the process group."""

    def __init__(self, objects: SharedObjects) -> None:
        self.objects = objects
        self.sent: Counter[str] = Counter()

    def watch(self) -> None:
        broadcast, call, check = StoreGroup.broadcast, TimedStore._call, TimedStore.check
        sent = self.sent

        def counted_broadcast(group: StoreGroup, name: str, data: str) -> str:
            sent["exchanges"] += 1
            return broadcast(group, name, data)

        def counted_call(store: TimedStore, do: Callable[[], Any]) -> Any:
            sent["calls"] += 1
            return call(store, do)

        def counted_check(store: TimedStore, keys: list[str]) -> bool:
            sent["looks"] += 1
            return check(store, keys)

        StoreGroup.broadcast = counted_broadcast  # type: ignore[method-assign]
        TimedStore._call = counted_call  # type: ignore[method-assign, assignment]
        TimedStore.check = counted_check  # type: ignore[method-assign]

    def clear(self) -> None:
        self.sent.clear()
        self.objects.requests.clear()

    def found(self) -> dict[str, float]:
        return {**self.sent, **self.objects.requests}


class Rank:
    """One rank: where it leaves its figures, and what it has counted."""

    def __init__(self, rank: int, folder: Path, kind: str, seed: int, timeout: float = TIMEOUT) -> None:
        self.rank, self.folder = rank, folder
        self.objects = SharedObjects("bucket/run", folder / "objects")
        self.counts = Counts(self.objects)
        self.counts.watch()
        self.figures: dict[str, dict[str, float]] = {}
        self.training = Training(kind, seed)
        optimizer = {} if self.training.optimizer is None else {"optimizer": self.training.optimizer}
        options = ckpt.RankOptions(timeout=timeout, broadcast=False)
        storage = ObjectStorage(self.objects)
        self.manager = ckpt.StateManager(storage, model=self.training.model, ranks=options, **optimizer)

    def phase(self, name: str, do: Callable[[], object]) -> None:
        """All ranks begin at once."""
        dist.barrier()
        self.counts.clear()
        began, computed = time.perf_counter(), time.process_time()
        more = peak(do)
        times = {"seconds": time.perf_counter() - began, "computing": time.process_time() - computed}
        self.figures[name] = {**times, "more memory": more or 0, **self.counts.found(), **memory()}

    def leave(self, what: str, value: object) -> None:
        Path(self.folder, f"{what}-{self.rank}").write_bytes(pickle.dumps(value))


def saves(rank: int, folder: Path, kind: str, killed: bool) -> None:
    """Two saves, and a third in whose middle all ranks are killed: the last rank writes none of its files."""
    it = Rank(rank, folder, kind, seed=1)
    it.manager.resume()
    it.training.step(0)
    it.phase(FIRST, partial(it.manager.save_state, "step-1", wait=True))
    it.training.step(1)
    it.phase(NEXT, partial(it.manager.save_state, "step-2", wait=True))
    it.leave("saved", it.training.local_state())
    it.leave("figures", it.figures)
    if not killed:
        it.manager.close()
        return
    it.training.step(2)
    if rank == dist.get_world_size() - 1:
        put = it.objects.put

        def stuck(key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
            Path(folder, "stuck").touch()
            signal.pause()
            return put(key, pieces, over=over)

        it.objects.put = stuck  # type: ignore[method-assign]
    with suppress(ckpt.CkptError):
        it.manager.save_state("step-3", wait=True)
    raise AssertionError("should have been killed")


def resumes(rank: int, folder: Path, kind: str) -> None:
    """A resume on as many ranks as there are now, then one save more."""
    it = Rank(rank, folder, kind, seed=2)

    def resume() -> None:
        restored = it.manager.resume()
        assert restored is not None, "there was nothing to resume from"
        assert restored.name == "step-2", restored

    it.phase(RESUME, resume)
    it.leave("resumed", it.training.local_state())
    it.training.step(2)
    it.phase(AFTER, partial(it.manager.save_state, "step-4", wait=True))
    it.leave("figures", it.figures)
    it.manager.close()


@dataclass(frozen=True)
class Freeze:
    """Where a rank gets SIGSTOP in a save: before the call, or in a call of that name whose text contains `about`."""

    where: str
    main: bool  # on rank 0, or on one in the middle
    call: str
    about: str = ""
    saved: bool = False  # whether the others save all the same

    def rank(self, ranks: int) -> int:
        return 0 if self.main else ranks // 2 + 1


_WRITTEN = "(files written)"
FREEZES = (
    Freeze("while it writes its files", False, "put", "step-2/"),
    Freeze("before it joins the save", False, ""),
    Freeze("before it describes its state", False, "gather"),
    Freeze("before it hears the plan", False, "broadcast"),
    Freeze("before it reports its files", False, "gather", _WRITTEN),
    Freeze("before it hears of the commit", False, "broadcast", _WRITTEN, saved=True),
    Freeze("rank 0, before it joins the save", True, ""),
    Freeze("rank 0, while it marks the save as begun", True, "put", ".saving"),
    Freeze("rank 0, before it announces the plan", True, "broadcast"),
    Freeze("rank 0, while it writes its files", True, "put", "step-2/model"),
    Freeze("rank 0, before it commits", True, "put", "manifest.json"),
    Freeze("rank 0, before it announces the commit", True, "broadcast", _WRITTEN),
)


def freezes(rank: int, folder: Path, freeze: Freeze, timeout: float) -> None:
    """A save in which one rank freezes: the others leave what they were told, and how long it took."""
    it = Rank(rank, folder, FSDP, seed=1, timeout=timeout)
    it.manager.resume()
    it.manager.save_state("step-1", wait=True)
    with torch.no_grad():
        for parameter in it.training.model.parameters():
            parameter.add_(1.0)
    dist.barrier()
    if rank == freeze.rank(dist.get_world_size()):
        _arrange(it, freeze)
    began, text = time.monotonic(), ""
    try:
        it.manager.save_state("step-2", wait=True)
    except ckpt.CkptError as error:
        text = f"{type(error).__name__}: {error}"
    Path(folder, f"told-{rank}").write_text(json.dumps([time.monotonic() - began, text]))


def _arrange(it: Rank, freeze: Freeze) -> None:
    def stop() -> None:
        Path(it.folder, "frozen").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    if not freeze.call:
        stop()
        return
    target: Any = it.objects if freeze.call == "put" else StoreGroup
    do = getattr(target, freeze.call)

    def stopping(*arguments: Any, **named: Any) -> Any:
        if any(freeze.about in text for text in arguments if isinstance(text, str)):
            stop()
        return do(*arguments, **named)

    setattr(target, freeze.call, stopping)


def joined(folder: Path, what: str, ranks: int) -> dict[str, bytes]:
    """Every tensor whole, from the parts that ranks have left. What ranks have alike must be equal."""
    found: dict[str, bytes] = {}
    for rank in range(ranks):
        left: dict[str, tuple[bool, bytes]] = pickle.loads(Path(folder, f"{what}-{rank}").read_bytes())
        for name, (is_part, data) in left.items():
            if is_part:  # ranks of a mesh are in the order of their parts
                found[name] = found.get(name, b"") + data
            elif found.setdefault(name, data) != data:
                raise AssertionError(f"{name} differs between ranks")
    return found


def figures(folder: Path, ranks: int) -> list[dict[str, dict[str, float]]]:
    return [pickle.loads(Path(folder, f"figures-{rank}").read_bytes()) for rank in range(ranks)]
