"""A mirror that is away: neither the start nor the end of a run waits for it beyond a bound, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from ckpt.root.mirror import AFTER_SIGTERM, MirrorPatience, QuietWait
from ckpt.storage import Entry, LocalStorage, open_storage
from ckpt.storage.base import Interruptible
from ckpt.util.threads import Worker
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.places import intact
from tests.helpers.processes import DEADLINE, start_alone
from tests.helpers.seaweed import BUCKET, Server, environment, serving
from tests.root.test_mirror import Counting, steps, weights

pytestmark = [pytest.mark.slow, pytest.mark.not_on_s3("about a mirror that a test takes away")]
LONG = 45.0  # seconds: less than a single try of a request takes that is not answered, and much more than is waited


def stopped(server: Server) -> None:
    """Connections are accepted, and never answered."""
    os.kill(server.pid, signal.SIGSTOP)


def killed(server: Server) -> None:
    """Connections are refused."""
    server.kill()


def back(server: Server, how: Callable[[Server], None]) -> None:
    if how is stopped:
        os.kill(server.pid, signal.SIGCONT)
    else:
        server.start()


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, str]]:
    """A server that a test may take away, and the URL of a mirror there."""
    with serving() as server:
        for name, value in environment(server.url).items():
            monkeypatch.setenv(name, value)
        yield server, f"s3://{BUCKET}/mirror"


def _train(rank: int, root: str, url: str, is_away: str, at_end: float, *, told: bool) -> None:
    """Save a step, wait until the mirror is away, and save another one, the last; `told`: because of SIGTERM."""
    model = weights(1)
    mirror = ckpt.Mirror(url, at_end=at_end)
    with ckpt.StateManager(root, model=model, mirror=mirror) as manager:
        manager.resume()
        manager.step()
        manager.save_state(wait=True)
        while manager.session.mirror is not None and manager.session.mirror.is_copying:
            time.sleep(0.05)
        Path(is_away).with_name("ready").touch()
        while not Path(is_away).exists():
            time.sleep(0.05)
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.step()
        manager.save_state(wait=True)


def _seconds_to_end(tmp_path: Path, own: tuple[Server, str], how: Callable[[Server], None], *given: Any) -> float:
    """The mirror goes away before the last save of a process: how long that takes to end."""
    server, url = own
    away = tmp_path / "away"
    job = start_alone(
        str(tmp_path), _train_told if given[-1] else _train_on, str(tmp_path / "root"), url, str(away), *given[:-1]
    )
    end = time.monotonic() + DEADLINE
    while not (tmp_path / "ready").exists() and time.monotonic() < end:
        time.sleep(0.05)
    how(server)
    began = time.monotonic()
    away.touch()
    job.join(DEADLINE)
    assert job.exitcode is not None, "it did not end"
    back(server, how)
    return time.monotonic() - began


def _train_on(rank: int, *given: Any) -> None:
    _train(rank, *given, told=False)


def _train_told(rank: int, *given: Any) -> None:
    _train(rank, *given, told=True)


@pytest.mark.parametrize("how", [stopped, killed])
def test_a_process_ends_within_its_bound_and_the_next_run_copies_what_was_left(
    tmp_path: Path, own: tuple[Server, str], how: Callable[[Server], None]
) -> None:
    assert _seconds_to_end(tmp_path, own, how, 3.0, False) < LONG
    assert steps(tmp_path / "root") == [2, 1]
    assert steps(own[1]) == [1]
    with ckpt.StateManager(tmp_path / "root", model=weights(0), mirror=own[1]) as manager:
        manager.resume()
    assert steps(own[1]) == [2, 1]
    assert intact(own[1])


def test_after_sigterm_a_process_waits_for_a_short_time_whatever_its_bound(
    tmp_path: Path, own: tuple[Server, str]
) -> None:
    assert _seconds_to_end(tmp_path, own, stopped, 600.0, True) < LONG
    assert steps(tmp_path / "root") == [2, 1]


def test_a_resume_whose_root_is_intact_does_not_wait_for_a_mirror_that_is_away(
    tmp_path: Path, own: tuple[Server, str], caplog: pytest.LogCaptureFixture
) -> None:
    server, url = own
    with ckpt.StateManager(tmp_path / "root", model=weights(3), mirror=url) as manager:
        manager.save_state("one", wait=True)
    stopped(server)
    began, model = time.monotonic(), weights(0)
    with ckpt.StateManager(tmp_path / "root", model=model, mirror=ckpt.Mirror(url, at_start=2, at_end=2)) as manager:
        restored = manager.resume()
        assert time.monotonic() - began < LONG
    assert time.monotonic() - began < 2 * LONG
    back(server, stopped)
    assert restored is not None
    assert restored.name == "one"
    assert model.weight[0, 0].item() == 3.0
    [unseen] = [line for line in caplog.messages if "could not list" in line]
    assert url in unseen


def test_what_is_sent_to_a_server_that_does_not_answer_is_no_sign_of_life(server: Server, s3: str) -> None:
    with FaultyProxy(server.port) as proxy:
        storage = open_storage(s3, endpoint_url=proxy.url)
        assert isinstance(storage, Interruptible)
        storage.write("object", [b"bytes"])
        before = storage.progress
        proxy.plan = lambda method, path: "stall"
        call = Worker("write").start(lambda: storage.write("object", [bytes(4096)]))  # as a lease is renewed
        while not proxy.done["stall"]:
            time.sleep(0.01)
        assert storage.progress == before
        with storage.giving_up(), pytest.raises(ckpt.TransientError, match="given up"):
            call.wait()


def test_requests_that_wait_for_a_server_are_given_up_and_later_ones_are_not(server: Server, s3: str) -> None:
    with FaultyProxy(server.port) as proxy:
        storage = open_storage(s3, endpoint_url=proxy.url)
        assert isinstance(storage, Interruptible)
        before = storage.progress
        storage.write("object", [b"bytes"])
        assert storage.progress > before
        proxy.plan = lambda method, path: "stall" if method in ("GET", "PUT") else None
        reads = [Worker("read").start(lambda: storage.read("object")) for _ in range(3)]
        large = Worker("write").start(lambda: storage.write("large", [bytes(40 << 20)]))
        while proxy.done["stall"] < 4:
            time.sleep(0.01)
        with storage.giving_up():
            for call in (*reads, large):
                with pytest.raises(ckpt.TransientError, match=r"given up: .* did not answer"):
                    call.wait()
            with pytest.raises(ckpt.TransientError, match="given up"):
                storage.version("object")
        proxy.plan = lambda method, path: None
        assert storage.read("object") == b"bytes"


class Remote(Counting):
    """A mirror elsewhere, whose requests nobody can end."""

    is_local = False


class TestMirrorsWhoseRequestsCannotBeEnded:
    def test_the_run_ends_without_them_and_their_thread_releases_the_mirror_when_it_can(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        mirror = Remote(tmp_path / "mirror")
        given = ckpt.Mirror(mirror, at_end=0.2)
        with ckpt.StateManager(tmp_path / "root", model=weights(1), mirror=given) as manager:
            manager.save_state("one", wait=True)
            _until(lambda: steps(tmp_path / "mirror") == [0])
            mirror.open.clear()
            manager.save_state("two", wait=True)
        [said] = [line for line in caplog.messages if "not in the mirror" in line]
        assert "two. All these checkpoints are safe in" in said
        assert manager.mirror_error is not None
        with (
            pytest.raises(ckpt.LockedError),
            ckpt.StateManager(tmp_path / "root", model=weights(1), mirror=given) as late,
        ):
            late.resume()
        mirror.open.set()
        _until(lambda: not manager.session.mirror.is_copying)  # type: ignore[union-attr]
        with ckpt.StateManager(tmp_path / "root", model=weights(1), mirror=given) as manager:
            manager.resume()
        assert {found.name for found in ckpt.list_checkpoints(mirror) if found.committed} == {"one", "two"}
        assert intact(tmp_path / "mirror")

    def test_one_that_is_slow_and_takes_bytes_is_waited_for_longer_than_the_bound(self, tmp_path: Path) -> None:
        model = nn.Linear(256, 4096, bias=False)  # 4 MB, by which a copy takes two seconds
        mirror = ckpt.Mirror(Remote(tmp_path / "mirror"), bandwidth="2MB", at_end=1.5)
        with ckpt.StateManager(tmp_path / "root", model=model, mirror=mirror) as manager:
            manager.save_state("one", wait=True)
            began = time.monotonic()
        assert time.monotonic() - began > 1.5
        assert intact(tmp_path / "mirror")
        assert steps(tmp_path / "mirror") == [0]

    def test_retention_keeps_in_the_root_what_was_not_copied(self, tmp_path: Path) -> None:
        mirror = Remote(tmp_path / "mirror")
        given = ckpt.Mirror(mirror, at_end=0.2)
        keep = ckpt.Keep(last=1)
        with ckpt.StateManager(tmp_path / "root", model=weights(1), mirror=given, keep=keep) as manager:
            mirror.open.clear()
            for name in ("one", "two"):
                manager.save_state(name, wait=True)
        assert {found.name for found in ckpt.list_checkpoints(tmp_path / "root")} == {"one", "two"}
        mirror.open.set()


class Late(LocalStorage):
    """A remote place that takes its time to say what it has."""

    is_local = False
    seconds = 0.0

    def list(self, prefix: str = "") -> Iterator[Entry]:
        time.sleep(self.seconds)
        return super().list(prefix)


class TestTheStart:
    def test_one_that_is_late_is_not_looked_at_while_the_root_has_something(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        late = self._saved(tmp_path)
        with ckpt.StateManager(tmp_path / "root", model=weights(0), mirror=ckpt.Mirror(late, at_start=0.2)) as manager:
            late.seconds = 1.0
            restored = manager.resume()
            late.seconds = 0.0
        assert restored is not None
        assert restored.url.startswith(str(tmp_path / "root"))
        assert [line for line in caplog.messages if "could not list" in line]

    def test_but_it_is_waited_for_before_an_older_one_takes_the_place_of_what_is_damaged(self, tmp_path: Path) -> None:
        late = self._saved(tmp_path)
        [file] = (tmp_path / "root" / "two").glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])
        model = weights(0)
        with ckpt.StateManager(tmp_path / "root", model=model, mirror=ckpt.Mirror(late, at_start=0.2)) as manager:
            late.seconds = 1.0
            restored = manager.resume()
            late.seconds = 0.0
        assert restored is not None
        assert (restored.name, model.weight[0, 0].item()) == ("two", 2.0)
        assert restored.url.startswith(str(tmp_path / "mirror"))

    def test_and_where_the_root_has_nothing(self, tmp_path: Path) -> None:
        late = self._saved(tmp_path)
        with ckpt.StateManager(tmp_path / "new", model=weights(0), mirror=ckpt.Mirror(late, at_start=0.2)) as manager:
            late.seconds = 1.0
            restored = manager.resume()
            late.seconds = 0.0
        assert restored is not None
        assert restored.name == "two"

    def _saved(self, tmp_path: Path) -> Late:
        model, late = weights(1), Late(tmp_path / "mirror")
        with ckpt.StateManager(tmp_path / "root", model=model, mirror=late) as manager:
            manager.save_state("one", wait=True)
            nn.init.constant_(model.weight, 2)
            manager.save_state("two", wait=True)
        return late


class TestPatience:
    def test_the_calls_of_a_start_share_their_time_until_one_is_answered(self, tmp_path: Path) -> None:
        late, patience = Late(tmp_path), MirrorPatience(at_start=2.0)
        late.seconds = 30.0
        with pytest.raises(ckpt.TransientError, match="has not answered for 2 s"):
            patience.reached(late, lambda: list(late.list()))
        with pytest.raises(ckpt.TransientError, match="has not answered for 1 s"):
            patience.reached(late, lambda: list(late.list()))
        late.seconds = 0.0
        assert patience.is_away
        assert patience.reached(late, lambda: list(late.list())) == []
        assert patience.left_at_start == 2.0
        assert not patience.is_away

    def test_told_to_terminate_it_is_shorter_and_ends_with_the_grace_period(self) -> None:
        patience = MirrorPatience(at_end=30.0)
        patience.hurry(None)
        assert (patience.at_end, patience.end_by) == (AFTER_SIGTERM, None)
        patience.hurry(1.0)
        assert patience.end_by is not None
        assert patience.end_by <= time.monotonic() + 1.0
        short = MirrorPatience(at_end=2.0)
        short.hurry(None)
        assert short.at_end == 2.0

    def test_what_makes_progress_is_waited_for_but_not_beyond_the_end(self) -> None:
        ended = threading.Event()
        call = Worker("call").start(lambda: ended.wait(30))
        assert not QuietWait(time.monotonic, 0.1, end_by=time.monotonic() + 0.5).ended(call)
        assert not QuietWait(lambda: 0, 0.1).ended(call)
        ended.set()
        assert QuietWait(lambda: 0, 30.0).ended(call)


def _until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)
