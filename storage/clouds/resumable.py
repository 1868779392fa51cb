"""Parts of a resumable upload to Google Cloud Storage."""

from __future__ import annotations

from typing import Any, Protocol

from ckpt.errors import StorageError
from ckpt.storage.clouds.answers import Answer, AnswerError


class Sender(Protocol):
    """Sends parts of an upload."""

    def send(self, session: str, views: list[memoryview], span: str) -> Answer:
        """The answer to a part, or without views to the question how much has arrived."""


class Part:
    """A part of an upload. Sent again, it first asks how much of it has arrived."""

    def __init__(self, client: Sender, session: str, start: int, views: list[memoryview], total: int | None) -> None:
        self._client = client
        self._session = session
        self._start = start
        self._views = views
        self._stop = start + sum(map(len, views))
        self._total = "*" if total is None else str(total)
        self._is_sent = False

    def __call__(self) -> dict[str, Any] | None:
        """What the server says about the object, if it is complete."""
        at, views = self._start, self._views
        if self._is_sent:
            answer = self._client.send(self._session, [], f"*/{self._total}")
            if answer.status != 308:
                return answer.fields()
            at = _arrived(answer)
            if at >= self._stop and self._total == "*":
                return None
            if not self._start <= at < self._stop:
                raise StorageError("the server has lost a part of an upload. Save again.")
            views = _after(views, at - self._start)
        self._is_sent = True
        answer = self._sent(views, at)
        if answer.status != 308:
            return answer.fields()
        arrived = _arrived(answer)
        if arrived < self._stop:  # the server may take less than it was sent
            raise AnswerError(503, "")
        return None

    def _sent(self, views: list[memoryview], at: int) -> Answer:
        """The answer to the part. Sent twice on its way, the second is refused, and the server has the first."""
        try:
            return self._client.send(self._session, views, f"{at}-{self._stop - 1}/{self._total}")
        except AnswerError as error:
            if error.status != 400:
                raise
            answer = self._client.send(self._session, [], f"*/{self._total}")
            if answer.status == 308 and _arrived(answer) < self._stop:
                raise
            return answer


def _arrived(answer: Answer) -> int:
    """The bytes of the upload that the server has; without a range it has none."""
    span = answer.headers.get("Range")
    return int(span.rpartition("-")[2]) + 1 if span else 0


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    left = []
    for view in views:
        left.append(view[count:])
        count = max(0, count - len(view))
    return [view for view in left if view]
