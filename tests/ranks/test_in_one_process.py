"""What ranks exchange, decide and ask for, with all of them in this process: each is a thread, on one store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ckpt.errors import AbsentError, CkptError, ConfigError, RanksError, StateError
from ckpt.formats.native.manifest import Host
from ckpt.ranks import find, hosts, schedule_and_signals, store_group
from ckpt.ranks.consensus import (
    FollowingError,
    Result,
    SingleProcess,
    decide_together,
    run_on_all_ranks,
)
from ckpt.ranks.find import Launched, find_ranks, meeting_name, ranks_per_host, require_process_group, started_together
from ckpt.ranks.hosts import Hosts, find_hosts, may_have_separate_roots
from ckpt.ranks.schedule_and_signals import CommonStep, Preemption, SaveSchedule, SignalListener
from ckpt.ranks.store_and_heartbeats import Heartbeat, LivenessWatch, LostStoreError, TimedStore, format_ranks
from ckpt.ranks.store_group import BuiltManagers, StoreGroup, UnreadBroadcast, linger
from ckpt.storage import open_storage


class Job:
    """Several ranks, and the store between them."""

    def __init__(self, size: int = 3, timeout: float = 30.0, members: tuple[int, ...] | None = None) -> None:
        self.store = TimedStore(HashStore(), timeout)
        self.built = [BuiltManagers() for _ in range(size)]
        self.ranks = [
            StoreGroup(self.store.below("group"), rank, size, timeout, self.store, self.built[rank], members)
            for rank in range(size)
        ]

    def run(self, do: Callable[[StoreGroup], Any]) -> list[Any]:
        """What it returns, or raises, on every rank."""
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(lambda rank: _outcome(do, rank), self.ranks))


def _outcome(do: Callable[[Any], Any], given: Any) -> Any:
    try:
        return do(given)
    except CkptError as error:
        return error


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# -- exchanges --------------------------------------------------------------------------------------------------------


def test_the_main_rank_gathers_and_all_get_what_it_broadcasts_again_and_again() -> None:
    job = Job()

    def talk(ranks: StoreGroup) -> list[Any]:
        found: list[Any] = []
        for turn in range(3):
            found.append(ranks.gather("call", f"{turn} of {ranks.rank}"))
            found.append(ranks.broadcast("call", f"{turn} for all" if ranks.rank == 0 else "unused"))
        return found

    main, *others = job.run(talk)
    assert main[::2] == [[f"{turn} of {rank}" for rank in range(3)] for turn in range(3)]
    assert [found[::2] for found in others] == [[[], [], []]] * 2
    assert [found[1::2] for found in (main, *others)] == [["0 for all", "1 for all", "2 for all"]] * 3
    keys = [f"{turn}.0/from/{rank}" for turn in (0, 2, 4) for rank in range(3)] + ["1/all", "3/all", "1/all/read"]
    assert not any(job.store.below("group").check_each(keys))  # nothing is left of earlier turns
    assert job.built[0].unread == {job.ranks[0]._unread}
    job.ranks[0].linger()
    assert job.built[0].unread == set()


def test_channels_and_groups_do_not_get_in_each_others_way() -> None:
    job = Job(2)

    def talk(ranks: StoreGroup) -> Any:
        channel = ranks.channel("side")
        ranks.gather("call", "main")
        side = channel.gather("call", "side")
        ranks.broadcast("call", "main")
        return side, channel.broadcast("call", "side"), (channel.rank, channel.world_size, channel.timeout)

    assert job.run(talk) == [(["side", "side"], "side", (0, 2, 30.0)), ([], "side", (1, 2, 30.0))]
    job.ranks[0].linger()
    assert job.built[0].unread == set()  # of its channels too


def test_notes_and_what_is_published_are_seen_by_all() -> None:
    first, second, third = Job().ranks
    assert first.notes("asked") == {}
    second.note("asked", "two")
    third.note("asked", "three")
    assert first.notes("asked") == {1: "two", 2: "three"}
    assert first.notes("other") == {}
    assert first.published("step") is None
    third.publish("step", "3")
    second.publish("step", "4")
    assert first.published("step") == "4"
    assert [ranks.first_wins("who", str(ranks.rank)) for ranks in (second, first, third)] == ["1"] * 3


def test_a_rank_that_does_not_answer_is_named_by_its_number_in_the_job() -> None:
    for members, words in ((None, "ranks 1, 2 did not answer within 0.2 s"), ((4, 6, 9), "ranks 6, 9 did not answer")):
        job = Job(3, 0.2, members)
        with pytest.raises(RanksError, match=words) as raised:
            job.ranks[0].gather("save_state('a')", "")
        assert "Nothing was committed; earlier checkpoints are kept" in str(raised.value)
        assert "Every rank must make this call" in str(raised.value)
    late = Job(3, 0.2)
    late.ranks[1].gather("call", "")
    with pytest.raises(RanksError, match="call: rank 2 did not answer"):
        late.ranks[0].gather("call", "")
    with pytest.raises(RanksError, match="call: rank 2 did not answer"):  # told to the one that did
        late.ranks[1].broadcast("call", "")
    for ranks in late.ranks:
        ranks.timeout = 60
    answers = late.run(lambda ranks: (ranks.gather("again", str(ranks.rank)), ranks.broadcast("again", "x")))
    assert answers == [(["0", "1", "2"], "x"), ([], "x"), ([], "x")]


def test_a_main_rank_that_does_not_decide_is_named_and_met_at_the_next_call() -> None:
    job = Job(2, 0.3)
    main, other = job.ranks
    other.gather("call", "lost")
    with pytest.raises(RanksError, match=r"call: rank 0 did not answer within 0.3 s.* Earlier checkpoints are kept"):
        other.broadcast("call", "")
    main.timeout = other.timeout = 60
    assert job.run(lambda ranks: (ranks.gather("again", "x"), ranks.broadcast("again", "y")))[0] == (["x", "x"], "y")
    assert main._turn == other._turn == 2


def test_ranks_that_have_built_other_managers_are_told_which() -> None:
    job = Job(2, 0.2)
    job.built[0].add("runs/a", "runs/a")
    job.built[1].add("runs/b", "runs/b")
    job.built[1].publish(job.store, 1)
    with pytest.raises(RanksError, match="rank 0 opened 'runs/a'; rank 1 opened 'runs/b'"):
        job.ranks[0].gather("call", "")
    built = BuiltManagers()
    assert [built.add("x", f"label {number}") for number in range(2)] == ["1/x", "2/x"]
    assert built.labels("x") == ["label 0", "label 1"]
    assert built.labels("y") == []
    assert built.add("y", "other") == "1/y"
    store = TimedStore(HashStore(), 5)
    built.publish(store, 1)
    assert built.difference(store, 0, [1]) == ""
    assert "rank 2 opened none" in built.difference(store, 0, [1, 2])
    assert (
        store_group._listed({str(number): str(number) for number in range(7)}) == "'0', '1', '2', '3', '4' and 2 more"
    )


def test_a_rank_is_silent_that_has_sent_no_heartbeat_for_the_timeout() -> None:
    job = Job(3, 4.0, (5, 6, 9))
    main, other, _ = job.ranks
    deadline = time.monotonic() + 60
    for job_wide, store, key in ((False, job.store.below("group"), "alive/1"), (True, job.store, "alive/6")):
        watch = LivenessWatch(1000.0)
        assert main.silent([1, 2], watch) == []
        watch._seen = {rank: (count, time.monotonic() - 1001) for rank, (count, _) in watch._seen.items()}
        before = store.add(key, 0)
        with other.working(job_wide=job_wide):
            while store.add(key, 0) == before and time.monotonic() < deadline:
                time.sleep(0.01)
        assert main.silent([1, 2], watch) == [2]
    assert main._in_job(2) == 9
    assert Job(2).ranks[0]._in_job(1) == 1


def test_a_rank_that_ends_waits_for_no_other() -> None:
    main = Job(2, 30).ranks[0]
    main.abandon()
    with pytest.raises(RanksError, match="call: this rank ended"):
        main.gather("call", "")


def test_lingering_ends_when_all_have_read_or_time_is_up_and_forgets() -> None:
    store, unread = TimedStore(HashStore(), 5), set[UnreadBroadcast]()
    broadcast = UnreadBroadcast(store, unread)
    assert broadcast.is_read()
    broadcast.expect("key", 2)
    assert unread == {broadcast}
    assert not broadcast.is_read()
    broadcast.confirm("key")
    assert not broadcast.is_read()
    began = time.monotonic()
    linger([broadcast], 0.3)
    assert time.monotonic() - began >= 0.3
    assert unread == set()
    assert broadcast.is_read()  # it is not waited for again
    broadcast.expect("key", 2)
    broadcast.confirm("key")
    began = time.monotonic()
    linger([broadcast], 30)
    assert time.monotonic() - began < 15
    broadcast.expect("other", 2)
    broadcast._process = -1  # a forked child has no connection
    assert broadcast.is_read()


# -- the store --------------------------------------------------------------------------------------------------------


def test_many_keys_are_asked_for_in_a_few_calls() -> None:
    store = TimedStore(HashStore(), 5).below("a").below("b")
    keys = [str(number) for number in range(300)]
    for key in keys:
        store.set(key, f"value {key}")
    assert store.get_all(keys) == [f"value {key}" for key in keys]
    assert store.check_each(["0", "300", "299"]) == [True, False, True]
    assert store.check(["0", "1"])
    assert not store.check(["0", "x"])
    assert store.add("count", 2) == 2
    assert store.add_each(["count", "other"], 3) == [5, 3]
    store.delete_each(keys)
    assert not any(store.check_each(keys))
    assert store.compare_set("first", "", "a") == "a"
    assert store.compare_set("first", "", "b") == "a"
    assert store.delete_key("first")
    assert not store.delete_key("first")
    assert TimedStore(HashStore(), 1)._timeout == 3.0
    assert TimedStore(HashStore(), 7)._timeout == 7.0


class Stuck:
    """A store whose calls return when they are let."""

    def __init__(self) -> None:
        self.let, self.calls = threading.Event(), 0

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        if keys == ["fails"]:
            raise RuntimeError("no connection")
        if keys == ["stuck"]:
            assert self.let.wait(60)
        return True


def test_a_call_that_the_store_does_not_answer_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck: Any = Stuck()
    store = TimedStore(stuck, 5)
    store._timeout = 0.2
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(RanksError, match=r"store did not answer within 0.2 s. The process of rank 0"):
        store.check(["stuck"])
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stuck.host, stuck.port = "here", 5
    store._timeout = 600
    began = time.monotonic()
    with pytest.raises(RanksError, match=r"store at here:5 did not answer within 600 s. torchrun's agent"):
        store.check(["a"])
    assert time.monotonic() - began < 60  # a store that is stuck is given a second
    stuck.let.set()
    assert store.check(["b"])
    assert stuck.calls == 2  # what was given up is not called late
    with pytest.raises(LostStoreError, match="have lost the connection to each other"):
        store.check(["fails"])


def test_a_watch_looks_again_after_a_while_and_counts_from_the_last_change() -> None:
    watch = LivenessWatch(100.0)
    assert watch.is_due()
    assert not watch.is_due()
    assert 10 < watch._next - time.monotonic() <= 12.5
    short = LivenessWatch(100.0, longest=1.0)
    assert short.is_due()
    assert short._next - time.monotonic() <= 1.0
    long = LivenessWatch(1000.0)
    assert long.is_due()
    assert long._next - time.monotonic() <= 20.0
    assert watch.silent({1: 0, 2: 0}) == []
    watch._seen = {1: (0, time.monotonic() - 101), 2: (0, time.monotonic() - 101), 3: (0, time.monotonic() - 50)}
    assert watch.silent({1: 0, 2: 1, 3: 0}) == [1]
    assert watch.silent({2: 1}) == []


def test_ranks_are_named_by_their_runs() -> None:
    cases: list[tuple[list[int], str]] = [
        ([3], "rank 3"),
        ([1, 2], "ranks 1, 2"),
        ([1, 2, 3], "ranks 1, 2, 3"),
        ([0, 1, 2, 3], "ranks 0 to 3"),
        ([0, 2, 3, 4, 5, 9], "ranks 0, 2 to 5, 9"),
        (list(range(0, 16, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
        (list(range(0, 20, 2)), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 2 more"),
    ]
    assert [format_ranks(ranks) for ranks, _ in cases] == [text for _, text in cases]


def test_a_heartbeat_lasts_as_long_as_anybody_is_at_work() -> None:
    store = TimedStore(HashStore(), 5)
    heart = Heartbeat(store, 3, 0.02)

    def count() -> int:
        return store.add("alive/3", 0)

    with heart.running():
        with heart.running():
            pass
        before = count()
        deadline = time.monotonic() + 30
        while count() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert count() > before
        assert sum(thread.name == "ckpt-alive" for thread in threading.enumerate()) == 1
    while any(thread.name == "ckpt-alive" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    before = count()
    heart.beat()
    assert count() == before + 1


# -- decisions --------------------------------------------------------------------------------------------------------


def test_what_the_main_rank_decides_from_all_values_is_returned_on_every_rank() -> None:
    decided = Job().run(lambda ranks: decide_together(ranks, "call", Result(ranks.rank + 1), sum))
    assert decided == [6, 6, 6]
    assert Job().run(lambda ranks: run_on_all_ranks(ranks, "call", lambda: ranks.rank)) == [0, 1, 2]
    assert decide_together(SingleProcess(), "call", Result(4), lambda values: values) == [4]


def _fails_on(*failing: int, kind: type[Exception] = StateError, text: str = "no room") -> list[Any]:
    def work(ranks: StoreGroup) -> Any:
        def do() -> int:
            if ranks.rank in failing:
                raise kind(text)
            return ranks.rank

        return run_on_all_ranks(ranks, "call", do)

    return Job().run(work)


def test_an_error_of_any_rank_is_raised_on_all_of_them() -> None:
    for errors, text in ((_fails_on(1), "rank 1: no room"), (_fails_on(0, 2), "ranks 0, 2: no room")):
        assert [(type(error), str(error)) for error in errors] == [(StateError, text)] * 3
    everywhere = _fails_on(0, 1, 2)
    assert [(type(error), str(error)) for error in everywhere] == [(StateError, "no room")] * 3
    odd = _fails_on(1, kind=ValueError, text="odd")
    assert [(type(error), str(error)) for error in odd] == [(CkptError, "rank 1: ValueError: odd")] * 3
    following = _fails_on(1, kind=FollowingError)
    assert {str(error) for error in following} == {"rank 1: no room"}


def test_different_errors_are_one_and_followers_are_left_out_of_it() -> None:
    def work(ranks: StoreGroup) -> Any:
        kinds = [FollowingError("follows"), StateError("first"), ConfigError("second")]
        return decide_together(ranks, "call", Result[int](error=kinds[ranks.rank]), sum)

    errors = Job().run(work)
    assert {str(error) for error in errors} == {"rank 1: first; rank 2: second"}
    assert type(errors[0]) is StateError

    def lines(ranks: StoreGroup) -> Any:
        text = "\n".join([f"error {ranks.rank}", *(f"  line {number}" for number in range(20)), "advice"])
        return decide_together(ranks, "call", Result[int](error=StateError(text)), sum)

    text = str(Job().run(lines)[0])
    assert len(text.splitlines()) <= 10
    assert text.startswith("rank 0: error 0")


def test_an_error_in_the_decision_is_raised_on_all() -> None:
    def refuse(values: list[Any]) -> int:
        raise ConfigError("refused")

    errors = Job().run(lambda ranks: decide_together(ranks, "call", Result(1), refuse))
    assert [(type(error), str(error)) for error in errors] == [(ConfigError, "refused")] * 3


def test_ranks_that_make_different_calls_are_told_so() -> None:
    def work(ranks: StoreGroup) -> Any:
        return decide_together(ranks, "load" if ranks.rank == 1 else "save", Result(1), sum)

    for error in Job().run(work):
        assert "ranks 0, 2 called save; rank 1 called load" in str(error)


def test_an_error_of_its_own_comes_before_that_of_a_rank_that_is_gone() -> None:
    main = Job(2, 0.2).ranks[0]
    with pytest.raises(StateError, match="no room"):
        decide_together(main, "call", Result[int](error=StateError("no room")), sum)
    with pytest.raises(RanksError, match="did not answer"):
        decide_together(main, "call", Result(1), sum)


def test_a_result_is_passed_on_with_its_error() -> None:
    assert Result(2).then(lambda value: value + 1).get() == 3
    failed = Result[int](error=StateError("x"))
    assert failed.then(lambda value: value + 1).error is failed.error
    assert isinstance(Result(2).then(lambda value: value // 0).error, ZeroDivisionError)
    for result in (
        Result[Any](3),
        Result[Any](None),
        Result[Any](error=StateError("x")),
        Result[Any](error=FollowingError("y")),
    ):
        again = Result[Any].from_json(result.to_json("call"))
        assert (again.value, type(again.error), str(again.error)) == (
            result.value,
            type(result.error),
            str(result.error),
        )


# -- the ranks of this job --------------------------------------------------------------------------------------------


def test_launchers_say_how_many_processes_they_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, _, _ in find._LAUNCHERS:
        monkeypatch.delenv(variable, raising=False)
    assert started_together() is None
    require_process_group(reads_only=False)
    for text, size in (("1", None), ("0", None), ("", None), ("two", None), ("2", 2), ("16", 16)):
        monkeypatch.setenv("PMI_SIZE", text)
        found = started_together()
        assert found == (None if size is None else Launched(size, "PMI_SIZE", "mpiexec"))
    require_process_group(reads_only=True)
    with pytest.raises(
        RanksError, match=r"this job has 16 processes, started by mpiexec .* or start them with torchrun"
    ):
        require_process_group(reads_only=False)
    with pytest.raises(RanksError, match="this job has 16 processes"):
        find_ranks("runs/x", 5.0)
    assert isinstance(find_ranks("runs/x", 5.0, reads_only=True), SingleProcess)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for reads_only in (True, False):
        with pytest.raises(RanksError, match=r"this job has 4 .*torchrun.*before StateManager\(...\)\. If"):
            require_process_group(reads_only=reads_only)
        with pytest.raises(RanksError):
            find_ranks("runs/x", 5.0, reads_only=reads_only)
    assert isinstance(find_ranks("runs/x", 5.0, alone=True), SingleProcess)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 8),
        ({"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, None),  # one process per host, which starts the ranks there
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "4"}, 4),  # torchrun
        ({"LOCAL_WORLD_SIZE": ""}, None),
        ({"LOCAL_WORLD_SIZE": "0"}, None),
        ({"LOCAL_WORLD_SIZE": "many"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NUM_TASKS": "16"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_STEP_NUM_TASKS": "16"}, 16),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --pty, and mp.spawn in it
        ({"SLURM_STEP_TASKS_PER_NODE": "6(x2),4", "SLURM_STEP_NUM_TASKS": "16"}, None),  # hosts differ
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "16"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "2"}, None),
        ({"MPI_LOCALNRANKS": "4", "PMI_SIZE": "16"}, 4),
    ],
)
def test_a_launcher_says_how_many_ranks_each_host_has_unless_the_ranks_are_not_its_processes(
    group: None, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], expected: int | None
) -> None:
    for variable in (name for total, per_host, _ in find._LAUNCHERS for name in (total, per_host)):
        monkeypatch.delenv(variable, raising=False)
    for variable, text in said.items():
        monkeypatch.setenv(variable, text)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 16)
    assert ranks_per_host() == expected


def test_a_process_that_is_alone_is_a_single_one(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"alone": True}, {"process_group": dist.group.WORLD}):
        found = find_ranks("runs/x", 5.0, **options)
        assert isinstance(found, SingleProcess)
        assert found.members is None
    with pytest.raises(ConfigError, match="rank 0 is not in the process_group"):
        find_ranks("runs/x", 5.0, process_group=dist.GroupMember.NON_GROUP_MEMBER)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 4)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 2)
    alone = find_ranks("runs/x", 5.0, alone=True)
    assert isinstance(alone, SingleProcess)
    assert alone.members == (2,)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda *_: [2])
    one = find_ranks("runs/x", 5.0, process_group=SimpleNamespace())
    assert isinstance(one, SingleProcess)
    assert one.members == (2,)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda *_: [1, 2])
    two = find_ranks("runs/x", 5.0, process_group=SimpleNamespace())
    assert (type(two), two.rank, two.world_size, two.members) == (StoreGroup, 1, 2, (1, 2))
    whole = find_ranks("runs/x", 5.0)
    assert (type(whole), whole.rank, whole.world_size, whole.members) == (StoreGroup, 2, 4, None)
    find_ranks("runs/y", 5.0, own_root=True)
    built = store_group.built_here()
    assert built.labels("runs/x") == ["runs/x"]
    assert built.labels(find.OWN_ROOTS) == ["runs/y"]


def test_managers_of_different_groups_never_meet() -> None:
    names = [meeting_name("runs/x", members) for members in (None, (0, 1), (1, 2))]
    assert names[0] == "runs/x"
    assert len(set(names)) == 3
    assert names[1] == meeting_name("runs/x", (0, 1))


# -- hosts ------------------------------------------------------------------------------------------------------------


def test_hosts_say_who_owns_a_root() -> None:
    shared, separate = Hosts((0, 0, 0), ("a", "a", "b")), Hosts((0, 0, 2, 2), ("a", "a", "b", "b"))
    assert not shared.separate_roots
    assert separate.separate_roots
    assert [shared.owns_root(rank) for rank in range(3)] == [True, False, False]
    assert [separate.owns_root(rank) for rank in range(4)] == [True, False, True, False]
    assert separate.records() == (Host("a", (0, 1)), Host("b", (2, 3)))
    assert str(separate) == "a (ranks 0, 1); b (ranks 2, 3)"
    assert (hosts.ONE_SHARED_ROOT.first, hosts.ONE_SHARED_ROOT.names) == ((0,), ("",))


def test_roots_may_be_separate_where_the_user_or_the_launcher_says_so(
    tmp_path: Path, group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, remote = open_storage(str(tmp_path)), cast(Any, SimpleNamespace(is_local=False))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert [may_have_separate_roots(local, shared=shared) for shared in (None, False, True)] == [False, True, False]
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 4)
    assert not may_have_separate_roots(local, shared=None)
    for here, expected in (("2", True), ("3", True), ("4", False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
        assert may_have_separate_roots(local, shared=None) is expected
        assert not may_have_separate_roots(local, shared=True)
        assert not may_have_separate_roots(remote, shared=None)
        assert not may_have_separate_roots(remote, shared=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2)")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert may_have_separate_roots(local, shared=None)


@pytest.mark.parametrize("roots", ["aaa", "aab", "abb", "aba"])
def test_which_ranks_share_a_root_is_found_by_what_each_sees_in_its_own(
    tmp_path: Path, group: None, roots: str, caplog: pytest.LogCaptureFixture
) -> None:
    def find_them(ranks: StoreGroup) -> Any:
        return find_hosts(ranks, open_storage(str(tmp_path / roots[ranks.rank] / "run")), shared=False)

    for root in "ab":
        (tmp_path / root / "run").mkdir(parents=True)
    found = Job().run(find_them)
    first = tuple(roots.index(root) for root in roots)
    expected = hosts.ONE_SHARED_ROOT if roots == "aaa" else Hosts(first, (hosts.host_name(),) * 3)
    assert found == [expected] * 3
    assert list(tmp_path.rglob(".host-*")) == []
    assert ("do not share" in caplog.text) is (roots != "aaa")
    assert find_hosts(SingleProcess(), open_storage(str(tmp_path)), shared=False) is hosts.ONE_SHARED_ROOT


def test_roots_of_other_runs_are_refused(tmp_path: Path) -> None:
    def root(url: str, *more: str) -> Any:
        return {"url": url, "opened": [url, *more]}

    same = [root("/a/run"), root("/b/run/")]
    assert len(hosts._agree_on_root(same, shared=None)) == 32
    other = [root("/a/run"), root("/b/other")]
    assert hosts._agree_on_root(other, shared=False)
    with pytest.raises(RanksError, match="rank 0 opened /a/run; rank 1 opened /b/other"):
        hosts._agree_on_root(other, shared=None)
    mixed = [root("/a/run", "/b/run"), root("/b/run")]
    with pytest.raises(RanksError, match="have opened different roots"):
        hosts._agree_on_root(mixed, shared=False)
    with pytest.raises(AbsentError, match="can't find it there"):
        hosts._first_seen(open_storage(str(tmp_path)), ["a", "b"])


# -- when to save and to stop -----------------------------------------------------------------------------------------


def test_alone_a_step_is_common_as_soon_as_it_is_asked_for() -> None:
    common = CommonStep(SingleProcess(), "save")
    assert not common.due(1)
    common.asked = True
    assert common.due(2)
    assert not common.due(3)
    common.asked = True
    assert common.due(4)


def test_ranks_find_a_step_that_none_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_and_signals, "_POLL", 0.0)
    for asking in range(3):
        steps = [CommonStep(ranks, "save") for ranks in Job().ranks]
        found: list[list[int]] = [[], [], []]
        for step in range(1, 60):
            if step in (3, 30):
                steps[asking].asked = True
            for rank, common in enumerate(steps):
                if common.due(step):
                    found[rank].append(step)
        assert found[0] == found[1] == found[2]
        assert len(found[0]) == 2
        assert 3 < found[0][0] < 12
        assert 30 < found[0][1] < 40


def test_ranks_that_are_apart_find_a_step_farther_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_and_signals, "_POLL", 0.0)
    main, other = (CommonStep(ranks, "stop") for ranks in Job(2).ranks)
    found: list[list[int]] = [[], []]
    main.asked = True
    for step in range(1, 100):
        if main.due(step):
            found[0].append(step)
        if other.due(step + 20):  # is twenty steps ahead
            found[1].append(step + 20)
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert found[0][0] > 20


def test_others_are_asked_once_in_a_while_and_not_after_the_store_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Job(2).ranks
    asked: list[str] = []

    def nobody(key: str) -> dict[int, str]:
        asked.append(key)
        return {}

    common = CommonStep(first, "save")
    monkeypatch.setattr(first, "notes", nobody)
    for step in range(5):
        assert not common.due(step)
    assert asked == ["save/0/asked"]

    def gone(key: str) -> dict[int, str]:
        raise LostStoreError("gone")

    lost = CommonStep(second, "save")
    monkeypatch.setattr(second, "notes", gone)
    assert not lost.due(1)
    assert lost._next_poll == float("inf")


def test_a_schedule_saves_by_steps_by_the_clock_and_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    by_steps = SaveSchedule(SingleProcess(), 3)
    assert [step for step in range(10) if by_steps.is_due(step)] == [3, 6, 9]
    never = SaveSchedule(SingleProcess(), None)
    assert not any(map(never.is_due, range(10)))
    never.listen()
    never.close()
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    by_time = SaveSchedule(SingleProcess(), None, "10s")
    clock[0] = 109.9
    assert not by_time.is_due(1)
    clock[0] = 110.0
    assert by_time.is_due(2)
    by_time.restart()
    assert not by_time.is_due(3)
    before = signal.getsignal(signal.SIGUSR1)
    asked = SaveSchedule(SingleProcess(), None, on_sigusr1=True)
    asked.listen()
    try:
        assert not asked.is_due(1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.is_due(2)
        assert not asked.is_due(3)
    finally:
        asked.close()
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_listener_calls_who_was_there_before_and_gives_the_signal_back() -> None:
    calls: list[str] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: calls.append("before"))
    try:
        own = signal.getsignal(signal.SIGUSR2)
        listener: Any = SignalListener(signal.SIGUSR2, lambda: calls.append("told"))
        assert not listener.is_listening
        listener.listen()
        installed = signal.getsignal(signal.SIGUSR2)
        listener.listen()
        assert signal.getsignal(signal.SIGUSR2) is installed
        assert listener.is_listening
        os.kill(os.getpid(), signal.SIGUSR2)
        assert calls == ["told", "before"]
        listener.close()
        assert not listener.is_listening
        assert signal.getsignal(signal.SIGUSR2) is own
        listener.close()
        listener.listen()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        listener.close()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN  # somebody else's by now
        elsewhere = SignalListener(signal.SIGUSR2, lambda: None)
        thread = threading.Thread(target=elsewhere.listen)
        thread.start()
        thread.join()
        assert not elsewhere.is_listening
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_in_a_forked_child_a_signal_does_what_it_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    listener: Any = SignalListener(signal.SIGUSR2, lambda: calls.append("told"))
    listener._previous = lambda *_: calls.append("before")
    listener._owner.is_here = False
    for number in (signal.SIGUSR2, signal.SIGINT, signal.SIGUSR1):  # of the last it would die
        listener._handle(number, None)
    assert calls == ["before", "before"]
    monkeypatch.setattr(schedule_and_signals, "get_worker_info", lambda: SimpleNamespace(id=0))
    for number in (signal.SIGUSR2, signal.SIGINT):
        listener._handle(number, None)
    assert calls == ["before"] * 3  # workers are left alone by Ctrl-C


def test_the_first_ctrl_c_is_answered_and_the_second_interrupts(capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    told: list[float | None] = []
    preemption = Preemption(SingleProcess(), sigterm=False, sigint=True, on_told=told.append)
    try:
        preemption.listen_early()
        assert not preemption.due(1)
        os.kill(os.getpid(), signal.SIGINT)
        assert "once more stops at once" in capfd.readouterr().err
        assert told == [None]
        assert preemption.due(2)
        assert preemption.due(3)  # and after every other
        assert preemption.exit_status == 130
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        preemption.close()
        restored = signal.signal(signal.SIGINT, before)
    assert restored is signal.default_int_handler


def test_sigterm_is_answered_from_the_first_step_on_and_ends_with_its_status() -> None:
    before = signal.getsignal(signal.SIGTERM)
    told: list[float | None] = []
    preemption = Preemption(SingleProcess(), grace=300.0, on_told=told.append)
    try:
        preemption.listen_early()
        assert signal.getsignal(signal.SIGTERM) is before
        assert not preemption.due(1)
        assert signal.getsignal(signal.SIGTERM) is not before
        grace: Any = preemption._grace
        assert grace._thread.daemon
        assert grace.left == 300.0
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.due(2)
        assert preemption.exit_status == 143
        assert told
        assert all(left is not None and 0 < left < 300 for left in told)
        assert not grace.is_over
        preemption.saved()
        assert grace.is_over
    finally:
        preemption.close()
    assert signal.getsignal(signal.SIGTERM) is before
    silent = Preemption(SingleProcess(), sigterm=False)
    assert not silent.due(1)
    assert signal.getsignal(signal.SIGTERM) is before
    silent.ask()
    assert silent.due(2)
    silent.saved()
    silent.close()
