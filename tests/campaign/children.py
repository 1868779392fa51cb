"""Forked processes with a deadline, which tell what they do, line by line."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from tests.campaign.verdicts import HANG, Ended, Failure, Found

DEADLINE = 60.0  # seconds that any process of a trial may take
_FRAMES = 9  # of each thread of a process that hangs
_STACKS = signal.SIGUSR2  # makes a child write the stacks of its threads to its log


class Voice:
    """In a child: how it talks to the process that started it."""

    def __init__(self, mouth: int, ear: int) -> None:
        self.ear = ear
        self._mouth = mouth
        self._lines = os.fdopen(ear)

    def tell(self, line: str) -> None:
        os.write(self._mouth, f"{line}\n".encode())

    def heed(self) -> str:
        """Wait for a line."""
        return self._lines.readline().strip()


class Child:
    """A forked process that runs `function(voice, *args)`. It shares nothing with its parent but two pipes."""

    def __init__(self, log: Path, function: Callable[..., Any], *args: Any) -> None:
        self.log = log
        heard, mouth = os.pipe()
        ear, said = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(heard)
            os.close(said)
            _live(log, Voice(mouth, ear), function, args)
        os.close(mouth)
        os.close(ear)
        os.set_blocking(heard, False)
        self._heard, self._said = heard, said
        self._handle = os.pidfd_open(self.pid)
        self._text = ""
        self._ended: Ended | None = None
        self.told: list[str] = []

    @property
    def handle(self) -> int:
        """Readable once the process has ended."""
        return self._handle

    def signal(self, number: int) -> None:
        if self._ended is None:
            os.kill(self.pid, number)

    def say(self, line: str) -> None:
        os.write(self._said, f"{line}\n".encode())

    def hear(self, beginning: str, seconds: float = DEADLINE) -> str | None:
        """Wait for a line that begins so, and return the rest of it; none if the child has ended before."""
        deadline = time.monotonic() + seconds
        seen = 0
        while True:
            over = self._listen(deadline)
            for line in self.told[seen:]:
                seen += 1
                if line.startswith(beginning):
                    return line[len(beginning) :].strip()
            if over:
                return None

    def wait(self, what: str, seconds: float = DEADLINE) -> Ended:
        """Until it has ended. One that does not is killed, and is a hang."""
        deadline = time.monotonic() + seconds
        while self._ended is None:
            try:
                over = self._listen(deadline)
            except Found as hang:
                raise Found(HANG, f"{what}: {hang.evidence}") from None
            if over:
                self._ended = self._bury()
        return self._ended

    def kill(self) -> Ended:
        """End it at once, whatever it does, and return what it had told."""
        if self._ended is None:
            os.kill(self.pid, signal.SIGKILL)
            self._ended = self._bury()
        return self._ended

    def _listen(self, deadline: float) -> bool:
        """Take in what is told within a while; true once the child has ended."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise Found(HANG, f"still there after its deadline\n{self._stacks()}")
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        poll.register(self._heard, select.POLLIN)
        ready = dict(poll.poll(left * 1000))
        self._take()
        return self._handle in ready

    def _take(self) -> None:
        while True:
            try:
                data = os.read(self._heard, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            self._text += data.decode()
        *lines, self._text = self._text.split("\n")
        self.told += lines

    def _bury(self) -> Ended:
        _, status = os.waitpid(self.pid, 0)
        self._take()
        for descriptor in (self._handle, self._heard, self._said):
            os.close(descriptor)
        results = [json.loads(line[1:]) for line in self.told if line.startswith("=")]
        ended = Ended(os.waitstatus_to_exitcode(status), told=self.told)
        if results:
            failure = results[-1]["failure"]
            ended.value, ended.failure = results[-1]["value"], Failure(**failure) if failure else None
        return ended

    def _stacks(self) -> str:
        """Where every thread is, for the report. The child is killed then."""
        os.kill(self.pid, signal.SIGCONT)
        os.kill(self.pid, _STACKS)
        time.sleep(0.5)
        self.kill()
        written = self.log.read_text(errors="replace")[-20000:]
        threads = re.split(r"(?=^(?:Current t|T)hread 0x)", written, flags=re.MULTILINE)
        return "".join("\n".join(one.splitlines()[:_FRAMES]) + "\n" for one in threads[1:])


def _live(log: Path, voice: Voice, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """The whole life of a child. Ends as an interpreter does: its threads are waited for."""
    status = 1
    try:
        with open(log, "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        faulthandler.register(_STACKS, file=2, all_threads=True)
        value, failure, status = None, None, 0
        try:
            value = function(voice, *args)
        except SystemExit as left:
            status = left.code if isinstance(left.code, int) else 1
        except BaseException as error:
            failure, status = asdict(Failure.of(error)), 130 if isinstance(error, KeyboardInterrupt) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        voice.tell("=" + json.dumps({"value": value, "failure": failure}))
        sys.stdout.flush()
    finally:
        os._exit(status)
