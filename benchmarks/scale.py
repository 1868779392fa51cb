"""What thousands of ranks cost the main rank: a save and a resume on one of them, the others simulated.

Real: the manager of rank 0 with its DTensors, the TCPStore and the exchange of all ranks through it, planning, the save
marker, the manifest, the object storage with its leases and the index. Simulated: the other ranks (their answers are
rank 0's with their own file names, and are put into the store before rank 0 asks for them, which is not timed), the
collectives (PyTorch's fake process group), and S3 (objects in memory; its requests are counted, not sent). Of more than
64 ranks, another one writes the documents: a process of its own takes them from the store, and is timed by itself.
"""

from __future__ import annotations

import json
import mmap
import resource
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)

import ckpt
from benchmarks import scale_checkpoints
from benchmarks.scale_checkpoints import LATENCY
from benchmarks.shared.counted_objects import CountedObjects
from benchmarks.shared.measure import in_a_new_process
from benchmarks.shared.report import Run, in_seconds, parser, table
from benchmarks.shared.results import Samples
from ckpt.formats.native.documents import joined_file, joined_name
from ckpt.ranks.store_and_heartbeats import TimedStore
from ckpt.ranks.store_group import BuiltManagers, StoreGroup
from ckpt.root.write_link_commit import hashed
from ckpt.save.transaction import ALONE, IN_A_FILE, LEFT, left_documents
from ckpt.storage.object_storage import ObjectStorage

SIZES = (16, 256, 4096, 16_384)
SAVE, AGAIN, RESUME = "first save", "next save", "resume"
PHASES = (SAVE, AGAIN, RESUME)
KINDS = {"put": "PUT", "get": "GET", "head": "HEAD", "list": "LIST", "delete": "DELETE"}

REAL = "Real: rank 0 with its manager, the TCPStore, planning, manifest, leases, index; the rank that writes documents"
SIMULATED = "Simulated: all other ranks, collectives, and S3, whose requests are counted and not sent"
TIMED = "Seconds are rank 0's, without those that the simulation took; all other ranks wait for it"
REQUESTS = "Requests are rank 0's. Others write their own files; in a resume each takes a lease and reads the manifest"
NOTES = (REAL, SIMULATED, TIMED, REQUESTS)


class Model(nn.Module):
    """Many small tensors, each sharded over all ranks: only their number and layout count here."""

    def __init__(self, ranks: int, count: int) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (ranks,))
        shape = torch.Size((ranks, 2))
        for index in range(count):
            shard = DTensor.from_local(torch.zeros(1, 2), mesh, [Shard(0)], run_check=False, shape=shape, stride=(2, 1))
            self.register_parameter(f"layer_{index}", nn.Parameter(shard))


