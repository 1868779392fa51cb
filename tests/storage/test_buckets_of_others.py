"""Buckets with conditions of their own: credentials that may only read, and settings that every request must carry."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.storage import open_storage
from ckpt.tools.show import summarize
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.seaweed import BUCKET, DOMAIN, Server
from tests.storage.test_faults import reached_through

pytestmark = pytest.mark.slow


@pytest.fixture
def proxied(server: Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(server.port) as proxy:
        yield proxy


def save(url: str, **options: object) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(40, 30)
    with ckpt.StateManager(url, model=model, storage_options=options or None) as manager:
        for step in (1, 2):
            manager.progress.step = step
            manager.save_state(wait=True)
    return model


def test_credentials_that_may_only_read_are_enough_for_all_that_reads(
    proxied: FaultyProxy, s3: str, tmp_path: Path
) -> None:
    saved = save(s3)
    proxied.plan = lambda method, path: None if method in ("GET", "HEAD") else "denied"
    options = reached_through(proxied)
    names: dict[str, list[str]] = {"step-00000002": [], "step-00000001": []}
    assert [found.name for found in ckpt.list_checkpoints(s3, storage_options=options)] == list(names)
    assert ckpt.verify(s3, storage_options=options) == names
    ckpt.load_model(s3, loaded := nn.Linear(40, 30), storage_options=options)
    assert torch.equal(loaded.weight, saved.weight)
    ckpt.merge(f"{s3}/step-00000002", tmp_path / "model.safetensors", storage_options=options)
    ckpt.pull(s3, tmp_path / "back", storage_options=options)
    assert ckpt.verify(tmp_path / "back") == names
    assert summarize(s3, options)
    with pytest.raises(ckpt.DeniedError, match="Check the credentials"):
        ckpt.StateManager(s3, model=nn.Linear(40, 30), storage_options=options)


def test_what_a_bucket_demands_of_requests_is_sent_with_each(proxied: FaultyProxy, s3: str) -> None:
    """Encryption, storage class and who pays: options of s3fs, in every request that can have them."""
    demanded = {"ServerSideEncryption": "AES256", "StorageClass": "STANDARD_IA"}
    options = {**reached_through(proxied), "s3_additional_kwargs": demanded, "requester_pays": True}
    save(s3, **options)
    storage = open_storage(s3, **options)
    storage.write("large", [bytes(17 << 20)])
    storage.link("large", "linked")
    writes = [headers for method, headers in proxied.asked if method == "PUT"]
    whole = [headers for headers in writes if "x-amz-meta-ckpt-write" in headers]
    begun = [headers for method, headers in proxied.asked if method == "POST" and "x-amz-meta-ckpt-write" in headers]
    copied = [headers for headers in writes if "x-amz-copy-source" in headers]
    assert whole
    assert begun
    assert copied
    for headers in (*whole, *begun, *copied):
        assert headers["x-amz-server-side-encryption"] == "AES256"
        assert headers["x-amz-storage-class"] == "STANDARD_IA"
    paying = [headers for _, headers in proxied.asked if headers.get("x-amz-request-payer") == "requester"]
    assert len(paying) == len(proxied.asked)


def test_a_bucket_may_be_a_part_of_the_hosts_name(server: Server, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Amazon's are. Not every resolver knows that all names below `localhost` are this machine."""
    asked, resolve = set(), socket.getaddrinfo

    def resolve_here(host: Any, *args: Any, **more: Any) -> Any:
        asked.add(host)
        return resolve("127.0.0.1" if host == f"{BUCKET}.{DOMAIN}" else host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    options = {
        "endpoint_url": f"http://{DOMAIN}:{server.port}",
        "config_kwargs": {"s3": {"addressing_style": "virtual"}},
    }
    save(s3, **options)
    open_storage(s3, **options).write("large", [bytes(17 << 20)])
    assert asked & {DOMAIN, f"{BUCKET}.{DOMAIN}"} == {f"{BUCKET}.{DOMAIN}"}  # others still have 127.0.0.1 to look up
    assert ckpt.verify(s3, storage_options=options) == ckpt.verify(s3) == {"step-00000002": [], "step-00000001": []}
    assert open_storage(s3).read("large") == bytes(17 << 20)


def test_uploads_that_may_not_be_listed_are_named_once(
    proxied: FaultyProxy, s3: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxied.plan = lambda method, path: "denied" if "uploads" in path else None
    storage = open_storage(s3, **reached_through(proxied))
    for _ in range(2):
        storage.sweep()
    assert caplog.text.count("could not remove interrupted uploads") == 1
