"""The environment that manifests record: versions, and the accelerator or processor."""

from __future__ import annotations

import platform
from functools import cache

import torch

from ckpt.version import __version__


def device_name() -> str:
    """The accelerator if this process uses one, else the processor."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # asking for its name would initialise CUDA
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
