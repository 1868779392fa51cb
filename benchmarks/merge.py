"""Merging a sharded checkpoint into one file: ours against Accelerate's `merge_fsdp_weights`, on the same folder.

    python benchmarks/merge.py [--megabytes 2200] [--repeats 5] [--root .]

Two real ranks save a model of Llama's shape with torch.distributed.checkpoint, divided as FSDP divides it. Then both
merge it, in turns, each time in a process of its own; what they write must be equal in every bit, or there are no
figures. Ours is durable (fsync) when it returns; Accelerate's is not. The table is printed and kept in
`benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors import safe_open

RESULTS = Path(__file__).parent / "results"
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
WAYS = {
    "ckpt": CHILD.format(
        imports="from ckpt.export.merge import merge",
        merge="merge(sys.argv[1], sys.argv[2] + '/model.safetensors')",
    ),
    "accelerate": CHILD.format(
        imports="import torch.distributed.checkpoint.format_utils\nfrom accelerate.utils import merge_fsdp_weights",
        merge="merge_fsdp_weights(sys.argv[1], sys.argv[2])",
    ),
}


def shapes(megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters until there are enough bytes of fp32."""
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    left, layer = megabytes * 1_000_000 - 4 * VOCABULARY * WIDTH, 0
    while left > 0:
        for name, shape in LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", shape
            left -= 4 * torch.Size(shape).numel()
        layer += 1


def save(rank: int, megabytes: int, folder: str, store: str) -> None:
    """One of two ranks: save the model as Accelerate does under FSDP."""
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


def measured(way: str, source: Path, target: Path) -> tuple[float, float]:
    """Seconds and bytes of memory for one merge. The page cache is warm, and nobody else's pages are dirty."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    subprocess.run(["cat", *source.iterdir()], check=True, stdout=subprocess.DEVNULL)
    os.sync()
    command = [sys.executable, "-W", "ignore", "-c", WAYS[way], str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, memory = json.loads(done.stdout.splitlines()[-1])
    return seconds, memory


def require_equal(one: Path, other: Path) -> None:
    with safe_open(one, "pt") as ours, safe_open(other, "pt") as theirs:
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in ours.keys():  # noqa: SIM118
            assert torch.equal(ours.get_tensor(name), theirs.get_tensor(name)), name


def compared(source: Path, root: Path, repeats: int) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, runs in found.items():
            runs.append(measured(way, source, root / way))
            print(f"{way}: {runs[-1][0]:.2f} s, {runs[-1][1] / 1e6:.0f} MB", flush=True)
        require_equal(root / "ckpt/model.safetensors", root / "accelerate/model.safetensors")
    return found


def processor() -> str:
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"Model name:\s*(.+)", lscpu)
    return found[1] if found else platform.processor() or platform.machine()


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    middle = {way: statistics.median(seconds for seconds, _ in runs) for way, runs in found.items()}
    rows = [
        "| | seconds, median | all | to Accelerate's | memory above the interpreter | fsync |",
        "|---|---|---|---|---|---|",
    ]
    for way, runs in found.items():
        listed = " ".join(f"{seconds:.2f}" for seconds, _ in runs)
        memory = max(memory for _, memory in runs) / 1e6
        durable = "yes" if way == "ckpt" else "no"
        ratio = middle[way] / middle["accelerate"]
        rows.append(f"| {way} | {middle[way]:.2f} | {listed} | {ratio:.2f} | {memory:.0f} MB | {durable} |")
    return "\n".join(rows)


def report(options: argparse.Namespace, size: int, busy: str, found: dict[str, list[tuple[float, float]]]) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch-ckpt", "accelerate", "torch", "safetensors"))
    return f"""# Merging {size / 1e9:.1f} GB of fp32 in two ranks' pieces into one file

- Command: `python benchmarks/merge.py --megabytes {options.megabytes} --repeats {options.repeats}`
- Date: {datetime.now(timezone.utc):%Y-%m-%d}
- Machine: {processor()}, {os.cpu_count()} cores, Linux
- Versions: Python {platform.python_version()}, {versions}
- Load of the machine: {busy} when it began, {os.getloadavg()[0]:.1f} at the end, this run included
- In turns, each in a process of its own, imports not counted; source in the page cache; outputs equal, bit for bit.

{table(found)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", default=".", help="the disk to write to")
    options = parser.parse_args()
    busy = f"{os.getloadavg()[0]:.1f}"
    with tempfile.TemporaryDirectory(prefix=".merge-", dir=options.root) as folder:
        root = Path(folder).resolve()
        arguments = (options.megabytes, str(root / "source"), str(root / "store"))
        torch.multiprocessing.spawn(save, arguments, nprocs=2)
        size = sum(path.stat().st_size for path in (root / "source").iterdir())
        text = report(options, size, busy, compared(root / "source", root, options.repeats))
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")
    (RESULTS / f"merge_{name}_{datetime.now(timezone.utc):%Y-%m-%d}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
