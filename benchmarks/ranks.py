"""What hundreds of real ranks cost, with FSDP 2 and with pipelines: saves, SIGKILL in one, a resume on other ranks.

Real: every rank is a process with a model, collectives of gloo, a manager, and the TCPStore, which has a process of its
own. Eight of them are as on one host, and write together. S3 is a folder in memory: its requests are counted, and take
no time. State is compared byte by byte after the resume. Then a job of fewer ranks, in which one rank freezes, once at
each phase of a save. Rank 0's counts are compared with those of `python -m benchmarks scale`, which simulates all other
ranks, for the model of that simulation.
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import ckpt.manager  # noqa: F401  (as are those above: what ranks import is imported once, before they are forked)
from benchmarks import ranks_job, scale
from benchmarks.ranks_job import AFTER, FIRST, FREEZES, FSDP, NEXT, PIPELINES, PLAIN, RESUME, TIMEOUT
from benchmarks.shared.forked_ranks import forked
from benchmarks.shared.measure import folder_in, in_a_new_process
from benchmarks.shared.report import Run, in_seconds, parser, table
from benchmarks.shared.results import Samples

_KINDS = {"fsdp": FSDP, "pipelines": PIPELINES}
_COMPARED = ("exchanges", *scale.KINDS)
Figures = list[dict[str, dict[str, float]]]  # of every rank, by phase


def resumed(memory: Path, kind: str, ranks: int, others: int, *, killed: bool) -> tuple[Figures, Figures, int]:
    """The figures of the saves and of the resume, and the number of objects of a checkpoint."""
    with folder_in(memory) as folder:
        with forked(ranks, folder, ranks_job.saves, kind, killed) as job:
            if killed:
                job.wait_for("stuck", TIMEOUT)
                job.kill()
            job.wait(TIMEOUT)
        saved, before = ranks_job.figures(folder, ranks), ranks_job.joined(folder, "saved", ranks)
        objects = sum(name.startswith("step-2%2F") for name in os.listdir(folder / "objects"))
        with forked(others, folder, ranks_job.resumes, kind) as job:
            job.wait(TIMEOUT)
        assert ranks_job.joined(folder, "resumed", others) == before, f"{kind}: the resumed state is another"
        return saved, ranks_job.figures(folder, others), objects


def frozen(memory: Path, ranks: int, timeout: float, freeze: ranks_job.Freeze) -> float:
    """Seconds until the last of the other ranks was told which one is frozen."""
    number = freeze.rank(ranks)
    with folder_in(memory) as folder, forked(ranks, folder, ranks_job.freezes, freeze, timeout) as job:
        job.wait(TIMEOUT, but=[number])
        assert list(job.processes) == [number], f"{freeze}: not frozen"
        told = {rank: json.loads(Path(folder, f"told-{rank}").read_text()) for rank in range(ranks) if rank != number}
    for rank, (_, text) in told.items():
        expected = "" if freeze.saved else f"rank {number} did not answer within {timeout:g} s"
        assert expected in text, f"{freeze.where}: rank {rank} was told {text!r}"
        assert bool(text) != freeze.saved, f"{freeze.where}: rank {rank} was told {text!r}"
    return max(took for took, _ in told.values())


def _keep(samples: Samples, subject: str, found: Figures) -> None:
    for phase in found[0]:
        for key in sorted({key for each in found for key in each[phase]}):
            values = [each[phase].get(key, 0.0) for each in found]
            unit = "s" if key in ("seconds", "computing") else "B" if key in ("own", "resident", "more memory") else ""
            samples.add(subject, f"{phase}, rank 0, {key}", values[0], unit)
            samples.add(subject, f"{phase}, others' median, {key}", median(values[1:]), unit)
            samples.add(subject, f"{phase}, slowest or most, {key}", max(values), unit)
            samples.add(subject, f"{phase}, all ranks, {key}", sum(values), unit)


def _row(samples: Samples, subject: str, phase: str, objects: str) -> list[str]:
    def found(who: str, key: str) -> float:
        return samples.best(subject, f"{phase}, {who}, {key}") or 0.0

    def requests(who: str) -> str:
        return ", ".join(f"{found(who, kind):,.0f} {name}" for kind, name in scale.KINDS.items() if found(who, kind))

    def megabytes(key: str) -> str:
        return f"{found('rank 0', key) / 1e6:.0f}, {found(_OTHERS, key) / 1e6:.0f} MB"

    return [
        subject, phase, in_seconds(found("slowest or most", "seconds")),
        f"{found('rank 0', 'computing'):.2f}, {found(_OTHERS, 'computing'):.2f} s",
        f"{found('rank 0', 'exchanges'):.0f}",
        requests("rank 0"), requests("all ranks"),
        f"{found('rank 0', 'calls'):,.0f}, {found(_OTHERS, 'calls'):,.0f}",
        megabytes("resident"), megabytes("own"), objects,
    ]  # fmt: skip


_OTHERS, _OTHER = "others' median", "NOT the same"


def _body(samples: Samples, jobs: Sequence[tuple[str, Sequence[str]]]) -> str:
    rows = []
    for subject, phases in jobs:
        for phase in phases:
            objects = samples.best(subject, "objects") if phase in (FIRST, NEXT) else None
            rows.append(_row(samples, subject, phase, "" if objects is None else f"{objects:.0f}"))
    head = [
        "job", "", "until the last rank was done", "CPU: rank 0, others", "exchanges", "S3 requests of rank 0",
        "of all ranks", "calls of the store: rank 0, others", "resident: rank 0, others",
        "own: rank 0, others", "objects",
    ]  # fmt: skip
    return table(head, rows)


def _beside_simulation(samples: Samples, ranks: int, simulated: dict[str, dict[str, float]], real: Figures) -> str:
    rows = []
    for phase in (FIRST, NEXT, RESUME):
        if phase not in real[0]:
            continue
        counts = [(simulated[phase].get(key, 0.0), real[0][phase].get(key, 0.0)) for key in _COMPARED]
        for key, (simulation, reality) in zip(_COMPARED, counts, strict=True):
            samples.add(f"{ranks} ranks", f"{phase}, {key}, simulated", simulation, "")
            samples.add(f"{ranks} ranks", f"{phase}, {key}, real", reality, "")
        same = "the same" if all(a == b for a, b in counts) else _OTHER
        rows.append([phase, *(f"{a:.0f}, {b:.0f}" for a, b in counts), same])
    head = ["simulated, real", "exchanges", *scale.KINDS.values(), ""]
    return f"Rank 0 of {ranks}, as the simulation has it and as it is:\n\n{table(head, rows)}"


def main(arguments: Sequence[str]) -> int:
    options_parser = parser("ranks", __doc__)
    options_parser.add_argument("--ranks", type=int, default=256)
    options_parser.add_argument("--resumed", type=int, default=192, help="on how many ranks the run is resumed")
    options_parser.add_argument("--per-host", type=int, default=8, help="ranks of a host, which write files together")
    options_parser.add_argument("--kinds", default="fsdp,pipelines", help="of jobs, with commas; may be empty")
    options_parser.add_argument(
        "--frozen", type=int, default=64, help="ranks of the jobs in which one freezes; 0: none"
    )
    options_parser.add_argument("--freezes", type=int, default=len(FREEZES), help="how many of the phases")
    options_parser.add_argument("--timeout", type=float, default=20.0, help="RankOptions.timeout of those jobs")
    options_parser.add_argument("--simulation", type=int, default=256, help="ranks held against it; 0: none")
    options: Namespace = options_parser.parse_args(arguments)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "CKPT_LOG": "warning"}
    memory = Path("/dev/shm")
    run, parts, jobs = Run("ranks", options, "torch"), [], []
    os.environ["LOCAL_WORLD_SIZE"] = str(options.per_host)  # as torchrun says it
    for kind in filter(None, options.kinds.split(",")):
        saved, again, objects = resumed(memory, _KINDS[kind], options.ranks, options.resumed, killed=True)
        subject, after = (f"{_KINDS[kind]}, {count} ranks" for count in (options.ranks, options.resumed))
        _keep(run.samples, subject, saved)
        _keep(run.samples, after, again)
        run.samples.add(subject, "objects", objects, "")
        jobs += [(subject, (FIRST, NEXT)), (after, (RESUME, AFTER))]
        print(_body(run.samples, jobs), flush=True)
    if jobs:
        parts.append(_body(run.samples, jobs))
    os.environ.pop("LOCAL_WORLD_SIZE")  # the simulation knows no hosts
    if options.simulation:
        saved, again, _ = resumed(memory, PLAIN, options.simulation, options.simulation, killed=False)
        real: Figures = [{**saved[0], **again[0]}]
        simulated = in_a_new_process(scale.measure, options.simulation, ranks_job.TENSORS)
        parts.append(_beside_simulation(run.samples, options.simulation, simulated, real))
        print(parts[-1], flush=True)
    if options.frozen:
        rows = []
        for freeze in FREEZES[: options.freezes]:
            took = frozen(memory, options.frozen, options.timeout, freeze)
            run.samples.add(freeze.where, "the last rank was told", took)
            rows.append([freeze.where, "saved" if freeze.saved else "the rank is named", in_seconds(took)])
            print(rows[-1], flush=True)
        title = f"One of {options.frozen} ranks is frozen, with a timeout of {options.timeout:g} s; all others:"
        parts.append(f"{title}\n\n{table(['where', 'all others', 'the last of them after'], rows)}")
    text = "\n\n".join(parts)
    run.keep(f"{options.ranks} real ranks", text)
    return int(_OTHER in text)
