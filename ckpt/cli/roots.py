"""The roots below a folder that holds several runs, as `ckpt ls` shows them."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.cli.output import echo
from ckpt.errors import StorageError
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.root.catalog import Overview
from ckpt.storage import open_storage
from ckpt.util.console import format_age, format_size, format_table, one_line

_COLUMNS = ("root", "checkpoints", "newest", "age", "size")
_RIGHT_ALIGNED = ("checkpoints", "age", "size")
_MOST = 200  # roots that are shown


def roots_below(found: Overview) -> list[str]:
    """The folders in a listing that hold checkpoints, at any depth, by their paths."""
    below = set()
    for folder, inside in found.files.items():
        for path in inside:
            above, _, last = f"{folder}/{path}".rpartition("/")
            if last == FILE_NAME and "/" in above:
                below.add(above.rpartition("/")[0])
    return sorted(below)


def show_roots(top: str, roots: Sequence[str]) -> None:
    """Print a line for each root."""
    echo(f"There are no checkpoints in {top} itself, but in these roots below it:")
    for line in format_table(_COLUMNS, [_row(top.rstrip("/"), root) for root in roots[:_MOST]], _RIGHT_ALIGNED):
        echo(line)
    if len(roots) > _MOST:
        echo(f"... and {len(roots) - _MOST:,} more")


def _row(top: str, root: str) -> list[str]:
    try:
        committed = Overview.of(open_storage(f"{top}/{root}")).committed
    except StorageError as error:
        return [root, "-", one_line(str(error)), "-", "-"]
    if not committed:
        return [root, "0", "-", "-", "-"]
    size = sum(summary.size for summary in committed)
    return [root, str(len(committed)), committed[0].name, format_age(committed[0].created), format_size(size)]
