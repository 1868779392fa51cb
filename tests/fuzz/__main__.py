"""The command: `python -m tests.fuzz --inputs 200000 --seed 1 --jobs 2 --report docs/fuzzing.md`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first input")
    parser.add_argument("--jobs", type=int, default=2, help="processes at the same time")
    parser.add_argument("--all", action="store_true", help="also the corpus of Lightning and DeepSpeed")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="operations with such a word in their names")
    parser.add_argument("--report", type=Path, help="a Markdown file")
    parser.add_argument("--save", type=Path, help="a folder for what is found, an input for each")
    parser.add_argument("--verbose", action="store_true", help="print every finding, before they are made smaller")
    parser.add_argument("--replay", type=Path, help="run the inputs that are kept in this folder, and nothing else")
    parser.add_argument("--corpus", type=Path, help="a folder of real files; made if it does not exist")
    parser.add_argument("--scratch", type=Path, help="where inputs are written; shared memory is fastest")
    return parser.parse_args()


def main() -> int:
    options = _options()
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    os.environ["CKPT_MEMORY_KEEPER"] = "off"
    sys.dont_write_bytecode = True  # of a module that an input is the first to need: it would pass for a finding
    scratch = options.scratch or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=scratch, ignore_cleanup_errors=True) as folder:
        from tests.fuzz.fuzzer import Fuzzer, replay

        if options.replay is None:
            return Fuzzer(options, Path(folder)).run()
        found = replay(options.replay, Path(folder), options.jobs)
        for one in found:
            print(f"{one.finding.kind}: {one.finding.signature} ({one.case.target})\n{one.finding.evidence}")
        return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
