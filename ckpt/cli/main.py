"""The command `ckpt`: gathers the commands, one per module of this package.

Imports no torch, so that it starts at once: commands that need it import it when they run.
"""

from __future__ import annotations

import traceback
from typing import Any

import click

from ckpt.cli.convert import convert
from ckpt.cli.demo import demo
from ckpt.cli.diff import diff
from ckpt.cli.key import key
from ckpt.cli.ls import ls
from ckpt.cli.memory import memory
from ckpt.cli.merge import merge
from ckpt.cli.output import echo, echo_error
from ckpt.cli.prune import prune
from ckpt.cli.pull import pull
from ckpt.cli.push import push
from ckpt.cli.report import report
from ckpt.cli.selftest import selftest
from ckpt.cli.show import show
from ckpt.cli.verify import verify
from ckpt.errors import CkptError
from ckpt.version import __version__

FAULT = 70  # the exit status of EX_SOFTWARE: an error inside the program
_OF_CLICK = (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError)


class _Commands(click.Group):
    """Commands that answer a `CkptError` with one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptError as error:
            echo_error(error)
            ctx.exit(1)
        except _OF_CLICK:
            raise
        except Exception as error:  # a mistake in ckpt, or in a library that it uses
            echo(_fault(error), err=True)
            ctx.exit(FAULT)


def _fault(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"ckpt: {type(error).__name__}: {error} ({place.filename}, line {place.lineno}). This is a fault of ckpt "
        f"{__version__}, not of yours: please report this line and the command. https://pypi.org/project/torch-ckpt/ "
        "says where."
    )


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Checkpoints of training runs: list, verify, compare, prune, publish, convert."""


for _command in (convert, demo, diff, key, ls, memory, merge, prune, pull, push, report, selftest, show, verify):
    main.add_command(_command)
