"""The command `ckpt`: gathers the commands, one per module of this package.

Imports no torch, so that it starts at once: commands that need it import it when they run.
"""

from __future__ import annotations

from typing import Any

import click

from ckpt.cli.convert import convert
from ckpt.cli.demo import demo
from ckpt.cli.diff import diff
from ckpt.cli.ls import ls
from ckpt.cli.memory import memory
from ckpt.cli.merge import merge
from ckpt.cli.output import echo_error
from ckpt.cli.prune import prune
from ckpt.cli.pull import pull
from ckpt.cli.push import push
from ckpt.cli.report import report
from ckpt.cli.selftest import selftest
from ckpt.cli.show import show
from ckpt.cli.verify import verify
from ckpt.errors import CkptError
from ckpt.version import __version__


class _Commands(click.Group):
    """Commands that answer a `CkptError` with one line and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptError as error:
            echo_error(error)
            ctx.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Checkpoints of training runs: list, verify, compare, prune, publish, convert."""


for _command in (convert, demo, diff, ls, memory, merge, prune, pull, push, report, selftest, show, verify):
    main.add_command(_command)
