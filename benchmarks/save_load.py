"""Saves and loads one model with its AdamW state in every way that people use, in one run, and compares.

    python benchmarks/save_load.py [--megabytes 500] [--repeats 3] [--root .]

The ways take turns, each timed section starts on a disk at rest, and the best of all turns counts. What was loaded must
equal what was saved in every bit, or there are no figures. The table is printed and kept in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt

WIDTH = 512
RESULTS = Path(__file__).parent / "results"


class Block(nn.Sequential):
    """Large matrices and small vectors, as a transformer has them."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


@dataclass
class State:
    """What is saved, or what a save is loaded into."""

    model: nn.Module
    optimizer: torch.optim.AdamW

    @classmethod
    def untrained(cls, megabytes: int, seed: int) -> State:
        """Weights that fill a third of the size. Their two moments come with the first step, or with a load."""
        torch.manual_seed(seed)
        of_a_block = 3 * 4 * sum(parameter.numel() for parameter in Block().parameters())
        model = nn.Sequential(*(Block() for _ in range(max(1, round(megabytes * 1e6 / of_a_block)))))
        return cls(model, torch.optim.AdamW(model.parameters()))

    @classmethod
    def trained(cls, megabytes: int) -> State:
        state = cls.untrained(megabytes, seed=1)
        for parameter in state.model.parameters():
            parameter.grad = torch.randn_like(parameter)
        state.optimizer.step()
        state.optimizer.zero_grad()
        return state

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it under flat names."""
        moments = self.optimizer.state_dict()["state"]
        return {
            **{f"model.{name}": tensor for name, tensor in self.model.state_dict().items()},
            **{f"optimizer.{index}.{key}": one for index, entry in moments.items() for key, one in entry.items()},
        }

    def take(self, tensors: Mapping[str, torch.Tensor], groups: Any) -> None:
        """Take back what `tensors` gave."""
        moments: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, key = name.split(".")
                moments.setdefault(int(index), {})[key] = tensor
        self.model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})

    @property
    def groups(self) -> Any:
        return self.optimizer.state_dict()["param_groups"]

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


@dataclass(frozen=True)
class Way:
    """One way to save a state into an empty folder, and to load it from there into other live objects."""

    name: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]
    durable: bool = False  # on the disk when `save` returns
    hashed: bool = False  # `load` notices a flipped bit
    in_place: bool = False  # `load` needs memory for all tensors, and brings none along


def save_ours(state: State, folder: Path) -> None:
    with ckpt.StateManager(folder, model=state.model, optimizer=state.optimizer) as manager:
        manager.save_state()


def load_ours(state: State, folder: Path) -> None:
    with (
        redirect_stderr(io.StringIO()),  # it says what it restored
        ckpt.StateManager(folder, model=state.model, optimizer=state.optimizer) as manager,
    ):
        manager.load_state()


def save_torch(state: State, folder: Path) -> None:
    both = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    torch.save(both, folder / "state.pt")


def load_torch(state: State, folder: Path) -> None:
    both = torch.load(folder / "state.pt", weights_only=True)
    state.model.load_state_dict(both["model"])
    state.optimizer.load_state_dict(both["optimizer"])


def save_dcp(state: State, folder: Path) -> None:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)


def load_dcp(state: State, folder: Path) -> None:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder, no_dist=True)
    set_state_dict(state.model, state.optimizer, model_state_dict=model, optim_state_dict=optimizer)


def save_safetensors(state: State, folder: Path) -> None:
    save_file(state.tensors(), folder / "state.safetensors", metadata={"groups": json.dumps(state.groups)})


def save_safetensors_durably(state: State, folder: Path) -> None:
    save_safetensors(state, folder)
    sync(folder / "state.safetensors")
    sync(folder)


def load_safetensors(state: State, folder: Path) -> None:
    path = folder / "state.safetensors"
    with safe_open(path, "pt") as file:
        groups = json.loads(file.metadata()["groups"])
    state.take(load_file(path), [group | {"betas": tuple(group["betas"])} for group in groups])


def save_raw(state: State, folder: Path) -> None:
    with open(folder / "raw", "wb", buffering=0) as file:
        for tensor in state.tensors().values():
            write_all(file, as_bytes(tensor))
        os.fsync(file.fileno())


def load_raw(state: State, folder: Path) -> None:
    with open(folder / "raw", "rb", buffering=0) as file:
        for tensor in state.tensors().values():
            read_all(file, as_bytes(tensor))


OURS = Way("ckpt", save_ours, load_ours, durable=True, hashed=True)
WAYS = (
    OURS,
    Way("torch.save / torch.load", save_torch, load_torch),
    Way("DCP save / load", save_dcp, load_dcp, durable=True),
    Way("safetensors", save_safetensors, load_safetensors),
    Way("safetensors + fsync", save_safetensors_durably, load_safetensors, durable=True),
    # what the disk and the kernel take for as many bytes
    Way("raw write + fsync / read", save_raw, load_raw, durable=True, in_place=True),
)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def write_all(file: io.FileIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def read_all(file: io.FileIO, view: memoryview) -> None:
    while view:
        view = view[file.readinto(view) or fail("the file is too short") :]


def fail(why: str) -> int:
    raise AssertionError(why)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def assert_equal(saved: State, loaded: State, way: str) -> None:
    """Every bit of every tensor, and every option of every group."""
    ours, theirs = saved.tensors(), loaded.tensors()
    assert ours.keys() == theirs.keys(), f"{way}: other tensors came back"
    unequal = [name for name in ours if not same_bits(ours[name], theirs[name])]
    assert not unequal, f"{way}: came back with other values: {', '.join(unequal)}"
    assert saved.groups == loaded.groups, f"{way}: the parameter groups came back with other options"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.dtype, one.shape) == (other.dtype, other.shape)
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@dataclass
class Figures:
    """The best of one way's turns, in seconds, and its peak of extra memory, in bytes."""

    save: float = math.inf
    load: float = math.inf
    save_memory: int | None = None
    load_memory: int | None = None


