"""Messages between a keeper that holds memfds and the processes of its run: JSON with at most one descriptor.

A socket of whole messages (SOCK_SEQPACKET) in the folder of the run. Only the standard library: the keeper imports it.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
from typing import Any

SOCKET = "keeper.sock"
Message = dict[str, Any]
LONGEST_KEY = 400  # bytes: a message holds a hundred
_LARGEST = 128 << 10  # bytes of a message: below the buffer that every socket has
_CREDENTIALS = struct.Struct("3i")


def listen(folder: int) -> socket.socket:
    """A socket in a folder, given by its descriptor, that only this user can connect to."""
    listener = _socket()
    listener.bind(_path(folder))
    os.chmod(_path(folder), 0o600)
    listener.listen(64)
    return listener


def connect(folder: int, timeout: float) -> socket.socket:
    """A connection to whoever listens in a folder. Another user's process there is refused."""
    connection = _socket()
    try:
        connection.settimeout(timeout)
        connection.connect(_path(folder))
        if not is_own(connection):
            raise PermissionError("a process of another user listens there")
    except BaseException:
        connection.close()
        raise
    return connection


def is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this user."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(packed)[1]
    return uid == os.geteuid()


def send(connection: socket.socket, message: Message, descriptor: int | None = None) -> None:
    """Send a message, and a copy of a descriptor with it."""
    socket.send_fds(
        connection, [json.dumps(message, ensure_ascii=False).encode()], [] if descriptor is None else [descriptor]
    )


def wait(connection: socket.socket, timeout: float) -> None:
    """Wait until a message can be received. None after so many seconds is a TimeoutError."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(timeout * 1000):
        raise TimeoutError("no answer")


def receive(connection: socket.socket) -> tuple[Message, int | None]:
    """The next message and the descriptor that came with it. An ended connection is a ConnectionError."""
    data, descriptors, _, _ = socket.recv_fds(connection, _LARGEST, 1, socket.MSG_CMSG_CLOEXEC)
    descriptor = descriptors[0] if descriptors else None
    try:
        if not data:
            raise ConnectionResetError("the other process has ended")
        message: Message = json.loads(data)
    except BaseException:
        if descriptor is not None:
            os.close(descriptor)
        raise
    return message, descriptor


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _path(folder: int) -> str:
    """The socket in a folder. Through its descriptor: an address has at most 107 bytes, and a path may have more."""
    return f"/proc/self/fd/{folder}/{SOCKET}"
