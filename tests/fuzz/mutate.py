"""Alters files: bytes, JSON, headers of safetensors, and what lies at a path."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from tests.fuzz.pickles import alter, is_pickled
from tests.fuzz.tree import BESIDE, Special, Tree

INTEGERS = (
    0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**33, 2**40,
    2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -(2**31), -(2**63),
)  # fmt: skip
WORDS = (
    "", ".", "..", "../beside/secret.json", "/etc/passwd", "a/../../b", "a\0b", "\x1b[2J\x1b]0;owned\x07", "x" * 300,
    "a\nb\rckpt: all is well", "](http://evil.example/x)", "![x](http://evil.example/y)", "<script>alert(1)</script>",
    "\u202egnp.exe", "\ud800", "model", "state.json", "manifest.json", ".lock", ".saving", "__metadata__", "@storage",
    "F32", "F64", "I64", "U8", "BOOL", "float32", "quint4x2", "quint2x4", "qint32", "bits8", "complex128",
    "float8_e8m0fnu", "S0", "S0/999999999", "R", "P", "S-1", "S9", "0", "-1", "nan", "inf", "1e999", "torch.float32",
    "%s%n{0}", "~", "C:\\x", "2026-01-01T00:00:00+00:00", "9999-99-99", "0001-01-01T00:00:00+23:59", "sharded", "full",
    "ckpt", "$tensor", "$tuple", "$set", "$range", "$size", "$counter", "$deque", "$dict", "$bytes", "$int", "$slice",
    "$device", "$dtype", "$numpy",
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [0, 0],
    {"": None},
)

Mutation = Callable[[random.Random, bytes, "Files"], bytes]


class Files:
    """The bytes of all files of the corpus, for splices."""

    def __init__(self, trees: Mapping[str, Tree]) -> None:
        self._all = [node for tree in trees.values() for node in tree.values() if isinstance(node, bytes) and node]

    def any(self, dice: random.Random) -> bytes:
        return dice.choice(self._all) if self._all else b"{}"


def flip(dice: random.Random, data: bytes, files: Files) -> bytes:
    changed = bytearray(data or b"\0")
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        changed[_place(dice, len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def overwrite(dice: random.Random, data: bytes, files: Files) -> bytes:
    """Put an integer over some bytes, in one of the widths and orders that formats have."""
    layout = dice.choice(("<Q", "<I", "<H", "<B", ">I", "<q", "<i"))
    width = struct.calcsize(layout)
    raw = (dice.choice(INTEGERS) % (1 << 8 * width)).to_bytes(width, "little" if layout[0] == "<" else "big")
    at = 0 if dice.random() < 0.2 else _place(dice, max(1, len(data)))
    return data[:at] + raw + data[at + width :]


def truncate(dice: random.Random, data: bytes, files: Files) -> bytes:
    return data[: dice.choice((0, 1, 8, len(data) // 2, max(0, len(data) - 1), dice.randrange(len(data) + 1)))]


def extend(dice: random.Random, data: bytes, files: Files) -> bytes:
    more = dice.choice((1, 4, 512, 4096))
    return data + (bytes(more) if dice.random() < 0.5 else dice.randbytes(more))


def splice(dice: random.Random, data: bytes, files: Files) -> bytes:
    """The beginning of one file and the end of another, or a piece of the other in the middle."""
    other = files.any(dice)
    start, cut = dice.randrange(len(data) + 1), dice.randrange(len(other))
    if dice.random() < 0.5:
        return data[:start] + other[cut:]
    return data[:start] + other[cut : cut + dice.choice((4, 16, 64, 256))] + data[start:]


def exchange(dice: random.Random, data: bytes, files: Files) -> bytes:
    return files.any(dice)


def cut_out(dice: random.Random, data: bytes, files: Files) -> bytes:
    start = dice.randrange(len(data) + 1)
    return data[:start] + data[start + dice.choice((1, 2, 8, 64, 1024)) :]


def repeat(dice: random.Random, data: bytes, files: Files) -> bytes:
    start = dice.randrange(len(data) + 1)
    piece = data[start : start + dice.choice((1, 2, 8, 64))]
    return data[:start] + piece * dice.choice((2, 3, 16, 1024)) + data[start:]


BYTES: tuple[Mutation, ...] = (
    flip, flip, flip, overwrite, overwrite, truncate, extend, splice, exchange, cut_out, repeat,
)  # fmt: skip


def _place(dice: random.Random, length: int) -> int:
    """Anywhere, but every other time near the beginning, where headers are."""
    return dice.randrange(min(length, 256) if dice.random() < 0.5 else length)


# JSON


def alter_json(dice: random.Random, value: Any) -> Any:
    """A value with one of its fields, anywhere in it, replaced, removed, doubled, moved or nested."""
    holders = list(_holders(value))
    if not holders:
        return _odd(dice, value)
    holder, key = dice.choice(holders)
    act = dice.randrange(8)
    if act == 0:
        del holder[key]
    elif act == 1 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif act == 1:
        holder[dice.choice(WORDS)] = holder[key]
    elif act == 2:
        other, at = dice.choice(holders)
        holder[key] = other[at] if not isinstance(other[at], dict | list) else json.loads(json.dumps(other[at]))
    elif act == 3 and isinstance(holder, dict):
        holder[dice.choice(WORDS)] = holder.pop(key)
    else:
        holder[key] = _odd(dice, holder[key])
    return value


def _holders(value: Any) -> Any:
    """Every container and key in a value."""
    stack = [value]
    while stack:
        held = stack.pop()
        pairs = (
            list(held.items()) if isinstance(held, dict) else list(enumerate(held)) if isinstance(held, list) else []
        )
        for key, inner in pairs:
            yield held, key
            stack.append(inner)


def _odd(dice: random.Random, value: Any) -> Any:
    kind = dice.randrange(7)
    if kind == 0:
        return dice.choice(INTEGERS)
    if kind == 1:
        return dice.choice(WORDS)
    if kind == 2:
        return deepcopy(dice.choice(_OTHERS))  # or what is put into one is in all of them, also in itself
    if kind == 3:
        return _nested(dice, dice.choice((2, 20, 200)), value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value + dice.choice((-1, 1, 2, -value, value, 4096, -4096))
    if isinstance(value, str) and value:
        at = dice.randrange(len(value))
        return value[:at] + dice.choice(("", "0", "/", "\0", "\x1b", "\n", "f", "é")) + value[at + 1 :]
    if isinstance(value, list):
        return value * dice.choice((0, 2, 3)) if dice.random() < 0.7 else value[::-1]
    return [value] if dice.random() < 0.5 else {"value": value}


def _nested(dice: random.Random, depth: int, value: Any) -> Any:
    for _ in range(depth):
        value = [value] if dice.random() < 0.5 else {"a": value}
    return value


def json_text(dice: random.Random, value: Any, **style: Any) -> bytes:
    """As text; sometimes with a field twice, with deep nesting or numbers that no decoder of Python's would write."""
    text = json.dumps(value, **style).encode("utf-8", "surrogatepass")
    chance = dice.random()
    if chance < 0.02:
        return text.replace(b": ", b": " + b'{"a":' * dice.choice((50, 2000, 100_000)), 1)
    if chance < 0.04:
        return text.replace(b"0", b"9" * dice.choice((400, 5000)), 1)
    if chance < 0.06 and b"{" in text:
        return text.replace(b"{", b'{"name":"twice","files":[],"dtype":"U8",', 1)
    if chance < 0.07:
        return text.replace(b"{", b"[" * dice.choice((500, 5000, 200_000)), 1)
    return text


