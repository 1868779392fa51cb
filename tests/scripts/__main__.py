"""`make scripts SOURCES=folder`: scripts of other people, killed three times and resumed, against a run that was not.

The folder has checkouts of their repositories, at the commits of tests/scripts/scripts.py; nothing of them is part of
ckpt. Each script runs as it stands but for the lines that its user adds, in processes of its own, on the CPU, without
the network. The weights after every step of every attempt are those of the uninterrupted run, bit for bit, or it fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1",  # how a sum is divided among threads is part of its bits
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    CKPT_MEMORY_KEEPER="off",
    CUDA_VISIBLE_DEVICES="",
)

import ckpt
from tests.scripts.scripts import SCRIPTS, Script, Source
from tests.scripts.traced import Attempt

_HERE = Path(__file__).parent
_PRELOADED = "torch._dynamo accelerate datasets transformers.trainer transformers.models.bert transformers.models.gpt2"


class FailedError(Exception):
    """What a script did that it should not."""


def checkout(sources: Path, source: Source) -> Path:
    """The checkout of a source; says how to get it where there is none, or another commit."""
    folder = sources / source.name
    found = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
    if found.stdout.strip() != source.commit:
        raise FailedError(
            f"{folder} is not at {source.commit}. Get it: git clone https://github.com/{source.repository} {folder} "
            f"&& git -C {folder} checkout {source.commit}"
        )
    return folder


class Work:
    """A folder in which a script is run, as often as it takes, each time in a new process."""

    def __init__(self, folder: Path, script: Script, sources: Path) -> None:
        self.script, self.attempts, self._notes = script, 0, folder
        self._packages = [str(_HERE / "stand_ins")]
        file = checkout(sources, script.source) / script.path
        if script.source.packages:
            self._packages.append(str(sources / script.source.name / script.source.packages))
        self.folder = folder / "work"
        shutil.copytree(file.parent, self.folder, ignore=shutil.ignore_patterns(".git", "*.ipynb", "assets", "tests"))
        _in_a_process(script.data, self.folder)
        text = file.read_text()
        for change in script.changes:
            text = change.apply(text)
        (self.folder / file.name).write_text(text)

    def run(self, killed_at: int = 0, seconds: float = 0) -> list[str]:
        """Start the script; return a hash of the weights after each of its steps."""
        self.attempts += 1
        arguments = self.script.arguments.split()
        if self.script.resume and (found := self._newest()):
            arguments += [self.script.resume, found]
        attempt = Attempt(
            script=self.folder / Path(self.script.path).name,
            arguments=arguments,
            packages=self._packages,
            root=self.script.root,
            notes=self._notes / f"attempt-{self.attempts}",
            killed_at=killed_at,
            seconds=seconds,
        )
        code = _in_a_process(attempt.run)
        if code != (-signal.SIGKILL if killed_at else 0):
            output = Path(f"{attempt.notes}.output").read_text()
            raise FailedError(f"{self.script.name} ended with {code}:\n{output[-8000:]}")
        return attempt.notes.read_text().split()

    def _newest(self) -> str | None:
        found = ckpt.list_checkpoints(self.folder / self.script.root)
        return next((f"{self.script.root}/{checkpoint.name}" for checkpoint in found if checkpoint.committed), None)


def _in_a_process(function: Callable[..., None], *arguments: object) -> int | None:
    """A fork of this process, which has imported the libraries: a new interpreter takes ten seconds for that."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join(900)
    process.kill()
    process.join()
    return process.exitcode


def compare(script: Script, sources: Path, folder: Path) -> str:
    """A row of the table. Raises FailedError where an attempt departs from the uninterrupted run."""
    straight = Work(folder / "straight", script, sources).run()
    killed = Work(folder / "killed", script, sources)
    began: list[int] = []
    ended: list[int] = []
    for killed_at, seconds in (*script.kills, (0, 0)):
        steps = killed.run(killed_at, seconds)
        first = straight.index(steps[0]) if steps and steps[0] in straight else -1
        if first < 0 or steps != straight[first : first + len(steps)]:
            raise FailedError(f"{script.name}: attempt {killed.attempts} is not what the uninterrupted run did")
        if ended and not 0 < first <= ended[-1]:
            raise FailedError(f"{script.name}: attempt {killed.attempts} began at step {first}, after {ended[-1]}")
        began.append(first)
        ended.append(first + len(steps))
    if ended[-1] != len(straight):
        raise FailedError(f"{script.name}: the last attempt ended after step {ended[-1]} of {len(straight)}")
    lines = sum(len(change.ours.strip().split("\n")) for change in script.changes)
    kills, resumes = (", ".join(map(str, numbers)) for numbers in (ended[:-1], began[1:]))
    link = f"https://github.com/{script.source.repository}/blob/{script.source.commit}/{script.path}"
    shown = f"[{script.source.name}: {script.path.removeprefix('examples/')}]({link})"
    return f"| {shown} | {lines} | {len(straight)} | {kills} | {resumes} | equal, every step |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names; all scripts without")
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    rows, failed = [], 0
    for name in _PRELOADED.split():
        with suppress(ImportError):
            importlib.import_module(name)
    for script in SCRIPTS:
        if options.names and not any(name in script.name for name in options.names):
            continue
        missing = [name for name in script.needs if importlib.util.find_spec(name) is None]
        with tempfile.TemporaryDirectory() as folder:
            try:
                if missing:
                    raise FailedError(
                        f"{script.name} needs {', '.join(missing)}: install them, or put them on PYTHONPATH"
                    )
                rows.append(compare(script, options.sources.resolve(), Path(folder)))
                print(rows[-1], flush=True)
            except FailedError as error:
                failed += 1
                print(error, flush=True)
    if options.report and (failed or options.names):
        print(f"{options.report} is left as it is: it is a table of all scripts", flush=True)
    elif options.report:
        rule = "|---|---:|---:|---|---|---|\n"
        head = options.report.read_text().partition(rule)[0]
        options.report.write_text(head + rule + "".join(f"{row}\n" for row in rows))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
