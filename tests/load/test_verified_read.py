"""What is read of a checkpoint's files is compared with their hashes, whatever part of them is read."""

from __future__ import annotations

import pytest
import torch

import ckpt
from ckpt.formats.native.manifest import BlockHasher, FileRecord, digest
from ckpt.formats.tensors import Transfer, host_bytes
from ckpt.load import verified_read
from ckpt.root.verify import StoredFile, VerifiedFile
from ckpt.storage import MemoryStorage, Storage

BLOCK, HEAD, SIZE = 1000, 300, 3500


def stored(anywhere: str, *, altered: int | None = None) -> tuple[VerifiedFile, bytes]:
    """A file of four blocks with a head, of which one byte may be another than when it was hashed."""
    data = bytes(number % 251 for number in range(SIZE))
    hasher = BlockHasher(BLOCK)
    hasher.update(memoryview(data))
    head = (HEAD, digest(data[:HEAD]))
    record = FileRecord(name="f", path="f", size=SIZE, blocks=hasher.digests, block_size=BLOCK, head=head)
    storage: Storage = MemoryStorage(anywhere.removeprefix("memory://"))
    there = bytearray(data)
    if altered is not None:
        there[altered] ^= 1
    storage.write("step/f", [bytes(there)])
    return VerifiedFile(StoredFile(storage, "step/f"), record), data


def test_what_is_intact_is_read(anywhere: str) -> None:
    file, data = stored(anywhere)
    for start, stop in [(0, 8), (8, HEAD), (0, SIZE), (999, 1001), (3400, SIZE), (3400, 9999)]:
        assert file.read(start, stop) == data[start:stop]


@pytest.mark.parametrize("where", [0, 5, HEAD - 1])
def test_an_altered_head_is_refused(anywhere: str, where: int) -> None:
    file, _ = stored(anywhere, altered=where)
    with pytest.raises(ckpt.DamagedError, match="f was altered"):
        file.read(8, 20)


@pytest.mark.parametrize("where", [HEAD, BLOCK, 2 * BLOCK - 1, SIZE - 1])
def test_altered_bytes_are_refused_wherever_they_are_in_what_is_read(anywhere: str, where: int) -> None:
    file, data = stored(anywhere, altered=where)
    with pytest.raises(ckpt.DamagedError, match="f was altered"):
        file.read(0, SIZE)
    with pytest.raises(ckpt.DamagedError, match="f was altered"):
        file.read(where, where + 1)
    elsewhere = (where // BLOCK + 2) * BLOCK % (4 * BLOCK)
    assert file.read(elsewhere, elsewhere + 10) == data[elsewhere : elsewhere + 10]


def wanted(file: VerifiedFile, *spans: tuple[int, int]) -> tuple[list[Transfer], list[torch.Tensor]]:
    targets = [torch.zeros(stop - start, dtype=torch.uint8) for start, stop in spans]
    found = zip(spans, targets, strict=True)
    return [Transfer(file, start, stop - start, into=into) for (start, stop), into in found], targets


SPANS = [(300, 700), (300, 700), (650, 2100), (2100, 2100 + 1), (10, 3500)]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("verified", [True, False])
def test_bytes_that_are_wanted_twice_arrive_twice(
    anywhere: str, threads: int, verified: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified_read, "WINDOW", 100)  # bytes: one of the spans is the first byte of a window alone
    file, data = stored(anywhere)
    transfers, targets = wanted(file, *SPANS)
    (verified_read.read_verified if verified else verified_read.read)(
        transfers, "step", lambda _: None, threads=threads
    )
    for (start, stop), target in zip(SPANS, targets, strict=True):
        assert bytes(host_bytes(target)) == data[start:stop]


def test_whoever_takes_bytes_gets_all_of_them_once(anywhere: str) -> None:
    file, data = stored(anywhere)
    taken: list[bytes] = []

    def take(memory: torch.Tensor) -> None:
        taken.append(bytes(host_bytes(memory)))

    transfers = [Transfer(file, start, 2500, take=take) for start in (1, 7)]
    verified_read.read_verified(transfers, "step", lambda _: None, threads=4)
    assert sorted(taken) == sorted(data[start : start + 2500] for start in (1, 7))


@pytest.mark.parametrize("where", [20, 1500, SIZE - 1])
def test_a_transfer_of_an_altered_block_is_refused_also_where_the_altered_byte_is_not_wanted(
    anywhere: str, where: int
) -> None:
    file, _ = stored(anywhere, altered=where)
    begin = where // BLOCK * BLOCK
    transfers, _ = wanted(file, (begin + 100, begin + 110))
    for check in (verified_read.read_verified, verified_read.verify):
        with pytest.raises(ckpt.DamagedError, match="f was altered"):
            check(transfers, "step", lambda _: None)
