"""A process of the selftest: runs the user's program with a recorder installed.

python -m ckpt.selftest.child PLAN.json
"""

from __future__ import annotations

import importlib.util
import os
import random
import runpy
import sys
from pathlib import Path

import torch

from ckpt.selftest.recorder import Recorder
from ckpt.selftest.trace import Plan


def main(path: str) -> None:
    plan = Plan.read(Path(path))
    rank = int(os.environ.get("RANK", "0"))
    _seed(plan, rank)
    sys.path[:0] = [folder for folder in plan.path if folder not in sys.path]
    recorder = Recorder(plan, rank)
    recorder.install()
    try:
        _run(plan)
    except SystemExit as done:
        if done.code not in (0, None):
            raise
    recorder.finish()


def _run(plan: Plan) -> None:
    if not plan.function:
        sys.argv = [plan.target, *plan.arguments]
        sys.path.insert(0, str(Path(plan.target).resolve().parent))
        runpy.run_path(plan.target, run_name="__main__")
        return
    name = Path(plan.target).stem
    spec = importlib.util.spec_from_file_location(name, plan.target)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    getattr(module, plan.function)(plan.root)


def _seed(plan: Plan, rank: int) -> None:
    """Seed the first process of every run alike, and resumed ones differently.

    A program that relies on the seed of its process, instead of the checkpoint, then differs.
    """
    seed = plan.seed + 1000 * rank + 100_000 * plan.process
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy as np

        np.random.seed(seed % (1 << 32))


if __name__ == "__main__":
    main(sys.argv[1])
