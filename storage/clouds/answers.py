"""Answers of a server over HTTP, of which no more is read than was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StorageError

LARGEST = 64 << 20  # bytes of an answer that describes objects; a page of a listing has one


class AnswerError(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def fields(self) -> dict[str, Any]:
        """The JSON object that it is; a `ValueError` if it is none."""
        return dict(json.loads(self.body))


def receive(response: Any, most: int | None = LARGEST) -> Answer:
    """Read an answer whose body is still to come. A longer one than `most` bytes is an error, and is not read."""
    with response:
        body = response.raw.read(None if most is None else most + 1)
    if most is not None and len(body) > most:
        raise StorageError(f"the server sends more than the {most:,} bytes that were asked for. Check the endpoint.")
    return Answer(response.status_code, response.headers, body)


def successful(answer: Answer) -> Answer:
    """The answer, if it is a success."""
    if answer.status < 300:
        return answer
    code = ""
    with suppress(ValueError, KeyError, IndexError, TypeError):
        code = str(answer.fields()["error"]["errors"][0]["reason"])
    raise AnswerError(answer.status, code)
