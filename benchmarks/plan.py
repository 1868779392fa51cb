"""What planning costs one rank of many: what it writes and what it reads; and what the commit costs the main rank.

Ranks are simulated with PyTorch's fake process group: the tensors are real DTensors of one rank, of small shapes, since
only their number and layout count here.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.compare import spelled
from benchmarks.shared.report import Run, parser, table
from benchmarks.shared.results import Samples
from ckpt.formats.layout import Box, Layout
from ckpt.formats.native.manifest import BLOCK_SIZE, FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardTable, build_table, written_by
from ckpt.util.console import utc_now

SHAPES = [(4096 + 64 * index, 2) for index in range(12)]  # about as many as a transformer has


def tensors_of(rank: int, ranks: int, count: int) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (ranks,))
    found = {}
    for index in range(count):
        rows, columns = SHAPES[index % len(SHAPES)]
        piece = torch.empty(Layout((ranks,), tuple(range(ranks)), ("S0",)).box((rows, columns), rank).sizes)
        shape = torch.Size((rows, columns))
        found[f"layers.{index}.weight"] = DTensor.from_local(
            piece, mesh, [Shard(0)], run_check=False, shape=shape, stride=(columns, 1)
        )
    return found


def plan_a_save(tensors: dict[str, DTensor], rank: int, ranks: int) -> tuple[float, ShardTable]:
    began = time.perf_counter()
    table = build_table(tensors, ranks)
    written_by(table, tensors, rank)
    return time.perf_counter() - began, table


def plan_a_load(table: ShardTable, rank: int, ranks: int) -> float:
    """As one of three quarters as many ranks: every shard has other bounds than before."""
    now = ranks * 3 // 4
    layout = Layout((now,), tuple(range(now)), ("S0",))
    began = time.perf_counter()
    for tensor in table.tensors.values():
        box: Box = layout.box(tensor.shape, rank % now)
        tensor.layout.overlaps(tensor.shape, tensor.copy, box)
    return time.perf_counter() - began


def commit(ranks: int) -> tuple[float, int, int]:
    """Of two files of each rank, as the main rank receives them: seconds, peak memory and size of the manifest."""
    blocks = tuple("0" * 32 for _ in range(40))  # 1.3 GB each
    size = len(blocks) * BLOCK_SIZE
    reports = [
        json.dumps([asdict(FileRecord(name=f"{part}/{rank:05d}", path=f"{part}/{rank:05d}", size=size, blocks=blocks))
                    for part in ("model", "optimizer")])
        for rank in range(ranks)
    ]  # fmt: skip
    tracemalloc.start()
    began = time.perf_counter()
    files = tuple(FileRecord(**record) for report in reports for record in json.loads(report))
    data = Manifest(name="x", id="x", sequence=1, created=utc_now(), run="", files=files).to_bytes()
    Manifest.from_bytes(data, "x")
    seconds = time.perf_counter() - began
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, memory, len(data)


def body(samples: Samples) -> str:
    return table(["ckpt", "best"], [[row.metric, spelled(row.best, row.unit)] for row in samples.rows()])


def measure_once(tensors: dict[str, DTensor], rank: int, ranks: int, samples: Samples) -> None:
    saving, shard_table = plan_a_save(tensors, rank, ranks)
    samples.add("ckpt", "plan of a save, one rank", saving)
    samples.add("ckpt", "plan of a load, one rank", plan_a_load(shard_table, rank, ranks))
    seconds, memory, size = commit(ranks)
    samples.add("ckpt", "commit, main rank", seconds)
    samples.add("ckpt", "commit, memory", memory, "B")
    samples.add("ckpt", "commit, size of the manifest", size, "B")


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("plan", __doc__)
    options_parser.add_argument("--ranks", type=int, default=1024)
    options_parser.add_argument("--tensors", type=int, default=10_000)
    options_parser.add_argument("--repeats", type=int, default=3)
    options = options_parser.parse_args(arguments)
    run = Run("plan", options, "torch")
    rank = options.ranks // 2
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=options.ranks)
    tensors = tensors_of(rank, options.ranks, options.tensors)
    for _ in range(options.repeats):
        measure_once(tensors, rank, options.ranks, run.samples)
    dist.destroy_process_group()
    run.keep(f"Planning on one of {options.ranks} ranks, {options.tensors} tensors", body(run.samples))
