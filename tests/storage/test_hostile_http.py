"""A web server that is dead, silent, endless or nosy: nothing waits or grows without end, and no secret goes on."""

from __future__ import annotations

import logging
import socketserver
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

import ckpt
from ckpt.errors import ConfigError, DamagedError, StorageError, TransientError
from ckpt.shown import masked_url, shown
from ckpt.storage import fsspec_stores, open_storage
from ckpt.storage.base import read_document

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
Answer = Callable[[BaseHTTPRequestHandler], None]
QUICK = {"deadline": 1.0, "stall": 1.0}


@contextmanager
def server(answer: Answer) -> Iterator[str]:
    """A server that answers every request in this way; its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                answer(self)
            except OSError:  # the client has had enough
                self.close_connection = True

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


def sends(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)

    return answer


def hangs_up(request: BaseHTTPRequestHandler) -> None:
    request.connection.close()
    request.close_connection = True


def is_silent(request: BaseHTTPRequestHandler) -> None:
    time.sleep(5)
    request.close_connection = True


def has_no_end(request: BaseHTTPRequestHandler) -> None:
    """A file of a length that is not said, which goes on for as long as somebody reads."""
    request.send_response(200)
    request.send_header("Connection", "close")
    request.end_headers()
    request.close_connection = True
    while request.command != "HEAD":
        request.wfile.write(b" " * 65536)


def has_folders_without_end(request: BaseHTTPRequestHandler) -> None:
    path = request.path.rstrip("/")
    sends(200, f'<a href="{path}/f/">f/</a>'.encode(), Content_Type="text/html")(request)


class TestAServerThatIsNotThere:
    @pytest.mark.parametrize("answer", [sends(503), sends(500), sends(429), hangs_up, is_silent])
    def test_is_no_empty_root(self, answer: Answer) -> None:
        with server(answer) as url, pytest.raises(TransientError):
            ckpt.list_checkpoints(f"{url}/run", storage_options=QUICK)

    def test_is_not_waited_for_as_long_as_one_that_has_answered_before(self) -> None:
        began = time.monotonic()
        with server(is_silent) as url, pytest.raises(TransientError):
            open_storage(f"{url}/run", deadline=300.0, stall=1.0).read("x")
        assert time.monotonic() - began < 60


class TestAServerWithoutEnd:
    def test_fills_no_disk_with_a_manifest(self) -> None:
        with server(has_no_end) as url, pytest.raises(DamagedError, match="more than 1,000 bytes"):
            read_document(open_storage(url, **QUICK), "manifest.json", 1000)

    def test_nor_with_a_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fsspec_stores, "_MOST_WITHOUT_LENGTH", 1 << 20)
        with server(has_no_end) as url, pytest.raises(StorageError, match="does not say how long the file is"):
            open_storage(url, **QUICK).read("model.safetensors")

    def test_is_listed_to_some_depth(self) -> None:
        seen: list[str] = []

        def answer(request: BaseHTTPRequestHandler) -> None:
            seen.append(request.path)
            has_folders_without_end(request)

        with server(answer) as url:
            assert list(open_storage(f"{url}/run", deadline=20.0, stall=5.0).list()) == []
        assert max(path.count("/f") for path in seen) < 50


class TestSecrets:
    def test_headers_of_the_user_do_not_follow_to_another_origin(self) -> None:
        seen: list[dict[str, str]] = []

        def takes(request: BaseHTTPRequestHandler) -> None:
            seen.append({name.lower(): value for name, value in request.headers.items()})
            sends(200, b"x", Accept_Ranges="bytes")(request)

        with server(takes) as other:
            redirects = sends(302, Location=f"{other}/elsewhere")
            with server(redirects) as url:
                storage = open_storage(
                    url, **QUICK, headers={"PRIVATE-TOKEN": "secret-1", "X-Api-Key": "secret-2"},
                    client_kwargs={"headers": {"X-Other": "secret-3"}},
                )  # fmt: skip
                assert storage.read("x") == b"x"
        assert seen
        assert "secret" not in str(seen)

    def test_they_do_within_one(self) -> None:
        def answer(request: BaseHTTPRequestHandler) -> None:
            moved = request.path == "/x"
            found = 302 if moved else 200 if request.headers["PRIVATE-TOKEN"] == "secret" else 403
            sends(found, b"x", **({"Location": "/moved"} if moved else {}))(request)

        with server(answer) as url:
            assert open_storage(url, **QUICK, headers={"PRIVATE-TOKEN": "secret"}).read("x") == b"x"

    @pytest.mark.parametrize("status", [200, 400, 403, 404, 418, 500])
    def test_a_server_that_repeats_them_gets_them_into_nothing(
        self, status: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        planted = {"X-Api-Key": "planted-one", "PRIVATE-TOKEN": "planted-two", "Cookie": "planted-three=planted-four"}

        def answer(request: BaseHTTPRequestHandler) -> None:
            told = " ".join(f"{value}" for value in request.headers.values())
            request.send_response(status, told)
            request.send_header("X-Told", told)
            request.send_header("Content-Length", str(len(told)))
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(told.encode())

        caplog.set_level(logging.DEBUG, "ckpt")
        with server(answer) as url:
            storage = open_storage(f"{url}/run", **QUICK, headers=planted, auth=("me", "planted-five"))
            for ask in (lambda: list(storage.list()), lambda: storage.read("x"), lambda: storage.version("x")):
                try:
                    ask()
                except ckpt.CkptError:
                    logging.getLogger("ckpt").debug("failed", exc_info=True)
                    assert "planted" not in traceback.format_exc()
        assert "planted" not in caplog.text
        assert "cGxhbnRlZC1maXZl" not in caplog.text

    @pytest.mark.parametrize(
        "url",
        [
            "https://host/run?key=planted", "https://host/run?auth=planted", "https://host/run?jwt=planted",
            "https://host/run?X-Api-Key=planted", "https://host/run?a=1&api_key=planted", "https://host/run?apikey=planted",
            "https://host/glpat-plantedplantedplanted1/run", "https://host/hf_plantedplantedplanted/run",
        ],
    )  # fmt: skip
    def test_they_are_refused_in_a_url_and_not_shown(self, url: str) -> None:
        with pytest.raises(ConfigError, match="contains a password, a token or a signature") as caught:
            open_storage(url)
        assert "planted" not in str(caught.value)
        assert "planted" not in shown(f"see {url} there")

    @pytest.mark.parametrize(
        "url", ["https://host/run?version=3", "https://host/keys/monkey?page=key", "s3://bucket/key=1"]
    )
    def test_what_is_none_is_kept(self, url: str) -> None:
        assert masked_url(url) == url

    def test_a_name_and_a_password_are_taken_as_a_pair(self) -> None:
        def answer(request: BaseHTTPRequestHandler) -> None:
            sends(200 if request.headers["Authorization"] == "Basic dTpw" else 401, b"x")(request)

        with server(answer) as url:
            assert open_storage(url, **QUICK, auth=("u", "p")).read("x") == b"x"
            with pytest.raises(ConfigError, match="auth= must be a user name and a password"):
                open_storage(url, auth="u:p")


@pytest.mark.parametrize("target", ["//", "file:///etc/passwd", "http://[", "x\x7f"])
def test_a_redirect_to_nowhere_is_refused(target: str) -> None:
    with server(sends(302, Location=target)) as url, pytest.raises(StorageError):
        open_storage(f"{url}/run", **QUICK).read("x")


def claims(size: int, more: Callable[[BaseHTTPRequestHandler], None]) -> Answer:
    """Says the size of a file when it is asked for that, and answers what reads it with something else."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.command == "HEAD":
            sends(200, b"x" * size, Accept_Ranges="bytes")(request)
        else:
            more(request)

    return answer


