"""How the cost of a save grows: with the bytes of the state, and with the number of checkpoints that are there already.

    python benchmarks/scaling.py [--max-megabytes 10000] [--checkpoints 1000] [--repeats 3] [--root .]

Every save is `save_state(wait=True)`: hashed, and on the disk when it returns. The largest state needs four thirds of
its size as memory. The tables are printed, and kept with a plot in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from benchmarks.shared import checkpointers as ways
from benchmarks.shared import measure, raw
from benchmarks.shared.measure import folder_in, in_seconds, ratio, seconds
from benchmarks.shared.state import State

SIZES = (10, 30, 100, 300, 1000, 3000, 10_000)  # megabytes
WINDOW = 9  # saves of which the middle one counts


def by_bytes(options: argparse.Namespace) -> dict[int, tuple[float, float | None]]:
    """For each size in bytes: seconds of the best save, and of a raw direct write, if there is memory for its image."""
    found = {}
    for megabytes in SIZES:
        if megabytes <= options.max_megabytes:
            state = State.trained(megabytes * 1e6)
            room = 3 * state.size < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            limit = best(raw.RawDirect, state, options) if room else None
            found[state.size] = (best(ways.Ours, state, options), limit)
            print(f"{state.size / 1e6:.0f} MB: {found[state.size][0]:.3f} s", flush=True)
            del state
    return found


def best(kind: type[ways.Way], state: State, options: argparse.Namespace) -> float:
    """Of a run's saves; the first may still make things ready."""
    with folder_in(options.root) as root, closing(kind(state, root)) as way:
        way.prepare()
        return min(time_a_save(way, f"save-{number}") for number in range(options.repeats))


def time_a_save(way: ways.Way, name: str) -> float:
    """Of a checkpoint that is gone afterwards."""
    os.sync()
    took = seconds(lambda: way.save(name))
    shutil.rmtree(way.root / name)
    return took


def by_checkpoints(options: argparse.Namespace) -> dict[int, tuple[float, float]]:
    """For some numbers of earlier checkpoints: seconds of a save, and of one beside a single earlier checkpoint.

    The state is tiny. The two take turns, so that both see the same noise; the median of each counts.
    """
    counts = [count for count in (1, 3, 10, 30, 100, 300, 1000) if count < options.checkpoints]
    found, names = {}, map("save-{:05d}".format, itertools.count())
    with run_of_a_tiny_state(options.root) as growing, run_of_a_tiny_state(options.root) as single:
        single.save("only")
        for before, count in itertools.pairwise([0, *counts, options.checkpoints]):
            for _ in range(count - before):
                growing.save(next(names))
            pairs = [[time_a_save(way, next(names)) for way in (growing, single)] for _ in range(WINDOW)]
            found[count] = tuple(map(statistics.median, zip(*pairs, strict=True)))
    return found


@contextmanager
def run_of_a_tiny_state(root: Path) -> Iterator[ways.Way]:
    model = torch.nn.Linear(8, 8)
    state = State(model, torch.optim.AdamW(model.parameters()))
    with folder_in(root) as folder, closing(ways.Ours(state, folder)) as way:
        yield way


def table_of_bytes(found: Mapping[int, tuple[float, float | None]]) -> str:
    rows = [
        [f"{size / 1e6:.0f} MB", in_seconds(ours), f"{ours / size * 1e9:.3f} s", in_seconds(limit), ratio(ours, limit)]
        for size, (ours, limit) in found.items()
    ]
    return measure.table(["state", "save", "per GB", "raw direct write + fsync", "ours to raw"], rows)


def table_of_checkpoints(found: Mapping[int, tuple[float, float]]) -> str:
    rows = [
        [str(count), f"{took * 1e3:.1f} ms", f"{beside_one * 1e3:.1f} ms", ratio(took, beside_one)]
        for count, (took, beside_one) in found.items()
    ]
    return measure.table(["earlier checkpoints", "save", "with one earlier, in turns", "ratio"], rows)


def report(
    preamble: str, sizes: Mapping[int, tuple[float, float | None]], counts: Mapping[int, tuple[float, float]]
) -> str:
    many = max(counts)
    small, large = min(sizes), max(sizes)
    grown = sizes[large][0] / sizes[small][0]
    return f"""# How the cost of a save grows

{preamble}, {os.getloadavg()[0]:.1f} at the end, this run included
- `save_state(wait=True)`, hashed and fsynced, one process, CPU

{table_of_bytes(sizes)}

{large / small:.0f} times the bytes took {grown:.0f} times as long. The best of each size's saves.

{table_of_checkpoints(counts)}

With {many} earlier checkpoints in the root a save takes {ratio(*counts[many])} of the time with one. The state is tiny;
the median of {WINDOW} saves.
"""


def plot(sizes: Mapping[int, tuple[float, float | None]], counts: Mapping[int, tuple[float, float]]) -> str:
    per_gigabyte = {f"ckpt, {size / 1e6:.0f} MB": ours / size * 1e9 for size, (ours, _) in sizes.items()}
    earlier = {f"ckpt, {count} earlier checkpoints": took for count, (took, _) in counts.items()}
    return measure.bars("The cost of a save", {"seconds per GB": per_gigabyte, "seconds, tiny state": earlier})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-megabytes", type=int, default=10_000)
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(), help="a folder on the disk to measure")
    parser.add_argument("--results", type=Path, help="where to leave the report and its plot")
    options = parser.parse_args()
    told = f"--max-megabytes {options.max_megabytes} --checkpoints {options.checkpoints} --repeats {options.repeats}"
    preamble = measure.preamble(f"scaling.py {told}", options.root, "torch")
    sizes, counts = by_bytes(options), by_checkpoints(options)
    text = report(preamble, sizes, counts)
    print(text)
    path = measure.keep("scaling", measure.processor(), text, plot(sizes, counts), options.results)
    print(f"kept in {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
