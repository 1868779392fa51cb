"""Azure Blob Storage, and Data Lake Storage over it: `az://`, `abfs://`, `abfss://`.

adlfs reads `storage_options` and the environment. Requests go through Microsoft's own client, whose conditions
(`If-None-Match`, `If-Match`) hold for the request that makes a large object appear too.
"""

from __future__ import annotations

import base64
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.errors import ConfigError, StorageError
from ckpt.storage.base import ANY, LARGEST_DOCUMENT, Entry
from ckpt.storage.clouds import errors
from ckpt.storage.clouds.objects import WRITE, CloudObjects, Head, Retried, refuse_unknown, several
from ckpt.storage.multipart import Body
from ckpt.storage.retry import AT_ONCE, Requests, RetryPolicy

_TAKEN = (
    "account_name", "account_key", "connection_string", "credential", "sas_token", "client_id", "client_secret",
    "tenant_id", "anon", "account_host", "location_mode", "max_concurrency",
)  # fmt: skip
_OF_LOGIN = ("authority", "managed_identity_client_id", "workload_identity_client_id", "process_timeout")
# about listings and files that ckpt does not use: without an effect before, too
_WITHOUT_EFFECT = (
    "asynchronous", "blocksize", "default_cache_type", "default_fill_cache", "assume_container_exists",
    "use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache",
)  # fmt: skip
_INSTEAD = {
    "timeout": "use deadline",
    "connection_timeout": "use stall",
    "read_timeout": "use stall",
    "socket_timeout": "use stall",
    "version_aware": "versions of a container are not used",
    "request_session": "proxies are taken from the environment",
}
_FOLDER = "hdi_isfolder"  # metadata of what stands for a folder where names are hierarchical
_COPY_POLL = 0.5  # seconds


def open_azure(scheme: str, rest: str, options: Mapping[str, Any]) -> CloudObjects:
    """The objects of `scheme://container/prefix`, or of `scheme://container@account.dfs.core.windows.net/prefix`."""
    given = dict(options)
    place, _, prefix = rest.partition("/")
    container, _, host = place.partition("@")
    url = f"{scheme}://{rest}".rstrip("/")
    if not container:
        raise ConfigError(f"{url} names no container: write {scheme}://container/folder.")
    of_login = [name for name in given if name.startswith("exclude_") or name in _OF_LOGIN]
    refuse_unknown(scheme, given, _TAKEN, [*_WITHOUT_EFFECT, *of_login], _INSTEAD)
    policy = RetryPolicy.taken_from(given)
    _take_account(url, host, given)
    requests = Requests(policy, url, given.get("max_concurrency") or AT_ONCE)
    client = AzureClient(_service(scheme, given, policy), container, requests.at_once, policy.deadline)
    return CloudObjects(url, prefix.strip("/"), client, requests)


