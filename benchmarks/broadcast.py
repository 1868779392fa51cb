"""A load of a model that all ranks want, from a store whose bandwidth is the limit: read by each, per host, per job.

Hosts are simulated: real ranks on this machine, told to be on several hosts. A SeaweedFS server on this machine is
behind a proxy in a process of its own, which limits the bytes per second of all answers together, and counts them.
Every rank compares what it has loaded with what was saved, or there are no figures.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ckpt
from benchmarks.shared.delaying_proxy import bytes_of, delaying
from benchmarks.shared.forked_ranks import forked
from benchmarks.shared.measure import in_a_new_process, peak
from benchmarks.shared.report import Run, in_megabytes, in_seconds, parser, ratio, table
from benchmarks.shared.results import Samples
from ckpt.ranks import hosts
from tests.helpers.seaweed import BUCKET, environment, serving

ROOT = f"s3://{BUCKET}/run"
WIDTH = 2048  # of a square layer: 16 MiB
MODES: dict[str, bool | str] = {"every rank": False, "one rank per host": True, "one rank of the job": "job"}
PER_HOST, PER_JOB = list(MODES)[1:]
TIME, BYTES, MEMORY = "load", "bytes of the store", "memory"
_WITHIN = 600.0


def model(megabytes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(-(-megabytes // 16))))


def expected(megabytes: int) -> Iterator[torch.Tensor]:
    """The parameters that are saved, one after the other: ranks need not hold them all."""
    for number in range(-(-megabytes // 16)):
        yield torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))


def save(megabytes: int) -> None:
    saved = model(megabytes)
    with torch.no_grad():
        for parameter, value in zip(saved.parameters(), expected(megabytes), strict=True):
            parameter.copy_(value)
    with ckpt.StateManager(ROOT, model=saved) as manager:
        manager.save_state("x", wait=True)


def load(rank: int, folder: Path, mode: str, ranks_per_host: int, megabytes: int) -> None:
    """On one rank: load, compare, and leave the time and the memory beyond the model's."""
    hosts.host_name = lambda: f"host-{rank // ranks_per_host}"
    loaded = model(megabytes)
    took = list[float]()
    manager = ckpt.StateManager(ROOT, model=loaded, ranks=ckpt.RankOptions(broadcast=MODES[mode]))

    def timed() -> None:
        began = time.perf_counter()
        manager.load_state("x")
        took.append(time.perf_counter() - began)

    dist.barrier()
    more = peak(timed)
    for parameter, value in zip(loaded.parameters(), expected(megabytes), strict=True):
        assert torch.equal(parameter, value), f"rank {rank} has loaded other values"
    Path(folder, f"figures-{rank}").write_text(json.dumps([took[0], more]))
    manager.close()


def measure(samples: Samples, mode: str, url: str, options_of: tuple[int, int, int]) -> None:
    """One load by a job of its own: until its last rank has the model."""
    host_count, ranks_per_host, megabytes = options_of
    ranks = host_count * ranks_per_host
    with tempfile.TemporaryDirectory() as folder:
        before = bytes_of(url)
        with forked(ranks, Path(folder), load, mode, ranks_per_host, megabytes) as job:
            job.wait(_WITHIN)
        figures = [json.loads(Path(folder, f"figures-{rank}").read_text()) for rank in range(ranks)]
        samples.add(mode, TIME, max(took for took, _ in figures))
        samples.add(mode, BYTES, bytes_of(url) - before, "B")
        samples.add(mode, MEMORY, max(more or 0 for _, more in figures), "B")


def body(samples: Samples) -> str:
    rows = [
        [
            mode, in_seconds(samples.best(mode, TIME)), in_seconds(samples.median(mode, TIME)),
            in_megabytes(samples.median(mode, BYTES)), in_megabytes(samples.worst(mode, MEMORY)),
        ]
        for mode in MODES
    ]  # fmt: skip
    head = ["who reads", "best", "median", "bytes of the store", "memory of a rank, beyond the model"]
    times, counts = (ratio(samples.median(PER_HOST, what), samples.median(PER_JOB, what)) for what in (TIME, BYTES))
    return (
        f"{table(head, rows)}\n\nPer host over per job: {times} times the time, {counts} times the bytes (medians).\n"
    )


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("broadcast", __doc__)
    options_parser.add_argument("--hosts", type=int, default=4, help="simulated hosts")
    options_parser.add_argument("--ranks", type=int, default=2, help="ranks of each")
    options_parser.add_argument("--megabytes", type=int, default=256, help="MiB of the model")
    options_parser.add_argument("--bandwidth", type=float, default=100.0, help="MB that the store sends per second")
    options_parser.add_argument("--repeats", type=int, default=3)
    options = options_parser.parse_args(arguments)
    run = Run("broadcast", options, "torch", "s3fs", "aiobotocore")
    with serving() as server:
        os.environ.update(environment(server.url))
        in_a_new_process(save, options.megabytes)
        with delaying(server.port, 0.0, options.bandwidth * 1e6) as url:
            os.environ["AWS_ENDPOINT_URL"] = url
            for _ in range(options.repeats):
                for mode in MODES:
                    measure(run.samples, mode, url, (options.hosts, options.ranks, options.megabytes))
                    print(mode, run.samples.all(mode, TIME)[-1], run.samples.all(mode, BYTES)[-1], flush=True)
    title = (
        f"A model of {options.megabytes} MiB, loaded by {options.hosts} hosts with {options.ranks} ranks each from a "
        f"store of {options.bandwidth:g} MB/s"
    )
    notes = (
        "Real: the ranks, gloo over this machine's loopback, SeaweedFS. Simulated: the hosts, the store's bandwidth",
        f"Until the last rank has the model; {options.repeats} runs by turns. Equal in every byte on every rank",
    )
    run.keep(title, body(run.samples), None, *notes)