class TestAnswersThatAreNotWhatWasAskedFor:
    """Of no answer more is taken into memory than was asked for, and nothing else is taken for a file."""

    @pytest.mark.parametrize("status", [300, 302, 303, 304, 307])
    def test_a_redirect_that_leads_nowhere_is_no_empty_file_and_no_empty_root(self, status: int) -> None:
        with server(sends(status)) as url:
            storage = open_storage(f"{url}/run", **QUICK)
            for ask in (lambda: storage.read("x"), lambda: storage.read("x", 0, 5), lambda: list(storage.list())):
                with pytest.raises(StorageError, match=f"the server says {status}"):
                    ask()

    def test_a_part_without_end_is_not_read_on(self) -> None:
        sent: list[int] = []

        def endless(request: BaseHTTPRequestHandler) -> None:
            request.send_response(206)
            request.send_header("Connection", "close")
            request.end_headers()
            request.close_connection = True
            for _ in range(1000):
                request.wfile.write(b" " * (1 << 20))
                sent.append(1 << 20)

        with server(claims(5000, endless)) as url:
            storage = open_storage(url, **QUICK)
            with pytest.raises(StorageError, match="has 5,000 bytes, but sent 5,001"):
                storage.read("x", 10, 20)
            with pytest.raises(StorageError, match="sent 5,001"):
                storage.read_into("x", 0, memoryview(bytearray(100)))
        assert sum(sent) < 200 << 20  # what the sockets have taken

    def test_nor_is_an_index(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fsspec_stores, "LARGEST_DOCUMENT", 1 << 20)
        with server(has_no_end) as url, pytest.raises(StorageError, match="is endless, or larger than 1 MB"):
            list(open_storage(f"{url}/run", **QUICK).list())

    @pytest.mark.parametrize("page", [b"<a" + b" " * 3000, b"<a " * 300_000, b"<a href='" * 100_000])
    def test_an_index_in_which_links_are_hard_to_find_is_searched_at_once(self, page: bytes) -> None:
        """fsspec's expression takes minutes for the first, and no other thread runs meanwhile."""

        def answer(request: BaseHTTPRequestHandler) -> None:
            sends(200, page if request.path == "/run" else b"", Content_Type="text/html")(request)

        with server(answer) as url:
            assert list(open_storage(f"{url}/run", deadline=20.0, stall=5.0).list()) == []

    def test_more_files_than_anybody_has_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fsspec_stores, "_MOST_FILES", 10)
        page = b"".join(b'<a href="file-%d">x</a>' % number for number in range(20))
        with server(sends(200, page, Content_Type="text/html")) as url, pytest.raises(StorageError, match="than 10 f"):
            list(open_storage(f"{url}/run", **QUICK).list())

    def test_a_file_that_comes_byte_by_byte_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def drips(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.send_header("Content-Length", "5000")
            request.end_headers()
            for _ in range(5000):
                request.wfile.write(b"x")
                time.sleep(0.2)

        with server(claims(5000, drips)) as url:
            storage = open_storage(url, **QUICK)
            for stop in (20, None):
                with pytest.raises(TransientError):
                    storage.read("x", 10, stop)

    def test_a_large_file_of_a_server_that_sends_no_parts_is_copied(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(fsspec_stores, "_MOST_WITHOUT_LENGTH", 1000)  # whose length is said
        data = bytes(range(256)) * 20
        for told in ({}, {"Accept_Ranges": "none"}):
            with server(sends(200, data, **told)) as url:
                storage = open_storage(url, **QUICK)
                assert storage.read("x", 300, 310) == data[300:310]
                assert storage.read("x") == data

    def test_a_size_below_nothing_is_no_empty_file(self) -> None:
        def answer(request: BaseHTTPRequestHandler) -> None:
            request.send_response(200)
            request.send_header("Content-Range", "bytes 0-0/-5")
            request.send_header("Connection", "close")
            request.end_headers()
            request.close_connection = True

        with server(answer) as url, pytest.raises(StorageError, match=r"the server says that .* has -5 bytes"):
            open_storage(url, **QUICK).read("x")

    def test_in_an_archive_there_headers_stay_with_their_origin_too(self) -> None:
        seen: list[str] = []

        def takes(request: BaseHTTPRequestHandler) -> None:
            seen.append(str(request.headers))
            sends(200, b"x" * 100)(request)

        given = {"http": {"headers": {"PRIVATE-TOKEN": "secret"}}}
        with server(takes) as other, server(sends(302, Location=f"{other}/a.zip")) as url, pytest.raises(StorageError):
            open_storage(f"zip://::{url}/a.zip", **given).read("x")
        assert seen
        assert "secret" not in str(seen)