@dataclass
class Options:
    megabytes: int
    repeats: int
    root: Path


@contextmanager
def folder_in(root: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=".save_load-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def seconds(do: Callable[[], None]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


def settle(state: State, options: Options) -> None:
    """The same start for all: nothing left to be written, and as much free memory that was in use just now.

    A virtual machine takes its time to hand out memory that has been idle: whoever came first after a pause would pay.
    """
    with folder_in(options.root) as folder:
        save_raw(state, folder)
    os.sync()


def take_turn(way: Way, state: State, options: Options, figures: Figures) -> None:
    target = target_for(way, options)
    with folder_in(options.root) as folder:
        settle(state, options)
        figures.save = min(figures.save, seconds(lambda: way.save(state, folder)))
        settle(state, options)
        figures.load = min(figures.load, seconds(lambda: way.load(target, folder)))
        assert_equal(state, target, way.name)


def target_for(way: Way, options: Options) -> State:
    """Live objects as a resumed run builds them: with other weights, and an optimizer that has no moments yet."""
    target = State.trained(options.megabytes) if way.in_place else State.untrained(options.megabytes, seed=2)
    for tensor in target.tensors().values():
        tensor.fill_(-1.0)  # nothing may be equal before it is loaded
    return target


def measure(options: Options) -> tuple[dict[str, Figures], int]:
    state = State.trained(options.megabytes)
    figures = {way.name: Figures() for way in WAYS}
    for turn in range(options.repeats):
        first = turn % len(WAYS)
        for way in (*WAYS[first:], *WAYS[:first]):
            take_turn(way, state, options, figures[way.name])
    for way in WAYS:
        figures[way.name].save_memory, figures[way.name].load_memory = memory_in_a_new_process(way, options)
    return figures, state.size


def memory_in_a_new_process(way: Way, options: Options) -> tuple[int | None, int | None]:
    """A process of its own, so that memory which another way gave back cannot be used again unnoticed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(memory, way, options).result()


def memory(way: Way, options: Options) -> tuple[int | None, int | None]:
    with folder_in(options.root) as folder:
        state, target = State.trained(options.megabytes), target_for(way, options)
        return peak(lambda: way.save(state, folder)), peak(lambda: way.load(target, folder))


def peak(do: Callable[[], None]) -> int | None:
    """By how much the resident memory of this process grows at most; none where the kernel does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    except OSError:
        return None
    before = status_of_memory("VmRSS")
    do()
    return status_of_memory("VmHWM") - before


def status_of_memory(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, key
    return int(found[1]) * 1024


def table(figures: Mapping[str, Figures]) -> str:
    ours = figures[OURS.name]
    head = ["", "save", "to ours", "load", "to ours", "fsync", "hashes", "memory, save", "memory, load"]
    rows = [head, ["---"] * len(head)]
    for way in WAYS:
        one = figures[way.name]
        times = [f"{one.save:.2f} s", f"{one.save / ours.save:.2f}", f"{one.load:.2f} s", f"{one.load / ours.load:.2f}"]
        promises = ["yes" if promised else "no" for promised in (way.durable, way.hashed)]
        rows.append([way.name, *times, *promises, megabytes(one.save_memory), megabytes(one.load_memory)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows)


def megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:.0f} MB"


def report(figures: Mapping[str, Figures], size: int, busy: str, options: Options) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, safetensors {safetensors.__version__}"
    memory_size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"""# Saving and loading {size / 1e6:.0f} MB: model and AdamW state in fp32, one process, CPU

- Command: `python benchmarks/save_load.py --megabytes {options.megabytes} --repeats {options.repeats}`
- Date: {today()}
- Machine: {cpu()}, {os.cpu_count()} cores, {memory_size / 1e9:.0f} GB memory, {platform.system()}, \
{filesystem(options.root)}
- Versions: ckpt {ckpt.__version__}, {versions}
- Load of the machine: {busy} when it began, {os.getloadavg()[0]:.1f} at the end, this run included
- The best of {options.repeats} turns; page cache warm when loading; every load equal to what was saved, bit for bit.

{table(figures)}

Ratios: above 1 is slower than ckpt. Memory: the peak of what the process needs beyond what it had before. A load brings
{size * 2 / 3e6:.0f} MB of moments along, which the optimizer of a new process does not have yet; only the raw read
needs none of its own. `safetensors` maps the file, and reads a moment's bytes after the load, when they are first used.
"""


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def cpu() -> str:
    """The processor's name. What the platform module says of it is often empty."""
    try:
        listed = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    found = re.search(r"^Model name:\s+(\S.*)$", listed, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def filesystem(root: Path) -> str:
    try:
        command = ["df", "--output=fstype", str(root)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    except (OSError, subprocess.CalledProcessError):
        return "filesystem unknown"


def keep(text: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", cpu().lower()).strip("-")
    path = RESULTS / f"save_load_{name}_{today()}.md"
    path.write_text(text)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of model and optimizer state together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(), help="a folder on the disk to measure")
    options = Options(**vars(parser.parse_args()))
    busy = f"{os.getloadavg()[0]:.1f}"
    figures, size = measure(options)
    text = report(figures, size, busy, options)
    print(text)
    print(f"kept in {os.path.relpath(keep(text))}")


if __name__ == "__main__":
    main()
