"""A process that measures one checkout: PYTHONPATH decides which. Run as a script by `benchmarks/against/run.py`.

It takes a sample of its task for each line on standard input, and answers with one line of JSON. Only the public names
of ckpt are used, since the checkouts may have different modules.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ckpt  # first of all: below, this checkout gets precedence, for `benchmarks` alone

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

from benchmarks.against import tasks  # noqa: E402


def require_no_strays(checkout: Path) -> None:
    """Every module of ckpt must be the checkout's, and not of an installed version, say."""
    modules = [module for name, module in sys.modules.items() if name == "ckpt" or name.startswith("ckpt.")]
    files = [file for module in modules if (file := getattr(module, "__file__", None))]
    strays = [file for file in files if not Path(file).resolve().is_relative_to(checkout)]
    assert not strays, f"{checkout} is to be measured, but these modules are of another one: {', '.join(strays)}"


def main() -> None:
    name, checkout, folder, megabytes = sys.argv[1:]
    with tasks.TASKS[name](Path(folder), int(megabytes)) as task:
        while tasks.on_all_ranks(sys.stdin.readline):
            samples = task.sample()
            require_no_strays(Path(checkout))
            if tasks.is_main():
                print(tasks.MARK + json.dumps({"samples": samples, "ckpt": ckpt.__file__}), flush=True)


if __name__ == "__main__":
    main()
