"""Summarize a checkpoint from its manifest, `state.json` and the headers of its files; no tensor is read.

Imports no torch, for the command line.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from ckpt.errors import AbsentError, CkptError
from ckpt.formats.checks import damage_reported
from ckpt.formats.native.header import SUFFIX, Outline, outlines
from ckpt.formats.native.manifest import STATE, FileRecord, Manifest
from ckpt.formats.registry import CKPT, ROOT
from ckpt.root import catalog
from ckpt.root.catalog import part_of
from ckpt.root.folder import Place, missing_files
from ckpt.root.signing import BELIEVES_ALL, Trust
from ckpt.root.verify import VerifiedFile, files_on_other_hosts, reader_threads
from ckpt.storage import Storage
from ckpt.util.checked_json import Rule, broken_rules, is_count, is_list, is_mapping, is_text, joined, parse_json
from ckpt.util.threads import in_parallel

_RANK_SUFFIX = re.compile(r"-\d{5}$")
_Value = TypeVar("_Value")
_PARTS = {"parts": Rule(is_mapping(lambda part: isinstance(part, dict)), "parts by key")}


@dataclass(frozen=True)
class PartSummary:
    """A part: the class of the object, its tensors, and the bytes of its files. `ranks` is 0 if it is not per rank."""

    key: str
    kind: str = ""
    tensors: Mapping[str, Outline] = field(default_factory=dict)
    size: int = 0
    ranks: int = 0

    @property
    def elements(self) -> int:
        """Elements of all tensors; tied ones count once."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values() if not tensor.tied)

    @property
    def dtypes(self) -> dict[str, int]:
        """The number of tensors of each dtype, the most frequent first."""
        return dict(Counter(tensor.dtype for tensor in self.tensors.values()).most_common())


@dataclass(frozen=True)
class CheckpointSummary:
    """A checkpoint and its parts, with the problems that can be found without reading all of its bytes.

    Of a root, `skipped` are the newer checkpoints that are not intact, with the reasons.
    """

    url: str
    manifest: Manifest
    parts: tuple[PartSummary, ...] = ()
    parent: str | None = None  # its name, unless it was removed
    problems: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # by file, the host that has it instead of this one

    @property
    def files(self) -> dict[str, int]:
        return {file.path: file.size for file in self.manifest.files}

    def to_json(self, *, tensors: bool = False) -> dict[str, Any]:
        """The summary as plain JSON. Metrics that are not finite are text: JSON has no numbers for them."""
        manifest = self.manifest
        fields = asdict(replace(manifest, files=()))
        fields |= {
            "url": self.url,
            "step": manifest.step,
            "size": manifest.size,
            "files": [{"path": path, "size": size} for path, size in self.files.items()],
            "metrics": {
                name: value if math.isfinite(value) else str(value) for name, value in manifest.metrics.items()
            },
            "parent_name": self.parent,
            "problems": list(self.problems),
            "passed_over": dict(self.skipped),
            "elsewhere": dict(self.elsewhere),
            "parts": {part.key: _part_to_json(part, tensors=tensors) for part in self.parts},
        }
        return fields


@dataclass(frozen=True)
class ForeignSummary:
    """What another tool has saved: its parts and files, and what ckpt does not read of it, with the reasons."""

    url: str
    tool: str
    parts: tuple[PartSummary, ...]
    files: Mapping[str, int]
    progress: Mapping[str, int]
    not_read: Mapping[str, str]

    def to_json(self, *, tensors: bool = False) -> dict[str, Any]:
        files = [{"path": path, "size": size} for path, size in self.files.items()]
        parts = {part.key: _part_to_json(part, tensors=tensors) for part in self.parts}
        return {**vars(self), "files": files, "parts": parts}


def _part_to_json(part: PartSummary, *, tensors: bool) -> dict[str, Any]:
    listed = {name: {"dtype": tensor.dtype, "shape": list(tensor.shape)} for name, tensor in part.tensors.items()}
    about = {"class": part.kind, "tensors": len(listed), "elements": part.elements, "dtypes": part.dtypes}
    return {**about, "size": part.size, "ranks": part.ranks or None, **({"listed": listed} if tensors else {})}


def summarize(
    url: str | os.PathLike[str], options: Mapping[str, Any] | None = None, trust: Trust = BELIEVES_ALL
) -> CheckpointSummary | ForeignSummary:
    """Summarize what is at a URL; of a root, its newest checkpoint whose files have their sizes."""
    place = Place.at(url, options, prefers=(CKPT, ROOT))
    if not place.is_ours:
        trust.refuse_unsigned(os.fspath(url))
        return _summarize_foreign(place)
    found = place.checkpoint(trust)
    return replace(_summarize(found.root, found.name, trust), skipped=found.skipped)


def _summarize_foreign(place: Place) -> ForeignSummary:
    from ckpt.formats.foreign.hf_safetensors import same_place  # torch, which other commands start without
    from ckpt.formats.native.tensor_file import dtype_name
    from ckpt.formats.pieces import PiecedTensor
    from ckpt.tools.portable_state import foreign_state

    state = foreign_state(place)
    parts = []
    for key, part in state.parts.items():
        tied = same_place({name: tensor for name, tensor in part.tensors.items() if isinstance(tensor, PiecedTensor)})
        about = {name: part.about(name) for name in part.tensors}
        tensors = {
            name: Outline(dtype_name(dtype), tuple(shape), tied=name in tied) for name, (dtype, shape) in about.items()
        }
        parts.append(PartSummary(key, "", tensors, state.size(key)))
    files = {place.file: place.folder.files[place.file]} if place.file else dict(place.folder.files)
    progress = {name: count for name, count in state.progress.to_json().items() if count}
    tool = place.format.tool if place.format is not None else "another tool"
    return ForeignSummary(place.source, tool, tuple(parts), files, progress, dict(state.skipped))


