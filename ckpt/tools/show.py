"""What is in a checkpoint, as far as its manifest and the headers of its files tell.

Imports no torch: a shell asks for it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ckpt.errors import AbsentError, CkptError, DamagedError, MissingError
from ckpt.formats.native.header import SUFFIX, Outline, outlines
from ckpt.formats.native.manifest import FileRecord, Manifest
from ckpt.root import catalog
from ckpt.root.file_names import part_of
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import files_on_other_hosts, reader_threads, size_problems, without_other_hosts
from ckpt.storage import Storage

_OF_A_RANK = re.compile(r"-\d{5}$")


@dataclass(frozen=True)
class Part:
    """One part: the class of the object, its tensors, and how many bytes its files have. Some parts every rank has."""

    key: str
    kind: str = ""
    tensors: Mapping[str, Outline] = field(default_factory=dict)
    size: int = 0
    ranks: int = 0

    @property
    def elements(self) -> int:
        """Numbers in all tensors together; what is tied counts once."""
        return sum(math.prod(one.shape) for one in self.tensors.values() if not one.tied)

    @property
    def dtypes(self) -> dict[str, int]:
        """How many tensors there are of each dtype, the most frequent first."""
        return dict(Counter(one.dtype for one in self.tensors.values()).most_common())


@dataclass(frozen=True)
class Shown:
    """A checkpoint, and what is wrong with it as far as that can be known without reading all of it.

    Where a root was asked for, `passed_over` are newer ones that are not whole, with the reasons.
    """

    url: str
    manifest: Manifest
    parts: tuple[Part, ...] = ()
    parent: str | None = None  # its name, if it is still there
    problems: tuple[str, ...] = ()
    passed_over: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # files that other hosts have, and which

    def to_json(self, *, tensors: bool = False) -> dict[str, Any]:
        """All of it in plain JSON; of metrics, those that JSON has no number for are text."""
        manifest = self.manifest
        fields = asdict(replace(manifest, files=()))
        fields |= {
            "url": self.url,
            "step": manifest.step,
            "size": manifest.size,
            "files": [{"path": file.path, "size": file.size} for file in manifest.files],
            "metrics": {
                name: value if math.isfinite(value) else str(value) for name, value in manifest.metrics.items()
            },
            "parent_name": self.parent,
            "problems": list(self.problems),
            "passed_over": dict(self.passed_over),
            "elsewhere": dict(self.elsewhere),
            "parts": {part.key: _part_to_json(part, tensors=tensors) for part in self.parts},
        }
        return fields


def _part_to_json(part: Part, *, tensors: bool) -> dict[str, Any]:
    listed = {name: {"dtype": one.dtype, "shape": list(one.shape)} for name, one in part.tensors.items()}
    about = {"class": part.kind, "tensors": len(listed), "elements": part.elements, "dtypes": part.dtypes}
    return {**about, "size": part.size, "ranks": part.ranks or None, **({"listed": listed} if tensors else {})}


def look(url: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Shown:
    """The checkpoint at a URL, or the newest of a root whose files are all there."""
    storage, names = catalog.locate(url, options)
    if not names:
        raise MissingError(f"there are no checkpoints in {storage.url}.")
    passed_over: dict[str, str] = {}
    for name in names:
        try:
            wrong = _missing(storage, catalog.read_manifest(storage, name))
        except DamagedError as error:
            wrong = [str(error)]
        if not wrong:
            return replace(_looked_at(storage, name), passed_over=passed_over)
        passed_over[name] = "; ".join(wrong)
    return replace(_looked_at(storage, names[0]), passed_over={name: passed_over[name] for name in names[1:]})


def _missing(storage: Storage, manifest: Manifest) -> list[str]:
    return size_problems(storage, without_other_hosts(storage, manifest))


def _looked_at(storage: Storage, name: str) -> Shown:
    with storage.lock(name, shared=True):  # a run that goes on meanwhile must not remove what is being read
        manifest = catalog.read_manifest(storage, name)
        problems = _missing(storage, manifest)
        parts = _Contents(storage, manifest, problems).parts()
    known = {one.manifest.id: one.name for one in catalog.scan(storage) if one.manifest is not None}
    parent = known.get(manifest.parent or "")
    return Shown(
        f"{storage.url}/{name}",
        manifest,
        tuple(parts),
        parent,
        tuple(dict.fromkeys(problems)),
        elsewhere=files_on_other_hosts(storage, manifest),
    )


@dataclass
class _Contents:
    """What the files of a checkpoint say. What one of them cannot say is added to the problems."""

    storage: Storage
    manifest: Manifest
    problems: list[str]

    def parts(self) -> list[Part]:
        stated = self._stated()
        by_part: dict[str, list[FileRecord]] = defaultdict(list)
        for file in self.manifest.files:
            if file.name.endswith(SUFFIX):
                by_part[part_of(file.name)].append(file)
        headers = self._headers(
            [file for key, one in by_part.items() if "spread" not in stated.get(key, {}) for file in one]
        )
        found = [
            self._part(key, stated.get(key, {}), by_part.get(key, []), headers)
            for key in dict.fromkeys([*stated, *by_part])
        ]
        return _of_ranks_together(found)

    def _part(
        self, key: str, stated: Mapping[str, Any], files: list[FileRecord], headers: Mapping[str, dict[str, Outline]]
    ) -> Part:
        if "spread" in stated:
            tensors = _spread(stated["spread"])
        else:
            tensors = {name: one for file in files for name, one in headers.get(file.name, {}).items()}
        return Part(key, str(stated.get("class", "")), tensors, sum(file.size for file in files))

    def _stated(self) -> dict[str, Any]:
        """The parts, as `state.json` has them; pieces of what is spread are listed there too."""
        for file in self.manifest.files:
            if file.name == catalog.STATE:
                found = self._tried(lambda: json.loads(self._opened(file).read_all())["parts"])  # noqa: B023
                return dict(found or {})
        return {}

    def _headers(self, files: list[FileRecord]) -> dict[str, dict[str, Outline]]:
        def header(file: FileRecord) -> dict[str, Outline]:
            return self._tried(lambda: outlines(self._opened(file), f"{self.manifest.name}/{file.path}")) or {}

        with ThreadPoolExecutor(reader_threads([self.storage])) as pool:
            return dict(zip([file.name for file in files], pool.map(header, files), strict=True))

    def _opened(self, file: FileRecord) -> VerifiedFile:
        return VerifiedFile.of(self.storage, self.manifest.name, file)

    def _tried(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except AbsentError:  # which the sizes have shown already
            return None
        except (CkptError, ValueError, LookupError, TypeError) as error:
            self.problems.append(str(error))
            return None


def _spread(table: Mapping[str, Any]) -> dict[str, Outline]:
    found = {name: Outline(dtype, tuple(shape)) for name, (dtype, shape, *_) in table["tensors"].items()}
    tied = {alias: replace(found[name], tied=True) for alias, name in table["aliases"].items()}
    return {**found, **tied}


def _of_ranks_together(parts: list[Part]) -> list[Part]:
    """What every rank has of its own, as gradients, is one part; its tensors are those of the first rank."""
    found: dict[str, Part] = {}
    for part in parts:
        key = _OF_A_RANK.sub("", part.key)
        known = found.get(key)
        if key == part.key:
            found[key] = part
        elif known is None:
            found[key] = replace(part, key=key, ranks=1)
        else:
            found[key] = replace(known, size=known.size + part.size, ranks=known.ranks + 1)
    return list(found.values())
