"""`storage_options` that make no sense are refused by name, before any request is sent or anything is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ckpt
from ckpt.storage import open_storage


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("s3://bucket/run", {"deadline": "5min"}, "deadline='5min' must be a number of seconds"),
        (
            "s3://bucket/run",
            {"stall": 0, "deadline": -1},
            "deadline=-1 must be a number of seconds; stall=0",
        ),
        ("gs://bucket/run", {"deadline": "5min"}, "deadline='5min' must be a number of seconds"),
        ("hub://me/run", {"deadline": None}, "deadline=None must be a number of seconds"),
        ("hub://me/run", {"interval": "1h"}, "interval='1h' must be the number of seconds"),
        ("s3://bucket/run", {"config_kwargs": 3}, r"s3fs does not accept these storage_options.*: config_kwargs"),
        (
            "s3://bucket/run",
            {"max_concurrency": "many"},
            r"s3fs does not accept these storage_options.*max_concurrency",
        ),
        ("s3://bucket/run", {"s3_additional_kwargs": 3}, "s3_additional_kwargs must be a dict"),
        ("http://127.0.0.1:9/run", {"endpoint": "x"}, "http:// does not accept these storage_options: endpoint"),
    ],
)
def test_a_value_that_is_none_is_named(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=said):
        open_storage(url, **options)


def test_a_misspelt_field_of_every_write_is_not_left_out() -> None:
    """s3fs would, and nothing would be encrypted."""
    given = {"ServerSideEncyption": "aws:kms", "StorageClass": "STANDARD_IA"}
    with pytest.raises(
        ckpt.ConfigError, match="S3 writes don't accept these s3_additional_kwargs: ServerSideEncyption"
    ):
        open_storage("s3://bucket/run", s3_additional_kwargs=given)


def test_what_goes_with_requests_of_http_is_taken() -> None:
    open_storage("http://127.0.0.1:9/run", headers={"X-Who": "me"}, client_kwargs={"trust_env": True}, ssl=False)


def test_a_profile_that_is_missing_and_an_endpoint_that_is_no_url_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    with pytest.raises(ckpt.ConfigError, match=r"has no such profile\. Check AWS_PROFILE"):
        open_storage("s3://bucket/run", profile="training").read("object")
    given = {"endpoint_url": "localhost:1234", "key": "k", "secret": "s"}
    with pytest.raises(ckpt.ConfigError, match="is no URL: write http://host:port"):
        open_storage("s3://bucket/run", **given).read("object")


def test_certificates_that_are_missing_or_none_are_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.pem").write_text("none")
    given = {"endpoint_url": "https://127.0.0.1:9", "key": "k", "secret": "s", "deadline": 1}
    for name in ("missing.pem", "empty.pem"):
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / name))
        with pytest.raises(
            ckpt.ConfigError, match=r"can't read the file of trusted certificates\. Check AWS_CA_BUNDLE"
        ):
            open_storage("s3://bucket/run", **given).read("object")
