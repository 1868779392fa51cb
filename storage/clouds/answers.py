"""Answers of a server over HTTP, of which no more is read than was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ckpt.errors import StorageError
from ckpt.storage.clouds.errors import CutError

_WITHOUT_BODY = (204, 304)
_HTTP_1_1 = 11
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
        """The JSON object that it is; a `CutError` if it is the beginning of one, a `ValueError` if it is none."""
        try:
            return dict(json.loads(self.body))
        except json.JSONDecodeError:
            if self.body.lstrip()[:1] in (b"", b"{"):
                raise CutError from None
            raise


def receive(response: Any, most: int | None = LARGEST) -> Answer:
    """Read an answer whose body is still to come. A longer one than `most` bytes is an error, and is not read.

    A server that closes the connection in the middle is noticed by the length that it announced: the client takes what
    has come for all of it.
    """
    with response:
        body = response.raw.read(None if most is None else most + 1)
    if most is not None and len(body) > most:
        raise StorageError(f"the server sends more than the {most:,} bytes that were asked for. Check the endpoint.")
    if _is_cut(response, len(body)):
        raise CutError
    return Answer(response.status_code, response.headers, body)


def _is_cut(response: Any, received: int) -> bool:
    """Whether bytes are missing: of the body, or of the headers, if they name no end that HTTP/1.1 knows."""
    headers = response.headers
    if announced := headers.get("Content-Length"):
        return received < int(announced)
    has_end = "Transfer-Encoding" in headers or headers.get("Connection") == "close"
    return response.raw.version == _HTTP_1_1 and response.status_code not in _WITHOUT_BODY and not has_end


def successful(answer: Answer) -> Answer:
    """The answer, if it is a success."""
    if answer.status < 300:
        return answer
    code = ""
    with suppress(CutError, ValueError, KeyError, IndexError, TypeError):
        code = str(answer.fields()["error"]["errors"][0]["reason"])
    raise AnswerError(answer.status, code)
