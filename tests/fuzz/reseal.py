"""Makes the hashes and sizes of manifests anew, as whoever alters a checkpoint can: only then is its content read."""

from __future__ import annotations

import json
import random
from typing import Any

from ckpt.formats.native.manifest import ALGORITHM, BLOCK_SIZE, digest
from tests.fuzz.mutate import alter_json, json_text
from tests.fuzz.tree import Tree

_MANIFEST = "manifest.json"
_COPY = "manifest.copy.json"


def manifests(tree: Tree) -> list[str]:
    return [path for path, node in tree.items() if path.endswith(f"/{_MANIFEST}") and isinstance(node, bytes)]


def reseal(tree: Tree) -> Tree:
    """The tree with every manifest made to fit the files that it lists."""
    sealed = dict(tree)
    for path in manifests(tree):
        fields = _fields(tree[path])
        if fields is not None:
            _fit(fields, tree, path.removesuffix(_MANIFEST))
            sealed[path] = _with_digest(json.dumps(fields, indent=1).encode())
            if (copy := f"{path.removesuffix(_MANIFEST)}{_COPY}") in tree:
                sealed[copy] = sealed[path]
    return sealed


def altered_manifest(dice: random.Random, data: bytes, *, times: int = 1) -> bytes:
    """A manifest with altered fields under a digest that fits them."""
    fields = _fields(data)
    if fields is None:
        return data
    for _ in range(times):
        fields = alter_json(dice, fields)
    return _with_digest(json_text(dice, fields, indent=1))


def sealed_text(fields: Any) -> bytes:
    """Fields as the text of a manifest."""
    return _with_digest(json.dumps(fields, indent=1).encode("utf-8", "surrogatepass"))


def _fields(data: Any) -> Any:
    try:
        fields = json.loads(data)
        fields.pop("digest", None)
        return fields if isinstance(fields, dict) else None
    except (ValueError, AttributeError, RecursionError):
        return None


def _with_digest(text: bytes) -> bytes:
    lines = text.removeprefix(b"{").lstrip(b"\n")
    return f'{{\n "digest": "{ALGORITHM}:{digest(lines)}",\n'.encode() + lines


def _fit(fields: dict[str, Any], tree: Tree, folder: str) -> None:
    files = fields.get("files")
    for record in files if isinstance(files, list) else ():
        content = tree.get(f"{folder}{record.get('path')}") if isinstance(record, dict) else None
        if isinstance(content, bytes):
            blocks = [content[at : at + BLOCK_SIZE] for at in range(0, len(content), BLOCK_SIZE)]
            record.update(size=len(content), blocks=[digest(block) for block in blocks], block_size=BLOCK_SIZE)
            head = record.get("head")
            if isinstance(head, list) and len(head) == 2:
                length = min(8 + int.from_bytes(content[:8], "little"), len(content))
                record["head"] = [length, digest(content[:length])]
