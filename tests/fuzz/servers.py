"""Conversations with servers that lie: `python -m tests.fuzz.servers --conversations 2000 --seed 1 --jobs 2`.

S3, GCS, Azure, the Hub and a web server on loopback have one checkpoint, and answer some requests otherwise than they
should: other lengths, ETags, names, bytes, statuses and redirects, without an end, or not at all. The number of a
conversation and the seed decide all of it. Whatever is asked of such a server must end in time, in the right state or
in one `CkptError`; nothing is written elsewhere, and no secret is raised, logged, written or sent to another origin.
"""

from __future__ import annotations

import argparse
import base64
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

from tests.helpers import hostile_bucket
from tests.helpers.hostile_bucket import FOLDED, Asked, HostileBucket, Reply, Server

SECRET = "plantedSecret0123456789abcdefghijkl"  # in every credential; also as base64 has it
KEY = base64.b64encode(SECRET.encode() * 2).decode()
SECONDS = 60.0
MEMORY = 600 << 10  # kB that a conversation may add
BUCKET = hostile_bucket.BUCKET
_QUICK = {"deadline": 0.5, "stall": 1.0}
_BATCH = 20
_MOMENT = "Thu, 01 Jan 2026 00:00:00 GMT"
_ENDLESS = 2 << 30  # bytes: whoever reads on takes more memory than a conversation may
_NAMES = ("../../evil", "/tmp/evil", "a\\..\\evil", "x\x00y", "run/step-1/../../../evil", "\x1b[2Jevil", "", "a" * 5000)
_STATUSES = (200, 204, 206, 301, 302, 304, 307, 308, 400, 401, 403, 404, 409, 410, 412, 416, 418, 429, 500, 503)
_NONSENSE = (b"", b"null", b"[]", b"{}", b"7", b"<a", b"<html></html>", b"\xff\xfe\x00", b"[" * 20_000, b'{"items": 5}')


class HangError(BaseException):
    """Raised in an operation that takes too long."""


class WrongError(Exception):
    """Something else was restored than was saved."""


@dataclass
class Liar:
    """Bends some answers of a conversation. Which, and how, is decided by the request, and how often it was made."""

    name: str
    share: float
    elsewhere: str
    counts: Counter[str] = field(default_factory=Counter)
    told: list[str] = field(default_factory=list)

    def bend(self, asked: Asked, reply: Reply) -> Reply:
        what = f"{asked.method} {asked.key} {sorted(asked.query)}"
        self.counts[what] += 1
        draw = random.Random(f"{self.name} {what} {self.counts[what]}")
        if draw.random() >= self.share:
            return reply
        lie = draw.choice(LIES)
        self.told.append(f"{lie.__name__} to {what}")
        return lie(draw, reply, asked, self.elsewhere)


