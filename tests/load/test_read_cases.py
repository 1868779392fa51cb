"""Reads of many transfers case by case: every byte at its place, every block that is needed verified, none in vain."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

from ckpt.errors import DamagedError, TransientError
from ckpt.formats.native.manifest import BlockHasher, FileRecord
from ckpt.formats.tensors import Transfer
from ckpt.load import verified_read
from ckpt.load.verified_read import Destination, read, read_verified, verify
from ckpt.root.verify import VerifiedFile, reader_threads
from ckpt.storage import MemoryStorage
from tests.helpers.places import PassedOn

DATA = bytes(range(1, 36))  # blocks of ten, the last of five
SPANS = [(0, 3), (3, 10), (9, 11), (10, 20), (12, 18), (5, 25), (30, 35), (34, 35), (7, 7), (0, 35), (20, 30)]
_numbers = itertools.count()


def file_of(data: bytes = DATA, storage: Any = None) -> VerifiedFile:
    storage = storage or MemoryStorage(f"reads-{next(_numbers)}")
    hasher = BlockHasher(10)
    hasher.update(memoryview(DATA))
    storage.write("a/f", [data])
    record = FileRecord(name="f", path="f", size=len(DATA), blocks=hasher.digests, block_size=10)
    return VerifiedFile.of(storage, "a", record)


def transfers(file: VerifiedFile, spans: list[tuple[int, int]]) -> tuple[list[Transfer], list[Any]]:
    """In turn into memory that is there, and into memory that is handed over."""
    found, targets = [], list[Any]()
    for number, (start, stop) in enumerate(spans):
        if number % 2:
            taken: list[torch.Tensor] = []
            targets.append(taken)
            found.append(Transfer(file, start, stop - start, take=taken.append))
        else:
            targets.append(torch.zeros(stop - start, dtype=torch.uint8))
            found.append(Transfer(file, start, stop - start, into=targets[-1]))
    return found, targets


def arrived(targets: list[Any]) -> list[bytes]:
    return [bytes((target[0] if isinstance(target, list) else target).tolist()) for target in targets]


@pytest.mark.parametrize("window", [3, 10, 1000])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("how", [read, read_verified])
def test_every_byte_gets_to_all_places_that_want_it(
    monkeypatch: pytest.MonkeyPatch, window: int, threads: int, how: Any
) -> None:
    monkeypatch.setattr(verified_read, "WINDOW", window)
    spans = [span for span in SPANS if span[0] < span[1]]
    for chosen in ([span] for span in spans):
        found, targets = transfers(file_of(), chosen)
        how(found, "a", lambda size: None, threads=threads)
        assert arrived(targets) == [DATA[start:stop] for start, stop in chosen]
    found, targets = transfers(file_of(), spans)
    sizes: list[float] = []
    how(found, "a", sizes.append, threads=threads)
    assert arrived(targets) == [DATA[start:stop] for start, stop in spans]
    assert all(len(target) == 1 for target in targets if isinstance(target, list))
    assert sum(sizes) == sum(stop - start for start, stop in spans)


def test_a_block_is_refused_if_any_of_it_was_altered_and_any_of_it_is_wanted() -> None:
    for at in (0, 9, 10, 19, 29, 30, 34):
        altered = bytearray(DATA)
        altered[at] ^= 1
        for start, stop in SPANS:
            file = file_of(bytes(altered))
            bad = start // 10 <= at // 10 <= (stop - 1) // 10 and start < stop
            for how in (read_verified, verify):
                found, targets = transfers(file, [(start, stop)])
                if bad:
                    first = at // 10 * 10
                    told = rf"^a is damaged: f was altered \(bytes {first} to {min(35, first + 10)}\)\.$"
                    with pytest.raises(DamagedError, match=told):
                        how(found, "a", lambda size: None)
                else:
                    how(found, "a", lambda size: None)
                if how is verify:
                    assert not targets[0].any()
            found, targets = transfers(file, [(start, stop)])
            read(found, "a", lambda size: None)
            assert arrived(targets) == [bytes(altered[start:stop])]


def test_every_altered_block_is_named_once() -> None:
    altered = bytearray(DATA)
    altered[3] ^= 1
    altered[33] ^= 1
    found, _ = transfers(file_of(bytes(altered)), [(0, 35), (0, 35), (30, 35)])
    for how in (read_verified, verify):
        with pytest.raises(DamagedError, match=r"^x is damaged: f was .*0 to 10\); f was .*30 to 35\)\.$"):
            how(found, "x", lambda size: None)


def test_bytes_beyond_the_end_are_damage_whichever_transfer_wants_them() -> None:
    file = file_of()
    for spans in ([(0, 3), (30, 36)], [(30, 36), (0, 3)], [(36, 37)]):
        found, _ = transfers(file, spans)
        with pytest.raises(DamagedError, match="a/f has only 35 bytes, too few for its tensors"):
            read(found, "a", lambda size: None)


def test_blocks_that_nobody_wants_are_not_read_and_unverified_reads_take_what_is_wanted_alone() -> None:
    class Noted(PassedOn):
        def __init__(self, root: str) -> None:
            super().__init__(root)
            self.reads: list[tuple[int, int]] = []

        def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
            self.reads.append((start, start + sum(map(len, buffers))))
            super().read_into(key, start, *buffers, again=again)

    noted = Noted(f"memory://noted-{next(_numbers)}")
    file = file_of(storage=noted)
    found, _ = transfers(file, [(12, 14), (15, 16)])
    read_verified(found, "a", lambda size: None)
    assert noted.reads == [(10, 20)]
    noted.reads.clear()
    found, _ = transfers(file, [(12, 14), (15, 16)])
    read(found, "a", lambda size: None)
    assert noted.reads == [(12, 16)]


def test_memory_is_allocated_by_one_thread_alone() -> None:
    class Counted:
        def __init__(self) -> None:
            self.count, self._lock = 0, threading.Lock()

        def __enter__(self) -> None:
            self.count += 1
            self._lock.acquire()

        def __exit__(self, *args: object) -> None:
            self._lock.release()

    taken: list[torch.Tensor] = []
    destination = Destination(Transfer(file_of(), 10, 6, take=taken.append))
    destination._lock = counted = Counted()  # type: ignore[assignment]
    first, second = destination.host_view(10, 12), destination.host_view(13, 16)
    assert counted.count == 1
    first[:], second[:] = b"ab", b"def"
    destination.filled(2)
    destination.filled(3)
    assert (taken, counted.count) == ([], 3)
    destination.filled(1)
    assert (bytes(taken[0].tolist())[:2], bytes(taken[0].tolist())[3:]) == (b"ab", b"def")
    given = torch.zeros(6, dtype=torch.uint8)
    destination = Destination(Transfer(file_of(), 10, 6, into=given))
    destination.host_view(12, 13)[:] = b"x"
    assert given.tolist() == [0, 0, ord("x"), 0, 0, 0]
    destination.filled(6)
    assert (destination.on_device, destination.device) == (False, torch.device("cpu"))


def test_how_many_threads_read() -> None:
    far = PassedOn(f"memory://far-{next(_numbers)}")
    far.is_local = False
    for storage in (MemoryStorage(f"near-{next(_numbers)}"), far):
        found, _ = transfers(file_of(storage=storage), [(0, 35)])
        blocks = verified_read.plan_reads(found)
        assert len(blocks) == 4
        for most, threads in ((1, 1), (3, 3), (9, 4), (None, min(4, reader_threads([storage])))):
            assert verified_read._thread_count(blocks, most) == threads
        many = blocks * 10
        assert verified_read._thread_count(many, 30) == 30
        monkeypatched = [block.segments[0].destination for block in many]
        for destination in monkeypatched:
            destination.on_device = True
        assert verified_read._thread_count(many, 30) == 10
    assert verified_read._thread_count([], None) == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_a_read_that_fails_ends_the_others_and_is_raised(threads: int) -> None:
    class Away(PassedOn):
        calls = 0

        def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
            self.calls += 1
            if self.calls == 2:
                raise TransientError("no answer")
            super().read_into(key, start, *buffers, again=again)

    away = Away(f"memory://away-{next(_numbers)}")
    found, _ = transfers(file_of(storage=away), [(0, 35)])
    with pytest.raises(TransientError, match="no answer"):
        read_verified(found, "a", lambda size: None, threads=threads)
    assert away.calls == 2 or threads > 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-read")]


def test_one_thread_is_the_callers() -> None:
    class Noted(PassedOn):
        def __init__(self, root: str) -> None:
            super().__init__(root)
            self.threads: set[threading.Thread] = set()

        def read_into(self, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
            self.threads.add(threading.current_thread())
            super().read_into(key, start, *buffers, again=again)

    for threads in (1, 2):
        noted = Noted(f"memory://threads-{next(_numbers)}")
        found, _ = transfers(file_of(storage=noted), [(0, 35)])
        read(found, "a", lambda size: None, threads=threads)
        assert (threading.current_thread() in noted.threads) == (threads == 1)