class AzureClient:
    """Requests about the blobs of one container."""

    removed_at_once = 1

    def __init__(self, service: Any, container: str, at_once: int, deadline: float) -> None:
        self._deadline = deadline  # seconds for a copy inside the store
        self._container = service.get_container_client(container)
        self._at_once = at_once
        self._advice = errors.Advice(
            f"container {container!r}",
            "the credentials (AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, `az "
            "login`, or storage_options)",
            "the account's name",
        )

    def head(self, key: str) -> Head:
        found = self._blob(key).get_blob_properties()
        if (found.metadata or {}).get(_FOLDER):
            raise FolderError(key)
        return Head(found.size, _told(found.etag), (found.metadata or {}).get(WRITE))

    def put(self, key: str, body: Body, over: str | None, token: str) -> str:
        data = b"".join(body.views)
        conditions = {"overwrite": True, **_condition(over)} if over is not None else {"overwrite": False}
        answer = self._blob(key).upload_blob(data, length=len(data), metadata={WRITE: token}, **conditions)
        return _told(answer["etag"])

    def put_in_parts(self, key: str, parts: Iterator[Body], over: str | None, token: str, retried: Retried) -> str:
        """Blocks, several concurrently. Their names hold the token: those of two writers of the same key are kept apart
        until one of them commits.
        """
        from azure.storage.blob import BlobBlock

        blob = self._blob(key)

        def stage(part: tuple[int, Body], stopped: threading.Event) -> str:
            def attempt() -> None:
                body.seek(0)
                blob.stage_block(name, body, length=len(body))

            name, body = base64.b64encode(f"{token}{part[0]:06d}".encode()).decode(), part[1]
            retried(attempt, stopped=stopped, is_large=True)
            return name

        names = several(stage, enumerate(parts), self._at_once, "ckpt-upload")
        blocks = [BlobBlock(block_id=name) for name in names]
        condition = {"metadata": {WRITE: token}, **_condition(over)}
        return retried(lambda: _told(blob.commit_block_list(blocks, **condition)["etag"]))

    def read(self, key: str, start: int, stop: int, stopped: threading.Event) -> list[bytes]:
        from azure.core.exceptions import HttpResponseError

        data = b""
        try:
            found = self._blob(key).download_blob(offset=start, length=stop - start)
            data = bytes(found.readall())
        except HttpResponseError as error:
            if error.status_code != 416:
                raise
        if not data:  # what stands for a folder is empty too
            self.head(key)
        return [data]

    def copy(self, source: str, target: str, size: int, retried: Retried) -> None:
        retried(lambda: self._copy(source, target))

    def _copy(self, source: str, target: str) -> None:
        blob, end = self._blob(target), time.monotonic() + self._deadline
        copy = blob.start_copy_from_url(self._blob(source).url)
        status = _told(copy["copy_status"])
        while status == "pending" and time.monotonic() < end:
            time.sleep(_COPY_POLL)
            status = blob.get_blob_properties().copy.status
        if status == "pending":
            blob.abort_copy(copy["copy_id"])
        if status != "success":
            raise StorageError(f"the server reports the status {errors.quotable(status)!r} for the copy.")

    def page(self, prefix: str, marker: Any) -> tuple[list[Entry], Any]:
        pages = self._container.list_blobs(name_starts_with=prefix, include=["metadata"]).by_page(marker)
        found = [
            Entry(blob.name, blob.size, f'"{blob.etag.strip(chr(34))}"')
            for blob in next(pages, ())
            if not (blob.metadata or {}).get(_FOLDER)
        ]
        return found, pages.continuation_token or None

    def remove(self, keys: list[str]) -> None:
        from azure.core.exceptions import HttpResponseError, ResourceNotFoundError

        try:
            self._blob(keys[0]).delete_blob()
        except ResourceNotFoundError as error:
            if _code(error) == "ContainerNotFound":
                raise
        except HttpResponseError as error:
            if _code(error) != "DirectoryIsNotEmpty":  # a folder is no object
                raise

    def translate(self, error: Exception, what: str, where: str) -> StorageError | None:
        from azure.core import exceptions

        begin = f"could not {what} {where}"
        if isinstance(error, FolderError):
            return errors.absent(where)
        if isinstance(error, exceptions.ServiceRequestError):
            return errors.unreached(begin, self._advice)
        if isinstance(error, exceptions.ClientAuthenticationError) and not error.status_code:
            return errors.refused(begin, self._advice)
        if isinstance(error, exceptions.HttpResponseError) and error.status_code:
            return errors.from_answer(error.status_code, _code(error), what, where, self._advice)
        if isinstance(error, exceptions.AzureError | OSError):
            return errors.cut_off(begin, error)
        if isinstance(error, ValueError):  # a key that is not base64, for instance
            return errors.refused(begin, self._advice)
        if isinstance(error, errors.OF_BELIEVERS):
            return errors.strange_answer(where, "the server gave an answer that Azure never gives")
        return None

    def _blob(self, key: str) -> Any:
        return self._container.get_blob_client(key)


class FolderError(Exception):
    """The key stands for a folder, which is no object."""


def _condition(over: str | None) -> dict[str, Any]:
    from azure.core import MatchConditions

    if over == ANY:
        return {}
    if over is None:
        return {"match_condition": MatchConditions.IfMissing}
    return {"etag": over, "match_condition": MatchConditions.IfNotModified}


def _told(header: str | None) -> str:
    """What a header says. The client takes an answer that was cut off among its headers for one that lacks some."""
    if not header:
        raise errors.CutError
    return str(header)


def _code(error: Any) -> str:
    """The code of an answer, as Azure names it."""
    code = getattr(error, "error_code", None) or ""
    return str(getattr(code, "value", code))


