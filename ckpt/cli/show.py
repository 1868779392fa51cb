"""`ckpt show`: what a checkpoint contains, its tensors as a tree of modules, equal ones folded into one line."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Generic, TypeVar

import click

from ckpt.cli.output import Line, Styled, checkpoint_or_path, echo, echo_json, with_trust
from ckpt.formats.native.header import Outline
from ckpt.formats.native.manifest import Manifest
from ckpt.root.signing import open_trust
from ckpt.tools.show import CheckpointSummary, PartSummary, summarize
from ckpt.util.console import format_age, format_number, format_size, format_table, one_line

_BITS = re.compile(r"\d+")
_DEEPEST = 60  # modules in each other: a file may claim anything
_LONGEST_NUMBER = 9  # digits
_COLUMNS = ("parameters", "size", "dtype", "shape")
T = TypeVar("T")


@dataclass
class Module(Generic[T]):
    """A module: what is known of the tensors of its own, and the modules in it, by their names."""

    tensors: dict[str, T] = field(default_factory=dict)
    modules: dict[str, Module[T]] = field(default_factory=dict)

    @classmethod
    def of(cls, tensors: Mapping[str, T]) -> Module[T]:
        top = cls()
        for name, tensor in tensors.items():
            *path, last = name.split(".", _DEEPEST)
            module = top
            for word in path:
                module = module.modules.setdefault(word, cls())
            module.tensors[last] = tensor
        return top

    @property
    def shape(self) -> str:
        """Equal for two modules with tensors of the same `repr` in the same places."""
        inside = [f"{name}:{tensor!r}" for name, tensor in self.tensors.items()]
        inside += [f"{name}({module.shape})" for name, module in self.modules.items()]
        return ",".join(inside)

    @property
    def all_tensors(self) -> Iterator[T]:
        yield from self.tensors.values()
        for module in self.modules.values():
            yield from module.all_tensors

    def folded(self) -> Iterator[tuple[str, list[str]]]:
        """The names of the modules in it, those in a row that are numbered and equal in one group: `0-11`."""
        waiting = deque(self.modules.items())
        while waiting:
            first, module = waiting.popleft()
            names, shape = [first], module.shape
            while waiting and _follows(waiting[0][0], names[-1]) and waiting[0][1].shape == shape:
                names.append(waiting.popleft()[0])
            yield first if len(names) == 1 else f"{first}-{names[-1]}", names


def tree_lines(title: str, tensors: Mapping[str, Outline], depth: int) -> Iterator[str]:
    """A table: modules down to a depth, and the tensors of those that are not cut off there."""
    rows = list(_rows(Module.of(tensors), depth, 0, 1))
    yield from format_table((title, *_COLUMNS), rows, _COLUMNS[:2])


def _rows(module: Module[Outline], depth: int, level: int, times: int) -> Iterator[tuple[str, ...]]:
    indent = "  " * level
    for name, tensor in module.tensors.items():
        size = "tied" if tensor.tied else format_size(times * _size(tensor))
        shape = f"[{', '.join(map(str, tensor.shape))}]"
        yield f"{indent}{name}", f"{times * _elements(tensor):,}", size, tensor.dtype, shape
    for name, names in module.folded():
        inside, count = module.modules[names[0]], len(names)
        found, all_of_them = list(inside.all_tensors), times * count
        dtypes = ", ".join(dict.fromkeys(tensor.dtype for tensor in found))
        counted = f"{indent}{name}" + (f"  ({count} equal)" if count > 1 else "")
        elements = f"{all_of_them * sum(map(_elements, found)):,}"
        yield counted, elements, format_size(all_of_them * sum(map(_size, found))), dtypes, ""
        if level + 1 < depth:
            yield from _rows(inside, depth, level + 1, all_of_them)


def _follows(name: str, before: str) -> bool:
    numbers = [word for word in (name, before) if word.isdecimal() and len(word) <= _LONGEST_NUMBER]
    return len(numbers) == 2 and int(name) == int(before) + 1


def _elements(tensor: Outline) -> int:
    return 0 if tensor.tied else math.prod(tensor.shape)


def _size(tensor: Outline) -> int:
    bits = _BITS.search(tensor.dtype)  # float8_e4m3fn has 8; bool has no number
    return -(-_elements(tensor) * (int(bits.group()) if bits else 8) // 8)


_MOST_FILES = 24
_SECONDS = {"blocked": "training waited {:.2f} s", "total": "durable after {:.2f} s"}


@click.command()
@click.argument("url", shell_complete=checkpoint_or_path)
@click.option(
    "--depth", type=click.IntRange(0), default=2, show_default=True, help="Depth of the tree of modules; 0 for none."
)
@click.option("--tensors", is_flag=True, help="List every tensor with its dtype and shape.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for other programs.")
@with_trust
def show(
    url: str, depth: int, tensors: bool, as_json: bool, verify_key: str | None, require_signed: bool | str
) -> None:
    """Show what is in the checkpoint at URL, or in the newest intact one of a root.

    It reads the manifest and the headers of files, but no tensor. It shows modules as a tree; equal numbered modules
    share one line. Exits with status 1 if files are missing or cut short.

    \b
    ckpt show runs/mrpc
    ckpt show s3://bucket/mrpc/step-00001000 --depth 4
    """
    summary = summarize(url, trust=open_trust(verify_key, required=require_signed))
    if as_json:
        echo_json(summary.to_json(tensors=tensors))
    else:
        for line in _heading(summary):
            echo(*line)
        for text in _tables(summary, depth, tensors=tensors):
            echo(text)
    if summary.problems:
        raise click.exceptions.Exit(1)


def _heading(summary: CheckpointSummary) -> Iterator[Line]:
    for name, why in summary.skipped.items():
        yield (Styled(f"{name} is skipped: {one_line(why)}", "red"),)
    yield (Styled(summary.url, bold=True),)
    facts = list(_facts(summary))
    width = max(len(name) for name, _ in facts)
    for name, about in facts:
        yield f"  {name:<{width}}  ", *((about,) if isinstance(about, str) else about)


def _tables(summary: CheckpointSummary, depth: int, *, tensors: bool) -> Iterator[str]:
    yield ""
    columns = ("part", "class", "tensors", "elements", "dtypes", "size")
    yield from format_table(columns, [_row(part) for part in summary.parts], ("tensors", "elements", "size"))
    yield ""
    files = sorted(summary.manifest.files, key=lambda file: -file.size)
    yield from format_table(
        ("file", "size"), [(file.path, format_size(file.size)) for file in files[:_MOST_FILES]], ("size",)
    )
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} smaller ones; --json lists all"
    if tensors:
        yield from _tensors(summary)
    elif depth:
        yield from _trees(summary, depth)


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


def _trees(summary: CheckpointSummary, depth: int) -> Iterator[str]:
    """Modules of the models: what belongs to an optimizer or to a rank has the same ones."""
    for part in summary.parts:
        if part.tensors and not part.ranks and not all(name.startswith("state.") for name in part.tensors):
            yield ""
            yield from tree_lines(part.key, part.tensors, depth)


def _tensors(summary: CheckpointSummary) -> Iterator[str]:
    for part in summary.parts:
        if part.tensors:
            yield ""
            rows = [(name, tensor.dtype, _shape(tensor.shape)) for name, tensor in part.tensors.items()]
            yield from format_table((part.key, "dtype", "shape"), rows)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
