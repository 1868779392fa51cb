"""`ckpt selftest`: whether a training script resumes exactly."""

from __future__ import annotations

from typing import Any

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--nproc",
    "processes",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="The number of ranks to start with torchrun.",
)
@click.option(
    "--kills", default=3, show_default=True, type=click.IntRange(min=1), help="The number of times to kill the script."
)
@click.option(
    "--save-every", type=click.IntRange(min=1), help="Save every N steps, regardless of what the script sets."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    help="The random seed for choosing the steps after which the script is killed.",
)
@click.option("--timeout", default=600.0, show_default=True, help="The time limit for each process, in seconds.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def selftest(script: str, **options: Any) -> None:
    """Check whether SCRIPT resumes exactly: run it straight through, then kill and resume it, and compare.

    The selftest compares every batch, loss, gradient, learning rate and parameter, step by step, and the final
    checkpoint. If the runs differ, the selftest names the first step that differs, says what differs, and gives a hint.
    Keep the run short: use few epochs and little data.

    \b
    ckpt selftest train.py --epochs 2
    ckpt selftest --save-every 5 --nproc 2 train.py --epochs 2
    ckpt selftest train.py --output_dir {root}      # for scripts that use the folder themselves

    The script's managers save into temporary folders. The command exits with status 0 if the resume is exact, 1 if not,
    and 2 if there is nothing to compare.
    """
    from ckpt.errors import ConfigError
    from ckpt.selftest import Program, ProgramError, check

    try:
        report = check(Program(target=script, say=lambda text: click.echo(text, err=True), **options))
    except (ConfigError, ProgramError) as error:
        click.echo(f"ckpt: {error}", err=True)
        raise click.exceptions.Exit(2) from error
    click.echo(str(report))
    if not report.exact:
        raise click.exceptions.Exit(1)
