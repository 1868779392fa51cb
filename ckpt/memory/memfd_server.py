"""The keeper's side of a memfd storage: objects in memfds, under keys.

The keeper creates every memfd and hands it to a writer, which fills it and names it with `put`. A writer that dies
before that leaves nothing: what belongs to an ended connection is taken back. Every descriptor that is handed out is
opened anew, so that the kernel knows whether anybody still has it. The memory of a removed object is handed to the next
writer only where nobody has: fresh pages take three times as long to write. Only the standard library is imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import socket
from collections.abc import Callable, Iterator

from ckpt.memory import memfd_wire
from ckpt.memory.memfd_wire import Message

_LISTED_AT_ONCE = 100  # keys in a message
_MOST_CONNECTIONS = 1000


class Refused(Exception):  # noqa: N818 - a reply, no failure
    """A request that cannot be met. Its text is the word by which the storage knows why."""


class Memory:
    """A memfd, with the number of keys that lead to it."""

    def __init__(self) -> None:
        made = os.memfd_create("ckpt", os.MFD_CLOEXEC)
        try:
            os.fchmod(made, 0o600)
            # the descriptor of memfd_create itself is not among those that the kernel counts
            self.descriptor = _opened_anew(made, os.O_RDWR)
        finally:
            os.close(made)
        self.keys = 0

    @property
    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def opened(self, mode: int) -> int:
        return _opened_anew(self.descriptor, mode)

    def is_unshared(self) -> bool:
        """Whether no other process has it open or mapped: a lease for writing is given only then."""
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def free(self) -> None:
        os.close(self.descriptor)


class MemfdServer:
    """Holds the objects of one run, and answers its processes. `limit`: the most bytes that it hands out."""

    def __init__(self, listener: socket.socket, limit: int | None = None) -> None:
        listener.setblocking(False)
        self.limit = limit
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}
        self._unnamed: dict[int, Memory] = {}  # by connection: what its process is writing
        self._objects: dict[str, tuple[Memory, str]] = {}  # with their versions
        self._spares: list[Memory] = []
        self._written = 0
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    @property
    def size(self) -> int:
        """The bytes of all memory that is held, in use or spare."""
        return sum(memory.size for memory in self._memories())

    def serve(self, seconds: float) -> None:
        """Answer requests; return after so many seconds without one."""
        for descriptor, _ in self._poll.poll(seconds * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._connections:
                self._answer(descriptor)

    def close(self) -> None:
        """Free everything."""
        for descriptor in list(self._connections):
            self._hang_up(descriptor)
        for memory in self._memories():
            memory.free()
        self._objects.clear()
        self._spares.clear()
        self._listener.close()

    def _memories(self) -> list[Memory]:
        return list({id(memory): memory for memory in self._each()}.values())

    def _each(self) -> Iterator[Memory]:
        yield from (memory for memory, _ in self._objects.values())
        yield from self._unnamed.values()
        yield from self._spares

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # whoever asked has ended meanwhile
            return
        if len(self._connections) >= _MOST_CONNECTIONS or not memfd_wire.is_own(connection):
            connection.close()
            return
        connection.setblocking(False)  # a process that reads no answers must not stop the keeper
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, number: int) -> None:
        connection, descriptor = self._connections[number], None
        try:
            request, unasked = memfd_wire.receive(connection)
            if unasked is not None:
                os.close(unasked)
            reply, descriptor = self._reply(number, request)
            memfd_wire.send(connection, reply, descriptor)
        except (OSError, ValueError):  # it has ended, or does not keep to the protocol
            self._hang_up(number)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _hang_up(self, number: int) -> None:
        self._poll.unregister(number)
        self._connections.pop(number).close()
        memory = self._unnamed.pop(number, None)
        if memory is not None:
            self._release(memory)

    def _reply(self, number: int, request: Message) -> tuple[Message, int | None]:
        methods: dict[str, Callable[..., tuple[Message, int | None]]] = {
            "new": self._new, "put": self._put, "get": self._get, "list": self._list, "link": self._link,
            "delete": self._delete, "version": self._version, "trim": self._trim,
        }  # fmt: skip
        try:
            return methods[request.pop("do")](number, **request)
        except (Refused, OSError) as why:
            return {"refused": str(why)}, None
        except (LookupError, TypeError) as error:
            raise ValueError(json.dumps(request)) from error

    def _new(self, number: int, size: int) -> tuple[Message, int | None]:
        """Memory to write an object of that size into; zero where it is not known."""
        if number in self._unnamed:
            self._release(self._unnamed.pop(number))
        memory = self._spare_for(size)
        self._unnamed[number] = memory or Memory()
        if self.limit is not None and self.size - (memory.size if memory else 0) + size > self.limit:
            self._free_spares()
            if self.size - (memory.size if memory else 0) + size > self.limit:
                raise Refused("full")
        return {}, self._unnamed[number].opened(os.O_RDWR)

    def _spare_for(self, size: int) -> Memory | None:
        """The spare that fits best, neither half as large nor twice: pages of the rest would be lost, or missing."""
        fitting = [memory for memory in self._spares if size and size / 2 <= memory.size <= size * 2]
        best = min(fitting, key=lambda memory: abs(memory.size - size), default=None)
        if best is not None:
            self._spares.remove(best)
        return best

    def _put(self, number: int, key: str, over: str | None) -> tuple[Message, int | None]:
        """Name what this connection's process has written, if the key still has the version that may be replaced."""
        present = self._objects.get(key)
        if over not in ("*", present[1] if present else None):
            raise Refused("conflict")
        memory = self._unnamed.pop(number)
        self._set(key, memory)
        return {}, None

    def _get(self, number: int, key: str) -> tuple[Message, int | None]:
        memory, _ = self._found(key)
        return {}, memory.opened(os.O_RDONLY)

    def _version(self, number: int, key: str) -> tuple[Message, int | None]:
        return {"version": self._found(key)[1]}, None

    def _list(self, number: int, prefix: str, after: str) -> tuple[Message, int | None]:
        """Keys that begin with the prefix, a few at a time: those that follow `after`."""
        keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)[:_LISTED_AT_ONCE]
        return {"entries": [[key, self._objects[key][0].size] for key in keys]}, None

    def _link(self, number: int, source: str, target: str) -> tuple[Message, int | None]:
        memory, _ = self._found(source)
        self._set(target, memory)
        return {}, None

    def _delete(self, number: int, keys: list[str]) -> tuple[Message, int | None]:
        for key in keys:
            if key in self._objects:
                self._drop(self._objects.pop(key)[0])
        return {}, None

    def _trim(self, number: int) -> tuple[Message, int | None]:
        """Free the memory of removed objects."""
        self._free_spares()
        return {}, None

    def _found(self, key: str) -> tuple[Memory, str]:
        if key not in self._objects:
            raise Refused("absent")
        return self._objects[key]

    def _set(self, key: str, memory: Memory) -> None:
        memory.keys += 1  # before the old one is dropped: it may be the same
        replaced = self._objects.get(key)
        self._written += 1
        self._objects[key] = memory, f"{os.getpid()}-{self._written}"
        if replaced is not None:
            self._drop(replaced[0])

    def _drop(self, memory: Memory) -> None:
        memory.keys -= 1
        if not memory.keys:
            self._release(memory)

    def _release(self, memory: Memory) -> None:
        """Keep memory for the next writer, or free it: somebody who reads it must not see another's bytes in it."""
        if memory.size and memory.is_unshared():
            self._spares.append(memory)
        else:
            memory.free()

    def _free_spares(self) -> None:
        while self._spares:
            self._spares.pop().free()


def allow_descriptors() -> None:
    """Every object and connection takes one: allow as many as this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _opened_anew(descriptor: int, mode: int) -> int:
    return os.open(f"/proc/self/fd/{descriptor}", mode | os.O_CLOEXEC)