def _take_account(url: str, host: str, options: dict[str, Any]) -> None:
    """The account, where the URL names it."""
    if not host:
        return
    account, _, domain = host.partition(".")
    if options.setdefault("account_name", account) != account:
        raise ConfigError(f"{url} names the account {account!r}, but storage_options name {options['account_name']!r}.")
    if domain not in ("", "dfs.core.windows.net", "blob.core.windows.net"):
        options.setdefault("account_host", f"{account}.{domain.replace('dfs.', 'blob.', 1)}")


def _service(scheme: str, options: dict[str, Any], policy: RetryPolicy) -> Any:
    """Microsoft's client, with what adlfs has made of the options."""
    try:
        from adlfs import AzureBlobFileSystem
        from azure.core.pipeline.transport import RequestsTransport
        from azure.storage.blob import BlobServiceClient
    except ImportError as error:
        raise ConfigError(
            f"{scheme}:// needs adlfs, which is not installed ({error.name}): pip install 'torch-ckpt[azure]'"
        ) from None
    try:
        fs = AzureBlobFileSystem(**{**options, "use_listings_cache": False, "skip_instance_cache": True})
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"can't open {scheme}:// ({type(error).__name__}). Give connection_string, or account_name with "
            "account_key, sas_token or a login: in storage_options, or in variables such as "
            "AZURE_STORAGE_CONNECTION_STRING and AZURE_STORAGE_ACCOUNT_NAME. You gave: "
            f"{', '.join(sorted(options)) or 'nothing'}."
        ) from None
    transport = RequestsTransport(connection_timeout=min(10.0, policy.stall), read_timeout=policy.stall)
    transport.open()
    transport.session.hooks["response"].append(_bound)
    ours = {
        "retry_total": 0,  # `CloudObjects` does it, with a deadline
        "transport": transport,
        "max_chunk_get_size": 8 << 20,
        "http_logging_level": logging.DEBUG,  # its own is INFO: fifty lines in the log of a training, every ten seconds
    }
    if fs.connection_string is not None:
        return BlobServiceClient.from_connection_string(fs.connection_string, **ours)
    credential = fs.sync_credential or _synchronous(fs) or fs.account_key
    address = _address(fs) + (fs.sas_token if fs.sas_token and not credential else "")
    return BlobServiceClient(address, credential=credential, location_mode=fs.location_mode, **ours)


_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_SLACK = 64 << 10  # bytes of an error that is sent in place of a range


def _bound(response: Any, *_: object, **__: object) -> None:
    """Let no more be read of an answer than was asked for: Microsoft's client reads all that comes."""
    headers = response.request.headers
    span = _RANGE.fullmatch(headers.get("x-ms-range") or headers.get("Range") or "")
    sent = response.headers.get("Content-Range", "")
    if span and span[1] != "0" and response.ok and not sent.startswith(f"bytes {span[1]}-"):
        response.close()
        raise StorageError("the server sent a different range of bytes than ckpt asked for. Check the endpoint.")
    response.raw = _Bounded(response.raw, int(span[2]) - int(span[1]) + 1 + _SLACK if span else LARGEST_DOCUMENT)


class _Bounded:
    """The body of an answer, and where it is too long."""

    def __init__(self, body: Any, most: int) -> None:
        self._body = body
        self._most = most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)

    def stream(self, *arguments: Any, **options: Any) -> Iterator[bytes]:
        left = self._most
        for chunk in self._body.stream(*arguments, **options):
            left -= len(chunk)
            if left < 0:
                self._body.close()
                raise StorageError(f"the server sent more than the {self._most:,} bytes that ckpt asked for.")
            yield chunk


def _address(fs: Any) -> str:
    return str(fs.account_url)


def _synchronous(fs: Any) -> Any:
    """The user's own credential: adlfs takes one for an event loop, which is asked there."""
    given = fs.credential
    if given is None or isinstance(given, str) or not hasattr(given, "get_token"):
        return given
    import inspect

    from fsspec.asyn import sync

    class Credential:
        def get_token(self, *scopes: str, **arguments: Any) -> Any:
            if inspect.iscoroutinefunction(given.get_token):
                return sync(fs.loop, given.get_token, *scopes, **arguments)
            return given.get_token(*scopes, **arguments)

    return Credential()
