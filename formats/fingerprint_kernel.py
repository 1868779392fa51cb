"""Fingerprints by a kernel of Triton's, on NVIDIA's and AMD's devices: 16 chunks in each program, 8 lanes of each.

Only imported where there is such a device: Triton comes with PyTorch's builds for it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PER_PROGRAM = 16


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    addresses, sizes, table, lanes, count, per_program: tl.constexpr, prime: tl.constexpr
):
    """Fills `lanes` with those of chunks. `table`: 24 words of the secret, 8 of the last stripe, 8 to start with."""
    chunk = tl.program_id(0).to(tl.int64) * per_program + tl.arange(0, per_program)
    lane = tl.arange(0, 8)
    known = chunk < count
    size = tl.load(sizes + chunk, mask=known, other=0)[:, None]
    words = tl.load(addresses + chunk, mask=known, other=0).to(tl.pointer_type(tl.uint64))[:, None]
    blocks = (size + 1023) // 1024
    scramble = tl.load(table + 16 + lane)[None, :]
    last = tl.load(table + 24 + lane)[None, :]
    found = tl.zeros((per_program, 8), tl.uint64) + tl.load(table + 32 + lane)[None, :]
    for block in range(tl.max(blocks)):
        mixed = (found ^ (found >> 47) ^ scramble) * prime
        found = tl.where((block > 0) & (block < blocks), mixed, found)
        added = tl.zeros((per_program, 8), tl.uint64)
        for stripe in tl.static_range(16):
            place = block * 128 + stripe * 8 + lane[None, :]
            left = size - place * 8  # bytes of the chunk from here on
            word = tl.load(words + place, mask=left > 0, other=0)
            unused = tl.where(left < 8, 8 - left, 0) * 8  # bits, of the last word
            word = tl.where(left > 0, (word << unused.to(tl.uint64)) >> unused.to(tl.uint64), 0)
            secret = tl.load(table + stripe + lane)[None, :]
            if stripe == 15:
                secret = tl.where(block == blocks - 1, last, secret)
            keyed = word ^ secret
            found = tl.where(block < blocks, found + (keyed & 0xFFFFFFFF) * (keyed >> 32), found)
            added += word
        even, odd = tl.split(tl.reshape(added, (per_program, 4, 2)))
        found += tl.reshape(tl.join(odd, even), (per_program, 8))
    tl.store(lanes + chunk[:, None] * 8 + lane[None, :], found, mask=known[:, None])


def fill_lanes(
    lanes: torch.Tensor, addresses: torch.Tensor, sizes: torch.Tensor, table: torch.Tensor, prime: int
) -> None:
    """Enqueue it, in the current stream: the lanes of every chunk after its last stripe."""
    with torch.cuda.device(lanes.device):
        _kernel[(triton.cdiv(len(sizes), _PER_PROGRAM),)](
            addresses,
            sizes,
            table.view(torch.uint64),
            lanes.view(torch.uint64),
            len(sizes),
            per_program=_PER_PROGRAM,
            prime=prime,
        )
