"""The command: builds the shim, starts itself under it, runs the trials and writes the report."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime, timezone
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
    parser.add_argument("--scratch", type=Path, help="where roots are made (a temporary folder)")
    return parser.parse_args()


def main() -> int:
    options = _options()
    scratch = os.environ.pop(_SCRATCH, None)
    if scratch is None:
        _start_under_shim(options)
    try:
        return _campaign(options, Path(scratch or ""))
    finally:
        shutil.rmtree(scratch or "", ignore_errors=True)


def _start_under_shim(options: argparse.Namespace) -> None:
    """Replace this process by one into which the shim is loaded. Threads of libraries would not survive a fork."""
    from tests.campaign.calls import build

    scratch = Path(tempfile.mkdtemp(prefix="campaign-", dir=options.scratch)).resolve()
    shim = build(scratch)
    alone = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    preload = {"LD_PRELOAD": str(shim)} if shim else {}
    environment = {**os.environ, **alone, **preload, _SCRATCH: str(scratch)}
    os.execve(sys.executable, [sys.executable, "-m", "tests.campaign", *sys.argv[1:]], environment)


def _campaign(options: argparse.Namespace, scratch: Path) -> int:
    os.environ.pop("LD_PRELOAD", None)
    import torch
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import ckpt.manager
    from tests.campaign.calls import Shim
    from tests.campaign.kinds import KINDS, counts, prepare
    from tests.campaign.report import Report, again, coverage
    from tests.campaign.runner import Runner
    from tests.campaign.trials import Trial
    from tests.campaign.verdicts import Verdict

    torch.set_num_threads(1)
    chosen = [kind for name, kind in KINDS.items() if options.only is None or name in options.only]
    unknown = set(options.only or ()) - KINDS.keys()
    if unknown or not chosen:
        print(f"no such kind: {', '.join(sorted(unknown))}. There are: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    left_out = [] if Shim.is_loaded() else [kind.name for kind in chosen if kind.shim]
    chosen = [kind for kind in chosen if kind.name not in left_out]
    begun, date = time.monotonic(), datetime.now(timezone.utc)
    prepare_in = scratch / "prepare"
    prepare_in.mkdir()
    preparing = Trial("prepare", 0, options.seed, prepare_in, scratch)
    try:
        prepared = prepare({kind.name for kind in chosen}, options.seed, scratch, preparing)
    finally:
        preparing.end()
    numbers = counts(options.trials, chosen, prepared) if options.index is None else {}

    done = 0

    def tell(verdict: Verdict) -> None:
        nonlocal done
        done += 1
        if verdict.fault:
            print(f"{verdict.fault}: {verdict.scenario}\n  {again(verdict, options.seed)}", file=sys.stderr)
        if options.index is not None:
            print(f"{verdict.scenario}: {verdict.fault or 'nothing found'}\n{verdict.evidence}")
        elif done % 100 == 0:
            print(f"{done} of {sum(numbers.values())} trials, {time.monotonic() - begun:.0f} s", file=sys.stderr)

    runner = Runner(options.seed, scratch, options.jobs, prepared, tell)
    one = [(kind.name, options.index) for kind in chosen]
    verdicts = runner.run(iter(one) if options.index is not None else _in_turn(numbers))
    notes = coverage(prepared, numbers)
    if left_out:
        notes.append(f"- no C compiler was found: {', '.join(left_out)} were left out.")
    report = Report(
        command=_command(options),
        seed=options.seed,
        date=f"{date:%Y-%m-%d %H:%M} UTC",
        seconds=time.monotonic() - begun,
        verdicts=sorted(verdicts, key=lambda one: (list(KINDS).index(one.kind), one.index)),
        notes=notes,
    )
    print(report.table())
    if options.report is not None:
        report.write(options.report)
    return 1 if report.findings else 0


def _in_turn(numbers: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Trials of all kinds, mixed: the long ones are not left for the end."""
    placed = [((index + 0.5) / count, name, index) for name, count in numbers.items() for index in range(count)]
    return iter([(name, index) for _, name, index in sorted(placed)])


def _command(options: argparse.Namespace) -> str:
    only = f" --only {' '.join(options.only)}" if options.only else ""
    return f"python -m tests.campaign --trials {options.trials} --seed {options.seed} --jobs {options.jobs}{only}"


if __name__ == "__main__":
    sys.exit(main())
