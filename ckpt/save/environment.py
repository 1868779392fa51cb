"""The environment of a run, as its manifests record it: versions, and the processor or accelerator."""

from __future__ import annotations

import platform
from functools import cache

import torch

from ckpt.version import __version__


def device_name() -> str:
    """The accelerator if this process uses one, else the processor."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # to ask for its name would initialise it
        return str(torch.cuda.get_device_name())
    return _processor() or platform.machine()


@cache
def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = (line.partition(":") for line in file)
            return next((value.strip() for key, _, value in lines if key.strip() == "model name"), "")
    except OSError:
        return platform.processor()


def versions() -> dict[str, str]:
    return {"ckpt": __version__, "torch": torch.__version__, "python": platform.python_version()}
