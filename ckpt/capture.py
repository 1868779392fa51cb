"""From live objects to the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ckpt.errors import CkptError, UnsupportedError
from ckpt.formats import documents, native
from ckpt.formats.state import Image, PartState
from ckpt.formats.values import refuse
from ckpt.parts import Part


@dataclass(frozen=True)
class Captured:
    """What this process has to save: the state of parts, and what is this rank's own.

    Tensors are still the live ones. `images` lays them out as files, and reads them when the files are written.
    """

    parts: Mapping[str, PartState]
    own: Mapping[str, PartState]
    document: bytes

    @cached_property
    def images(self) -> list[Image]:
        """The files for what all ranks have in common."""
        document = documents.to_json({"parts": _values(self.parts)})
        return [*_tensor_files(self.parts), Image.of(documents.STATE, document)]

    @cached_property
    def own_images(self) -> list[Image]:
        """The files that only this rank can write."""
        return _tensor_files(self.own)


def capture(parts: Iterable[Part], own: Mapping[str, Part], rank_state: Mapping[str, Any]) -> Captured:
    """Ask every part for its state. Refuses all values that cannot be held at once, each by its path."""
    problems: list[str] = []
    shared = {part.key: _encoded(part, problems) for part in parts}
    mine = {key: _encoded(part, problems) for key, part in own.items()}
    state = {key: documents.encode_inline(value, key, problems) for key, value in rank_state.items()}
    refuse(problems)
    document = {"state": state, "own": _values(mine)}
    return Captured(shared, mine, documents.to_json(document))


def _encoded(part: Part, problems: list[str]) -> PartState:
    try:
        state = part.capture()
    except CkptError:
        raise
    except Exception as error:
        raise UnsupportedError(f"{part.key}: its state could not be taken: {type(error).__name__}: {error}") from error
    return documents.encode_part(part.kind, state, part.key, problems)


def _values(parts: Mapping[str, PartState]) -> dict[str, Any]:
    return {key: {"class": part.kind, "state": part.values} for key, part in parts.items()}


def _tensor_files(parts: Mapping[str, PartState]) -> list[Image]:
    return [native.image(key + native.SUFFIX, part.tensors) for key, part in parts.items() if part.tensors]
