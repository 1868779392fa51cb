"""XXH3 on a device, by kernels of Triton's: the chunks of fingerprints, and the blocks of files.

Only imported where there is a device of NVIDIA's or AMD's: Triton comes with PyTorch's builds for it.
"""

from __future__ import annotations

from collections.abc import Sequence

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
            # the last word may reach beyond the chunk: those bits become zeros, which is how a chunk is padded
            unused = tl.where(left < 8, 8 - left, 0) * 8
            word = tl.where(left > 0, (word << unused.to(tl.uint64)) >> unused.to(tl.uint64), 0)
            secret = tl.load(table + stripe + lane)[None, :]
            if stripe == 15:  # XXH3 has another secret for the last stripe of its input
                secret = tl.where(block == blocks - 1, last, secret)
            keyed = word ^ secret
            found = tl.where(block < blocks, found + (keyed & 0xFFFFFFFF) * (keyed >> 32), found)
            added += word
        # XXH3 adds each word, without its secret, to the neighbouring lane
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


@triton.jit
def _copy_kernel(sources, targets, sizes):  # type: ignore[no-untyped-def]
    """Copies up to 1024 bytes in each program, from and to any address."""
    number = tl.program_id(0)
    at = tl.arange(0, 1024)
    known = at < tl.load(sizes + number)
    source = tl.load(sources + number).to(tl.pointer_type(tl.uint8))
    target = tl.load(targets + number).to(tl.pointer_type(tl.uint8))
    tl.store(target + at, tl.load(source + at, mask=known), mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_kernel(  # type: ignore[no-untyped-def]
    addresses, rows, counts, table, sums, per_program: tl.constexpr, wide: tl.constexpr
):
    """Fills rows of `sums` with what every KiB adds to the lanes.

    Addresses are multiples of eight if `wide`, else of four: to read 64 bits at a time takes half as long.
    """
    unit = tl.program_id(0)
    address = tl.load(addresses + unit)
    first, count = tl.load(rows + unit), tl.load(counts + unit)
    lane = tl.arange(0, 8)
    for start in range(0, count, per_program):
        kib = start + tl.arange(0, per_program).to(tl.int64)
        known = (kib < count)[:, None] & (lane >= 0)[None, :]
        found = tl.zeros((per_program, 8), tl.uint64)
        added = tl.zeros((per_program, 8), tl.uint64)
        for stripe in tl.static_range(16):
            place = kib[:, None] * 128 + stripe * 8 + lane[None, :]
            if wide:
                word = tl.load(address.to(tl.pointer_type(tl.uint64)) + place, mask=known, other=0)
            else:
                halves = address.to(tl.pointer_type(tl.uint32)) + place * 2
                low = tl.load(halves, mask=known, other=0).to(tl.uint64)
                word = low | (tl.load(halves + 1, mask=known, other=0).to(tl.uint64) << 32)
            keyed = word ^ tl.load(table + stripe + lane)[None, :]
            found += (keyed & 0xFFFFFFFF) * (keyed >> 32)
            added += word
        even, odd = tl.split(tl.reshape(added, (per_program, 4, 2)))
        found += tl.reshape(tl.join(odd, even), (per_program, 8))
        tl.store(sums + (first + kib)[:, None] * 8 + lane[None, :], found, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _scramble_kernel(  # type: ignore[no-untyped-def]
    firsts, counts, table, sums, lanes, blocks, per_program: tl.constexpr, prime: tl.constexpr
):
    """Fills the lanes of a few blocks in each program. 32 rows are loaded ahead of their turn."""
    block = tl.program_id(0) * per_program + tl.arange(0, per_program)
    lane = tl.arange(0, 8)[None, :]
    known = block < blocks
    count = tl.load(counts + block, mask=known, other=0)[:, None] + lane * 0  # in the shape of the lanes, for the masks
    row = sums + tl.load(firsts + block, mask=known, other=0)[:, None] * 8 + lane
    secret = tl.load(table + 16 + lane)
    found = tl.zeros((per_program, 8), tl.uint64) + tl.load(table + 32 + lane)
    for start in range(0, tl.max(count), 32):
        for step in tl.static_range(32):
            number = start + step
            is_there = number < count
            added = tl.load(row + number * 8, mask=is_there, other=0)
            mixed = (found ^ (found >> 47) ^ secret) * prime
            found = tl.where(is_there, tl.where(is_there & (number > 0), mixed, found) + added, found)
    tl.store(lanes + block[:, None] * 8 + lane, found, mask=known[:, None] & (lane >= 0))


def copy_bytes(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, device: torch.device) -> None:
    """Enqueue copies of at most 1024 bytes each, from addresses to addresses."""
    with torch.cuda.device(device):
        _copy_kernel[(len(sizes),)](*_sent(device, sources, targets, sizes))


def fill_sums(
    sums: torch.Tensor, addresses: torch.Tensor, rows: torch.Tensor, counts: torch.Tensor, table: torch.Tensor
) -> None:
    """Enqueue what every KiB adds to the lanes: of as many KiB from an address on, from a row on."""
    is_wide = addresses % 8 == 0
    with torch.cuda.device(sums.device):
        for wide, chosen in ((True, is_wide), (False, ~is_wide)):
            if chosen.any():
                units = (column[chosen] for column in (addresses, rows, counts))
                _sum_kernel[(int(chosen.sum()),)](
                    *_sent(sums.device, *units), table.view(torch.uint64), sums.view(torch.uint64),
                    per_program=_PER_PROGRAM, wide=wide,
                )  # fmt: skip


def scrambled(sums: torch.Tensor, counts: Sequence[int], table: torch.Tensor, prime: int) -> torch.Tensor:
    """Enqueue the lanes of blocks that have so many rows of the sums each."""
    number = torch.tensor(counts)
    firsts, rows = _sent(sums.device, torch.cumsum(number, 0) - number, number)
    lanes = torch.empty(len(counts), 8, dtype=torch.int64, device=sums.device)
    with torch.cuda.device(sums.device):
        _scramble_kernel[(triton.cdiv(len(counts), _PER_PROGRAM),)](
            firsts, rows, table.view(torch.uint64), sums.view(torch.uint64), lanes.view(torch.uint64), len(counts),
            per_program=_PER_PROGRAM, prime=prime,
        )  # fmt: skip
    return lanes


def _sent(device: torch.device, *columns: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # pinned, or the copy would wait for the stream; PyTorch keeps the pinned memory until the copy is done
    return torch.stack(columns).pin_memory().to(device, non_blocking=True).unbind()