class OtherRanks:
    """All ranks but the first, as the first sees them: their answers in the store, and their files in the bucket."""

    def __init__(self, ranks: int, objects: CountedObjects, store: TCPStore) -> None:
        self.ranks, self.objects, self.store = ranks, objects, store
        self.document = ""  # of each rank, packed, if these are in the store
        self.writer: dict[str, float] = {}  # what the rank that wrote the first file of documents took
        self.seconds = 0.0  # that were spent on simulation
        self.requests: Counter[str] = Counter()  # of rank 0 to the store
        self.sent = 0  # bytes that rank 0 has received, or the store in its process
        self.exchanges = 0
        self.answers: list[str] = []  # the keys of those that are in the store

    @contextmanager
    def answering(self) -> Iterator[None]:
        gather, broadcast, leave, call = StoreGroup.gather, StoreGroup.broadcast, StoreGroup.leave, TimedStore._call
        others, rest = self, self.ranks - 1

        def answered_gather(group: StoreGroup, name: str, data: str) -> list[str]:
            others.answer(group, data)
            return gather(group, name, data)

        def read_broadcast(group: StoreGroup, name: str, data: str) -> str:
            key = f"{group._turn}/all/read"
            found = broadcast(group, name, data)
            with others.paused():
                for answer in others.answers:
                    group._store._store.delete_key(answer)
                others.answers.clear()
                group._store._store.add(key, rest)
            others.exchanges += 1
            return found

        def left_by_all(group: StoreGroup, key: str, value: str) -> None:
            leave(group, key, value)
            with others.paused():
                group._store._store.delete_key(f"{key}/0")  # it is where the process that takes it finds it
                for rank in range(others.ranks):
                    others.store.set(f"{key}/{rank}", value)
                others.document = value
                others.sent += len(value) * (others.ranks - 1)

        def counted_call(store: TimedStore, do: Any) -> Any:
            others.requests["calls"] += 1
            return call(store, do)

        exchanges = patch.multiple(StoreGroup, gather=answered_gather, broadcast=read_broadcast, leave=left_by_all)
        with exchanges, patch.object(TimedStore, "_call", counted_call):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def answer(self, group: StoreGroup, data: str) -> None:
        with self.paused():
            said = json.loads(data)
            value = said.get("value")
            beside: dict[int, list[Any]] = {}
            if isinstance(value, dict) and "files" in value:
                beside = self._documents(value["files"]) if self.ranks > ALONE else {}
                value["files"] = [entry for entry in value["files"] if "00000." in entry["file"]["name"]]
                for entry in value["files"]:
                    self._copy_file(entry["file"]["path"])
            if isinstance(value, list) and isinstance(value[0], dict) and "names" in value[0]:
                value[0]["names"] = {}  # rank 0 has said them for all
            text = json.dumps(said)
            for rank in range(1, self.ranks):
                answer = text
                if rank in beside:
                    answer = json.dumps({**said, "value": {**value, "files": [*value["files"], *beside[rank]]}})
                self.answers.append(group._answer_key(rank))
                group._store._store.set(self.answers[-1], answer.replace("00000.", f"{rank:05d}."))
                self.sent += len(answer)

    def _documents(self, written: list[dict[str, Any]]) -> dict[int, list[Any]]:
        """What the ranks that write the documents report, by rank. A process does all that the first of them does. All
        lines are equal, and so are their hashes: only the first is kept."""
        found: dict[int, list[Any]] = {}
        for first in range(0, self.ranks, IN_A_FILE):
            ranks = range(first, min(first + IN_A_FILE, self.ranks))
            if not found:
                record, line, self.writer = in_a_new_process(write_documents, self.store.port, self.ranks, ranks)
            else:
                for rank in ranks:
                    self.store.delete_key(f"{LEFT}/{rank}")
            name, size = joined_name(ranks), len(ranks) * len(line)
            record |= {"name": name, "path": name, "blocks": record["blocks"][:1] * len(ranks), "size": size}
            found[ranks[-1]] = [{"file": {**record}, "receipt": None, "linked": False}]
            content = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            content[: len(line)] = line
            for key in [key for key in self.objects.content if key.endswith(f"/{written[0]['file']['path']}")]:
                self.objects.content[f"{key.split('/')[0]}/{name}"] = content  # type: ignore[assignment]
        return found

    def _copy_file(self, path: str) -> None:
        for key, content in [item for item in self.objects.content.items() if item[0].endswith(f"/{path}")]:
            for rank in range(1, self.ranks):
                self.objects.content[key.replace("00000.", f"{rank:05d}.")] = content


def write_documents(port: int, size: int, ranks: range) -> tuple[dict[str, Any], bytes, dict[str, float]]:
    """All that the rank does which writes the documents of these ranks, but for sending them to S3: the record of the
    file, its first line, and what that took. The documents are in the TCPStore at this port."""
    store = TimedStore(TCPStore("127.0.0.1", port, is_master=False), 600.0)
    channel = StoreGroup(store, ranks[-1], size, 600.0, store, BuiltManagers())
    before, began = _peak(), time.perf_counter()
    documents = left_documents(channel, ranks)
    one = next(documents)
    plan = joined_file(ranks, chain([one], documents), len(one) + 1)
    record = hashed(plan, plan.path, lambda _: None)
    took = {"writer, seconds": time.perf_counter() - began, "writer, memory": max(0, _peak() - before)}
    return asdict(record), one + b"\n", took


def measure(ranks: int, tensors: int) -> dict[str, dict[str, float]]:
    """The figures of each phase, in a process of its own."""
    store = TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("fake", store=store, rank=0, world_size=ranks)
    objects = CountedObjects("bucket/run")
    others = OtherRanks(ranks, objects, store)
    figures: dict[str, dict[str, float]] = {}

    def phase(name: str, do: Any) -> None:
        others.seconds, others.sent, others.exchanges = 0.0, 0, 0
        others.requests.clear()
        others.writer.clear()
        objects.requests.clear()
        before, began = _peak(), time.perf_counter()
        do()
        took = time.perf_counter() - began - others.seconds
        figures[name] = {
            "seconds": took,
            "memory": max(0, _peak() - before),
            "received": others.sent,
            "exchanges": others.exchanges,
            "calls": others.requests["calls"],
            **{kind: objects.requests[kind] for kind in KINDS},
            **others.writer,
        }
        print(f"{ranks} ranks, {name}: {took:.1f} s, simulation {others.seconds:.1f} s", flush=True)

    with others.answering():
        with manager_of(objects, ranks, tensors) as manager:
            manager.resume()
            phase(SAVE, partial(manager.save_state, "step-1", wait=True))
            phase(AGAIN, partial(manager.save_state, "step-2", wait=True))
        with manager_of(objects, ranks, tensors) as manager:
            phase(RESUME, manager.resume)
    written = [key for key in objects.content if key.startswith("step-2/")]
    figures["manifest"] = {"size": len(objects.content["step-2/manifest.json"]), "objects": len(written)}
    return figures


