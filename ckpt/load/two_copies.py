"""A checkpoint of which neither the root's copy nor the mirror's is whole: each file is read where it is.

The main rank finds out where, by reading every byte; all ranks then read from the same places, and compare as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypedDict

from ckpt.errors import DamagedError
from ckpt.formats.native.manifest import Manifest
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.group import MAIN, Ranks
from ckpt.root import catalog
from ckpt.root.signing import Trust
from ckpt.root.verify import find_whole_files
from ckpt.storage import Patched, Place, Storage

_log = logging.getLogger("ckpt")


class _Pieces(TypedDict):
    """The tier whose manifest is whole, for each path the tier and the key to read, and the paths that are lost."""

    manifest: int
    places: dict[str, tuple[int, str]]
    lost: list[str]


def join_copies(
    tiers: Sequence[Storage], name: str, ranks: Ranks, call: str, trust: Trust, held: ExitStack
) -> tuple[Manifest, Storage]:
    """The manifest, and a storage in which every file is whole. Raises a `DamagedError` if one is whole nowhere.

    `held` receives the locks on both copies, against removal.
    """
    locked = Result.capture(lambda: [held.enter_context(tier.lock(name, shared=True)) for tier in tiers] and None)
    found = locked.then(lambda _: _find(tiers, name, trust) if ranks.rank == MAIN else None)
    pieces: _Pieces = decide_together(ranks, call, found, lambda each: each[MAIN])
    if pieces["lost"]:
        where = " nor in ".join(tier.url for tier in tiers)
        raise DamagedError(f"{', '.join(pieces['lost'][:5])} of {name} is whole neither in {where}.")
    read = Result.capture(lambda: trust.checked(catalog.read_manifest(tiers[pieces["manifest"]], name)))
    decide_together(ranks, call, read.then(lambda _: None), lambda _: None)
    manifest: Manifest = read.get()
    sizes = {file.path: file.size for file in manifest.files}
    places = {f"{name}/{path}": Place(tiers[tier], key, sizes[path]) for path, (tier, key) in pieces["places"].items()}
    if ranks.rank == MAIN:
        _say(tiers, manifest, sorted(pieces["places"]))
    return manifest, Patched(tiers[0], places)


def _find(tiers: Sequence[Storage], name: str, trust: Trust) -> _Pieces:
    whole = find_whole_files(tiers, name, trust, links=False, show=True)
    places = {path: (place.home, place.key) for path, place in whole.elsewhere.items()}
    return {"manifest": whole.manifest_home, "places": places, "lost": list(whole.lost)}


def _say(tiers: Sequence[Storage], manifest: Manifest, elsewhere: list[str]) -> None:
    root, mirror = (tier.url for tier in tiers[:2])
    some = ", ".join(elsewhere[:5]) + (" ..." if len(elsewhere) > 5 else "")
    _log.warning(
        "%s is damaged in %s and in %s, in different files, and each is read where it is whole: %d of %d from the "
        "second (%s). To mend the root: ckpt verify %s/%s --repair --from %s",
        manifest.name, root, mirror, len(elsewhere), len(manifest.files), some, root, manifest.name, mirror,
    )  # fmt: skip
