"""Checksums of tensors, by which ranks compare their state without sending it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import torch
import xxhash

from ckpt.formats.native.manifest import digest
from ckpt.formats.tensors import FilePlan, as_bytes, host_bytes, is_dense, on_host

SHARES = 16  # saves within which every byte in host memory is compared: a sixteenth at each save
_LEAST = 4 << 10  # bytes of a share; smaller tensors have fewer shares
_ROW = 4 << 10  # bytes
_SMALL = 16 << 10  # bytes of a tensor on a device
_MIX = (0x2545F4914F6CDD1D, 0x9E3779B97F4A7C1 | 1)
_MASK = (1 << 64) - 1


def fingerprints(tensors: Mapping[str, torch.Tensor], turn: int | None = None) -> Callable[[], dict[str, str]]:
    """The checksums of tensors as they are now, by name: computed on their devices, and read by the function returned.

    On a device, all bytes are summed up, in milliseconds. In host memory only a share of each tensor is hashed if there
    is a `turn`, so that a save costs a few per cent more; another share at the next turn, and all within `SHARES`.
    Weights that drift apart differ in nearly every byte, and are found in any share.
    """
    hashed: dict[str, str] = {}
    on_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.is_cpu or not is_dense(tensor) or not tensor.numel():
            hashed[name] = _hash_of(tensor, turn)
        else:
            on_device.setdefault(tensor.device, {})[name] = tensor
    pending = [_enqueued(device, found) for device, found in on_device.items()]

    def read() -> dict[str, str]:
        for checksums_of in pending:
            hashed.update(checksums_of())
        return hashed

    return read


def _enqueued(device: torch.device, tensors: Mapping[str, torch.Tensor]) -> Callable[[], dict[str, str]]:
    """Enqueue what is computed on a device: sums of large tensors; small ones are brought together and hashed here."""
    large = {name: weighted_sums(tensor) for name, tensor in tensors.items() if tensor.nbytes >= _SMALL}
    small = {name: as_bytes(tensor.detach()) for name, tensor in tensors.items() if name not in large}
    sums = torch.stack([*large.values()]) if large else torch.empty(0, 2)
    packed = torch.cat([*small.values()]) if small else torch.empty(0)
    done = torch.get_device_module(device).current_stream(device).record_event()

    def read() -> dict[str, str]:
        done.synchronize()  # it may be read on another thread, which has another current stream
        rows, data, start = zip(large, sums.tolist(), strict=True), host_bytes(packed.cpu()), 0
        found = {name: f"sums:{one & _MASK:016x}{two & _MASK:016x}" for name, (one, two) in rows}
        for name, flat in small.items():
            found[name] = digest(data[start : start + len(flat)])
            start += len(flat)
        return found

    return read


def _hash_of(tensor: torch.Tensor, turn: int | None) -> str:
    data = host_bytes(on_host(tensor))
    if turn is None:
        return digest(data)
    shares = max(1, min(SHARES, len(data) // _LEAST))
    number = turn % shares
    return f"{number}/{shares}:{digest(data[number * len(data) // shares : (number + 1) * len(data) // shares])}"


def checksum(tensor: torch.Tensor) -> str:
    """The hash of all bytes of a tensor, in host memory."""
    return digest(host_bytes(on_host(tensor)))


def differ(one: str | None, other: str | None) -> bool:
    """Whether two checksums show that tensors differ. Those of other shares, or of none, show nothing."""
    return one is not None and other is not None and one != other and _kind(one) == _kind(other)


def _kind(checksum: str) -> str:
    return checksum[: checksum.rfind(":") + 1]


def weighted_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums of a tensor's memory as 64-bit integers, by rows and by columns, with odd weights, modulo 2**64.

    A word that changes changes both, and two that change places change one: they cannot be in the same row and column.
    Integers of the size of the sum, as others would be converted first, in twice the memory of the tensor. Not
    torch.hash_tensor, the exclusive or of all elements: any two constant tensors of an even number of elements have the
    same.
    """
    flat = as_bytes(tensor.detach())
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    end = len(flat) // _ROW * _ROW
    table = flat[:end].view(torch.int64).view(-1, _ROW // 8)
    rows, columns = table.sum(1), table.sum(0)
    if end < len(flat):
        rest = torch.cat([flat[end:], flat.new_zeros(end + _ROW - len(flat))]).view(torch.int64)
        rows, columns = torch.cat([rows, rest.sum(0, keepdim=True)]), columns + rest
    weights = _weights(max(_ROW // 8, 1 << len(rows).bit_length()), tensor.device)
    return torch.stack([(rows * weights[: len(rows)]).sum(), (columns * weights[: _ROW // 8]).sum()])


@lru_cache(maxsize=16)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Odd numbers. They are made on the host: the copy is complete when this returns, for every stream."""
    weights = torch.arange(1, count + 1, dtype=torch.int64)
    weights.mul_(_MIX[0]).bitwise_xor_(weights >> 29).mul_(_MIX[1]).bitwise_or_(1)
    return weights.to(device)


def checksums(file: FilePlan, snapshot: FilePlan | None, wanted: Callable[[str], bool]) -> dict[str, str]:
    """The checksums of the wanted tensors of a file, by name: from its snapshot, or of the live tensors without one."""
    tensors = [content for content in file.contents or () if isinstance(content, tuple)]
    if snapshot is None:
        return {name: checksum(tensor) for name, tensor in tensors if wanted(name)}
    if not any(wanted(name) for name, _ in tensors):
        return {}
    return {name: value for name, value in _digests_in(file, snapshot.pieces()) if wanted(name)}


def _digests_in(file: FilePlan, pieces: Iterator[memoryview]) -> Iterator[tuple[str, str]]:
    """The digests of all tensors of a file, whose bytes come in pieces."""
    left = memoryview(b"")
    for content in file.contents or ():
        name, size = ("", len(content)) if isinstance(content, bytes) else (content[0], content[1].nbytes)
        hashed = xxhash.xxh3_128()
        while size:
            left = left or next(pieces)
            hashed.update(left[:size])
            left, size = left[size:], size - len(left[:size])
        if name:
            yield name, hashed.hexdigest()
