"""Saves in experiment trackers: callbacks for `manager.on_save`.

    manager.on_save(trackers.tensorboard(writer))

Each records how long training waited for a checkpoint, when it was durable, and its bytes, under names that begin with
`ckpt/`. The library is the caller's: none is imported here before it is asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.save.saver import SaveReport

Callback = Callable[[SaveReport], None]


def numbers(report: SaveReport) -> dict[str, float]:
    """What is recorded of a save, by name."""
    return {
        "ckpt/seconds_blocked": report.blocked,
        "ckpt/seconds_durable": report.durable,
        "ckpt/bytes": float(report.size),
        "ckpt/bytes_linked": float(report.linked),
    }


def tensorboard(writer: Any) -> Callback:
    """Report to a TensorBoard `SummaryWriter`: scalars at the step of the checkpoint."""

    def record(report: SaveReport) -> None:
        if not report.mirrored:
            for name, value in numbers(report).items():
                writer.add_scalar(name, value, report.step)

    return record


def wandb(run: Any = None) -> Callback:
    """Report to a run of Weights & Biases, by default the current one, with your script's next log call."""

    def record(report: SaveReport) -> None:
        if not report.mirrored:
            current = run if run is not None else _current_run()
            current.log({**numbers(report), "ckpt/step": report.step}, commit=False)

    return record


def mlflow(run_id: str | None = None) -> Callback:
    """Report to the active run of MLflow, or the one with this id."""

    def record(report: SaveReport) -> None:
        if not report.mirrored:
            import mlflow as library

            library.log_metrics(numbers(report), step=report.step, run_id=run_id)

    return record


def prometheus(path: str | os.PathLike[str], **labels: str) -> Callback:
    """Write a text file for Prometheus' node exporter at every save: `prometheus("textfiles/x.prom", run="x")`.

    Besides the numbers of the newest save, it has its step, its time, and how many checkpoints the mirror lacks.
    """
    target, behind = Path(path), set[str]()
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())

    def record(report: SaveReport) -> None:
        (behind.add if report.mirrored is False else behind.discard)(report.name)
        values = {
            **{name.replace("/", "_"): value for name, value in numbers(report).items()},
            "ckpt_step": float(report.step),
            "ckpt_saved_timestamp_seconds": time.time(),
            "ckpt_not_mirrored": float(len(behind)),
        }
        lines = [f"# TYPE {name} gauge\n{name}{{{shown}}} {value!r}\n" for name, value in values.items()]
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        temporary.write_text("".join(lines))
        os.replace(temporary, target)

    return record


def _current_run() -> Any:
    import wandb as library

    if library.run is None:
        raise RuntimeError("no run of Weights & Biases is active. Call wandb.init first, or pass the run")
    return library.run


def _escaped(value: str) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
