"""Answers of an object store as `StorageError`s: whether a retry may help, and what to check otherwise."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.errors import AbsentError, DeniedError, FullError, StorageError, TransientError
from ckpt.storage.base import changed
from ckpt.storage.retry import UnreachedError

_WORD = re.compile(r"[A-Za-z.]{1,64}")  # a server may repeat a token in place of a code: that has digits
# the codes of Azure, Google Cloud Storage and S3; where S3's client has no code, it gives the status
_CONFLICT = {
    "ConditionNotMet", "TargetConditionNotMet", "BlobAlreadyExists", "InvalidBlockList", "conditionNotMet",
    "PreconditionFailed", "412",
}  # fmt: skip
_ABSENT = {
    "BlobNotFound", "ResourceNotFound", "CannotVerifyCopySource", "notFound", "NoSuchKey", "NoSuchVersion", "NotFound",
    "404",
}  # fmt: skip
_NO_CONTAINER = {
    "ContainerNotFound", "ContainerBeingDeleted", "ContainerDisabled", "FilesystemNotFound", "NoSuchBucket",
}  # fmt: skip
TRANSIENT = {
    "ServerBusy", "OperationTimedOut", "InternalError", "backendError", "rateLimitExceeded", "SlowDown",
    "ServiceUnavailable", "RequestTimeout", "Throttling", "ThrottlingException", "TooManyRequests",
    "RequestLimitExceeded", "BandwidthLimitExceeded", "OperationAborted", "ConditionalRequestConflict",
    "IncompleteBody", "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch",
}  # fmt: skip
_FULL = {
    "AccountQuotaExceeded", "InsufficientAccountPermissionsQuota", "storageQuotaExceeded", "EntityTooLarge",
    "QuotaExceeded", "XMinioStorageFull", "StorageFull", "InsufficientStorage",
}  # fmt: skip
_DENIED = {  # whatever their status is
    "AccessDenied", "AllAccessDisabled", "AccountProblem", "ExpiredToken", "ExpiredTokenException",
    "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch", "TokenRefreshRequired", "UnauthorizedAccess",
}  # fmt: skip


_KNOWN = _CONFLICT | _ABSENT | _NO_CONTAINER | TRANSIENT | _FULL | _DENIED

NO_UPLOAD = "NoSuchUpload"


class CutError(ConnectionError):
    """An answer that ends before its end: the same request may bring all of it."""


class UploadGoneError(AbsentError):
    """The server does not know an upload in parts any more: it is complete, or somebody has aborted it."""


@dataclass(frozen=True)
class Advice:
    """How a store is spoken of: what its objects lie in, and what to check when it refuses or does not answer."""

    container: str  # the container 'x', the bucket 'x'
    credentials: str
    address: str


def absent(where: str) -> AbsentError:
    return AbsentError(f"{where} does not exist.")


def no_container(begin: str, advice: Advice) -> StorageError:
    return StorageError(f"{begin}: there is no {advice.container}. Create it, or check its name and {advice.address}.")


def unreached(begin: str, advice: Advice) -> UnreachedError:
    return UnreachedError(f"{begin}: no server answers. Check {advice.address} and the network.")


def refused(begin: str, advice: Advice) -> DeniedError:
    return DeniedError(
        f"{begin}: the credentials are missing, or do not allow it. Check {advice.credentials}, and that they may "
        "list, read, write and delete there."
    )


def cut_off(begin: str, error: BaseException) -> TransientError:
    return TransientError(f"{begin}: the connection failed ({type(error).__name__}).")


# what clients raise that believe a server: its lengths, the fields that it leaves out, documents without an end
OF_BELIEVERS = (AttributeError, LookupError, MemoryError, RecursionError, TypeError)


def strange_answer(where: str, what: str) -> StorageError:
    """The error for an answer that no such store gives: to ask again would not help."""
    return StorageError(f"could not read {where}: {what}. Check the endpoint.")


def quotable(code: object) -> str:
    """A word of the server's that may be shown: one of its codes; else nothing, as it may repeat what it was sent."""
    word = str(code)
    return word if word in _KNOWN or _WORD.fullmatch(word) else ""


def from_answer(status: int, code: str, what: str, where: str, advice: Advice) -> StorageError:
    """The error for an answer with this status, and the store's own code for it, if it has given one."""
    begin = f"could not {what} {where}"
    quoted = quotable(code) or status
    said = f"{begin}: the server says {quoted}"
    if code in _CONFLICT or (status == 412 and not code):
        return changed(where)
    if code == NO_UPLOAD:
        return UploadGoneError(f"{begin}: the server does not know this upload any more. Save again.")
    if code in _NO_CONTAINER:
        return no_container(begin, advice)
    if status == 404 and (code in _ABSENT or not code):
        return absent(where)
    if code in _FULL or status in (413, 507):
        return FullError(f"{said}. Free some space or raise the quota, then save again.")
    if status == 501:
        needed = "ckpt needs conditional writes, uploads in parts and ranged reads there"
        return StorageError(
            f"{said}, because it does not know such a request. {needed}: check the URL and the endpoint."
        )
    if code in TRANSIENT or status >= 500 or status in (408, 429):
        return TransientError(f"{said} ({status}).")
    if code in _DENIED or status in (401, 403):
        return refused(f"{begin} ({quoted})", advice)
    return StorageError(f"{said} ({status}).")
