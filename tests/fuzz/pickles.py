"""Pickles and archives of `torch.save`, altered opcode by opcode, and made hostile."""

from __future__ import annotations

import io
import pickletools
import random
import zipfile
from collections.abc import Sequence

_NAMES = (
    b"tests.fuzz.canary\nfire", b"os\nsystem", b"builtins\neval", b"builtins\nexec", b"subprocess\nPopen",
    b"builtins\ngetattr", b"builtins\nfrozenset", b"builtins\nset", b"builtins\nrange", b"builtins\nbytearray",
    b"builtins\nlist", b"builtins\ncomplex", b"builtins\nint", b"torch\nSize", b"torch\nload", b"torch\nfloat32",
    b"torch\nquint4x2", b"torch\nbits8", b"torch._utils\n_rebuild_tensor_v2", b"torch._utils\n_rebuild_tensor_v3",
    b"torch._utils\n_rebuild_parameter", b"torch.storage\nUntypedStorage", b"torch\nFloatStorage",
    b"torch\nLongStorage", b"collections\nOrderedDict", b"collections\nCounter", b"collections\ndefaultdict",
    b"collections\ndeque",
    b"numpy._core.multiarray\n_reconstruct", b"numpy\nndarray", b"numpy\ndtype", b"numpy._core.multiarray\nscalar",
    b"_codecs\nencode", b"torch.distributed.checkpoint.metadata\nMetadata",
    b"torch.distributed.checkpoint.metadata\nTensorStorageMetadata",
    b"torch.distributed.checkpoint.metadata\nChunkStorageMetadata",
    b"torch.distributed.checkpoint.metadata\nMetadataIndex",
    b"torch.distributed.checkpoint.filesystem\n_StorageInfo",
    b"torch.distributed.checkpoint.filesystem\n_StoragePrefix",
)  # fmt: skip
# opcodes with arguments that are valid for themselves: any sequence of them is read up to the first that does not fit
PIECES: tuple[bytes, ...] = (
    b"(", b")", b"]", b"}", b"\x8f", b"N", b"\x88", b"\x89", b"t", b"l", b"d", b"\x91", b"a", b"e", b"s", b"u", b"\x90",
    b"0", b"1", b"2", b"\x85", b"\x86", b"\x87", b"R", b"R", b"\x81", b"b", b"\x93", b"\x94", b"Q", b"K\x00", b"K\x01",
    b"K\xff", b"M\xff\xff", b"J\xff\xff\xff\x7f", b"J\xff\xff\xff\xff", b"\x8a\x08\0\0\0\0\0\0\0\x10",
    b"\x8a\x09\0\0\0\0\0\0\0\0\x01", b"\x8b\x00\x01\0\0" + b"\xff" * 256, b"G@\t\x21\xfbTD-\x18",
    b"G\x7f\xf8\0\0\0\0\0\0",
    b"X\x01\0\0\0a", b"\x8c\x05model", b"\x8c\x07storage", b"\x8c\x010", b"\x8c\x03cpu", b"C\x02\x00\xff",
    b"B\x04\0\0\0abcd", b"q\x00", b"q\x01", b"h\x00", b"h\x01", b"h\x07", b"j\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f",
    b"I99999999999999999999\n", b"I01\n", b"L1234567890L\n", b"F1e999\n", b"V\\u0041\n", b"p3\n", b"g3\n",
    b"\x80\x04", b"\x95\xff\0\0\0\0\0\0\0", b"\x97", b"\x98", b"\x96\x04\0\0\0\0\0\0\0abcd", b"\x82\x01",
    b"i" + _NAMES[1] + b"\n",
    b"P0\n", b"o", *(b"c" + name + b"\n" for name in _NAMES),
)  # fmt: skip


def program(pieces: Sequence[bytes]) -> bytes:
    return b"\x80\x02" + b"".join(pieces) + b"."


def _nested_key(depth: int) -> bytes:
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."


def _laughs(rounds: int) -> bytes:
    """Each list holds the one before ten times."""
    lists = b"".join(b"(" + b"h%c" % number * 10 + b"lq%c" % (number + 1) for number in range(rounds))
    return b"\x80\x02(K\x01lq\x00" + lists + b"."


def _call(name: bytes, arguments: bytes) -> bytes:
    return b"\x80\x02c" + name + b"\n" + arguments + b"R."