def _summarize(storage: Storage, name: str, trust: Trust) -> CheckpointSummary:
    with storage.lock(name, shared=True):  # retention of a running job must not remove what is being read
        manifest = trust.accepted(catalog.read_manifest(storage, name))
        problems = missing_files(storage, manifest)
        parts = _Contents(storage, manifest, problems).parts()
    known = {other.manifest.id: other.name for other in catalog.scan(storage) if other.manifest is not None}
    parent = known.get(manifest.parent or "")
    return CheckpointSummary(
        f"{storage.url}/{name}",
        manifest,
        tuple(parts),
        parent,
        tuple(dict.fromkeys(problems)),
        elsewhere=files_on_other_hosts(storage, manifest),
    )


@dataclass
class _Contents:
    """Reads the parts from the files of a checkpoint. A file that cannot be read is added to the problems."""

    storage: Storage
    manifest: Manifest
    problems: list[str]

    def parts(self) -> list[PartSummary]:
        stated, by_part = self._stated_parts(), self._files_by_part()
        unsharded = [key for key in by_part if "spread" not in stated.get(key, {})]
        headers = self._headers([file for key in unsharded for file in by_part[key]])
        found = [
            self._part(key, stated.get(key, {}), by_part.get(key, []), headers)
            for key in dict.fromkeys([*stated, *by_part])
        ]
        return _join_ranks(found)

    def _files_by_part(self) -> dict[str, list[FileRecord]]:
        by_part: dict[str, list[FileRecord]] = defaultdict(list)
        for file in self.manifest.files:
            if file.name.endswith(SUFFIX):
                by_part[part_of(file.name)].append(file)
        return by_part

    def _part(
        self, key: str, stated: Mapping[str, Any], files: list[FileRecord], headers: Mapping[str, dict[str, Outline]]
    ) -> PartSummary:
        if "spread" in stated:
            where = f"{self.manifest.name}: {key}"
            tensors = self._try_read(lambda: _sharded_outlines(stated["spread"]), where, "shard table") or {}
        else:
            tensors = {name: outline for file in files for name, outline in headers.get(file.name, {}).items()}
        return PartSummary(key, str(stated.get("class", "")), tensors, sum(file.size for file in files))

    def _stated_parts(self) -> dict[str, Any]:
        """The parts as `state.json` lists them, with the shard tables of sharded ones."""
        for file in self.manifest.files:
            if file.name == STATE:
                where = f"{self.manifest.name}/{file.path}"
                return self._try_read(lambda: _parts(self._open(file).read_all()), where, "list of parts") or {}  # noqa: B023
        return {}

    def _headers(self, files: list[FileRecord]) -> dict[str, dict[str, Outline]]:
        def header(file: FileRecord) -> dict[str, Outline]:
            where = f"{self.manifest.name}/{file.path}"
            return self._try_read(lambda: outlines(self._open(file), where, file.size), where, "safetensors file") or {}

        found = in_parallel(header, files, reader_threads([self.storage]), "ckpt-read")
        return {file.name: each for file, each in zip(files, found, strict=True)}

    def _open(self, file: FileRecord) -> VerifiedFile:
        return VerifiedFile.of(self.storage, self.manifest.name, file)

    def _try_read(self, read: Callable[[], _Value], where: str, what: str) -> _Value | None:
        try:
            with damage_reported(where, what):
                return read()
        except AbsentError:  # found by the comparison of sizes already
            return None
        except CkptError as error:
            self.problems.append(str(error))
            return None


def _parts(document: bytes) -> dict[str, Any]:
    fields = parse_json(document)
    if wrong := broken_rules(fields, _PARTS):
        raise ValueError(joined(wrong))
    return dict(fields["parts"])


def _sharded_outlines(table: Mapping[str, Any]) -> dict[str, Outline]:
    rows = {name: (dtype, shape) for name, (dtype, shape, *_) in table["tensors"].items()}
    wrong = [name for name, (dtype, shape) in rows.items() if not is_text(dtype) or not is_list(is_count)(shape)]
    if wrong:
        raise ValueError(f"these tensors have no dtype or no shape: {', '.join(wrong[:8])}")
    found = {name: Outline(dtype, tuple(shape)) for name, (dtype, shape) in rows.items()}
    tied = {alias: replace(found[name], tied=True) for alias, name in table["aliases"].items()}
    return {**found, **tied}


def _join_ranks(parts: list[PartSummary]) -> list[PartSummary]:
    """Parts that every rank has of its own, such as gradients, as one part with the tensors of the first rank."""
    found: dict[str, PartSummary] = {}
    for part in parts:
        key = _RANK_SUFFIX.sub("", part.key)
        known = found.get(key)
        if key == part.key:
            found[key] = part
        elif known is None:
            found[key] = replace(part, key=key, ranks=1)
        else:
            found[key] = replace(known, size=known.size + part.size, ranks=known.ranks + 1)
    return list(found.values())
