"""Runs benchmarks, and compares their results.

    python -m benchmarks cpu|gpu|memory|merge|s3|s3_clients|sharded [options]  measures ckpt beside other libraries
    python -m benchmarks broadcast|commands|listing|mirror_end [options]     measures ckpt by itself
    python -m benchmarks plan|ranks|scale|scaling [options]                  likewise
    python -m benchmarks goodput [options]                                   simulates what failures and saves cost
    python -m benchmarks against CHECKOUT [options]                          measures this code beside another checkout
    python -m benchmarks cpu|merge|sharded --against CHECKOUT [options]      the same, with the tasks of one benchmark
    python -m benchmarks compare OLD.json NEW.json                           compares two runs, row by row

`--help` after a name lists its options. Reports and every sample are kept in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

MODULES = {
    "broadcast": "benchmarks.broadcast",
    "commands": "benchmarks.commands",
    "cpu": "benchmarks.cpu",
    "goodput": "benchmarks.goodput",
    "gpu": "benchmarks.gpu",
    "listing": "benchmarks.listing",
    "memory": "benchmarks.memory",
    "merge": "benchmarks.merge",
    "mirror_end": "benchmarks.mirror_end",
    "plan": "benchmarks.plan",
    "ranks": "benchmarks.ranks",
    "s3": "benchmarks.s3",
    "s3_clients": "benchmarks.s3_clients",
    "scale": "benchmarks.scale",
    "scaling": "benchmarks.scaling",
    "sharded": "benchmarks.sharded",
    "against": "benchmarks.against.run",
    "compare": "benchmarks.compare",
}
TASKS = {"cpu": "save,load,blocked", "merge": "merge", "sharded": "sharded"}  # of a benchmark with --against


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark; the exit status is 1 if it is a comparison that found something slower."""
    name = arguments[0] if arguments else "--help"
    if name not in MODULES:
        print((__doc__ or "").strip(), file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    name, rest = redirected(name, arguments[1:])
    return importlib.import_module(MODULES[name]).main(rest) or 0


def redirected(name: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """`cpu --against CHECKOUT` is `against CHECKOUT --tasks save,load,blocked`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    if name in TASKS:
        parser.add_argument("--against")
    found, rest = parser.parse_known_args(arguments)
    checkout: str | None = getattr(found, "against", None)
    return (name, rest) if checkout is None else ("against", [checkout, "--tasks", TASKS[name], *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
