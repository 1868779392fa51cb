"""Copy checkpoints to a storage in which objects appear by commits: each checkpoint is one commit.

Of an interrupted copy nothing is visible, and the large files that it has sent are not sent again.
"""

from __future__ import annotations

from contextlib import ExitStack

from ckpt.errors import ConfigError, DamagedError
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, Manifest
from ckpt.root import catalog
from ckpt.root.lock import lock_root
from ckpt.root.manifest_files import manifest_bytes
from ckpt.root.trust import Trust
from ckpt.root.verified_file import VerifiedFile
from ckpt.root.verify import reading
from ckpt.storage import HubStorage, Storage
from ckpt.util.console import one_line, progress_bar, say


def publish_copies(source: Storage, target: HubStorage, manifests: list[Manifest], trust: Trust) -> list[str]:
    """Copy checkpoints, verified while they are read, and return their names. An error names the damaged ones.

    Those that the target has are not copied again; another one by the name of one of them is refused before anything is
    sent.
    """
    present = {found.name: found.manifest for found in catalog.scan(target)}
    for manifest in manifests:
        known = present.get(manifest.name)
        if known is not None and known.id != manifest.id:
            raise another_by_that_name(target, manifest.name)
    copied, damaged = [], []
    with ExitStack() as held:
        lock_root(target, held)
        for manifest in manifests:
            known = present.get(manifest.name)
            try:
                if known is None and not _published(source, target, manifest.name, trust):
                    say(f"{manifest.name} is not copied: it was removed from {source.url} meanwhile")
                    continue
            except DamagedError as error:
                damaged.append(one_line(str(error)))
                continue
            copied.append(manifest.name)
        target.settle()
    if damaged:
        raise DamagedError(f"not all of {source.url} was copied: {' '.join(damaged)}")
    return copied


def _published(source: Storage, target: HubStorage, name: str, trust: Trust) -> bool:
    """Send the files of a checkpoint and publish them with its manifest. False if it was removed meanwhile."""
    with reading(source, name) as found:
        if found is None:
            return False
        manifest = trust.checked(found)
        receipts = {}
        with progress_bar(f"copying {name}", manifest.size, in_bytes=True) as advance:
            for file in manifest.files:
                verified = VerifiedFile.of(source, name, file, sha256=bool(file.sha256))
                key = f"{name}/{file.path}"
                receipts[key] = target.stage(key, verified.pieces())
                advance(file.size)
        data = manifest_bytes(source, name)
        for key in (f"{name}/{COPY_NAME}", f"{name}/{FILE_NAME}"):
            receipts[key] = target.stage(key, [data])
    target.publish(receipts)
    return True


def another_by_that_name(target: Storage, name: str) -> ConfigError:
    return ConfigError(
        f"{target.url} has another checkpoint {name!r}, which is kept as it is. Choose another destination."
    )
