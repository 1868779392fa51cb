"""Leases case by case, on a clock that only requests and pauses move: whose object stands, and whose falls."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import AbsentError, ConflictError, DeniedError, LockedError, TransientError
from ckpt.storage import ANY, Buffer, Entry, leases
from ckpt.storage.leases import EXPIRY, LARGEST, Lease, Leases, Sightings, exclusive_path, has_ended, parse_record
from ckpt.storage.retry import time_left
from ckpt.util.threads import process_identity

Event = Callable[[], None]
POLL = 1.0  # seconds


class Store:
    """An object store whose requests take no time. `before` and `after` one of them something else may happen."""

    url = "mem://store"

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.done: list[str] = []
        self.before: dict[str, list[Event]] = {}
        self.after: dict[str, list[Event]] = {}
        self.left: list[float] = []

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        with self._request("put", key):
            found = self.version_of(key)
            if over not in (ANY, found):
                raise ConflictError(key)
            self.write(key, b"".join(pieces))
        return self.objects[key][1]

    def version(self, key: str) -> str | None:
        with self._request("version", key):
            return self.version_of(key)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._request("get", key):
            if key not in self.objects:
                raise AbsentError(key)
            return self.objects[key][0][start:stop]

    def entries(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(key, len(data)) for key, (data, _) in self.objects.items() if key.startswith(prefix)])

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            self.left.append(time_left())
            with self._request("remove", key):
                self.objects.pop(key, None)

    def version_of(self, key: str) -> str | None:
        return self.objects[key][1] if key in self.objects else None

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = (data, uuid.uuid4().hex)

    @contextmanager
    def _request(self, kind: str, key: str) -> Iterator[None]:
        self.done.append(kind)
        assert len(self.done) < 1000, "it asks without end"
        _happens(self.before, kind)
        yield
        _happens(self.after, kind)

    @property
    def changes(self) -> list[str]:
        return [kind for kind in self.done if kind in ("put", "remove")]


def _happens(events: dict[str, list[Event]], kind: str) -> None:
    if events.get(kind):
        events[kind].pop(0)()


class Clock:
    def __init__(self) -> None:
        self.now = 5000.0
        self.slept = 0.0
        self.meanwhile: Event = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        assert self.slept < 10 * EXPIRY, "it waits without end"
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    return clock


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def held(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Leases:
    """Leases that nobody renews in the background."""
    monkeypatch.setattr(Leases, "_start_renewing", lambda self: None)
    return Leases(store)  # type: ignore[arg-type]


def raises(error: Exception) -> Event:
    def event() -> None:
        raise error

    return event


HERE = process_identity(os.getpid())
ENDED = [*HERE[:3], "0"]
ELSEWHERE = ["another machine", *HERE[1:]]


def record(process: list[Any], holder: str = "another") -> bytes:
    return json.dumps({"note": "another run.", "process": process, "holder": holder, "sign": uuid.uuid4().hex}).encode()


def test_what_a_record_must_be() -> None:
    good = record(HERE)
    assert parse_record(good) == json.loads(good)
    for data in (b"", b"x", b"[]", b"{}", good.replace(b"note", b"nota"), good.replace(b'"another"', b"3")):
        assert parse_record(data) is None
    assert parse_record(good + b" " * (LARGEST - len(good))) is not None
    assert parse_record(good + b" " * (LARGEST - len(good) + 1)) is None


def test_who_has_ended_is_known_of_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "holders_here", {"mine"})
    monkeypatch.setattr(leases, "start_time", lambda number: {7: "70", 8: None}[number])
    machine, container = HERE[0], HERE[1]
    for process, holder, ended in (
        (HERE, "mine", False), (HERE, "another", True), (ELSEWHERE, "mine", None), ([], "another", None),
        ([machine, 1 if container != 1 else 2, 7, "70"], "another", None),
        ([machine, container, 7, "70"], "another", False), ([machine, container, 7, "71"], "another", True),
        ([machine, container, 8, "80"], "another", True),
    ):  # fmt: skip
        assert has_ended(json.loads(record(process, holder))) is ended, process


def test_for_how_long_a_version_has_been_known(clock: Clock) -> None:
    seen = Sightings()
    assert seen.age("a", "1") == 0
    clock.now += 7
    assert (seen.age("a", "1"), seen.age("b", "1")) == (7, 0)
    clock.now += 2
    assert (seen.age("a", "2"), seen.age("b", "1"), seen.age("a", "2")) == (0, 2, 0)
    assert seen.age("a", "1") == 0  # it was another one in between


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("there", "waits", "taken"),
    [
        (None, 0.0, True), (b"garbage", 0.0, True), (record(ENDED), 0.0, True), (record(HERE), 0.0, True),
        (record(HERE, "mine"), 0.0, False), (record(ELSEWHERE), EXPIRY + POLL, True), ("changes", 5 * POLL, False),
        ("is released", 3 * POLL, True),
    ],
)  # fmt: skip
def test_the_object_of_another_holder(
    store: Store, clock: Clock, held: Leases, monkeypatch: pytest.MonkeyPatch, shared: bool, there: Any, waits: float,
    taken: bool, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(leases, "holders_here", {"mine"})
    path = exclusive_path("step/a")

    def meanwhile() -> None:
        if there == "changes" and clock.slept == 5 * POLL:
            store.write(path, record(ELSEWHERE))
        if there == "is released" and clock.slept == 3 * POLL:
            del store.objects[path]

    clock.meanwhile = meanwhile
    if there is not None:
        store.write(path, there if isinstance(there, bytes) else record(ELSEWHERE))
    before = dict(store.objects)
    lock = held.shared("step/a", "mine.") if shared else held.exclusive("step/a", "mine.")
    if taken:
        with lock:
            (lease,) = held._held
            assert json.loads(store.objects[lease.path][0])["holder"] == lease.holder
            assert lease.holder in leases.holders_here
            assert (path in store.objects) == (not shared or there not in (None, "is released"))
        assert not held._held
    else:
        with pytest.raises(LockedError, match=r"^mem://store/step/a is held: another run\.$"), lock:
            pass
        assert store.objects.keys() == before.keys()
    assert (clock.slept, leases.holders_here) == (waits, {"mine"})
    assert caplog.text.count("Waiting up to 60 s to see whether that run is still alive") == bool(waits)


@pytest.mark.parametrize(
    ("there", "known_for", "stands"),
    [
        (record(ENDED), 0.0, False), (b"garbage", 0.0, False), (record(HERE, "mine"), EXPIRY, True),
        (record(ELSEWHERE), 0.0, True), (record(ELSEWHERE), EXPIRY, True), (record(ELSEWHERE), EXPIRY + 1, False),
    ],
)  # fmt: skip
def test_the_objects_of_those_who_share(
    store: Store, clock: Clock, held: Leases, monkeypatch: pytest.MonkeyPatch, there: bytes, known_for: float,
    stands: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(leases, "holders_here", {"mine"})
    path = f"{leases.shared_folder('a')}x"
    store.write(path, there)
    held._seen.age(path, store.version_of(path))
    clock.now += known_for
    if stands:
        with pytest.raises(LockedError, match=r"^mem://store/a is held: another run\.$"), held.exclusive("a", ""):
            pass
        assert store.objects.keys() == {path}
    else:
        with held.exclusive("a", ""):
            assert store.objects.keys() == {exclusive_path("a")}


def test_one_who_shared_and_leaves_while_it_is_looked_at_is_in_nobodys_way(store: Store, held: Leases) -> None:
    path = f"{leases.shared_folder('a')}x"
    store.write(path, record(ELSEWHERE))
    store.before["version"] = [lambda: store.objects.clear()]
    with held.exclusive("a", ""):
        assert "remove" not in store.done


def test_a_reader_that_may_not_write_holds_nothing(store: Store, held: Leases) -> None:
    store.before["put"] = [raises(DeniedError("read only"))]
    before = set(leases.holders_here)
    with held.shared("a", ""):
        assert (held._held, store.objects, leases.holders_here) == ([], {}, before)


def test_a_reader_that_was_frozen_writes_its_object_again_before_it_reads(
    store: Store, clock: Clock, held: Leases
) -> None:
    def freeze(seconds: float) -> Event:
        return lambda: setattr(clock, "now", clock.now + seconds)

    for frozen, writes in ((EXPIRY / 2, 1), (EXPIRY / 2 + 1, 2)):
        store.done.clear()
        store.before["version"] = [freeze(frozen)]
        with held.shared("a", ""):
            assert (store.done.count("put"), store.done.count("version")) == (writes, writes)


def test_who_holds_alone_asks_after_a_silence_whether_it_still_does(store: Store, clock: Clock, held: Leases) -> None:
    with held.exclusive("a", ""), held.shared("b", ""):
        store.done.clear()
        clock.now += EXPIRY / 2
        held.confirm()
        assert store.done == []
        clock.now += 1
        held.confirm()
        assert store.done == ["put"]
        store.write(exclusive_path("a"), record(ELSEWHERE))
        clock.now += EXPIRY
        with pytest.raises(
            LockedError, match=r"took over the lock mem://store/a, because .* for 60 s: another run\. This run"
        ):
            held.confirm()
        store.done.clear()
        clock.now += EXPIRY
        with pytest.raises(LockedError, match="took over"):
            held.confirm()
        assert "put" not in store.done
    assert json.loads(store.objects[exclusive_path("a")][0])["holder"] == "another"


@pytest.mark.parametrize(
    ("silent", "away", "changes", "stays"),
    [
        (0.0, False, ["remove"], False), (EXPIRY / 2, False, ["remove"], False),
        (EXPIRY / 2 + 1, False, ["put", "remove"], False), (EXPIRY + 1, False, ["put", "remove"], False),
        (EXPIRY / 2 + 1, True, ["put", "remove"], False), (EXPIRY, True, ["put", "remove"], False),
        (EXPIRY + 1, True, ["put"], True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("shared", [False, True])
def test_an_object_is_removed_while_it_is_certainly_the_holders(
    store: Store, clock: Clock, held: Leases, silent: float, away: bool, changes: list[str], stays: bool, shared: bool
) -> None:
    with held.shared("a", "") if shared else held.exclusive("a", ""):
        store.done.clear()
        clock.now += silent
        if away:
            store.before["put"] = [raises(TransientError("no answer"))]
        left = EXPIRY - (0 if "put" in changes and not away else silent)
    assert (store.changes, bool(store.objects)) == (changes, stays)
    assert all(seconds <= min(left, leases._TO_REMOVE) for seconds in store.left)
    assert stays or store.left
    assert held._to_remove == []


def test_what_could_not_be_removed_is_tried_again_in_its_order(store: Store, held: Leases) -> None:
    store.before["remove"] = [raises(TransientError("no answer")) for _ in range(3)]
    for key in ("a", "b"):
        with held.exclusive(key, ""):
            pass
    assert [lease.key for lease in held._to_remove] == ["a", "b"]
    held._renew_and_remove([])
    assert ([lease.key for lease in held._to_remove], len(store.objects)) == (["a", "b"], 2)
    held._renew_and_remove([])
    assert (held._to_remove, store.objects) == ([], {})


def test_another_holders_object_is_not_removed_late(store: Store, held: Leases) -> None:
    store.before["remove"] = [raises(TransientError("no answer"))]
    with held.exclusive("a", ""):
        pass
    store.write(exclusive_path("a"), record(ELSEWHERE))
    held._renew_and_remove([])
    assert (held._to_remove, list(store.objects)) == ([], [exclusive_path("a")])


def test_one_renewal_that_fails_keeps_no_other_from_being_made(store: Store, clock: Clock, held: Leases) -> None:
    with held.exclusive("a", ""), held.shared("b", ""), held.exclusive("c", ""):
        first, second, third = held._held
        clock.now += 20
        store.before["put"] = [raises(TransientError("no answer"))]
        held._renew_and_remove([first, second, third])
        assert [lease.age for lease in (first, second, third)] == [20, 0, 0]
        left = Lease("d", exclusive_path("d"), "", exclusive=True)
        held._renew(left)  # it was let go in the meantime
        assert exclusive_path("d") not in store.objects


def test_a_lease_counts_from_before_its_write(store: Store, clock: Clock, held: Leases) -> None:
    def takes(seconds: float) -> Event:
        return lambda: setattr(clock, "now", clock.now + seconds)

    for shared in (False, True):
        store.before["put"] = [takes(3)]
        with held.shared("a", "") if shared else held.exclusive("a", ""):
            assert held._held[0].age == 3
            store.before["put"] = [takes(4)]
            held._renew(held._held[0])
            assert held._held[0].age == 4


def test_an_answer_that_was_lost_is_looked_up(store: Store, clock: Clock, held: Leases) -> None:
    path = exclusive_path("a")
    for lost in (ConflictError("a"), TransientError("no answer")):
        store.after["put"] = [raises(lost)]  # has taken effect
        with held.exclusive("a", ""):
            assert held._held[0].version == store.version_of(path)
            store.after["put"] = [raises(lost)]
            held._renew(held._held[0])
            assert (held._held[0].lost, held._held[0].version) == (False, store.version_of(path))
            held._held[0].version = "of an earlier sign of life, unbeknownst"
            held._renew(held._held[0])
            assert (held._held[0].lost, held._held[0].version) == (False, store.version_of(path))
        assert store.objects == {}
    before = set(leases.holders_here)
    for lookup in ([], [raises(TransientError("nor to this"))]):
        store.before = {"put": [raises(TransientError("no answer"))], "version": lookup}  # has taken none
        with pytest.raises(TransientError, match="no answer"), held.exclusive("a", ""):
            pass
        assert (store.objects, leases.holders_here) == ({}, before)


def test_whose_object_is_gone_or_anothers_has_lost_the_lease(
    store: Store, held: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    for other in (None, record(ELSEWHERE), b"garbage"):
        caplog.clear()
        with held.exclusive("a", ""):
            store.objects.clear()
            if other is not None:
                store.write(exclusive_path("a"), other)
            held._renew(held._held[0])
            assert held._held[0].lost
            assert "another run took over the lock mem://store/a" in caplog.text
        assert len(store.objects) == (other is not None)
        store.objects.clear()


def test_a_removal_waits_for_a_renewal_under_way_but_not_without_end(store: Store, held: Leases) -> None:
    asked: list[float] = []
    with held.exclusive("a", ""):
        (lease,) = held._held
        lease.writing = SimpleNamespace(acquire=lambda timeout: asked.append(timeout))  # type: ignore[assignment]
    assert (asked, held._to_remove, store.changes) == ([leases._TO_REMOVE], [lease], ["put"])
