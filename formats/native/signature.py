"""The signature of a manifest: one line of fixed form, which covers every byte after it.

    {
     "digest": "xxh3-128:<of every byte after this line>",
     "signature": "ed25519:<public key, 64 hex digits>:<signature, 128 hex digits>",
     "format": "ckpt",
     ...

What is signed is `CONTEXT` followed by those bytes, so that no signature of another kind of document fits. Readers that
know no signatures ignore the field. Nothing here computes or verifies one: see `ckpt.root.keys`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

CONTEXT = b"ckpt manifest 1\n"

_LINE = re.compile(rb' "signature": "ed25519:([0-9a-f]{64}):([0-9a-f]{128})",\n')


@dataclass(frozen=True)
class Signature:
    """Who signed a manifest, and its bytes as they were signed, from which copies of it are written.

    `name` is the checkpoint's in those bytes: its folder may be called otherwise by now. `verified`: a key that is
    trusted has made it, as `ckpt.root.trust.Trust` found.
    """

    key: str
    value: str
    text: bytes = field(repr=False)
    name: str = ""
    verified: bool = False

    @property
    def message(self) -> bytes:
        return CONTEXT + self.text

    @property
    def line(self) -> bytes:
        return f' "signature": "ed25519:{self.key}:{self.value}",\n'.encode()


def split_signature(lines: bytes) -> tuple[Signature | None, bytes]:
    """The signature of a manifest's lines, if they begin with one, and the lines after it."""
    found = _LINE.match(lines)
    if found is None:
        return None, lines
    text = lines[found.end() :]
    return Signature(found[1].decode(), found[2].decode(), text), text


def short(key: str) -> str:
    """A public key as it is shown: its first 16 digits."""
    return key[:16]
