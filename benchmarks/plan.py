"""What it costs one rank of 1,024 to work out what it writes and reads, and the main rank to commit.

    python benchmarks/plan.py [--ranks 1024] [--tensors 10000]

Ranks are simulated with PyTorch's fake process group: the tensors are real DTensors of one rank, of small shapes, since
only their number and layout count here.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.formats.layout import Box, Layout
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.formats.native.shard_table import ShardTable, build_table, written_by

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
    """As one of three quarters as many ranks: no piece lies as it did."""
    now = ranks * 3 // 4
    layout = Layout((now,), tuple(range(now)), ("S0",))
    began = time.perf_counter()
    for one in table.tensors.values():
        box: Box = layout.box(one.shape, rank % now)
        one.layout.overlaps(one.shape, one.copy, box)
    return time.perf_counter() - began


def commit(ranks: int) -> tuple[float, float, int]:
    """Two files a rank, as the main rank gets them: seconds, peak memory in MB, bytes of the manifest."""
    blocks = tuple("0" * 32 for _ in range(40))  # 1.3 GB each
    reports = [
        json.dumps([asdict(FileRecord(name=f"{part}/{rank:05d}", path=f"{part}/{rank:05d}", size=1, blocks=blocks))
                    for part in ("model", "optimizer")])
        for rank in range(ranks)
    ]  # fmt: skip
    tracemalloc.start()
    began = time.perf_counter()
    files = tuple(FileRecord(**record) for report in reports for record in json.loads(report))
    data = Manifest(name="x", id="x", sequence=1, created="", run="", files=files).to_bytes()
    Manifest.from_bytes(data, "x")
    seconds = time.perf_counter() - began
    return seconds, tracemalloc.get_traced_memory()[1] / 1e6, len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=10_000)
    options = parser.parse_args()
    rank = options.ranks // 2
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=options.ranks)
    saving, table = plan_a_save(tensors_of(rank, options.ranks, options.tensors), rank, options.ranks)
    loading = plan_a_load(table, rank, options.ranks)
    seconds, memory, size = commit(options.ranks)
    print(f"{options.ranks} ranks, {options.tensors} tensors:")
    print(f"  plan of a save, one rank    {saving:.2f} s")
    print(f"  plan of a load, one rank    {loading:.2f} s")
    print(f"  commit, on the main rank    {seconds:.2f} s, {memory:.0f} MB, manifest of {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
