"""`ckpt demo`: train twice, once killed in the middle of a save and resumed, and compare the results bit for bit.

Imports no torch: the training itself (`ckpt.cli.demo_training`) runs in processes of its own, and is killed for real.
"""

from __future__ import annotations

import filecmp
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass

import click

from ckpt.cli.ls import show_checkpoints
from ckpt.errors import CkptError, ConfigError
from ckpt.formats.checkpoint_name import name_of_step
from ckpt.root import catalog
from ckpt.storage import LocalStorage
from ckpt.util.console import format_size, say

STRAIGHT = "straight"
INTERRUPTED = "interrupted"
MARKER = ".ckpt-demo"
_NOTE = f"by a `ckpt demo`. The next one removes {STRAIGHT}/ and {INTERRUPTED}/ here."
_SAVES, _FATAL_SAVE = 8, 5  # saves of a run, and the one in which it is killed

Losses = dict[int, float]  # by step


@click.command()
@click.option("--root", default="runs/demo", show_default=True, help="The folder for the demo's checkpoints.")
@click.option("--steps", default=240, hidden=True, type=click.IntRange(min=24), help="The number of steps to train.")
def demo(root: str, steps: int) -> None:
    """Train a small model with and without a kill in the middle of a save, and compare the results.

    The demo trains on the CPU and takes half a minute. The command
    exits with status 1 unless both runs end in the same state, bit for bit.
    """
    if not Demo(os.path.normpath(root) if "://" not in root else root, steps).run():
        raise click.exceptions.Exit(1)


@dataclass(frozen=True)
class Demo:
    """`steps` of training in `root` with eight saves, killed in the fifth."""

    root: str
    steps: int

    @property
    def save_every(self) -> int:
        return self.steps // _SAVES

    @property
    def killed_at(self) -> int:
        return _FATAL_SAVE * self.save_every

    def run(self) -> bool:
        """Train, kill, resume and compare, and print every step. Returns True if both runs ended in the same state, bit
        for bit."""
        self.check_root()
        cut_off = name_of_step(self.killed_at)
        with LocalStorage(self.root).lock(MARKER, note=_NOTE):
            self.clear()
            click.echo(f"A small transformer learns the text of a short story on the CPU: {self.steps} steps.\n")
            click.secho("1  straight through ...", bold=True)
            straight, _ = self._train(STRAIGHT)
            click.secho(f"2  the same run, killed by SIGKILL halfway through saving {cut_off} ...", bold=True)
            doomed, _ = self._train(
                INTERRUPTED, "--die-writing", f"{cut_off}/optimizer.safetensors", status=-signal.SIGKILL
            )
            self._show_wreck(cut_off)
            click.secho("3  in a new process ...", bold=True)
            resumed, said = self._train(INTERRUPTED)
            click.echo(f"\n{said}")
            began = min(resumed) - 1
            same = self.compare(straight, doomed | resumed, began)
            click.echo(f"{cut_off} was interrupted; the new process resumed from {name_of_step(began)}.")
            folder = shlex.quote(self.folder(INTERRUPTED))
            click.echo(f"\nThe checkpoints of both runs are in {self.root}. Look at them:\n")
            click.echo(f"  ckpt ls {folder}\n  ckpt verify {folder}")
            return same

    def folder(self, name: str) -> str:
        return f"{self.root}/{name}"

    def check_root(self) -> None:
        """Refuse a directory that no demo made: what an earlier demo left there will be removed."""
        root = self.root
        if "://" in root:
            raise ConfigError(
                f"the demo shows you the files that it writes, so --root must be a folder on this machine, not {root}."
            )
        if os.path.isdir(root) and os.listdir(root) and not os.path.isfile(f"{root}/{MARKER}"):
            raise ConfigError(
                f"{root} has files that are not from an earlier demo. Nothing was changed. Use another --root."
            )

    def clear(self) -> None:
        for path in map(self.folder, (STRAIGHT, INTERRUPTED)):
            try:
                if os.path.lexists(path):
                    shutil.rmtree(path)
            except OSError as error:
                raise ConfigError(f"ckpt can't remove {path}: {error}. Use another --root.") from error

    def _train(self, folder: str, *more: str, status: int = 0) -> tuple[Losses, str]:
        """Run the training in a new process, which must end so. Returns its losses, and what it said."""
        options = ["--steps", str(self.steps), "--save-every", str(self.save_every), *more]
        command = [sys.executable, "-m", "ckpt.cli.demo_training", self.folder(folder), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode != status:
            say(done.stderr)
            raise CkptError(
                f"the demo's training ended with status {done.returncode} instead of {status}. See the output above."
            )
        pairs = (line.split() for line in done.stdout.splitlines())
        return {int(step): float(loss) for step, loss in pairs}, done.stderr

    def _show_wreck(self, cut_off: str) -> None:
        """Show the files that the kill left, before the new process removes them."""
        folder = self.folder(INTERRUPTED)
        click.echo(f"\nWhat the kill left, as `ckpt ls {folder}` sees it:\n")
        show_checkpoints(folder)
        click.echo(f"\nand in {folder}/{cut_off}:\n")
        for name in sorted(os.listdir(f"{folder}/{cut_off}")):
            click.echo(f"  {format_size(os.path.getsize(f'{folder}/{cut_off}/{name}')):>9}  {name}")
        click.echo()

    def compare(self, straight: Losses, joined: Losses, began: int) -> bool:
        """Show both runs side by side, and return whether they ended bit for bit the same."""
        marks = {began: "<- resumed from here", self.killed_at: "<- killed while saving this"}
        click.echo(f"\n{'step':>6}  {'straight through':>16}  {'killed, resumed':>16}")
        for step in [1, *range(self.save_every, len(straight) + 1, self.save_every)]:
            other = click.style(f"{joined[step]:>16.8f}", fg="green" if straight[step] == joined[step] else "red")
            click.echo(f"{step:>6}  {straight[step]:>16.8f}  {other}  {marks.get(step, '')}".rstrip())
        same = self._same_files() and straight == joined
        verdict = f"BIT-IDENTICAL: weights, optimizer, generators and all {len(joined)} losses."
        if not same:
            verdict = "NOT IDENTICAL: the two runs did not end in the same state. This is a bug in ckpt!"
        click.secho(f"\n{verdict}", bold=True, fg="green" if same else "red")
        return same

    def _same_files(self) -> bool:
        """Show the files of the last checkpoint, and return whether both runs have the same bytes."""
        (name, first), (_, second) = (_last_files(self.folder(name)) for name in (STRAIGHT, INTERRUPTED))
        click.echo(f"\nThe last checkpoint, {name}, in both runs:\n")
        differ = first.keys() ^ second.keys()
        differ |= {one for one in first.keys() & second.keys() if not filecmp.cmp(first[one], second[one], False)}
        for one in sorted(first | second):
            click.echo(f"  {one:<21}  {'DIFFERENT' if one in differ else 'identical'}")
        return not differ


def _last_files(folder: str) -> tuple[str, dict[str, str]]:
    """The name of the last checkpoint, and the paths of its files by their names."""
    last = catalog.list_checkpoints(folder)[0]
    return last.name, {file.name: f"{last.url}/{file.path}" for file in last.manifest.files} if last.manifest else {}
