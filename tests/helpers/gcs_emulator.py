"""gcp-storage-emulator as a process, with the one condition that it lacks: `ifGenerationMatch` of a write.

Of an upload of which nothing has arrived it says that it has the first byte; Google then names none, and so does this.

python -m tests.helpers.gcs_emulator PORT BUCKET [conditions]
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import HTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


class PreconditionError(Exception):
    """Another generation is there than the one that may be replaced."""


class ConditionalStorage(Storage):  # type: ignore[misc]  # it has no types
    """Compares generations where an object appears, whatever request has made it."""

    condition: str | None = None

    def create_file(self, bucket_name: str, file_name: str, *arguments: Any, **named: Any) -> Any:
        if self.condition is not None:
            try:
                there = self.get_file_obj(bucket_name, file_name)["generation"]
            except NotFound:
                there = "0"
            if there != self.condition:
                raise PreconditionError
        return super().create_file(bucket_name, file_name, *arguments, **named)


class Handler(RequestHandler):  # type: ignore[misc]
    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        self.storage.condition = parse_qs(urlparse(self.path).query).get("ifGenerationMatch", [None])[0]
        return True

    def do_POST(self) -> None:  # noqa: N802
        self._refusing(super().do_POST)

    def do_PUT(self) -> None:  # noqa: N802
        self._refusing(super().do_PUT)

    def _refusing(self, handle: Any) -> None:
        try:
            handle()
        except PreconditionError:
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()


def _incomplete(response: Any, storage: Any, upload_id: str, fallback_end: int = 0) -> None:
    response.status = objects.GoogleHTTPStatus.RESUME_INCOMPLETE
    if received := storage.get_resumable_byte_count(upload_id):
        response["Range"] = f"bytes=0-{received - 1}"


def main(port: int, bucket: str, *how: str) -> None:
    conditions = "conditions" in how
    objects._resumable_incomplete = _incomplete
    storage = (ConditionalStorage if conditions else Storage)(use_memory_fs=True)
    create_bucket(bucket, storage)
    HTTPServer(("127.0.0.1", port), partial(Handler if conditions else RequestHandler, storage)).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
