"""Several processes that use leases on one object store, simulated: a seed decides their order, latencies and faults.

Every simulated thread is a real one, but only one of them runs at a time, and only at requests, pauses and waits does
the next one get its turn. Time is the simulation's: ten minutes take some milliseconds.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import pytest

from ckpt.errors import AbsentError, ConflictError, TransientError
from ckpt.storage import ANY, Buffer, Entry, Unfinished, leases
from ckpt.storage.leases import Lease, Leases

T = TypeVar("T")


class Crashed(BaseException):
    """Raised in every thread of a process that has crashed, at its next turn."""


class ViolationError(AssertionError):
    """A guarantee of leases does not hold."""


@dataclass(eq=False)
class Process:
    """A simulated process, on one of several machines, with a clock of its own."""

    number: int
    machine: int
    clock: float  # what it shows when the simulation begins
    crashed: bool = False
    frozen_until: float = 0.0
    faulty_until: float = 0.0  # requests may fail until then
    loses_answers: bool = False  # to writes, for about as long as a lease lasts
    disturbed: float = float("-inf")  # when it was last frozen or had a failing request

    @property
    def identity(self) -> list[Any]:
        return [f"machine {self.machine}", 1, self.number, "0"]


@dataclass(eq=False)
class Task:
    """A thread of a process."""

    process: Process
    wake: float
    done: bool = False
    is_sending: bool = False  # a request, which arrives also when its process is frozen
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    @property
    def due(self) -> float:
        can_run = self.process.crashed or self.is_sending
        return self.wake if can_run else max(self.wake, self.process.frozen_until)


class World:
    """A clock, an object store, processes and their threads."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.processes: list[Process] = []
        self.objects: dict[str, tuple[bytes, str]] = {}  # content and version
        self.history: list[str] = []
        self.check: Callable[[], None] = lambda: None  # called before every turn
        self._tasks: list[Task] = []
        self._back = threading.Semaphore(0)
        self._numbers = 0
        self._error: BaseException | None = None
        self.current: Task | None = None

    def process(self, machine: int | None = None) -> Process:
        number = len(self.processes)
        clock = self.random.uniform(0, 1e6)
        self.processes.append(Process(number, number if machine is None else machine, clock))
        return self.processes[-1]

    def spawn(self, process: Process, target: Callable[[], object]) -> Task:
        task = Task(process, self.now)
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task, target), daemon=True).start()
        return task

    def run(self, tasks: Iterable[Task]) -> None:
        """Give turns until these tasks are done."""
        for task in tasks:
            while not task.done:
                self._next_turn()

    def close(self) -> None:
        """End all threads."""
        for process in self.processes:
            process.crashed = True
        self.check = lambda: None
        while self._tasks:
            self._next_turn()

    def sleep(self, seconds: float) -> None:
        """Let others run for so many seconds of the simulation."""
        task = self.this_task
        task.wake = self.now + seconds
        self._back.release()
        task.turn.acquire()
        if task.process.crashed:
            raise Crashed

    @property
    def this_task(self) -> Task:
        assert self.current is not None
        return self.current

    @property
    def this_process(self) -> Process:
        return self.this_task.process

    def note(self, text: str) -> None:
        self.history.append(f"{self.now:8.2f} process {self.this_process.number}: {text}")

    def unique(self) -> str:
        self._numbers += 1
        return f"{self._numbers:032x}"

    def _next_turn(self) -> None:
        task = min(self._tasks, key=lambda task: task.due)
        self.now = max(self.now, task.due)
        self.check()
        self.current = task
        task.turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, task: Task, target: Callable[[], object]) -> None:
        task.turn.acquire()
        try:
            if not task.process.crashed:
                target()
        except Crashed:
            pass
        except BaseException as error:
            self._error = error
        task.done = True
        self._tasks.remove(task)
        self._back.release()


