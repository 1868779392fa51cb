"""Threads, processes and the garbage collector: what runs beside training, for whom, and how much it may take.

Calls in background threads, whose errors are raised in the caller's, their priority, and the number of cores. Which
process is meant: not another that has its number later, and not a forked child, which inherits its objects. Pauses of
the cyclic garbage collector.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

from ckpt.errors import ConfigError
from ckpt.util.aligned_memory import system_library

Identity = list[str | int | None]  # as in JSON: boot id, inode of the PID namespace, process id, start time


def is_identity(value: Any) -> bool:
    """Whether a value from a document is what `process_identity` gives; also empty, where the system has no /proc."""
    if not isinstance(value, list) or len(value) not in (0, 4):
        return False
    kinds = (str, int, int, str | None)
    return all(isinstance(item, kind) for item, kind in zip(value, kinds, strict=False))


def process_identity(process: int) -> Identity:
    """Identity of a process in this PID namespace, unique across reboots and reuse of process ids."""
    namespace = os.stat("/proc/self/ns/pid").st_ino if sys.platform == "linux" else 0
    return [boot_id(), namespace, process, start_time(process)]


def boot_id() -> str:
    """The identity of this boot of the machine."""
    if sys.platform != "linux":
        import psutil

        return f"{int(psutil.boot_time())}"
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(process: int) -> str | None:
    """When a process started, in clock ticks since boot. None if it has ended, also if it is still a zombie."""
    if sys.platform != "linux":
        import psutil

        with suppress(psutil.Error):
            found = psutil.Process(process)
            return None if found.status() == psutil.STATUS_ZOMBIE else f"{found.create_time()}"
        return None
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


class OwnerProcess:
    """The process that created an object. `is_here`: True in that process, False in a forked child of it.

    It is set when a process is forked: to ask for the process id at every step takes longer.
    """

    def __init__(self) -> None:
        self.process, self.is_here = os.getpid(), True
        _owners.add(self)

    def require(self, call: str) -> None:
        """Raise in a forked child: the call would wait for threads that it does not have, or write without lock."""
        if not self.is_here:
            raise ConfigError(
                f"{call}: this StateManager belongs to process {self.process}, but this is process {os.getpid()}, a "
                "fork of it. ckpt did nothing. Build another StateManager in the child, with its own root."
            )


_owners: WeakSet[OwnerProcess] = WeakSet()


def _note_fork() -> None:
    for owner in _owners:
        owner.is_here = False


os.register_at_fork(after_in_child=_note_fork)


class NotCopyableError(ConfigError, TypeError):
    """Raised by `copy` and `pickle`; whoever tries to copy what can be copied expects a TypeError."""


def refuse_copy(self: object) -> NoReturn:
    """The `__reduce__` of what holds locks, threads and live objects."""
    raise NotCopyableError(
        f"you can't copy or pickle a {type(self).__name__}, because it holds the lock on its root. Keep the manager "
        "out of objects that you copy or send to other processes, and build a manager where you need it."
    )


Item = TypeVar("Item")
Returned = TypeVar("Returned")


def usable_cores() -> int:
    """The cores that this process may run on: fewer than the machine has under taskset, SLURM, or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cores_of_rank() -> int:
    """What each rank of a host may use. Ranks of torchrun share all of them; srun and mpirun give each its own."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, CORES // max(1, int(ranks) if ranks.isdecimal() else 1))


CORES = usable_cores()
CORES_OF_RANK = _cores_of_rank()


def in_parallel(call: Callable[[Item], Returned], items: Sequence[Item], threads: int, name: str) -> list[Returned]:
    """Call with every item, in several threads. Returns the results in order; after an error no more calls begin."""
    if min(threads, len(items)) < 2:
        return [call(item) for item in items]
    results: dict[int, Returned] = {}
    waiting = list(enumerate(items))[::-1]

    def work() -> None:
        try:
            while waiting:
                try:
                    number, item = waiting.pop()
                except IndexError:  # another thread has taken the last
                    return
                results[number] = call(item)
        except BaseException:
            waiting.clear()
            raise

    workers = [Worker(name, daemon=True).start(work) for _ in range(min(threads, len(items)))]
    try:
        for worker in workers:
            worker.close()
    except BaseException:  # an interrupt
        waiting.clear()
        raise
    for worker in workers:
        worker.wait()
    return [results[number] for number in range(len(items))]


class Worker:
    """Runs calls in a thread, one at a time. The next `start`, `wait` or `check` raises an error of the last, once.

    A thread begins with a call and ends after it, unless it is `kept` for the next one until `close`: to start a thread
    for every block of a file takes the interpreter's lock from training too often. Unless it is a `daemon`, a program
    that ends waits for it. It belongs to no executor: those refuse work while the interpreter shuts down.
    """

    def __init__(self, name: str, *, daemon: bool = False, kept: bool = False) -> None:
        self._name, self._daemon, self._kept = name, daemon, kept
        self._owner = OwnerProcess()
        self._done = threading.Event()
        self._done.set()
        self._thread: threading.Thread | None = None
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()  # of this thread; None ends it
        self._result: Any = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        return not self._done.is_set()

    def start(self, call: Callable[[], object]) -> Worker:
        """Wait for the previous call, then start this one."""
        self.wait()
        self._done.clear()
        try:
            if self._thread is None:
                self._calls = SimpleQueue()
                thread = threading.Thread(target=self._run, args=(self._calls,), name=self._name, daemon=self._daemon)
                thread.start()
                self._thread = thread
            # Only now: a thread that began with a call might keep the interpreter's lock for 5 ms from the caller
            self._calls.put(call)
        except BaseException:  # an interrupt, or no more threads: nothing would ever be done
            self._calls.put(None)
            self._thread = None
            self._done.set()
            raise
        return self

    def done_within(self, seconds: float) -> bool:
        """Wait for the call, but not longer. Returns whether none is under way."""
        return self._done.wait(max(0.0, seconds))

    def wait(self) -> Any:
        """Wait for the call, and return its result. If the call failed, raise its error; later calls don't
        raise it again."""
        self._wait()
        if not self._kept:
            self.close()
        result, error, self._result, self._error = self._result, self._error, None, None
        if error is not None:
            raise error
        return result

    def check(self) -> None:
        """Raise the error of a call that is done, once. Does not wait."""
        if not self.busy:
            self.wait()

    def close(self) -> None:
        """Wait for the call, and end the thread. If the call failed, only `wait` raises its error."""
        self._wait()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join()

    def _wait(self) -> None:
        """Refused in a forked child, which has no such thread."""
        if self.busy:
            self._owner.require(self._name)
        self._done.wait()  # before Python 3.13 a `join` that a signal has interrupted marks the thread as ended

    def _run(self, calls: SimpleQueue[Callable[[], object] | None]) -> None:
        while (call := calls.get()) is not None:
            try:
                self._result = call()
            except BaseException as error:  # raised by `wait`
                self._error = error
            finally:
                del call  # or what it refers to would live until the next one
                self._done.set()
            if not self._kept:
                return


# Not the lowest priority: a thread that is starved while it holds the interpreter's lock holds up training.
_NICER = 5
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "loongarch64": 30, "ppc64le": 273, "s390x": 282}
_CALLING_THREAD = (1, 0)  # IOPRIO_WHO_PROCESS, and 0 for the caller
_BEST_EFFORT, _IDLE = 2, 3
_CLASS_SHIFT, _MIDDLE = 13, 4


def work_in_background() -> None:
    """Give this thread, and those that it starts, a lower priority; its I/O is served when the disk is idle."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        with suppress(OSError):
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
        _set_io_priority(_IDLE, 0)


