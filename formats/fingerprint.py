"""Fingerprints of tensors: 128 bits of their bytes, the same wherever they are computed.

Bytes are divided into chunks of 128 KiB. Each chunk is padded with zeros to a multiple of 1 KiB, and its hash is
XXH3-128 of that. The fingerprint is XXH3-128 of the chunks' hashes, one after the other, and the number of bytes;
docs/format.md says it byte by byte.

Tensors in host memory are hashed by the library xxhash. Tensors on a device are hashed where they are: all chunks side
by side, by one kernel of Triton's (`xxh3_kernels.py`), or by PyTorch's operators where there is no Triton. What
crosses the bus are 16 bytes per chunk. XXH3 finds accidents, not attacks: signatures use SHA-256.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash

from ckpt.formats.tensors import as_bytes, host_bytes, is_dense, movable, on_host
from ckpt.util.threads import in_parallel

_log = logging.getLogger("ckpt")
Key = TypeVar("Key")

CHUNK = 128 << 10  # bytes
BLOCK = 1 << 10  # bytes, after which XXH3 scrambles its lanes
LANES = 8  # 64-bit numbers
STRIPES = BLOCK // (8 * LANES)
_PER_CHUNK = CHUNK // BLOCK
_TOGETHER = 1 << 30  # bytes that PyTorch's operators hash side by side
_AT_ONCE = 64 << 20  # bytes for which they have temporary memory, some three times as much
_WORTH_THREADS = 8 << 20  # bytes

# The constants of XXH3 (xxHash 0.8, XXH3_kSecret and the primes).
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
SCRAMBLE, LAST_STRIPE = len(SECRET) - 64, len(SECRET) - 71  # where the secrets of these begin
PRIME = 0x9E3779B1
_PRIMES = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_AVALANCHE = 0x165667919E3779F9
_LOW = 0xFFFFFFFF


def fingerprint(data: memoryview) -> str:
    """The fingerprint of bytes in host memory."""
    return _combined(b"".join(_chunk_hashes(data)), len(data))


def fingerprints(tensors: Mapping[Key, torch.Tensor]) -> Callable[[], dict[Key, str]]:
    """Those of tensors as they are now, by name.

    Tensors in host memory are hashed here. The work for tensors on devices is enqueued in the current streams, and the
    function that this returns waits for it.
    """
    local = {name: tensor.detach() for name, tensor in tensors.items()}
    done = _on_host({name: tensor for name, tensor in local.items() if tensor.is_cpu})
    by_device: dict[torch.device, dict[Key, torch.Tensor]] = {}
    for name, tensor in local.items():
        if not tensor.is_cpu:
            by_device.setdefault(tensor.device, {})[name] = tensor
    pending = [_enqueued(device, found) for device, found in by_device.items()]

    def read() -> dict[Key, str]:
        while pending:
            done.update(pending.pop()())
        return {name: done[name] for name in tensors}

    return read


def _on_host(tensors: Mapping[Key, torch.Tensor]) -> dict[Key, str]:
    """Large tensors are hashed in several threads: training may wait for it."""
    threads = torch.get_num_threads() if sum(tensor.nbytes for tensor in tensors.values()) > _WORTH_THREADS else 1
    return dict(zip(tensors, in_parallel(_of_copy, [*tensors.values()], threads, "ckpt-fingerprint"), strict=True))


def _of_copy(tensor: torch.Tensor) -> str:
    """That of a tensor anywhere, whose bytes are brought to the host if they are not there."""
    return fingerprint(host_bytes(on_host(tensor)))


def _chunk_hashes(data: memoryview) -> Iterator[bytes]:
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        padding = -len(chunk) % BLOCK
        if padding:
            hashed = xxhash.xxh3_128(chunk)
            hashed.update(bytes(padding))
            yield hashed.intdigest().to_bytes(16, "little")
        else:
            yield xxhash.xxh3_128_intdigest(chunk).to_bytes(16, "little")


def _combined(hashes: bytes, size: int) -> str:
    return xxhash.xxh3_128_hexdigest(hashes + size.to_bytes(8, "little"))


# On a device: every chunk at the same time. Numbers are int64, since PyTorch lacks most operators for uint64: sums and
# products wrap to the same bits, and only shifts to the right and products of 128 bits need functions of their own.


class Chunks(NamedTuple):
    """The chunks of tensors on one device, in order."""

    owner: torch.Tensor  # the number of its tensor, of each chunk
    start: torch.Tensor  # bytes, in its tensor
    size: torch.Tensor  # bytes

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Chunks:
        return cls(*divided(sizes, CHUNK))


def divided(sizes: Sequence[int], limit: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts of at most `limit`: the number of what each is a part of, its start in that, and its size."""
    total = torch.tensor(sizes, dtype=torch.int64)
    counts = (total + (limit - 1)) // limit
    owner = torch.repeat_interleave(counts)
    start = (torch.arange(len(owner)) - (torch.cumsum(counts, 0) - counts)[owner]) * limit
    return owner, start, (total[owner] - start).clamp(max=limit)


