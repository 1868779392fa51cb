"""Formats that installed packages add, through the entry point group `ckpt.formats`."""

from __future__ import annotations

from importlib.metadata import entry_points

from ckpt.formats.pieces import PiecedTensor, check_complete
from ckpt.root.folder import Folder

ENTRY_POINTS = "ckpt.formats"


def open_installed(folder: Folder, part: str) -> dict[str, PiecedTensor] | None:
    """The tensors of a folder that ckpt itself does not know, from the first format that recognises it.

    An entry point is a function of a folder and the name of a part. It returns the tensors by name, or None for a
    folder that is not of its kind.
    """
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        tensors: dict[str, PiecedTensor] | None = point.load()(folder, part)
        if tensors is not None:
            check_complete(tensors, folder.where)
            return tensors
    return None
