"""The command: builds the shim, starts itself under it, runs the trials and writes the report."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

_SCRATCH = "CKPT_CAMPAIGN_SCRATCH"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="trials at the same time")
    parser.add_argument("--report", type=Path, help="a Markdown file; a JSON file is written beside it")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these kinds of faults alone")
    parser.add_argument("--index", type=int, help="this trial of the kind alone")
    parser.add_argument("--plant", nargs="+", default=[], metavar="FAULT", help="see planted.py; for tests")
    parser.add_argument("--scratch", type=Path, help="where roots are made (a temporary folder)")
    return parser.parse_args()


def main() -> int:
    options = _options()
    scratch = os.environ.pop(_SCRATCH, None)
    if scratch is None:
        _start_under_shim(options)
    os.environ.pop("LD_PRELOAD", None)
    try:
        from tests.campaign.campaign import Campaign

        return Campaign(options, Path(scratch or "")).run()
    finally:
        shutil.rmtree(scratch or "", ignore_errors=True)


def _start_under_shim(options: argparse.Namespace) -> None:
    """Replace this process by one into which the shim is loaded. Threads of libraries would not survive a fork."""
    from tests.campaign.calls import build

    scratch = Path(tempfile.mkdtemp(prefix="campaign-", dir=options.scratch)).resolve()
    shim = build(scratch)
    alone = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    preload = {"LD_PRELOAD": str(shim)} if shim else {}
    environment = {**os.environ, **alone, **preload, _SCRATCH: str(scratch)}
    os.execve(sys.executable, [sys.executable, "-m", "tests.campaign", *sys.argv[1:]], environment)


if __name__ == "__main__":
    sys.exit(main())
