"""The command that says what is in a checkpoint: `ckpt show`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime

import click

from ckpt.tools.show import Part, Shown, look
from ckpt.util.console import age, aligned, number, one_line, size

_MOST_FILES = 24
_SECONDS = {"blocked": "training waited {:.2f} s", "total": "durable after {:.2f} s"}


@click.command()
@click.argument("url")
@click.option("--tensors", is_flag=True, help="List every tensor with its dtype and shape.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
def show(url: str, tensors: bool, as_json: bool) -> None:
    """Say what is in the checkpoint at URL, or in the newest whole one below it.

    Reads the manifest and the headers of files, no tensor. Exits with status 1 if files are missing or cut short.
    """
    shown = look(url)
    if as_json:
        click.echo(json.dumps(shown.to_json(tensors=tensors), indent=1, allow_nan=False))
    else:
        for line in _lines(shown, tensors=tensors):
            click.echo(line)
    if shown.problems:
        raise click.exceptions.Exit(1)


def _lines(shown: Shown, *, tensors: bool) -> Iterator[str]:
    for name, why in shown.passed_over.items():
        yield click.style(f"{name} is not whole: {one_line(why)}", fg="red")
    yield click.style(shown.url, bold=True)
    facts = list(_facts(shown))
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        yield f"  {name:<{width}}  {text}"
    yield ""
    columns = ("part", "class", "tensors", "elements", "dtypes", "size")
    yield from aligned(columns, [_row(part) for part in shown.parts], ("tensors", "elements", "size"))
    yield ""
    files = sorted(shown.manifest.files, key=lambda file: -file.size)
    yield from aligned(("file", "size"), [(file.path, size(file.size)) for file in files[:_MOST_FILES]], ("size",))
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} smaller ones; --json lists all"
    if tensors:
        yield from _tensors(shown)


def _facts(shown: Shown) -> Iterator[tuple[str, str]]:
    manifest = shown.manifest
    saved = datetime.fromisoformat(manifest.created).astimezone()
    yield "saved", f"{saved:%Y-%m-%d %H:%M:%S %Z}, {age(manifest.created)} ago"
    progress = {"step": manifest.step, **manifest.progress}
    yield "progress", ", ".join(f"{name} {count:,}" for name, count in progress.items())
    if manifest.metrics:
        yield "metrics", ", ".join(f"{name} {number(value)}" for name, value in manifest.metrics.items())
    yield "size", f"{size(manifest.size)} in {len(manifest.files)} files"
    whole = click.style("yes", fg="green") + ", by size; 'ckpt verify' reads every byte"
    yield "whole", click.style(f"NO: {one_line('; '.join(shown.problems))}", fg="red") if shown.problems else whole
    ranks = f"{manifest.world_size} ranks" if manifest.world_size > 1 else "one process"
    yield "saved by", ", ".join(filter(None, [f"{ranks}, {manifest.layout} layout", manifest.hardware, _origin(shown)]))
    for host in manifest.hosts:
        there = ", has its files itself" if host.name in shown.elsewhere.values() else ""
        yield "host", f"{host.name}: ranks {', '.join(map(str, host.ranks))}{there}"
    times = [text.format(manifest.seconds[key]) for key, text in _SECONDS.items() if key in manifest.seconds]
    if times:
        yield "took", ", ".join(times)
    yield "goes on from", shown.parent or ("one that is gone" if manifest.parent else "nothing")
    yield "run", f"{manifest.run} (checkpoint {manifest.id}, number {manifest.sequence})"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()) or "not known"


def _origin(shown: Shown) -> str:
    return f"converted from {shown.manifest.origin}" if shown.manifest.origin else ""


def _row(part: Part) -> tuple[str, ...]:
    name = f"{part.key} (of each rank)" if part.ranks else part.key
    dtypes = ", ".join(part.dtypes) or "-"
    return name, part.kind or "-", str(len(part.tensors)), f"{part.elements:,}", dtypes, size(part.size)


def _tensors(shown: Shown) -> Iterator[str]:
    for part in shown.parts:
        if part.tensors:
            yield ""
            rows = [(name, one.dtype, _shape(one.shape)) for name, one in part.tensors.items()]
            yield from aligned((part.key, "dtype", "shape"), rows)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
