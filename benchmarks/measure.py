"""How the benchmarks measure and report: time, memory, the page cache, the machine, tables, targets and plots."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ckpt
from ckpt.util.aligned_memory import allocate_pages

RESULTS = Path(__file__).parent / "results"
PIECE = 8 << 20


def seconds(do: Callable[[], Any]) -> float:
    started = time.perf_counter()
    do()
    return time.perf_counter() - started


@contextmanager
def folder_in(root: Path) -> Iterator[Path]:
    """A folder of its own on the disk to measure, gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=".benchmark-", dir=root)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def warm(folder: Path) -> None:
    """Bring every file into the page cache."""
    buffer = memoryview(bytearray(PIECE))
    for path in files_in(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cold(folder: Path) -> None:
    """Take every file out of the page cache. Only what is on the disk can be dropped, hence the sync."""
    os.sync()
    for path in files_in(folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


CACHES: Mapping[str, Callable[[Path], None]] = {"warm": warm, "cold": cold}


def in_a_new_process(do: Callable[..., Any], *arguments: Any) -> Any:
    """So that memory which somebody else gave back cannot be used again unnoticed. What takes long is imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "accelerate", "safetensors.torch", "ckpt.manager"])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(do, *arguments).result()


def settle(size: int) -> None:
    """The same start for all: nothing left to be written, and free memory that was in use just now.

    A virtual machine takes its time to hand out memory that has been idle: whoever came first after a pause would pay.
    Several times as much as will be needed, as nobody knows which of it comes first.
    """
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    size = max(mmap.PAGESIZE, min(4 * size, free * 3 // 4))
    with allocate_pages(size) as memory:
        for start in range(0, size, mmap.PAGESIZE):
            memory[start] = 1
    os.sync()


def peak(do: Callable[[], None]) -> int | None:
    """By how much the resident memory of this process grows at most; none where the kernel does not say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts from here
    except OSError:
        return None
    before = _memory("VmRSS")
    do()
    return _memory("VmHWM") - before


def _memory(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found, key
    return int(found[1]) * 1024


def processor() -> str:
    """The processor's name. What the platform module says of it is often empty."""
    found = re.search(r"^Model name:\s+(\S.*)$", _said_by("lscpu"), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def filesystem(root: Path) -> str:
    said = _said_by("df", "--output=fstype", str(root)).split()
    return said[-1] if said else "filesystem unknown"


def _said_by(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def versions(*packages: str) -> str:
    """Of Python, of ckpt (which need not be installed), and of those packages that are."""
    found = [f"Python {platform.python_version()}", f"ckpt {ckpt.__version__}"]
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def preamble(command: str, root: Path, *packages: str, accelerator: str = "") -> str:
    """What a figure is worth nothing without. Call it first: it reads how busy the machine was."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"""- Command: `python benchmarks/{command}`
- Date: {today()}
- Machine: {accelerator}{processor()}, {os.cpu_count()} cores, {memory / 1e9:.0f} GB memory, {platform.system()}, \
{filesystem(root)}
- Versions: {versions(*packages)}
- Load of the machine when it began: {os.getloadavg()[0]:.1f}"""


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def in_seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f} s" if abs(value) < 0.1 else f"{value:.2f} s"


def in_megabytes(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e6:.0f} MB"


def ratio(one: float | None, other: float | None) -> str:
    """Nothing where noise made one of them negative."""
    return "" if one is None or other is None or one < 0 or other <= 0 else f"{one / other:.2f}"


@dataclass(frozen=True)
class Target:
    """Something to reach: at most `limit`. What could not be measured is not reached."""

    text: str
    measured: float | None
    limit: float
    unit: str = ""

    def row(self) -> list[str]:
        limit = f"at most {self.limit:g}{self.unit}"
        if self.measured is None:
            return [self.text, limit, "not measured", ""]
        return [self.text, limit, f"{self.measured:.3g}{self.unit}", "yes" if self.measured <= self.limit else "NO"]


def table_of_targets(targets: Sequence[Target]) -> str:
    return table(["target", "limit", "measured", "reached"], [target.row() for target in targets])


def divided(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def keep(what: str, hardware: str, text: str, plot: str, results: Path | None) -> Path:
    """Leave the report and its plot where results are kept."""
    folder = results or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{what}_{re.sub(r'[^a-z0-9]+', '-', hardware.lower()).strip('-')}_{today()}"
    (folder / f"{name}.svg").write_text(plot)
    path = folder / f"{name}.md"
    path.write_text(f"{text}\n![plot]({name}.svg)\n")
    return path


def bars(title: str, groups: Mapping[str, Mapping[str, float]], unit: str = "s") -> str:
    """A picture of figures, written by hand: a plot is no reason to need a plotting library.

    One chart below the other, `groups` by name, each with a bar for every label.
    """
    left, width, height, top = 330, 420, 20, 40
    body, line = [], top
    for group, values in groups.items():
        longest = max([*values.values(), 1e-9])
        body.append(f'<text x="10" y="{line + 15}" font-weight="bold">{escape(group)}</text>')
        line += height + 4
        for label, value in values.items():
            colour = "#d1495b" if label.startswith("ckpt") else "#8d99ae"
            length = max(1.0, width * max(value, 0.0) / longest)
            body.append(
                f'<text x="{left - 8}" y="{line + 14}" text-anchor="end">{escape(label)}</text>'
                f'<rect x="{left}" y="{line + 2}" width="{length:.1f}" height="{height - 5}" fill="{colour}"/>'
                f'<text x="{left + length + 6:.1f}" y="{line + 14}">{value:.3g} {unit}</text>'
            )
            line += height
        line += 16
    size = f'width="{left + width + 110}" height="{line}"'
    style = 'xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
    head = f'<rect width="100%" height="100%" fill="white"/><text x="10" y="22" font-size="15">{escape(title)}</text>'
    return f"<svg {style} {size}>\n{head}\n" + "\n".join(body) + "\n</svg>\n"
