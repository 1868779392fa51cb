"""What is wrong with a place is one clear error: a container that is not there, credentials, options, no network."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import ckpt
from ckpt.storage import Entry, Storage, multipart, open_storage
from ckpt.storage.clouds.errors import CutError
from ckpt.storage.clouds.gcs import Answer, AnswerError, Part, receive
from ckpt.storage.clouds.objects import CloudObjects
from ckpt.storage.retry import Requests, RetryPolicy
from tests.helpers import clouds
from tests.helpers.clouds import ACCOUNT, BUCKET, KEY
from tests.helpers.hostile_bucket import HostileBucket, Reply
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
        ("az://container/run", {}, r"account_name with account_key.* You gave: nothing"),
        ("az://container/run", {"connection_string": "nonsense"}, r"You gave: connection_string"),
        ("az:///run", {"account_name": "a"}, r"az:///run names no container"),
        ("gs:///run", {}, r"gs:///run names no bucket"),
        ("gs://bucket/run", {"token": "/no/such/file.json"}, r"gcsfs finds no credentials .*token"),
        ("abfss://c@one.dfs.core.windows.net/run", {"account_name": "two"}, r"names the account 'one', but .*'two'"),
        (
            "az://container/run",
            {"acount_name": "x"},
            r"accept these storage_options: acount_name\. \w+:// accepts account_host",
        ),
        ("az://container/run", {"read_timeout": 3}, r"not accept these storage_options: read_timeout.*use stall"),
        (
            "gs://bucket/run",
            {"tokn": "x", "token": "anon"},
            r"not accept these storage_options: tokn\. \w+:// accepts access",
        ),
        ("gs://bucket/run", {"session_kwargs": {}}, r"session_kwargs: proxies .* from the environment"),
        ("hf://me/run", {"tokn": "x", "token": "x"}, r"hf:// does not accept these storage_options: tokn\."),
        ("local:///tmp/run", {"mkdir": True}, r"local:// does not accept these storage_options: mkdir\."),
        ("s3://bucket/run", {"secrt": "x", "key": "x"}, r"s3:// does not accept these storage_options: secrt\."),
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


class Raw(io.BytesIO):
    """The body of an answer as it comes over HTTP/1.0 or 1.1."""

    def __init__(self, body: bytes, version: int = 11) -> None:
        super().__init__(body)
        self.version = version


class Response(nullcontext[None]):
    def __init__(self, raw: Raw, **headers: str) -> None:
        super().__init__()
        self.raw, self.status_code = raw, 200
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def test_an_answer_is_not_read_beyond_what_was_asked_for() -> None:
    raw = Raw(bytes(1000), 10)
    with pytest.raises(ckpt.StorageError, match="more than the 10 bytes that ckpt asked for"):
        receive(Response(raw), 10)
    assert raw.tell() == 11
    assert receive(Response(Raw(bytes(10), 10)), 10).body == bytes(10)


def test_an_answer_that_was_cut_off_is_not_taken_for_a_complete_one() -> None:
    for whole in ({"Content_Length": "5"}, {"Connection": "close"}, {"Transfer_Encoding": "chunked"}):
        assert receive(Response(Raw(b"12345"), **whole)).body == b"12345"
    for cut in ({"Content_Length": "6"}, {}):  # within the body, or before the header that says where it ends
        with pytest.raises(CutError):
            receive(Response(Raw(b"12345"), **cut))
    for beginning in (b"", b'{"name": "mod'):
        with pytest.raises(CutError):
            receive(Response(Raw(beginning), Connection="close")).fields()


class Recorded:
    """A server of uploads that has the first `count` bytes of one, and takes some at a time, of the first nothing."""

    def __init__(self, count: int, takes: int = 100) -> None:
        self.count = count
        self.takes = takes
        self.sent: list[tuple[bytes, str]] = []

    def send(self, session: str, views: list[memoryview], span: str) -> Answer:
        self.sent.append((b"".join(views), span))
        if views:
            if len(self.sent) == 1:
                raise ConnectionError
            self.count += min(self.takes, len(self.sent[-1][0]))
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


def test_a_part_of_which_the_server_took_less_is_sent_again_from_there() -> None:
    server = Recorded(0, takes=4)
    part = Part(server, "session", 0, [memoryview(b"0123456789")], None)
    for error in (ConnectionError, AnswerError, AnswerError):
        with pytest.raises(error):
            part()
    assert part() is None
    assert [sent for sent in server.sent if sent[0]] == [
        (b"0123456789", "0-9/*"), (b"0123456789", "0-9/*"), (b"456789", "4-9/*"), (b"89", "8-9/*"),
    ]  # fmt: skip


@pytest.mark.parametrize("there", [9, 21])
def test_a_server_that_has_lost_what_it_had_or_has_what_it_was_not_sent_is_an_error(there: int) -> None:
    server = Recorded(10)
    part = Part(server, "session", 10, [memoryview(b"0123456789")], 30)
    with pytest.raises(ConnectionError):
        part()
    server.count = there
    with pytest.raises(ckpt.StorageError, match="the server lost a part of an upload"):
        part()


@pytest.mark.parametrize("arrived", [False, True])
def test_a_part_that_is_refused_has_arrived_before_or_is_an_error(arrived: bool) -> None:
    class Refusing(Recorded):
        def send(self, session: str, views: list[memoryview], span: str) -> Answer:
            if views:
                raise AnswerError(400, "")
            return super().send(session, views, span)

    part = Part(Refusing(10 if arrived else 4), "session", 0, [memoryview(b"0123456789")], None)
    with nullcontext() if arrived else pytest.raises(AnswerError, match="400"):
        assert part() is None


def test_a_request_that_the_server_does_not_know_is_not_sent_again() -> None:
    from ckpt.storage.clouds.errors import Advice, from_answer

    error = from_answer(501, "", "write", "gs://bucket#1/run", Advice("bucket 'bucket#1'", "", ""))
    assert not isinstance(error, ckpt.TransientError)
    assert "the server says 501, because it does not know such a request. ckpt needs" in str(error)


class Lying:
    """A client whose server answers a listing with this page, again and again."""

    def __init__(self, *page: Any) -> None:
        self._page = page

    def page(self, prefix: str, marker: str | None) -> Any:
        return self._page

    def translate(self, error: Exception, what: str, where: str) -> None:
        return None


@pytest.mark.parametrize(
    ("entries", "following", "said"),
    [
        ([Entry("other/object", 1)], None, "keys below a prefix that ckpt did not ask for"),
        ([Entry("run/object", -1)], None, "an object with a negative size"),
        ([Entry("run/object", 1)], "here", "its list continues, but not where"),
    ],
)
def test_a_store_that_lists_nonsense_is_refused(entries: list[Entry], following: str | None, said: str) -> None:
    client: Any = Lying(entries, following)
    with pytest.raises(ckpt.StorageError, match=said):
        list(CloudObjects("az://container/run", "run", client, Requests(RetryPolicy(deadline=0))).entries(""))


@contextmanager
def answering(url: str, **replies: Reply) -> Iterator[Storage]:
    """A storage whose server has one answer for each method."""
    with HostileBucket({}, lambda asked, _: replies[asked.method]) as server:
        if url.startswith("gs:"):
            yield open_storage(url, token="anon", endpoint_url=server.url, deadline=1.0)
        else:
            account = f"AccountName=a;AccountKey={SECRET};BlobEndpoint={server.url}/a;"
            yield open_storage(url, connection_string=account, deadline=1.0)


def test_an_answer_that_is_neither_a_success_nor_an_error_is_no_list() -> None:
    page = json.dumps({"items": [{"name": "run/object", "size": "3", "generation": "1"}]}).encode()
    with (
        answering("gs://bucket/run", GET=Reply(300, page)) as storage,
        pytest.raises(ckpt.StorageError, match="the server says 300"),
    ):
        list(storage.list())


@pytest.mark.parametrize("status", [404, 410])
def test_an_upload_that_the_server_has_forgotten_is_said(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart.split_into_parts, "__defaults__", (5,))
    begun = Reply(headers={"Location": "http://elsewhere/upload?upload_id=1"})
    with (
        answering("gs://bucket/run", POST=begun, PUT=Reply(status), DELETE=Reply(204), GET=Reply(404)) as storage,
        pytest.raises(
            ckpt.StorageError, match=r"run/object: the server does not know this upload any more\. Save again"
        ),
    ):
        storage.write("object", iter([b"01234", b"56789"]))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("conditionNotMet", ckpt.errors.ConflictError), ("orgPolicyConstraintFailed", ckpt.StorageError)],
)
def test_of_the_conditions_that_google_refuses_a_write_for_only_ours_is_a_conflict(
    reason: str, kind: type[Exception]
) -> None:
    body = json.dumps({"error": {"errors": [{"reason": reason}]}}).encode()
    with (
        answering("gs://bucket/run", POST=Reply(412, body), GET=Reply(404)) as storage,
        pytest.raises(ckpt.StorageError) as raised,
    ):
        storage.write("object", [b"x"])
    assert type(raised.value) is kind


def test_a_copy_that_azure_gives_up_is_an_error() -> None:
    there = Reply(headers={"ETag": "x"}, announced=1)
    failed = Reply(202, headers={"x-ms-copy-status": "failed", "x-ms-copy-id": "1"})
    with (
        answering("az://container/run", HEAD=there, PUT=failed) as storage,
        pytest.raises(
            ckpt.StorageError, match=r"could not copy \S+/other: the server reports the status 'failed' for the copy"
        ),
    ):
        storage.link("object", "other")