def altered_json(dice: random.Random, data: bytes, **style: Any) -> bytes:
    """A JSON file with one to three alterations; the bytes altered where it is none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return flip(dice, data, Files({}))
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        value = alter_json(dice, value)
    return json_text(dice, value, **style)


def altered_header(dice: random.Random, data: bytes) -> bytes:
    """A safetensors file with an altered header, whose length fits it."""
    length = int.from_bytes(data[:8], "little")
    try:
        fields = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError):
        return flip(dice, data, Files({}))
    inner = fields.get("__metadata__", {}) if isinstance(fields, dict) else {}
    key = dice.choice([None, *inner])
    try:
        if key is not None and dice.random() < 0.6:  # the metadata is text, in which ckpt and DCP put JSON
            inner[key] = json.dumps(alter_json(dice, json.loads(inner[key])))
        else:
            fields = alter_json(dice, fields)
    except ValueError:
        fields = alter_json(dice, fields)
    text = json_text(dice, fields, separators=(",", ":"))
    text = text.ljust(length) if dice.random() < 0.8 else text
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def alter_file(dice: random.Random, path: str, data: bytes, files: Files) -> bytes:
    """A file altered in the way of its format, or, every third time, by bytes."""
    if dice.random() < 0.66:
        if path.endswith((".json", "/.lock", "/.saving")) and data:
            return altered_json(dice, data)
        if path.endswith(".safetensors") and len(data) > 8:
            return altered_header(dice, data)
        if is_pickled(path, data):
            return alter(dice, path, data)
    for _ in range(dice.choice((1, 1, 2))):
        data = dice.choice(BYTES)(dice, data, files)
    return data


# what lies at a path


def rearrange(dice: random.Random, tree: Tree) -> Tree:
    """Something else in the place of a file: nothing, a link, a pipe, a folder; or more files than there were."""
    paths = list(tree)
    path = dice.choice(paths)
    act = dice.randrange(9)
    if act == 0:
        return {name: node for name, node in tree.items() if name != path}
    if act == 1:
        other = dice.choice(paths)
        return {**tree, path: tree[other], other: tree[path]}
    if act == 2:
        return {**tree, f"{path.rpartition('/')[0]}/{dice.choice(NAMES)}": tree[path]}
    if act == 3:  # a folder replaced: everything below it goes
        above = path.rpartition("/")[0]
        if above:
            rest = {name: node for name, node in tree.items() if not name.startswith(f"{above}/")}
            return {**rest, above: _special(dice, path, named="step-" not in above)}
    if act == 4:
        moved = f"{path.rpartition('/')[0]}/{dice.choice(NAMES)}"
        return {(moved if name == path else name): node for name, node in tree.items()}
    if act == 5:
        return {**tree, f"{path.rpartition('/')[0]}/{dice.choice(NAMES)}": _special(dice, path)}
    return {**tree, path: _special(dice, dice.choice(paths), named="/" not in path)}


NAMES = (
    ".lock", ".saving", "manifest.json", "state.json", "model.safetensors", "model.safetensors.index.json", ".metadata",
    "optimizer.bin", "rank-00000.json", "new\nline", "\x1b[31mred", "step-00000009", "-rf", "\u202ename",
    ".out.ckpt-tmp", "model", "step-00000001", "run.json", "alive", "extra.tmp", "__0_0.distcp", "n" * 240,
)  # fmt: skip


def _special(dice: random.Random, path: str, *, named: bool = False) -> Special:
    """Something that is no plain file. A link that a user has `named` is followed, wherever it leads: there is none."""
    kinds = ("fifo", "socket", "folder", "sparse")
    kind = dice.choice(kinds if named else ("link", "link", "hard", *kinds))
    if kind == "link":
        inside = (f"{BESIDE}/secret.json", f"{BESIDE}/model.safetensors", BESIDE, "/dev/zero", "/dev/full", ".", "..")
        return Special(kind, dice.choice((*inside, path.rpartition("/")[2], "nowhere")))
    if kind == "hard":
        return Special(kind, dice.choice((f"{BESIDE}/linked.json", path)))
    return Special(kind)
