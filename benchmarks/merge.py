"""Merges a sharded checkpoint into one file: ckpt beside Accelerate's `merge_fsdp_weights`, on the same folder.

Two real ranks save a model of Llama's shape with torch.distributed.checkpoint, sharded as FSDP does. Then both merge
it, by turns, each time in a new process; the outputs must be equal in every bit, or there are no figures. Ours is
durable (fsync) when it returns; Accelerate's is not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors import safe_open

from benchmarks.shared.measure import folder_in, warm
from benchmarks.shared.plot import bars
from benchmarks.shared.report import Run, in_megabytes, in_seconds, parser, ratio, table
from benchmarks.shared.results import Samples

WIDTH, HIDDEN, VOCABULARY = 2048, 5632, 32000
LAYER = {"q": (WIDTH, WIDTH), "k": (512, WIDTH), "v": (512, WIDTH), "o": (WIDTH, WIDTH), "norm": (WIDTH,)} | {
    "gate": (HIDDEN, WIDTH),
    "up": (HIDDEN, WIDTH),
    "down": (WIDTH, HIDDEN),
}
# Each child imports first, then measures the seconds of the merge alone, and memory above the interpreter with its
# imports. Not with getrusage: a child's ru_maxrss begins with what its parent had.
CHILD = """
import json, re, sys, time
{imports}
def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, begin = peak(), time.perf_counter()
{merge}
print(json.dumps([time.perf_counter() - begin, peak() - before]))
"""
PROGRAMS = {
    "ckpt": CHILD.format(
        imports="import ckpt; ckpt.merge",
        merge="ckpt.merge(sys.argv[1], sys.argv[2] + '/model.safetensors')",
    ),
    "accelerate": CHILD.format(
        imports="import torch.distributed.checkpoint.format_utils\nfrom accelerate.utils import merge_fsdp_weights",
        merge="merge_fsdp_weights(sys.argv[1], sys.argv[2])",
    ),
}
MERGE, MEMORY = "merge", "memory"


def shapes(megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters until there are enough bytes of fp32."""
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    left, layer = megabytes * 1_000_000 - 4 * VOCABULARY * WIDTH, 0
    while left > 0:
        for name, shape in LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", shape
            left -= 4 * torch.Size(shape).numel()
        layer += 1


def write_source(megabytes: int, folder: Path) -> int:
    """Write the sharded checkpoint with two ranks. Returns its size in bytes."""
    store = folder.with_suffix(".store")
    torch.multiprocessing.spawn(save_shard, (megabytes, str(folder), str(store)), nprocs=2)
    return sum(path.stat().st_size for path in folder.iterdir())


def save_shard(rank: int, megabytes: int, folder: str, store: str) -> None:
    """What each of the two ranks does: save the model as Accelerate does under FSDP."""
    from torch.distributed.checkpoint import save as save_dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    state = {name: distribute_tensor(torch.randn(shape), mesh, [Shard(0)]) for name, shape in shapes(megabytes)}
    save_dcp({"model": state}, checkpoint_id=folder)
    dist.destroy_process_group()


def measured(program: str, source: Path, target: Path) -> tuple[float, float]:
    """Seconds and bytes of memory of one merge, from the page cache, with no dirty pages at the beginning."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    warm(source)
    os.sync()
    command = [sys.executable, "-W", "ignore", "-c", PROGRAMS[program], str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory


def require_equal(left: Path, right: Path) -> None:
    with safe_open(left, "pt") as ours, safe_open(right, "pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name)), name


def measure_all(source: Path, root: Path, repeats: int, samples: Samples) -> None:
    for _ in range(repeats):
        for program in PROGRAMS:
            seconds, memory = measured(program, source, root / program)
            samples.add(program, MERGE, seconds)
            samples.add(program, MEMORY, memory, "B")
            print(f"{program}: {in_seconds(seconds)}, {in_megabytes(memory)}", flush=True)
        require_equal(root / "ckpt/model.safetensors", root / "accelerate/model.safetensors")


def body(samples: Samples) -> str:
    head = ["", "median", "all, in seconds", "to Accelerate's", "memory above the interpreter", "fsync"]
    rows = []
    for program in PROGRAMS:
        median = samples.median(program, MERGE)
        listed = " ".join(f"{seconds:.2f}" for seconds in samples.all(program, MERGE))
        to_rival = ratio(median, samples.median("accelerate", MERGE))
        memory = in_megabytes(samples.worst(program, MEMORY))
        rows.append([program, in_seconds(median), listed, to_rival, memory, "yes" if program == "ckpt" else "no"])
    return table(head, rows)


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("merge", __doc__)
    options_parser.add_argument("--megabytes", type=int, default=2200, help="size of the model")
    options_parser.add_argument("--repeats", type=int, default=5, help="merges of each")
    options = options_parser.parse_args(arguments)
    run = Run("merge", options, "accelerate", "torch", "safetensors")
    with folder_in(options.root) as root:
        size = write_source(options.megabytes, root / "source")
        measure_all(root / "source", root, options.repeats, run.samples)
    medians = {program: run.samples.median(program, MERGE) or 0.0 for program in PROGRAMS}
    note = "By turns, each in a new process, imports not counted; source in the page cache; outputs equal, bit for bit."
    title = f"Merging {size / 1e9:.1f} GB of fp32 in the shards of two ranks into one file"
    run.keep(title, body(run.samples), bars("Merge", {MERGE: medians}), note)
