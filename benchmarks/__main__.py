"""`python -m benchmarks NAME ...` runs the benchmark in `benchmarks/NAME.py`."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    name = sys.argv.pop(1)
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