def _enqueued(device: torch.device, tensors: Mapping[Key, torch.Tensor]) -> Callable[[], dict[Key, str]]:
    """Enqueue the work. A device that has no memory for it brings the tensors to the host, one after the other."""
    try:
        flat = [_aligned_bytes(tensor) for tensor in tensors.values()]
        sizes = list(map(len, flat))
        hashes = device_hashes(flat, Chunks.of(sizes)) if any(sizes) else torch.empty(0, 2, dtype=torch.int64)
    except torch.OutOfMemoryError:
        flat = []
        found_on_host = {name: _of_copy(tensor) for name, tensor in tensors.items()}
        return lambda: found_on_host
    module: Any = torch.get_device_module(device)
    event = module.current_stream(device).record_event() if hasattr(module, "current_stream") else None

    def read() -> dict[Key, str]:
        if event is not None:
            event.synchronize()  # it may be read on another thread, which has another current stream
        data, found, place = bytes(host_bytes(hashes.cpu())), {}, 0
        for name, size in zip(tensors, sizes, strict=True):
            stop = place + 16 * -(-size // CHUNK)
            found[name] = _combined(data[place:stop], size)
            place = stop
        flat.clear()
        return found

    return read


def _aligned_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the order of its file, from an address that 64-bit numbers may have."""
    dense = tensor if is_dense(tensor) else movable(tensor.resolve_conj().resolve_neg()).contiguous()
    flat = as_bytes(dense)
    return flat if flat.data_ptr() % 8 == 0 else flat.clone()


def device_hashes(flat: Sequence[torch.Tensor], chunks: Chunks) -> torch.Tensor:
    """The hashes of chunks: two 64-bit numbers each, the lower one first. `flat`: bytes of the tensors, aligned."""
    device = flat[0].device
    lanes = _lanes_by_kernel if device.type == "cuda" and _has_kernel() else _lanes
    padded = (chunks.size + (BLOCK - 1)) // BLOCK * BLOCK
    return merged(lanes(flat, chunks), padded.to(device))


@cache
def _has_kernel() -> bool:
    """Whether there is Triton, with a compiler that makes of the kernel what PyTorch's operators compute."""
    try:
        sample = [torch.arange(300_001, device="cuda").to(torch.uint8)]
        chunks = Chunks.of([len(sample[0])])
        return torch.equal(_lanes_by_kernel(sample, chunks), _lanes(sample, chunks))
    except Exception as error:  # whatever the compiler raises
        _log.debug("Triton is not available, so fingerprints take longer on the device: %s", error)
        return False


def _lanes_by_kernel(flat: Sequence[torch.Tensor], chunks: Chunks) -> torch.Tensor:
    """The lanes of every chunk after its last stripe."""
    from ckpt.formats.xxh3_kernels import fill_lanes

    device = flat[0].device
    starts = torch.tensor([tensor.data_ptr() for tensor in flat])[chunks.owner] + chunks.start
    addresses, sizes = (column.pin_memory().to(device, non_blocking=True) for column in (starts, chunks.size))
    lanes = torch.empty(len(sizes), LANES, dtype=torch.int64, device=device)
    fill_lanes(lanes, addresses, sizes, kernel_table(device), PRIME)
    return lanes


def kernel_table(device: torch.device) -> torch.Tensor:
    """What the kernels need: 24 words of the secret, those of the last stripe, and the lanes to start with."""
    return torch.cat([words64(0, 24), words64(LAST_STRIPE, LANES), START]).to(device)


def _lanes(flat: Sequence[torch.Tensor], chunks: Chunks) -> torch.Tensor:
    """The lanes of every chunk after its last stripe, by PyTorch's operators alone.

    What blocks add to the lanes is computed for many at once; only to scramble the lanes, blocks must be in order.
    """
    found, sums, size = [], list[torch.Tensor](), 0
    blocks, done, known = (chunks.size + (BLOCK - 1)) // BLOCK, 0, 0
    for tensor in flat:
        for start in range(0, len(tensor), _TOGETHER):
            part = tensor[start : start + _TOGETHER]
            sums += _sums_of(part)
            size, done = size + len(part), done + -(-len(part) // CHUNK)
            if size >= _TOGETHER:
                found.append(scrambled(torch.cat(sums), blocks[known:done]))
                sums, size, known = [], 0, done
    if sums:
        found.append(scrambled(torch.cat(sums), blocks[known:done]))
    return torch.cat(found)


def _sums_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """What the blocks of consecutive chunks add to their lanes; the last block is padded."""
    whole = len(flat) // BLOCK * BLOCK
    for start in range(0, whole, _AT_ONCE):
        some = flat[start : min(whole, start + _AT_ONCE)]
        yield _block_sums(some, is_last=start + len(some) == len(flat))
    if whole < len(flat):
        yield _block_sums(torch.nn.functional.pad(flat[whole:], (0, BLOCK - len(flat) + whole)), is_last=True)


def _block_sums(data: torch.Tensor, *, is_last: bool) -> torch.Tensor:
    """What each block adds to the lanes, in data from the start of a chunk on. `is_last`: it ends one, too.

    The last stripe of a chunk has a secret of its own.
    """
    words = data.view(torch.int64).view(-1, STRIPES, LANES)
    keyed = words ^ torch.stack([words64(8 * stripe, LANES) for stripe in range(STRIPES)]).to(words.device)
    for ends in (slice(_PER_CHUNK - 1, None, _PER_CHUNK), *([slice(-1, None)] if is_last else ())):
        keyed[ends, -1] = words[ends, -1] ^ words64(LAST_STRIPE, LANES).to(words.device)
    return products(keyed).sum(1) + swapped(words.sum(1))


def products(keyed: torch.Tensor) -> torch.Tensor:
    """The lower half of every 64-bit number times its upper half."""
    return (keyed & _LOW) * shifted(keyed, 32)


def swapped(words: torch.Tensor) -> torch.Tensor:
    """Every second lane in the place of its neighbour."""
    return words.view(*words.shape[:-1], LANES // 2, 2).flip(-1).view(words.shape)


def scrambled(sums: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The lanes of chunks of so many blocks each, by what the blocks add to them."""
    device, most = sums.device, int(blocks.max())
    lanes = START.to(device).repeat(len(blocks), 1)
    starts, blocks = ((torch.cumsum(blocks, 0) - blocks).to(device), blocks.to(device))
    secret = words64(SCRAMBLE, LANES).to(device)
    for block in range(most):
        mixed = (lanes ^ shifted(lanes, 47) ^ secret) * PRIME if block else lanes
        # clamped, as a chunk without such a block would read beyond the end: `where` drops what it reads
        mixed = mixed + sums[(starts + block).clamp(max=len(sums) - 1)]
        lanes = torch.where((blocks > block)[:, None], mixed, lanes)
    return lanes


def merged(lanes: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """The hashes, by the lanes after the last stripe and the numbers of bytes: two 64-bit numbers, the lower first."""
    low = _folded(lanes, 11, sizes * _signed(_PRIMES[0]))
    high = _folded(lanes, len(SECRET) - 75, ~(sizes * _signed(_PRIMES[1])))
    return torch.stack([low, high], 1)


def _folded(lanes: torch.Tensor, offset: int, start: torch.Tensor) -> torch.Tensor:
    pairs = (lanes ^ words64(offset, LANES).to(lanes.device)).view(-1, LANES // 2, 2)
    mixed = start + _product(pairs[..., 0], pairs[..., 1]).sum(1)
    mixed = (mixed ^ shifted(mixed, 37)) * _signed(_AVALANCHE)
    return mixed ^ shifted(mixed, 32)


def _product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The 128 bits of a product of unsigned numbers, folded: the upper half xor the lower."""
    one_low, one_high, low, high = one & _LOW, shifted(one, 32), other & _LOW, shifted(other, 32)
    lowest, middle = one_low * low, one_high * low
    cross = shifted(lowest, 32) + (middle & _LOW) + one_low * high
    upper = shifted(middle, 32) + shifted(cross, 32) + one_high * high
    return upper ^ ((cross << 32) | (lowest & _LOW))


def shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A shift to the right as of an unsigned number."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


@cache
def words64(offset: int, count: int) -> torch.Tensor:
    """As many 64-bit numbers of the secret, from a byte on."""
    words = (SECRET[place : place + 8] for place in range(offset, offset + 8 * count, 8))
    return torch.tensor([int.from_bytes(word, "little", signed=True) for word in words])


START = torch.tensor(list(map(_signed, (0xC2B2AE3D, *_PRIMES[:4], 0x85EBCA77, _PRIMES[4], PRIME))))
