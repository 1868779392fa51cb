"""The command `ckpt`: gathers the commands, which are in modules of this package.

Imports no torch, so that it starts at once: commands that need it import it when they run.
"""

from __future__ import annotations

import errno
import importlib
import traceback
from typing import Any

import click

from ckpt.cli.output import echo, echo_error
from ckpt.errors import CkptError
from ckpt.version import __version__

FAULT = 70  # the exit status of EX_SOFTWARE: an error inside the program
_OF_CLICK = (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError)


# every command and what it says of itself: its module is imported when it runs
COMMANDS = {
    "convert": "Convert a checkpoint between formats, and list what the new format can't hold.",
    "demo": "Train a small model with and without a kill in the middle of a save, and compare the results.",
    "diff": "Compare two checkpoints, FIRST and SECOND, and list the tensors and values that differ.",
    "key": "Make a key pair that signs and verifies checkpoints (ckpt.Signing(key=...), ckpt verify --key).",
    "ls": "List the checkpoints in ROOT, newest first.",
    "memory": "List or remove the snapshots that runs keep in this machine's memory.",
    "merge": "Merge the checkpoint at SOURCE into one safetensors file, DESTINATION.",
    "plan": "Show what saving costs at different intervals, and which interval loses the least time.",
    "prune": "Remove old checkpoints and the leftovers of crashed saves from ROOT.",
    "pull": "Copy a checkpoint, a root or other files from SOURCE to DESTINATION, and verify the copy.",
    "push": "Publish the model of the checkpoint at SOURCE as REPO_ID on the Hub.",
    "report": "Print how the run in ROOTS went, or write it to an HTML or Markdown page.",
    "selftest": "Check whether SCRIPT resumes exactly: run it straight through, then kill and resume it, and compare.",
    "show": "Show what is in SOURCE: parts, tensors, progress and files.",
    "verify": "Read every byte of the checkpoint at URL, or of all checkpoints in a root, and verify the hashes.",
}


# those that are not in a module of their name
_MODULES = {**dict.fromkeys(("convert", "merge", "pull", "push"), "transfer"), "key": "verify"}


class _Commands(click.Group):
    """Commands that answer a `CkptError` with one line and exit status 1. Each is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ckpt.cli.{_MODULES.get(cmd_name, cmd_name)}")
        found: click.Command = getattr(module, cmd_name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptError as error:
            echo_error(error)
            ctx.exit(1)
        except _OF_CLICK:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of standard output: others are a CkptError
                echo("ckpt: the output could not be written: no space is left on the device.", err=True)
                ctx.exit(1)
            echo(_fault(error), err=True)  # a mistake in ckpt, or in a library that it uses
            ctx.exit(FAULT)


def _fault(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"ckpt: {type(error).__name__}: {error} ({place.filename}, line {place.lineno}). This is a bug in ckpt "
        f"{__version__}, not a mistake of yours: please report this line and the command. "
        "https://pypi.org/project/torch-ckpt/ says where."
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """List, verify, compare, prune, publish and convert the checkpoints of training runs."""