def _status(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    return Reply(draw.choice(_STATUSES), draw.choice((reply.body, b"no")), dict(reply.headers))


def _redirect(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    to = draw.choice((f"{elsewhere}/{asked.key}", "//", "file:///etc/passwd", "http://[", f"/{asked.key}", "x\x7f"))
    return Reply(draw.choice((301, 302, 303, 307, 308)), b"", {**reply.headers, "Location": to})


def _length(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    reply.announced = max(0, len(reply.body) + draw.choice((-1, 1, -len(reply.body), 1000, 1 << 40)))
    return reply


def _body(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    reply.body = draw.choice((*_NONSENSE, reply.body[: len(reply.body) // 2], reply.body * 2, reply.body + b"x"))
    return reply


def _byte(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    data = bytearray(reply.body or b"x")
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    reply.body = bytes(data)
    return reply


def _names(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    """Other names, sizes and versions in what describes objects."""
    old, new = draw.choice((
        (b"step-1", draw.choice(_NAMES).encode()), (b"model.safetensors", draw.choice(_NAMES).encode()),
        (b'"size": ', b'"size": -'), (b"<Size>", b"<Size>-"), (b"Content-Length>", b"Content-Length>x"),
        (b"Etag", b"E"), (b"ETag", b"E"), (b'"generation"', b'"g"'), (b'"size"', b'"s"'), (b'"oid"', b'"o"'),
        (b"false", b"true"),
        (b"metadata", b"m"), (b"<Name>", b"<N>"), (b"<Key>", b"<K>"),
    ))  # fmt: skip
    reply.body = reply.body.replace(old, new)
    return reply


def _headers(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    odd = draw.choice(("", "x", "-1", "bytes 0-0/*", "bytes 5-1/2", '"other"', "gzip", "9" * 400, "W/", "é"))
    names = ("ETag", "Content-Range", "Content-Encoding", "Content-Type", "Last-Modified", "X-Linked-Size",
             "Retry-After", "X-Repo-Commit", "x-ms-meta-x", "Link", "X-Error-Code")  # fmt: skip
    reply.headers = {**reply.headers, draw.choice(names): odd.encode("latin-1").decode("latin-1")}
    return reply


def _less(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    left = draw.choice([*reply.headers, ""])
    reply.headers = {name: value for name, value in reply.headers.items() if name != left}
    return reply


def _index(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    """A page of links in which it takes long to find one."""
    reply.body = draw.choice(
        (b"<a" + b" " * 50_000, b"<a " * 50_000, b'<a href="x/">x</a>' * 1000, b"<a href='" * 9999)
    )
    return reply


def _endless(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    reply.endless = True
    return reply


def _silent(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    time.sleep(3)
    return reply


def _echo(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    """Repeats what it was sent, where errors are shown from."""
    alone = [value.rpartition(" ")[2] for value in asked.headers.values() if SECRET in value]  # where a code belongs
    sent = draw.choice((str(asked.headers), *alone))
    told = json.dumps({"error": {"message": sent, "errors": [{"reason": sent}]}})
    xml = f"<Error><Code>{escape(sent)}</Code><Message>{escape(sent)}</Message></Error>"
    headers = {"X-Error-Message": sent[:2000], "x-ms-error-code": sent[:2000]}
    return Reply(draw.choice((400, 403, 404, 500)), draw.choice((told, xml)).encode(), headers)


def _unfolding(draw: random.Random, reply: Reply, asked: Asked, elsewhere: str) -> Reply:
    """A megabyte, of which a client that decodes what it reads makes a gigabyte."""
    reply.body, reply.headers = FOLDED, {**reply.headers, "Content-Encoding": "gzip"}
    return reply


LIES = (
    _status, _redirect, _length, _body, _byte, _names, _names, _headers, _less, _index, _endless, _silent, _echo,
    _unfolding,
)  # fmt: skip


class Objects(Server):
    """Objects in memory, each with the number of the write that made it, and its metadata. A subclass is a cloud."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects, self.bend = objects, Liar("", 0, "").bend
        self._about: dict[str, tuple[int, dict[str, str]]] = {}
        self._parts: dict[str, bytes] = {}
        self._turn = threading.Lock()

    def answer(self, asked: Asked, body: bytes) -> Reply:
        with self._turn:
            reply = self.honest(asked, body)
        return self.bend(asked, reply)

    def honest(self, asked: Asked, body: bytes) -> Reply:
        raise NotImplementedError

    def about(self, key: str) -> tuple[int, dict[str, str]]:
        return self._about.get(key, (1, {}))

    def keep(self, key: str, data: bytes, metadata: dict[str, str]) -> int:
        number = len(self.requests) + 2
        self.objects[key], self._about[key] = data, (number, metadata)
        return number

    def part(self, key: str, asked: Asked, headers: dict[str, str]) -> Reply:
        """An object, or the range of it that was asked for."""
        data = self.objects[key]
        span = asked.headers.get("x-ms-range") or asked.headers.get("range")
        if span is None or asked.method == "HEAD":
            return Reply(200, data, headers)
        start, _, last = span.removeprefix("bytes=").partition("-")
        stop = min(int(last) + 1 if last else len(data), len(data))
        if int(start) >= len(data):
            return Reply(416)
        return Reply(
            206, data[int(start) : stop], {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
        )


class Gcs(Objects):
    def honest(self, asked: Asked, body: bytes) -> Reply:
        _, _, key = asked.key.partition("/o/")
        if asked.method == "POST":
            return self._write(asked, key, body)
        if asked.method == "GET" and not key:
            found = [name for name in self.objects if name.startswith(asked.query.get("prefix", ""))]
            return self._told({"items": [self._resource(name) for name in found]})
        if key not in self.objects:
            return Reply(404)
        if asked.method == "DELETE":
            del self.objects[key]
            return Reply(204)
        return self.part(key, asked, {}) if "alt" in asked.query else self._told(self._resource(key))

    def _write(self, asked: Asked, key: str, body: bytes) -> Reply:
        if "/rewriteTo/" in key:
            source, _, target = key.partition(f"/rewriteTo/b/{BUCKET}/o/")
            self.keep(target, self.objects[source], self.about(source)[1])
            return self._told({"done": True})
        _, described, content = body.split(f"--{asked.headers['content-type'].partition('=')[2]}".encode())[:3]
        fields = json.loads(described.partition(b"\r\n\r\n")[2])
        wanted, name = asked.query.get("ifGenerationMatch"), fields["name"]
        if wanted is not None and int(wanted) != (self.about(name)[0] if name in self.objects else 0):
            return Reply(412)
        self.keep(name, content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n"), fields.get("metadata", {}))
        return self._told(self._resource(name))

    def _resource(self, key: str) -> dict[str, Any]:
        number, metadata = self.about(key)
        return {"name": key, "size": str(len(self.objects[key])), "generation": str(number), "metadata": metadata}

    def _told(self, fields: dict[str, Any]) -> Reply:
        return Reply(200, json.dumps(fields).encode())


class Azure(Objects):
    def honest(self, asked: Asked, body: bytes) -> Reply:
        key = asked.key.removeprefix(f"account/{BUCKET}").lstrip("/")
        if asked.query.get("comp") == "list":
            return self._listed(asked.query.get("prefix", ""))
        if asked.method == "PUT":
            return self._write(asked, key, body)
        if key not in self.objects:
            return Reply(404, b"", {"x-ms-error-code": "BlobNotFound"})
        if asked.method == "DELETE":
            del self.objects[key]
            return Reply(202)
        return self.part(key, asked, self._facts(key))

    def _write(self, asked: Asked, key: str, body: bytes) -> Reply:
        present = f'"{self.about(key)[0]}"' if key in self.objects else None
        wanted = asked.headers.get("if-match")
        if (wanted is not None and wanted != present) or (present and asked.headers.get("if-none-match") == "*"):
            return Reply(412, b"", {"x-ms-error-code": "ConditionNotMet"})
        if source := asked.headers.get("x-ms-copy-source"):
            body = self.objects[unquote(source.partition(f"/account/{BUCKET}/")[2])]
        names = {name: value for name, value in asked.headers.items() if name.startswith("x-ms-meta-")}
        self.keep(key, body, names)
        return Reply(
            202 if source else 201, b"", {**self._facts(key), "x-ms-copy-id": "1", "x-ms-copy-status": "success"}
        )

    def _facts(self, key: str) -> dict[str, str]:
        number, metadata = self.about(key)
        return {"ETag": f'"{number}"', "Last-Modified": _MOMENT, "x-ms-blob-type": "BlockBlob", **metadata}

    def _listed(self, prefix: str) -> Reply:
        blobs = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_MOMENT}</Last-Modified><Etag>"
            f"{self.about(name)[0]}</Etag><Content-Length>{len(self.objects[name])}</Content-Length>"
            "<BlobType>BlockBlob</BlobType></Properties></Blob>"
            for name in self.objects
            if name.startswith(prefix)
        )
        text = f'<?xml version="1.0"?><EnumerationResults ContainerName="{BUCKET}"><Blobs>{blobs}</Blobs><NextMarker/>'
        return Reply(200, f"{text}</EnumerationResults>".encode(), {"Content-Type": "application/xml"})


class Web(Objects):
    def honest(self, asked: Asked, body: bytes) -> Reply:
        key = asked.key.strip("/")
        if key in self.objects:
            return self.part(key, asked, {"ETag": '"1"', "Accept-Ranges": "bytes"})
        inside = {name.removeprefix(f"{key}/").split("/")[0] for name in self.objects if name.startswith(f"{key}/")}
        is_folder = {name: any(other.startswith(f"{key}/{name}/") for other in self.objects) for name in inside}
        links = "".join(f'<a href="{name}{"/" * is_folder[name]}">{name}</a>' for name in sorted(inside))
        return Reply(200, links.encode(), {"Content-Type": "text/html"}) if inside else Reply(404)


@contextmanager
def served(kind: str, folder: Path, objects: dict[str, bytes]) -> Iterator[tuple[Callable[[Any], None], str, Any]]:
    """How to set what bends answers, the URL of the root, and its storage options."""
    if kind == "hub":
        with _hub(folder, objects) as (hub, url):
            yield partial(_bend_hub, hub), url, {"token": f"hf_{SECRET}", **_QUICK}
        return
    made: dict[str, Callable[[dict[str, bytes]], Any]] = {"s3": HostileBucket, "gs": Gcs, "az": Azure, "http": Web}
    with made[kind](objects) as server:
        if kind == "s3":
            url, options = (
                f"s3://{BUCKET}/run",
                {**hostile_bucket.options(server.url), "secret": SECRET, "token": SECRET},
            )
        elif kind == "gs":
            from google.oauth2.credentials import Credentials

            os.environ["STORAGE_EMULATOR_HOST"] = server.url
            url, options = f"gs://{BUCKET}/run", {"token": Credentials(SECRET), "endpoint_url": server.url}
        elif kind == "az":
            text = (
                f"DefaultEndpointsProtocol=http;AccountName=account;AccountKey={KEY};BlobEndpoint={server.url}/account;"
            )
            url, options = f"az://{BUCKET}/run", {"connection_string": text}
        else:
            headers = {"PRIVATE-TOKEN": SECRET, "Authorization": f"Bearer {SECRET}"}
            url, options = f"{server.url}/run", {"headers": headers}
        yield partial(setattr, server, "bend"), url, {**options, **_QUICK}


@contextmanager
def _hub(folder: Path, objects: dict[str, bytes]) -> Iterator[tuple[Any, str]]:
    from tests.helpers.hub_server import HubServer, connect

    hub = HubServer(folder / "hub")
    try:
        connect(hub.url, str(folder / "home"), f"hf_{SECRET}")
        from huggingface_hub.utils import _http

        from ckpt.storage import HubStorage

        vars(_http)["time"] = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})  # it asks again at once
        storage = HubStorage("me/runs", interval=0)
        for key, data in objects.items():
            storage.write(key.removeprefix("run/"), [data])
        yield hub, "hub://me/runs"
    finally:
        hub.close()


def _bend_hub(hub: Any, bend: Callable[[Asked, Reply], Reply]) -> None:
    authorization = {"authorization": f"Bearer hf_{SECRET}"}
    hub.bend = lambda method, path, reply: bend(
        Asked(method, path.partition("?")[0].lstrip("/"), {}, authorization), reply
    )


def _train(url: str, options: dict[str, Any]) -> None:
    """A run that saves, and one that resumes from what it finds there: that is what was saved, or nothing."""
    import torch
    from torch import nn

    import ckpt

    def manager(model: nn.Module) -> ckpt.StateManager:
        return ckpt.StateManager(url, model=model, storage_options=options, saving=ckpt.SaveOptions(background=False))

    saved, loaded = nn.Linear(30, 30), nn.Linear(30, 30)
    with manager(saved) as first:
        first.resume()
        first.save_state("one")
    with manager(loaded) as second:
        restored = second.resume()
    if restored is not None and not torch.equal(saved.weight, loaded.weight):
        raise WrongError(f"{restored.name} was restored, and is not what was saved")


def _operations(
    url: str, out: Path, source: Path, options: dict[str, Any], place: int
) -> dict[str, Callable[[], object]]:
    import ckpt
    from ckpt.tools.show import summarize

    given: dict[str, Any] = {"storage_options": options}
    operations: dict[str, Callable[[], object]] = {
        "list": lambda: ckpt.list_checkpoints(url, **given),
        "verify": lambda: ckpt.verify(url, **given),
        "show": lambda: summarize(url, options),
        "merge": lambda: ckpt.merge(f"{url}/step-1", out / "x.safetensors", **given),
        "pull": lambda: ckpt.pull(url, out / "pulled", **given),
    }
    if not url.startswith("http"):
        operations["send"] = lambda: ckpt.pull(source, f"{url}/{place}-sent", **given)
        operations["train"] = lambda: _train(f"{url}/{place}-run", options)
    return operations


KINDS = ("s3", "gs", "az", "hub", "http")


class Conversations:
    """Holds conversations in a folder of its own, and says what was wrong with them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._log = StringIO()
        self._source = folder / "made"
        self._prepare()

    def _prepare(self) -> None:
        from torch import nn

        import ckpt
        from ckpt.storage import leases
        from ckpt.storage.retry import RetryPolicy

        leases.EXPIRY, leases._POLL = 3.0, 0.2  # of a lease whose end a server does not tell
        hostile_bucket.MOST = _ENDLESS
        RetryPolicy.pauses = lambda self: iter((0.0, 0.0))  # type: ignore[method-assign]
        os.environ.update(NO_GCE_CHECK="true", GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT="false")
        logging.getLogger("ckpt").setLevel(logging.DEBUG)
        logging.getLogger("ckpt").addHandler(logging.StreamHandler(self._log))
        signal.signal(signal.SIGALRM, _too_long)
        with ckpt.StateManager(self._source, model=nn.Linear(30, 30)) as manager:
            manager.save_state("step-1")
        files = (path for path in self._source.rglob("*") if path.is_file())
        found = {f"run/{path.relative_to(self._source).as_posix()}": path.read_bytes() for path in files}
        self._objects = {key: data for key, data in found.items() if "/." not in key}

    def hold(self, numbers: list[int]) -> tuple[Counter[str], list[str]]:
        """How many ended in which way, and the findings."""
        ended: Counter[str] = Counter()
        findings: list[str] = []
        for kind in KINDS:
            of_kind = [number for number in numbers if KINDS[number % len(KINDS)] == kind]
            with ExitStack() as stack:
                if of_kind:
                    here = stack.enter_context(served(kind, self._folder / kind, dict(self._objects)))
                    other = stack.enter_context(hostile_bucket.elsewhere())
                for number in of_kind:
                    how, wrong = self._one(number, kind, here, other)
                    ended[f"{kind}: {how}"] += 1
                    findings += wrong
        return ended, findings

    def _one(self, number: int, kind: str, served: Any, other: Server) -> tuple[str, list[str]]:
        bend, url, options = served
        draw = random.Random(f"{self._seed} {number}")
        out = self._folder / "place" / "out"
        shutil.rmtree(out.parent, ignore_errors=True)
        shutil.rmtree(self._folder / kind / "home", ignore_errors=True)
        out.mkdir(parents=True)
        liar = Liar(f"{self._seed} {number}", draw.choice((0.0, 0.1, 0.3, 0.7, 1.0)), other.url)
        operations = _operations(url, out, self._source, options, number)
        name = draw.choice(sorted(operations))
        bend(liar.bend)
        other.requests.clear()
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        how, said = self._ended(operations[name])
        bend(lambda asked, reply: reply)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        wrong = [how] if how not in ("done", "refused", "not reached") else []
        if how == "refused" and not liar.told:
            wrong.append("wrong: nothing but the truth was refused")
        wrong += [f"memory: {grown >> 10} MB"] if grown > MEMORY else []
        wrong += [f"leak: {where}" for where in self._leaks(said, out, other)]
        wrong += [f"outside: {path}" for path in out.parent.iterdir() if path != out]
        wrong += self._lies(out / "pulled") if how == "done" and name == "pull" else []
        where = f"{number}: {name} of {kind} after {time.monotonic() - began:.1f} s; {'; '.join(liar.told[-6:])}"
        return how.partition(":")[0], [f"{one} ({where})\n{said[-1500:]}" for one in wrong]

    def _ended(self, operation: Callable[[], object]) -> tuple[str, str]:
        from ckpt.errors import CkptError, TransientError

        self._log.seek(0)
        self._log.truncate()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            operation()
            return "done", self._log.getvalue()
        except TransientError:  # a loaded machine may be too slow for so little patience
            return "not reached", self._log.getvalue() + traceback.format_exc()
        except CkptError:
            return "refused", self._log.getvalue() + traceback.format_exc()
        except HangError:
            return "hang", self._log.getvalue() + traceback.format_exc()
        except BaseException as error:
            return f"error: {type(error).__name__}", self._log.getvalue() + traceback.format_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _leaks(self, said: str, out: Path, other: Server) -> Iterator[str]:
        """Where the secret is found, though it belongs nowhere."""
        known = (SECRET, KEY)
        if any(secret in said for secret in known):
            yield "what is raised or logged"
        for path in out.rglob("*"):
            text = path.name + (path.read_bytes().decode("latin-1") if path.is_file() else "")
            if any(secret in text for secret in known):
                yield f"{path.relative_to(out)}"
        if any(secret in str(asked.headers) for asked in other.requests for secret in known):
            yield "another origin"

    def _lies(self, pulled: Path) -> list[str]:
        """Files that are not what was saved, in a checkpoint that was pulled and passes for intact."""
        import ckpt

        if not (pulled / "step-1/manifest.json").exists() or ckpt.verify(pulled / "step-1")["step-1"]:
            return []  # plain files, which pull says that it could not verify
        true = {key.removeprefix("run/"): data for key, data in self._objects.items()}
        files = {path.relative_to(pulled).as_posix(): path for path in pulled.rglob("*") if path.is_file()}
        return [f"wrong: {key}" for key, path in files.items() if key in true and path.read_bytes() != true[key]]


def _too_long(number: int, frame: FrameType | None) -> None:
    raise HangError


def _batch(folder: str, seed: int, numbers: list[int]) -> tuple[Counter[str], list[str]]:
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as own:
        sys.stdout = sys.stderr = StringIO()  # progress bars and warnings
        return Conversations(Path(own), seed).hold(numbers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.servers", description=__doc__)
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes at the same time")
    parser.add_argument("--scratch", type=Path)
    options = parser.parse_args()
    began, ended, findings = time.monotonic(), Counter[str](), list[str]()
    numbers = range(options.first, options.first + options.conversations)
    batches = [list(numbers[start : start + _BATCH]) for start in range(0, len(numbers), _BATCH)]
    with (
        tempfile.TemporaryDirectory(prefix="servers-", dir=options.scratch, ignore_cleanup_errors=True) as folder,
        ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool,  # a crash is an error of it
    ):
        for counts, found in pool.map(partial(_batch, folder, options.seed), batches):
            ended += counts
            findings += found
            for one in found:
                print(one, flush=True)
    seconds = time.monotonic() - began
    print(f"{ended.total()} conversations with servers that lie, in {seconds:.0f} s: {len(findings)} findings")
    print("\n".join(f"{how}: {count}" for how, count in sorted(ended.items())))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
