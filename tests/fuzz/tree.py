"""Folders as values: what lies at each path, to be altered, written to a disk, and kept as JSON."""

from __future__ import annotations

import base64
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BESIDE = "{beside}"  # in the target of a link: the folder beside the root, which nobody may touch
_SPARSE = 700 << 20  # more than may be held in memory


@dataclass(frozen=True)
class Special:
    """Something that is no plain file: a link, hard link, fifo, socket, folder, or a large file of nothing."""

    kind: str
    target: str = ""


Node = bytes | Special
Tree = dict[str, Node]


def read_tree(folder: Path) -> Tree:
    """The files below a folder. Hard links and everything else become plain files."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def write_tree(tree: Mapping[str, Node], folder: str, beside: str) -> int:
    """Write a tree below a folder. Returns the bytes of its files, as the disk has them.

    Paths that exclude each other (a file and a folder of one name) are left out in their order.
    """
    size, made = 0, set[str]()
    for path, node in tree.items():
        target = f"{folder}/{path}"
        parent = os.path.dirname(target)
        try:
            if parent not in made:
                os.makedirs(parent, exist_ok=True)
                made.add(parent)
            size += _write_node(node, target, folder, beside)
        except (OSError, ValueError):  # a name that no filesystem takes
            continue
    return size


def _write_node(node: Node, target: str, folder: str, beside: str) -> int:
    if isinstance(node, bytes):
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            return os.write(descriptor, node)
        finally:
            os.close(descriptor)
    where = node.target.replace(BESIDE, beside)
    if node.kind == "link":
        os.symlink(where, target)
    elif node.kind == "hard":
        os.link(where if where.startswith("/") else f"{folder}/{where}", target)
    elif node.kind == "fifo":
        os.mkfifo(target)
    elif node.kind == "socket":
        _bind(target)
    elif node.kind == "folder":
        os.mkdir(target)
    else:
        with open(target, "xb") as file:
            file.truncate(_SPARSE)
    return 0


def _bind(target: str) -> None:
    """Bound by a short relative name: a socket's path has at most 107 bytes."""
    here = os.getcwd()
    os.chdir(os.path.dirname(target))
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.basename(target))
    finally:
        os.chdir(here)


def to_json(tree: Mapping[str, Node]) -> dict[str, Any]:
    return {path: _node_to_json(node) for path, node in tree.items()}


def from_json(fields: Mapping[str, Any]) -> Tree:
    return {path: _node_from_json(node) for path, node in fields.items()}


def _node_to_json(node: Node) -> Any:
    if isinstance(node, Special):
        return {"kind": node.kind, "target": node.target}
    try:
        text = node.decode("ascii")
    except UnicodeDecodeError:
        text = "\0"
    if text.isprintable() or (text.replace("\n", "").isprintable() and len(node) < 4096):
        return text
    return {"zlib": base64.b85encode(zlib.compress(node, 9)).decode()}


def _node_from_json(node: Any) -> Node:
    if isinstance(node, str):
        return node.encode()
    return zlib.decompress(base64.b85decode(node["zlib"])) if "zlib" in node else Special(node["kind"], node["target"])