def manager_of(objects: CountedObjects, ranks: int, tensors: int) -> ckpt.StateManager:
    options = ckpt.RankOptions(broadcast=False, timeout=600.0)
    return ckpt.StateManager(ObjectStorage(objects), model=Model(ranks, tensors), ranks=options)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def body(samples: Samples, sizes: Sequence[int]) -> str:
    rows = []
    for phase in PHASES:
        for ranks in sizes:
            found = {key: samples.best(f"{ranks} ranks", f"{phase}, {key}") or 0.0 for key in _METRICS}
            requests = ", ".join(f"{found[kind]:.0f} {KINDS[kind]}" for kind in KINDS if found[kind])
            rows.append(
                [phase, f"{ranks:,}", in_seconds(found["seconds"]), f"{found['memory'] / 1e6:.0f} MB",
                 f"{found['received'] / 1e6:.1f} MB", f"{found['calls']:,.0f}", f"{found['exchanges']:.0f}", requests]
            )  # fmt: skip
    head = ["", "ranks", "seconds", "more memory", "received", "calls of the store", "exchanges", "S3 requests"]
    return f"{table(head, rows)}\n\n{_body_of_writers(samples, sizes)}"


def _body_of_writers(samples: Samples, sizes: Sequence[int]) -> str:
    rows = []
    for ranks in [ranks for ranks in sizes if ranks > ALONE]:
        found = {key: samples.best(f"{ranks} ranks", f"{AGAIN}, {key}") or 0.0 for key in _WRITER}
        seconds, memory = in_seconds(found[_WRITER[0]]), f"{found[_WRITER[1]] / 1e6:.0f} MB"
        rows.append([f"{ranks:,}", f"{-(-ranks // IN_A_FILE)}", seconds, memory])
    text = f"Another rank takes the documents of up to {IN_A_FILE:,} ranks from the store, and makes one file of them."
    return f"{text}\n\n{table(['ranks', 'files of documents', 'seconds of a writer', 'its memory'], rows)}"


def body_of_checkpoints(samples: Samples, counts: Sequence[int]) -> str:
    tasks = [row.metric for row in samples.rows() if row.subject == f"{counts[0]} checkpoints"]
    rows = []
    for task in [metric.removesuffix(", seconds") for metric in tasks if metric.endswith(", seconds")]:
        cells = [task]
        for count in counts:
            seconds = samples.best(f"{count} checkpoints", f"{task}, seconds") or 0.0
            requests = samples.best(f"{count} checkpoints", f"{task}, requests") or 0.0
            cells += [f"{requests:.0f}", in_seconds(seconds), f"{seconds / LATENCY:.0f}"]
        rows.append(cells)
    head = [f"{count} checkpoints: {what}" for count in counts for what in ("requests", "time", "time / latency")]
    return f"""Beside many checkpoints on S3, each request of {1000 * LATENCY:.0f} ms (simulated). Time by latency is
the most round trips that can have followed each other.

{table(["", *head], rows)}"""


_METRICS = ("seconds", "memory", "received", "exchanges", "calls", *KINDS)
_WRITER = ("writer, seconds", "writer, memory")
_UNITS = {"seconds": "s", "memory": "B", "received": "B", _WRITER[0]: "s", _WRITER[1]: "B"}


def keep(ranks: int, figures: dict[str, dict[str, float]], samples: Samples) -> None:
    for phase in PHASES:
        for key in [key for key in (*_METRICS, *_WRITER) if key in figures[phase]]:
            samples.add(f"{ranks} ranks", f"{phase}, {key}", figures[phase][key], _UNITS.get(key, ""))
    samples.add(f"{ranks} ranks", "manifest", figures["manifest"]["size"], "B")


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("scale", __doc__)
    options_parser.add_argument("--ranks", default=",".join(map(str, SIZES)), help="numbers of ranks, with commas")
    options_parser.add_argument("--tensors", type=int, default=20_000)
    options_parser.add_argument("--checkpoints", default="100,1000", help="numbers of checkpoints in a root")
    options: Namespace = options_parser.parse_args(arguments)
    run = Run("scale", options, "torch")
    sizes = [int(text) for text in options.ranks.split(",")]
    counts = [int(text) for text in options.checkpoints.split(",")]
    for ranks in sizes:
        keep(ranks, in_a_new_process(measure, ranks, options.tensors), run.samples)
    for count in counts:
        for task, (seconds, requests) in in_a_new_process(scale_checkpoints.measure, count).items():
            run.samples.add(f"{count} checkpoints", f"{task}, seconds", seconds)
            run.samples.add(f"{count} checkpoints", f"{task}, requests", requests, "requests")
    text = f"{body(run.samples, sizes)}\n\n{body_of_checkpoints(run.samples, counts)}"
    run.keep(f"Rank 0 of many, {options.tensors:,} tensors", text, None, *NOTES)
