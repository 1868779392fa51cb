"""What a save must not overtake, overwrite or mix with. Checked in the held root before anything is written."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.errors import ConfigError, ConflictError
from ckpt.formats.native.manifest import FILE_NAME, Manifest
from ckpt.root.catalog import Summary, find
from ckpt.root.folder import ROOT_ITSELF, is_foreign
from ckpt.root.open import parent_instead
from ckpt.storage import Storage


def refuse_to_overtake(url: str, newest: Summary | None, lost: Mapping[str, object], failed_load: str) -> None:
    """For a run that has not resumed: refused if there are checkpoints, whole or not, or may be since a load failed."""
    if failed_load:
        raise ConfigError(
            f"nothing is saved, because the load before it failed: {failed_load} There may be newer checkpoints, and "
            f"what is saved to {url} now would be put before them. Call resume() or load_state() again until it "
            "succeeds, or give this run another root and mirror."
        )
    if newest is not None:
        raise ConfigError(
            f"{url} has checkpoints ({newest.name} is the newest) that this run has not resumed from: saving now would "
            "put a fresh start before them. Call resume() or load_state() first, or give this run another root."
        )
    if lost:
        raise ConfigError(
            f"{url} has checkpoints that were committed and cannot be read, so nothing is saved before them: "
            f"{' '.join(map(str, lost.values()))} Restore one from a backup, move them away, or give this run another "
            "root."
        )


def refuse_foreign(storage: Storage, name: str, *, has_checkpoints: bool) -> None:
    """Nothing is saved into a folder that Accelerate wrote, be it the root or the checkpoint's own."""
    if not has_checkpoints and is_foreign(storage, ROOT_ITSELF):
        raise ConfigError(
            f"{storage.url} was written by Accelerate, and is kept as it is: nothing is saved into it. "
            f"{parent_instead(storage.url)}"
        )
    if is_foreign(storage, name):
        raise ConfigError(
            f"{storage.url}/{name} was written by Accelerate, and is kept as it is. Save under another name."
        )


def version_to_replace(storage: Storage, name: str, known: Manifest | None) -> str | None:
    """The version of the manifest that a save replaces. Refused if another run has written it."""
    version = storage.version(f"{name}/{FILE_NAME}")
    present = find(storage, name).manifest if version is not None else None
    if present is not None and (known is None or present.id != known.id):
        raise ConflictError(
            f"{storage.url}/{name} was saved by another run meanwhile, and is kept. Let only one run write there, "
            "then start this one again: it continues from the newest checkpoint."
        )
    return version