class Store:
    """The world's object store, as the process whose turn it is sees it."""

    url = "sim://store"

    def __init__(self, world: World) -> None:
        self._world = world

    def put(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> str:
        content = b"".join(pieces)

        def effect() -> str:
            if over not in (ANY, self._version(key)):
                raise ConflictError(key)
            self._world.objects[key] = (content, self._world.unique())
            return self._world.objects[key][1]

        return self._request(effect, f"write {key}", repeated=ConflictError(key) if over != ANY else None)

    def version(self, key: str) -> str | None:
        return self._request(lambda: self._version(key))

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        def effect() -> bytes:
            if key not in self._world.objects:
                raise AbsentError(key)
            return self._world.objects[key][0]

        return self._request(effect)

    def entries(self, prefix: str) -> Iterator[Entry]:
        listed = self._request(lambda: [key for key in self._world.objects if key.startswith(prefix)])
        return iter([Entry(key, 1) for key in listed])

    def remove(self, keys: list[str]) -> None:
        def effect() -> None:
            for key in keys:
                self._world.objects.pop(key, None)

        self._request(effect, f"remove {keys}")

    def fill(self, key: str, start: int, buffers: list[memoryview]) -> NoReturn:
        raise NotImplementedError

    def copy(self, source: str, target: str) -> NoReturn:
        raise NotImplementedError

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        raise NotImplementedError

    def abort(self, prefix: str, age: float) -> NoReturn:
        raise NotImplementedError

    def _version(self, key: str) -> str | None:
        return self._world.objects[key][1] if key in self._world.objects else None

    def _request(self, effect: Callable[[], T], change: str = "", repeated: Exception | None = None) -> T:
        """A request takes its time, and where the network is faulty it fails: before it takes effect, or after.

        `repeated` is what the store answers when the client sends it again because the first answer was lost. That a
        process is frozen between its decision to remove an object and the request is left out: stores have no
        conditional removal, so nothing could be done about it.
        """
        world, process = self._world, self._world.this_process
        world.this_task.is_sending = True
        world.sleep(self._latency())
        world.this_task.is_sending = False
        fault = self._fault(process, is_write=repeated is not None)
        if fault:
            process.disturbed = world.now
            world.note(f"{change or 'a read'} is {fault}")
        if fault == "unreached":
            self._fail(None)
        result = effect()
        if change:
            world.note(change)
        if fault == "lost":
            self._fail(repeated)
        elif world.random.random() < 0.5:
            world.sleep(self._latency())
        return result

    def _fault(self, process: Process, *, is_write: bool) -> str:
        choices = ["", "lost"] if process.loses_answers and is_write else [""]
        if self._world.now < process.faulty_until:
            choices = ["", "unreached", "lost", "lost"]
        return self._world.random.choice(choices)

    def _latency(self) -> float:
        return self._world.random.choice([0.01, 0.02, 0.05, 0.1, 0.5]) * self._world.random.random()

    def _fail(self, repeated: Exception | None) -> NoReturn:
        """The client tries for a while, and gives up or gets an answer to a later try."""
        world = self._world
        long = world.this_process.loses_answers
        world.sleep(leases.EXPIRY if long else world.random.choice([0.1, 2.0, 20.0, 100.0]) * world.random.random())
        world.this_process.disturbed = world.now
        raise repeated if repeated is not None and world.random.random() < 0.5 else TransientError("no answer")


class Clock:
    """Stands for the module `time`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.sleep = world.sleep

    def monotonic(self) -> float:
        current = self._world.current
        return self._world.now + (current.process.clock if current else 0.0)


class Threads:
    """Stands for the module `threading`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def Lock(self) -> _Lock:  # noqa: N802
        return _Lock(self._world)

    def Event(self) -> _Event:  # noqa: N802
        return _Event(self._world)

    def Thread(self, *, target: Callable[[], None], name: str, daemon: bool) -> _Thread:  # noqa: N802
        return _Thread(self._world, target)


class _Lock:
    def __init__(self, world: World) -> None:
        self._world = world
        self._taken = False

    def acquire(self, timeout: float = math.inf) -> bool:
        end = self._world.now + timeout
        while self._taken:
            if self._world.now >= end:
                return False
            self._world.sleep(0.01)
        self._taken = True
        return True

    def release(self) -> None:
        self._taken = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Event:
    def __init__(self, world: World) -> None:
        self._world = world
        self._waiting: Task | None = None
        self._is_set = False

    def wait(self, timeout: float) -> None:
        if not self._is_set:
            self._waiting = self._world.this_task
            self._world.sleep(timeout)
            self._waiting = None

    def set(self) -> None:
        self._is_set = True
        if self._waiting is not None:
            self._waiting.wake = self._world.now

    def clear(self) -> None:
        self._is_set = False


@dataclass
class _Thread:
    world: World
    target: Callable[[], None]

    def start(self) -> None:
        self.world.spawn(self.world.this_process, self.target)


class _Ids:
    """Stands for the module `uuid`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def uuid4(self) -> Any:
        return type("Id", (), {"hex": self._world.unique()})


def install(world: World, patch: pytest.MonkeyPatch) -> None:
    """Let `leases` run in a world."""
    clock, threads = Clock(world), Threads(world)
    patch.setattr(leases, "time", clock)
    patch.setattr(leases, "threading", threads)
    patch.setattr(leases, "_POLL", 4.0)
    patch.setattr(leases._log, "disabled", True)
    patch.setattr(leases, "uuid", _Ids(world))
    patch.setattr(leases, "process_identity", lambda _: world.this_process.identity)
    patch.setattr(leases, "start_time", lambda number: None if world.processes[number].crashed else "0")


@dataclass(eq=False)
class Holder:
    """What a process believes about its lease while it is inside the context."""

    process: Process
    lease: Lease
    began: float  # to acquire it
    was_silent: bool = False  # for so long that it may have been taken for dead

    def trusts(self, now: float) -> bool:
        """Whether it continues without asking the store: see `Leases.confirm`."""
        age = now + self.process.clock - self.lease.renewed
        return not self.lease.lost and age <= leases.EXPIRY / 2


class Actors:
    """Processes that take and hold leases of one key, and the guarantees that must hold at every moment."""

    KEY = "key"

    def __init__(self, world: World) -> None:
        self.world = world
        self.inside: list[Holder] = []
        self.taken = 0
        world.check = self.check

    def hold(self, of: Leases, *, shared: bool, work: Callable[[Leases], None]) -> None:
        """Take the lease, and work while it is held."""
        world, began = self.world, self.world.now
        with of.shared(self.KEY, "") if shared else of.exclusive(self.KEY, ""):
            self.taken += 1
            holder = Holder(world.this_process, of._held[-1], began)
            self.inside.append(holder)
            world.note(f"holds {holder.lease.path}")
            if shared and not holder.trusts(world.now):
                self.violated(f"process {holder.process.number} holds a shared lease that others may have removed")
            try:
                work(of)
            finally:
                self.inside.remove(holder)
                with suppress(Crashed):
                    world.note("leaves")

    def check(self) -> None:
        now = self.world.now
        alive = [holder for holder in self.inside if not holder.process.crashed]
        for holder in alive:
            self._check_undisturbed(holder, now)
        exclusive = [holder for holder in alive if holder.lease.exclusive and holder.trusts(now)]
        shared = [holder for holder in alive if not holder.lease.exclusive and not holder.was_silent]
        if len(exclusive) > 1 or (exclusive and shared):
            self.violated(f"{[holder.process.number for holder in exclusive + shared]} hold it at the same time")

    def _check_undisturbed(self, holder: Holder, now: float) -> None:
        """Who lives and reaches the store keeps what it holds."""
        if holder.process.disturbed >= holder.began:
            holder.was_silent = holder.was_silent or not holder.trusts(now)
        elif holder.lease.lost:
            self.violated(f"process {holder.process.number} lives, and was taken over")
        elif holder.lease.path not in self.world.objects:
            self.violated(f"the object of process {holder.process.number}, which lives, was removed")

    def violated(self, what: str) -> NoReturn:
        raise ViolationError("\n".join([what, *self.world.history[-60:]]))