BOMBS: tuple[bytes, ...] = (
    *(_nested_key(depth) for depth in (10, 1000, 200_000)),
    *(_laughs(rounds) for rounds in (3, 9, 30)),
    b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    b"\x80\x02)" + b"\x85" * 300_000 + b".",
    b"\x80\x02]q\0h\0a.",  # a list that holds itself
    b"\x80\x02}q\0K\x01h\0s.",
    _call(b"builtins\nfrozenset", b"cbuiltins\nrange\nJ\x00\xca\x9a\x3b\x85R\x85"),
    _call(b"torch\nSize", b"cbuiltins\nrange\nJ\x00\xca\x9a\x3b\x85R\x85"),
    _call(b"torch\nSize", b"(" + b"\x8a\x09\0\0\0\0\0\0\0\0\x01" * 4 + b"t\x85"),
    _call(b"builtins\nbytearray", b"\x8a\x05\0\0\0\0\x10\x85"),
    _call(b"builtins\nset", b"cbuiltins\nrange\nJ\x00\xca\x9a\x3b\x85R\x85"),
    _call(b"collections\nCounter", b"cbuiltins\nrange\nJ\x00\xca\x9a\x3b\x85R\x85"),
    _call(b"collections\ndeque", b"\x8c\x04" + b"aaaa" + b"J\xff\xff\xff\xff\x86"),
    _call(b"os\nsystem", b"\x8c\x04true\x85"),
    _call(b"tests.fuzz.canary\nfire", b"\x8c\x01x\x85"),
    b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of a length that nobody has
    b"\x80\x02X\xff\xff\xff\xff.",
    b"\x80\x02\x8b\xff\xff\xff\x7f.",
    b"I" + b"9" * 200_000 + b"\n.",
)


def altered_pickle(dice: random.Random, data: bytes) -> bytes:
    """A pickle with opcodes removed, doubled, exchanged, put in or given other arguments; sometimes a hostile one."""
    if dice.random() < 0.15:
        return dice.choice(BOMBS)
    pieces = _split(data)
    if len(pieces) < 2:
        return dice.choice(BOMBS)
    for _ in range(dice.choice((1, 1, 2, 5))):
        at, other = dice.randrange(len(pieces)), dice.randrange(len(pieces))
        act = dice.randrange(6)
        if act == 0:
            del pieces[at]
        elif act == 1:
            pieces.insert(at, pieces[other])
        elif act == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif act == 3:
            pieces.insert(at, dice.choice(PIECES))
        elif act == 4:
            pieces[at] = dice.choice(PIECES)
        else:
            pieces[at] = _other_argument(dice, pieces[at])
        if not pieces:
            break
    return b"".join(pieces)


def _split(data: bytes) -> list[bytes]:
    places = []
    try:
        places += [at for _, _, at in pickletools.genops(data) if at is not None]
    except Exception:  # what was altered before need not be a pickle
        return []
    return [data[start:stop] for start, stop in zip(places, [*places[1:], len(data)], strict=True)]


def _other_argument(dice: random.Random, piece: bytes) -> bytes:
    if len(piece) < 2:
        return piece
    changed = bytearray(piece)
    changed[dice.randrange(1, len(piece))] = dice.choice((0, 1, 2, 127, 128, 255, dice.randrange(256)))
    return bytes(changed)


def altered_archive(dice: random.Random, data: bytes) -> bytes:
    """An archive of `torch.save` whose pickle, entries or methods are others, with checksums that fit."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:
        return data
    act = dice.randrange(8)
    if act == 0 and entries:
        entries.pop(dice.randrange(len(entries)))
    elif act == 1 and entries:
        entries.append(dice.choice(entries))
    elif act == 2 and entries:
        at = dice.randrange(len(entries))
        name, content = entries[at]
        entries[at] = (name, content[: len(content) // 2])
    else:
        entries = [
            (name, altered_pickle(dice, content) if name.endswith("data.pkl") else content) for name, content in entries
        ]
    return archived(entries, compressed=dice.random() < 0.05)


def archived(entries: Sequence[tuple[str, bytes]], *, compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def is_pickled(path: str, data: bytes) -> bool:
    return path.endswith((".bin", ".pkl", ".pt", ".metadata", ".distcp", ".ckpt")) and bool(data)


def alter(dice: random.Random, path: str, data: bytes) -> bytes:
    """A file of pickles, altered in its opcodes."""
    if data[:2] == b"PK":
        return altered_archive(dice, data)
    return altered_pickle(dice, data)
