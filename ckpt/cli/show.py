"""`ckpt show`: what a checkpoint contains, the tensors of equal numbered modules in one line."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime

import click

from ckpt.cli.output import Line, Styled, checkpoint_or_path, echo, echo_json, with_trust
from ckpt.formats.native.header import Outline
from ckpt.formats.native.manifest import Manifest
from ckpt.root.signing import open_trust
from ckpt.tools.show import CheckpointSummary, ForeignSummary, PartSummary, summarize
from ckpt.util.console import format_age, format_number, format_size, format_table, one_line

Summary = CheckpointSummary | ForeignSummary
_BITS = re.compile(r"\d+")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name between dots
_COLUMNS = ("tensors", "elements", "size", "dtype", "shape")


def without_numbers(name: str) -> str:
    """The name of a tensor that those of all numbered modules share: `h.*.weight`."""
    return _NUMBER.sub("*", name)


def layer_lines(title: str, tensors: Mapping[str, Outline]) -> Iterator[str]:
    """A table of tensors, those of numbered modules with the same dtype and shape in one line."""
    alike: dict[tuple[str, str, str], list[Outline]] = {}
    for name, tensor in tensors.items():
        alike.setdefault((without_numbers(name), tensor.dtype, _shape(tensor.shape)), []).append(tensor)
    rows = [
        (name, str(len(found)), f"{sum(map(_elements, found)):,}", format_size(sum(map(_size, found))), dtype, shape)
        for (name, dtype, shape), found in alike.items()
    ]
    yield from format_table((title, *_COLUMNS), rows, _COLUMNS[:3])


def _elements(tensor: Outline) -> int:
    return 0 if tensor.tied else math.prod(tensor.shape)


def _size(tensor: Outline) -> int:
    bits = _BITS.search(tensor.dtype)  # float8_e4m3fn has 8; bool has no number
    return -(-_elements(tensor) * (int(bits.group()) if bits else 8) // 8)


_MOST_FILES = 24
_SECONDS = {"blocked": "training waited {:.2f} s", "total": "durable after {:.2f} s"}


@click.command()
@click.argument("source", shell_complete=checkpoint_or_path)
@click.option("--tensors", is_flag=True, help="List every tensor with its dtype and shape.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for other programs to read.")
@with_trust
def show(source: str, tensors: bool, as_json: bool, verify_key: str | None, require_signed: bool | str) -> None:
    """Show what is in SOURCE: parts, tensors, progress and files.

    SOURCE is the path or URL of a checkpoint, or of anything else that 'ckpt merge' reads. If SOURCE is a root, the
    command shows its newest intact checkpoint. The command reads only the manifest and the files' headers, not the
    tensors, and never executes pickles. Tensors whose names differ only in a number share a line if they have the same
    dtype and shape. The command exits with status 1 if files are missing or too short.

    \b
    ckpt show runs/mrpc
    ckpt show last.pt
    ckpt show s3://bucket/mrpc/step-00001000 --tensors
    """
    summary = summarize(source, trust=open_trust(verify_key, required=require_signed))
    if as_json:
        echo_json(summary.to_json(tensors=tensors))
    else:
        for line in _heading(summary):
            echo(*line)
        for text in _tables(summary, tensors=tensors):
            echo(text)
    if isinstance(summary, CheckpointSummary) and summary.problems:
        raise click.exceptions.Exit(1)


def _heading(summary: Summary) -> Iterator[Line]:
    for name, why in summary.skipped.items() if isinstance(summary, CheckpointSummary) else ():
        yield (Styled(f"{name} is skipped: {one_line(why)}", "red"),)
    yield (Styled(summary.url, bold=True),)
    facts = list(_facts(summary) if isinstance(summary, CheckpointSummary) else _foreign_facts(summary))
    width = max(len(name) for name, _ in facts)
    for name, about in facts:
        yield f"  {name:<{width}}  ", *((about,) if isinstance(about, str) else about)


def _tables(summary: Summary, *, tensors: bool) -> Iterator[str]:
    yield ""
    columns = ("part", "class", "tensors", "elements", "dtypes", "size")
    yield from format_table(columns, [_row(part) for part in summary.parts], ("tensors", "elements", "size"))
    yield ""
    files = sorted(summary.files.items(), key=lambda file: -file[1])
    rows = [(path, format_size(size)) for path, size in files[:_MOST_FILES]]
    yield from format_table(("file", "size"), rows, ("size",))
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} smaller ones; --json lists all"
    yield from _tensors(summary) if tensors else _layers(summary)


def _facts(summary: CheckpointSummary) -> Iterator[tuple[str, str | Line]]:
    manifest = summary.manifest
    saved = datetime.fromisoformat(manifest.created).astimezone()
    yield "saved", f"{saved:%Y-%m-%d %H:%M:%S %Z}, {format_age(manifest.created)} ago"
    progress = {"step": manifest.step, **manifest.progress}
    yield "progress", ", ".join(f"{name} {count:,}" for name, count in progress.items())
    if manifest.metrics:
        yield "metrics", ", ".join(f"{name} {format_number(value)}" for name, value in manifest.metrics.items())
    yield "size", f"{format_size(manifest.size)} in {len(manifest.files)} files"
    yield "intact", _intact(summary)
    yield "saved by", _saved_by(manifest)
    for host in manifest.hosts:
        there = ", has its files itself" if host.name in summary.elsewhere.values() else ""
        yield "host", f"{host.name}: ranks {', '.join(map(str, host.ranks))}{there}"
    times = [text.format(manifest.seconds[key]) for key, text in _SECONDS.items() if key in manifest.seconds]
    if times:
        yield "took", ", ".join(times)
    yield "continues", summary.parent or ("a checkpoint that was removed" if manifest.parent else "nothing")
    yield "run", f"{manifest.run} (checkpoint {manifest.id}, number {manifest.sequence})"
    yield "versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items()) or "not known"


def _foreign_facts(summary: ForeignSummary) -> Iterator[tuple[str, str]]:
    yield "saved by", summary.tool
    if summary.progress:
        yield "progress", ", ".join(f"{name} {count:,}" for name, count in summary.progress.items())
    files = "1 file" if len(summary.files) == 1 else f"{len(summary.files)} files"
    yield "size", f"{format_size(sum(summary.files.values()))} in {files}"
    yield "intact", "unknown: there is no manifest with hashes"
    for what, why in summary.not_read.items():
        yield "not read", f"{what}: {one_line(why)}"


def _intact(summary: CheckpointSummary) -> Line:
    if summary.problems:
        return (Styled(f"NO: {one_line('; '.join(summary.problems))}", "red"),)
    return Styled("yes", "green"), ", by size; 'ckpt verify' reads every byte"


def _saved_by(manifest: Manifest) -> str:
    ranks = f"{manifest.world_size} ranks" if manifest.world_size > 1 else "one process"
    origin = f"converted from {manifest.origin}" if manifest.origin else ""
    return ", ".join(filter(None, [f"{ranks}, {manifest.layout} layout", manifest.hardware, origin]))


def _row(part: PartSummary) -> tuple[str, ...]:
    name = f"{part.key} (of each rank)" if part.ranks else part.key
    dtypes = ", ".join(part.dtypes) or "-"
    return name, part.kind or "-", str(len(part.tensors)), f"{part.elements:,}", dtypes, format_size(part.size)


def _layers(summary: Summary) -> Iterator[str]:
    """The tensors of the models: what belongs to an optimizer or to a rank has the same ones."""
    for part in summary.parts:
        if part.tensors and not part.ranks and not all(name.startswith("state.") for name in part.tensors):
            yield ""
            yield from layer_lines(part.key, part.tensors)


def _tensors(summary: Summary) -> Iterator[str]:
    for part in summary.parts:
        if part.tensors:
            yield ""
            rows = [(name, tensor.dtype, _shape(tensor.shape)) for name, tensor in part.tensors.items()]
            yield from format_table((part.key, "dtype", "shape"), rows)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
