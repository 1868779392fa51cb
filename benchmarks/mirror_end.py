"""How long a run takes to end, and to start again, while its mirror is away: SIGSTOP of a real S3 server, or SIGKILL.

The root must have the last checkpoint afterwards, or there are no figures. Beside it the same with the mirror there.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn

import ckpt
from benchmarks.shared.measure import in_a_new_process
from benchmarks.shared.report import Run, Target, in_seconds, parser, table, table_of_targets
from tests.helpers.seaweed import BUCKET, environment, serving

THERE, STOPPED, KILLED = "there", "not answering", "refusing"
CLOSE, SIGTERM, RESUME = "close()", "close() after SIGTERM", "resume() with an intact root"
MORE = 2.0  # seconds beyond the bounds: the last try that is under way
NOTES = ("Bounds: at_end for close(), 5 s after SIGTERM, at_start for resume(); they run while nothing moves",)


def ended(root: str, how: str, pid: int, at_end: float, *, told: bool) -> float:
    """In a process of its own: save, take the mirror away, save the last, and end."""
    mirror = ckpt.Mirror(f"s3://{BUCKET}/{os.path.basename(root)}", at_end=at_end)
    manager = ckpt.StateManager(root, model=nn.Linear(64, 64), mirror=mirror)
    manager.resume()
    manager.step()
    manager.save_state("first", wait=True)
    while manager.session.mirror is not None and manager.session.mirror.is_copying:
        time.sleep(0.05)
    if how != THERE:
        os.kill(pid, signal.SIGSTOP if how == STOPPED else signal.SIGKILL)
    if told:
        os.kill(os.getpid(), signal.SIGTERM)
    began = time.perf_counter()
    with suppress(SystemExit):  # after SIGTERM the step saves, and ends the process
        manager.step()
        manager.save_state("last", wait=True)
        began = time.perf_counter()
    manager.close()
    return time.perf_counter() - began


def resumed(root: str, at_start: float) -> float:
    mirror = ckpt.Mirror(f"s3://{BUCKET}/{os.path.basename(root)}", at_start=at_start, at_end=0.1)
    manager = ckpt.StateManager(root, model=nn.Linear(64, 64), mirror=mirror)
    began = time.perf_counter()
    restored = manager.resume()
    took = time.perf_counter() - began
    assert restored.name == "last", restored.name
    manager.close()
    return took


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("mirror_end", __doc__)
    options_parser.add_argument("--at-end", type=float, default=10.0)
    options_parser.add_argument("--at-start", type=float, default=5.0)
    options_parser.add_argument("--repeats", type=int, default=2)
    options = options_parser.parse_args(arguments)
    run = Run("mirror_end", options, "torch", "s3fs", "aiobotocore")
    for number in range(options.repeats):
        for how in (THERE, STOPPED, KILLED):
            for told in (False, True):
                with tempfile.TemporaryDirectory(dir=options.root) as root, serving() as server:
                    os.environ.update(environment(server.url))
                    took = in_a_new_process(ended, root, how, server.pid, options.at_end, told=told)
                    run.samples.add(how, SIGTERM if told else CLOSE, took)
                    assert [found.step for found in ckpt.list_checkpoints(root)] == [2, 1]
                    if not told:
                        run.samples.add(how, RESUME, in_a_new_process(resumed, root, options.at_start))
                    print(number, how, told, round(took, 1), flush=True)
                    if how == STOPPED:
                        os.kill(server.pid, signal.SIGCONT)
    bounds = {CLOSE: options.at_end, SIGTERM: min(5.0, options.at_end), RESUME: options.at_start}
    subjects = (THERE, STOPPED, KILLED)
    rows = [[task, *(in_seconds(run.samples.median(how, task)) for how in subjects)] for task in bounds]
    worst = {task: max(run.samples.median(how, task) or 0.0 for how in subjects) for task in bounds}
    targets = table_of_targets([Target(task, worst[task], bounds[task] + MORE, unit=" s") for task in bounds])
    body = f"{table(['', *(f'mirror {how}' for how in subjects)], rows)}\n\n{targets}"
    run.keep(f"The end of a run whose mirror is away, torch {torch.__version__}", body, None, *NOTES)