@contextmanager
def normal_io_priority() -> Iterator[None]:
    """The I/O of a thread that works in the background, and of those that it starts here, has its usual priority."""
    if sys.platform == "linux":
        _set_io_priority(_BEST_EFFORT, _MIDDLE)
    try:
        yield
    finally:
        if sys.platform == "linux":
            _set_io_priority(_IDLE, 0)


def _set_io_priority(kind: int, level: int) -> None:
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        system_library().syscall(number, *_CALLING_THREAD, kind << _CLASS_SHIFT | level)


_lock = threading.Lock()
_pauses = 0  # in all threads
_was_enabled = False  # before the first of them


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the collector in this context. The last of several threads that leave theirs enables it again.

    For milliseconds in which thousands of objects are allocated, all of which are kept: they would trigger collections,
    and those a full one, which takes 0.2 s in a large process, holds up training, and finds nothing. A program that
    disables the collector meanwhile would find it enabled, so the context must be short.
    """
    _begin()
    try:
        yield
    finally:
        _end()


def _begin() -> None:
    global _pauses, _was_enabled
    with _lock:
        if not _pauses:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1


def _end() -> None:
    global _pauses
    with _lock:
        _pauses -= 1
        if not _pauses and _was_enabled:
            gc.enable()


def _resume_in_child() -> None:
    """A forked child has none of the threads that would enable the collector again: a DataLoader's worker, say."""
    global _lock, _pauses
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses = 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_resume_in_child)
