"""Errors of S3 as `StorageError`s: whether a retry may help, and what to check otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.errors import AbsentError, ConfigError, StorageError, TransientError
from ckpt.storage.clouds.errors import TRANSIENT, Advice, cut_off, from_answer, refused, unreached
from ckpt.storage.retry import UnreachedError
from ckpt.storage.s3.http_session import EndlessError

_ELSEWHERE = {
    "PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException",
    "301", "302", "303", "307", "308",
}  # fmt: skip


def _advice(bucket: str) -> Advice:
    return Advice(
        f"bucket {bucket!r}",
        "the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or storage_options)",
        "the endpoint (AWS_ENDPOINT_URL, or storage_options={'endpoint_url': ...})",
    )


def code_of(error: BaseException) -> str:
    """The error code of the server's answer; empty if there is none."""
    answer = _answer(error)
    return str(answer.get("Error", {}).get("Code", "")) if answer else ""


def not_deleted(errors: Iterable[Mapping[str, Any]], where: str) -> StorageError:
    """The error for objects that a bulk delete has not removed, although the request itself succeeded."""
    wrong = {str(error.get("Key")): str(error.get("Code") or "") for error in errors}
    is_transient = all(code in TRANSIENT or not code for code in wrong.values())  # SeaweedFS gives none
    listed = ", ".join(f"{key} ({code or 'without a reason'})" for key, code in wrong.items())
    return (TransientError if is_transient else StorageError)(f"could not delete in {where}: {listed}.")


def translate_error(error: BaseException, what: str, where: str, bucket: str) -> StorageError | ConfigError:
    """The error for one of botocore, aiohttp or the system. Quotes no secret."""
    from botocore import exceptions

    answer = _answer(error)
    if answer is not None:
        return _translate_answer(answer, what, where, bucket)
    if isinstance(error, StorageError | ConfigError):
        return error
    if (endless := _endless(error)) is not None:
        return StorageError(f"could not {what} {where}: {endless}")
    if _is(error, exceptions.NoCredentialsError, exceptions.PartialCredentialsError):
        return refused(f"could not {what} {where}", _advice(bucket))
    if _is(error, exceptions.ProfileNotFound):
        return ConfigError(
            f"could not {what} {where}: ~/.aws/config has no such profile. Check AWS_PROFILE, or storage_options="
            "{'profile': ...}."
        )
    if isinstance(error, ValueError) and str(error).startswith("Invalid endpoint"):
        return ConfigError(
            f"could not {what} {where}: the endpoint (AWS_ENDPOINT_URL, or storage_options={{'endpoint_url': ...}}) is "
            "no URL: write http://host:port or https://host."
        )
    if _lacks_certificates(error):
        return ConfigError(
            f"could not {what} {where}: the file of certificates to trust cannot be read. Check AWS_CA_BUNDLE, or "
            "storage_options={'client_kwargs': {'verify': ...}}."
        )
    if _is(error, exceptions.SSLError):
        return UnreachedError(
            f"could not {what} {where}: no secure connection. Check the endpoint (https:// or http://?) and its "
            "certificate (AWS_CA_BUNDLE, or storage_options={'client_kwargs': {'verify': ...}})."
        )
    if _is(error, exceptions.EndpointConnectionError, exceptions.ConnectTimeoutError, ConnectionRefusedError):
        return unreached(f"could not {what} {where}", _advice(bucket))
    kind = type(error.__cause__ or error).__name__
    if _is_network_failure(error):
        return cut_off(f"could not {what} {where}", error.__cause__ or error)
    if _is(error, exceptions.BotoCoreError, ValueError, TypeError):
        return ConfigError(f"could not {what} {where}: {kind}. Check storage_options and the URL.")
    return StorageError(f"could not {what} {where}: {kind}.")


def _lacks_certificates(error: BaseException) -> bool:
    """Whether the bundle of certificates is missing, or is none. Nothing else here is read from a file."""
    inner = getattr(error, "kwargs", {}).get("error")  # botocore wraps what it does not expect
    return isinstance(inner, FileNotFoundError) or "NO_CERTIFICATE" in str(getattr(inner, "reason", ""))


def _endless(error: BaseException | None) -> EndlessError | None:
    """The error of an answer that was too long, which the client wraps."""
    while error is not None and not isinstance(error, EndlessError):
        error = error.__cause__ or error.__context__
    return error


def _is(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Whether an error is of these classes, or was caused by one."""
    return isinstance(error, kinds) or isinstance(error.__cause__, kinds)


def _answer(error: BaseException) -> dict[str, Any] | None:
    from botocore.exceptions import ClientError

    found = error if isinstance(error, ClientError) else error.__cause__
    return found.response if isinstance(found, ClientError) else None


def _translate_answer(answer: dict[str, Any], what: str, where: str, bucket: str) -> StorageError:
    code = str(answer.get("Error", {}).get("Code", ""))
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    begin = f"could not {what} {where}: the server says {code}"
    if code == "NoSuchUpload":
        return AbsentError(f"{begin}: that upload was completed or aborted meanwhile.")
    if code in _ELSEWHERE:
        return StorageError(
            f"{begin}. The bucket is in another region, or at another address: set AWS_REGION, or check the endpoint."
        )
    if code == "RequestTimeTooSkewed":
        return StorageError(f"{begin}. Set this machine's clock.")
    return from_answer(status, code, what, where, _advice(bucket))


def _is_network_failure(error: BaseException) -> bool:
    from aiohttp import ClientError as ConnectionFailure
    from botocore.exceptions import FlexibleChecksumError as Altered
    from botocore.exceptions import HTTPClientError
    from botocore.exceptions import IncompleteReadError as Truncated
    from botocore.parsers import ResponseParserError

    network = (OSError, asyncio.TimeoutError, EOFError, ConnectionFailure)
    return _is(error, *network, HTTPClientError, Truncated, Altered, ResponseParserError)
