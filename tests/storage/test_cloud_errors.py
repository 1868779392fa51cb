"""What is wrong with a place is one clear error: a container that is not there, credentials, options, no network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import pytest

import ckpt
from ckpt.storage import open_storage
from ckpt.storage.clouds.answers import Answer, receive
from ckpt.storage.clouds.resumable import Part
from tests.helpers import clouds
from tests.helpers.clouds import ACCOUNT, BUCKET, KEY
from tests.helpers.storage_contract import sizes

SECRET = "c2VjcmV0LXRoYXQtbXVzdC1ub3QtYmUtc2hvd24="


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of this machine nor of a cloud that it might run in, and nothing listens where they are looked for."""
    for name in [name for name in os.environ if name.startswith(("AZURE_", "GOOGLE_", "STORAGE_EMULATOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.fixture(scope="module")
def azurite() -> Iterator[int]:
    with clouds.azurite() as port:
        yield port


@pytest.mark.slow
class TestAzure:
    @pytest.fixture(autouse=True)
    def told(self, azurite: int, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in clouds.environment("az", azurite).items():
            monkeypatch.setenv(name, value)

    def test_a_container_that_is_missing_is_named_whatever_is_asked_of_it(self) -> None:
        storage = open_storage("az://nowhere/run")
        said = r"there is no container 'nowhere'\. Create it, or check its name"
        with pytest.raises(ckpt.StorageError, match=f"could not list az://nowhere/run: {said}"):
            list(storage.list())
        with pytest.raises(ckpt.StorageError, match=said):
            storage.read("object")
        with pytest.raises(ckpt.StorageError, match=said):
            storage.write("object", [b"x"])
        with pytest.raises(ckpt.StorageError, match=said):
            storage.delete(["object"])
        with pytest.raises(ckpt.StorageError, match=said):
            ckpt.list_checkpoints("az://nowhere/run")

    def test_a_folder_of_hierarchical_names_is_no_object(self, azurite: int) -> None:
        """They are blobs with a mark; Azurite has none, so one is made by hand."""
        from azure.storage.blob import BlobServiceClient

        container = BlobServiceClient.from_connection_string(clouds.connection_string(azurite)).get_container_client(
            BUCKET
        )
        container.upload_blob("hns/folder", b"", metadata={"hdi_isfolder": "true"})
        storage = open_storage(f"az://{BUCKET}/hns")
        storage.write("folder/object", [b"x"])
        assert sizes(storage) == {"folder/object": 1}
        assert storage.version("folder") is None
        with pytest.raises(ckpt.AbsentError, match="hns/folder does not exist"):
            storage.read("folder")

    def test_its_requests_do_not_fill_the_log_of_a_training(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        open_storage(f"az://{BUCKET}/quiet").write("object", [b"x"])
        assert not caplog.messages

    def test_a_key_that_is_wrong_is_denied_and_not_shown(self, azurite: int) -> None:
        storage = open_storage(f"az://{BUCKET}/run", connection_string=clouds.connection_string(azurite, SECRET))
        with pytest.raises(ckpt.DeniedError, match="Check the credentials") as raised:
            storage.read("object")
        assert SECRET not in str(raised.value)
        assert raised.value.__cause__ is raised.value.__context__ is None

    def test_all_ways_to_give_credentials_lead_there(self, azurite: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """By name and key, and by a signature."""
        monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        from ckpt.storage.clouds import azure

        monkeypatch.setattr(azure, "_address", lambda fs: f"http://127.0.0.1:{azurite}/{ACCOUNT}")
        everything = ResourceTypes(service=True, container=True, object=True)
        allowed = AccountSasPermissions(read=True, write=True, delete=True, list=True, create=True)
        sas = generate_account_sas(ACCOUNT, KEY, everything, allowed, "2099-01-01")
        for number, given in enumerate([{"account_key": KEY}, {"sas_token": sas}]):
            storage = open_storage(f"abfs://{BUCKET}/by-{number}", account_name=ACCOUNT, **given)
            storage.write("object", [b"x"], over=None)
            storage.link("object", "other")
            assert sizes(storage) == {"object": 1, "other": 1}


def test_a_credential_for_an_event_loop_is_asked_in_one() -> None:
    from fsspec.asyn import get_loop

    from ckpt.storage.clouds.azure import _synchronous

    class Login:
        async def get_token(self, *scopes: str, **arguments: object) -> str:
            return f"a token for {scopes[0]}"

    filesystem = SimpleNamespace(credential=Login(), loop=get_loop())
    assert _synchronous(filesystem).get_token("https://storage.azure.com/.default").startswith("a token for https")


@pytest.mark.slow
def test_a_bucket_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with clouds.gcs_emulator() as port:
        for name, value in clouds.environment("gs", port).items():
            monkeypatch.setenv(name, value)
        storage = open_storage("gs://nowhere/run")
        said = r"there is no bucket 'nowhere'\. Create it, or check its name"
        with pytest.raises(ckpt.StorageError, match=f"could not list gs://nowhere/run: {said}"):
            list(storage.list())
        with pytest.raises(ckpt.StorageError, match=said):
            storage.write("object", [b"x"])
        with pytest.raises(ckpt.StorageError, match=said):
            storage.write("object", [bytes(17 << 20)])
        with pytest.raises(ckpt.AbsentError):
            storage.read("object")


def test_a_login_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage("abfss://container@account.dfs.core.windows.net/run", **_ONLY_ENVIRONMENT)
    with pytest.raises(ckpt.DeniedError, match=r"abfss://container@account\S+/object: the credentials are missing"):
        storage.read("object")


_ONLY_ENVIRONMENT = {
    f"exclude_{name}_credential": True
    for name in (
        "workload_identity", "managed_identity", "shared_token_cache", "visual_studio_code", "cli", "powershell",
        "developer_cli",
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("az://container/run", {}, r"it needs account_name with account_key.* Given: nothing"),
        ("az://container/run", {"connection_string": "nonsense"}, r"Given: connection_string"),
        ("az:///run", {"account_name": "a"}, r"az:///run names no container"),
        ("gs:///run", {}, r"gs:///run names no bucket"),
        ("gs://bucket/run", {"token": "/no/such/file.json"}, r"gcsfs finds no credentials .*token"),
        ("abfss://c@one.dfs.core.windows.net/run", {"account_name": "two"}, r"of the account 'one', but .*'two'"),
        (
            "az://container/run",
            {"acount_name": "x"},
            r"take the storage_options acount_name\. It takes account_host",
        ),
        ("az://container/run", {"read_timeout": 3}, r"not take the storage_options read_timeout.*use stall"),
        ("gs://bucket/run", {"tokn": "x", "token": "anon"}, r"not take the storage_options tokn\. It takes access"),
        ("gs://bucket/run", {"session_kwargs": {}}, r"session_kwargs: proxies .* from the environment"),
        ("hf://me/run", {"tokn": "x", "token": "x"}, r"hf:// does not take the storage_options tokn\."),
        ("local:///tmp/run", {"mkdir": True}, r"local:// does not take the storage_options mkdir\."),
        ("s3://bucket/run", {"secrt": "x", "key": "x"}, r"s3:// does not take the storage_options secrt\."),
    ],
)
def test_an_option_that_is_wrong_is_named(url: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=said):
        open_storage(url, **options)


def test_options_that_other_programs_give_are_taken() -> None:
    open_storage("gs://bucket/run", token="anon", project="p", requester_pays=True, block_size=5, deadline=1.0)
    open_storage("az://container/run", account_name="a", account_key=KEY, blocksize=5, max_concurrency=3, stall=1.0)
    open_storage("s3://bucket/run", key="k", secret="s", client_kwargs={}, use_listings_cache=True, profile=None)


@pytest.mark.parametrize(("scheme", "package"), [("az", "adlfs"), ("abfss", "adlfs"), ("gs", "gcsfs.core")])
def test_a_package_that_is_missing_is_named_with_the_line_to_install_it(
    scheme: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    extra = {"adlfs": "azure", "gcsfs.core": "gcs"}[package]
    with pytest.raises(ckpt.ConfigError, match=rf"pip install 'torch-ckpt\[{extra}\]'"):
        open_storage(f"{scheme}://somewhere/run", account_name="a") if extra == "azure" else open_storage("gs://b/run")


@pytest.mark.parametrize("url", ["gs://bucket/run", "az://container/run"])
def test_a_server_that_does_not_answer_is_said(url: str) -> None:
    nobody = "http://127.0.0.1:9"
    given: dict[str, object] = {"token": "anon", "endpoint_url": nobody}
    if url.startswith("az"):
        given = {"connection_string": f"AccountName=a;AccountKey={SECRET};BlobEndpoint={nobody}/a;"}
    with pytest.raises(ckpt.TransientError, match=r"no server answers\. Check .*Tried \d+ times") as raised:
        open_storage(url, deadline=0.3, **given).read("object")
    assert SECRET not in str(raised.value)


def test_the_hub_without_a_network_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = {"endpoint": "http://127.0.0.1:9", "skip_instance_cache": True, "deadline": 0.3}
    storage = open_storage("hf://me/repository/run", **nobody)
    with pytest.raises(ckpt.TransientError, match=r"could not read hf://me/repository/run/object: the connection"):
        storage.read("object")
    with pytest.raises(ckpt.TransientError, match="could not list"):
        list(storage.list())


class Raw:
    """A body that does not end."""

    version = 10

    def read(self, most: int | None) -> bytes:
        return bytes(most or 0)


def test_an_answer_is_not_read_beyond_what_was_asked_for() -> None:
    class Response(nullcontext[None]):
        raw = Raw()
        status_code = 200
        headers: ClassVar[dict[str, str]] = {}

    assert receive(Response(), None).body == b""
    with pytest.raises(ckpt.StorageError, match="more than the 10 bytes that were asked for"):
        receive(Response(), 10)


class Recorded:
    """A server of uploads that has the first `count` bytes of one."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[tuple[bytes, str]] = []

    def send(self, session: str, views: list[memoryview], span: str) -> Answer:
        self.sent.append((b"".join(views), span))
        if views:
            self.count = int(span.partition("/")[0].rpartition("-")[2]) + 1
            if len(self.sent) == 1:
                raise ConnectionError
        return Answer(308, {"Range": f"bytes=0-{self.count - 1}"} if self.count else {}, b"")


@pytest.mark.parametrize(("there", "again"), [(0, b"0123456789"), (4, b"456789"), (10, None)])
def test_a_part_is_sent_again_from_where_it_has_arrived(there: int, again: bytes | None) -> None:
    server = Recorded(0)
    part = Part(server, "session", 0, [memoryview(b"012"), memoryview(b"3456789")], None)
    with pytest.raises(ConnectionError):
        part()
    server.count = there
    assert part() is None
    assert server.sent[1] == (b"", "*/*")
    assert [data for data, _ in server.sent[2:]] == ([] if again is None else [again])
    assert all(span == f"{there}-9/*" for _, span in server.sent[2:])


def test_a_request_that_the_server_does_not_know_is_not_sent_again() -> None:
    from ckpt.storage.clouds.errors import Advice, from_answer

    error = from_answer(501, "", "write", "gs://bucket#1/run", Advice("bucket 'bucket#1'", "", ""))
    assert not isinstance(error, ckpt.TransientError)
    assert "the server says 501, as it does not know such a request. Check the URL" in str(error)
