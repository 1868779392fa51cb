"""What the fields of a manifest must be: one table for each kind of record, checked once, when a manifest is read.

A field that is added to the manifest gets a line here. Fields without one are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ckpt.util.checked_json import (
    LARGEST_NUMBER,
    Rule,
    broken_rules,
    is_count,
    is_finite,
    is_key,
    is_list,
    is_mapping,
    is_moment,
    is_text,
    shown,
)

LARGEST_SEQUENCE = LARGEST_NUMBER
LARGEST_VERSION = 999_999
LARGEST_BLOCK = 1 << 30  # bytes
_LARGEST_FILE = (1 << 63) - 1
_MOST_RANKS = 1 << 24
_NO_FILES = ("manifest.json", "manifest.copy.json", ".saving")  # the manifest itself, its copy, the save marker
_HASH = re.compile(r"[0-9a-f]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NOT_JSON = ("nan", "inf", "-inf")  # numbers that JSON has not


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_id(value: Any) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _is_file(value: Any) -> bool:
    return is_key(value) and value not in _NO_FILES


def _is_head(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple) and len(value) == 2 and is_count(value[0], 1))


def _is_metric(value: Any) -> bool:
    return value in _NOT_JSON if isinstance(value, str) else is_finite(value)


def _is_measure(value: Any) -> bool:
    return is_finite(value) and abs(value) <= LARGEST_NUMBER


def _is_rank(value: Any) -> bool:
    return is_count(value, 0, _MOST_RANKS)


def is_resumed(value: Any) -> bool:
    """What was loaded before a checkpoint: its name, id and step, where it was, and what was passed over and why."""
    return isinstance(value, dict) and (not value or not broken_rules(value, _RESUMED))


_RESUMED = {
    "name": Rule(is_text, "text"),
    "id": Rule(is_text, "text"),
    "step": Rule(is_count, "a whole number, 0 or more"),
    "found_in": Rule(is_text, "text"),
    "passed_over": Rule(is_mapping(is_text), "names with text"),
    "more": Rule(is_count, "a whole number, 0 or more", required=False),
}
_TEXT = Rule(is_text, "text", required=False)
_SECONDS = Rule(is_mapping(_is_measure), "names with numbers that can be summed up", required=False)

MANIFEST = {
    "name": Rule(is_text, "text"),
    "id": Rule(_is_id, "up to 64 letters, digits, - and _"),
    "sequence": Rule(is_count, "a whole number, 0 or more"),
    "created": Rule(is_moment, "a time with its zone, in ISO 8601"),
    "run": Rule(is_text, "text"),
    "files": Rule(is_list(lambda file: isinstance(file, dict)), "a list of files"),
    "world_size": Rule(lambda value: is_count(value, 1, _MOST_RANKS), "a number of ranks", required=False),
    "layout": _TEXT,
    "parent": Rule(lambda value: value is None or is_text(value), "text or null", required=False),
    "origin": _TEXT,
    "progress": Rule(is_mapping(is_count), "names with whole numbers, 0 or more", required=False),
    "metrics": Rule(is_mapping(_is_metric), "names with numbers", required=False),
    "versions": Rule(is_mapping(is_text), "names with text", required=False),
    "hardware": _TEXT,
    "seconds": _SECONDS,
    "hosts": Rule(is_list(lambda host: isinstance(host, dict)), "a list of hosts", required=False),
    "memory": _SECONDS,
    "resumed": Rule(is_resumed, "what was loaded, and what was passed over", required=False),
}
FILE = {
    "name": Rule(_is_file, "a relative path, without '..'"),
    "path": Rule(_is_file, "a relative path, without '..'"),
    "size": Rule(lambda value: is_count(value, 0, _LARGEST_FILE), "a number of bytes, 0 or more"),
    "blocks": Rule(is_list(_is_hash), "a list of hashes"),
    "block_size": Rule(lambda value: is_count(value, 1, LARGEST_BLOCK), "a number of bytes, 1 or more", required=False),
    "head": Rule(_is_head, "a length and a hash, or null", required=False),
    "sha256": Rule(is_list(_is_sha256), "a list of SHA-256", required=False),
    "head_sha256": Rule(lambda value: value == "" or _is_sha256(value), "a SHA-256", required=False),
}
HOST = {
    "name": Rule(is_text, "text"),
    "ranks": Rule(is_list(_is_rank), "a list of ranks"),
}


def manifest_problems(fields: Any, block_size: int) -> list[str]:
    """Everything that is wrong with the fields of a manifest. `block_size` is that of files which do not say theirs."""
    problems = broken_rules(fields, MANIFEST)
    if problems:
        return problems
    for number, file in enumerate(fields["files"]):
        problems += _file_problems(file, f"file {shown(file.get('path', number))}", block_size)
    for number, host in enumerate(fields.get("hosts", ())):
        problems += broken_rules(host, HOST, f"host {number}")
    return problems or [*_repeated(fields["files"], "name"), *_repeated(fields["files"], "path")]


def _file_problems(file: dict[str, Any], of: str, block_size: int) -> list[str]:
    problems = broken_rules(file, FILE, of)
    if problems:
        return problems
    size, blocks, head = file["size"], len(file["blocks"]), file.get("head")
    needed = -(-size // file.get("block_size", block_size))
    if blocks != needed:
        problems.append(f"{of}: {size} bytes have {needed} blocks, and there are {blocks} hashes")
    if len(file.get("sha256", ())) not in (0, blocks):
        problems.append(f"{of}: it has {blocks} blocks, and the SHA-256 of {len(file['sha256'])}")
    if head is not None and (head[0] > size or not _is_hash(head[1])):
        problems.append(f"{of}: head is no length up to {size} with a hash")
    return problems


def _repeated(files: Iterable[dict[str, Any]], field: str) -> list[str]:
    counted = Counter(file[field] for file in files)
    return [f"{shown(value)} is the {field} of {count} files" for value, count in counted.items() if count > 1]
