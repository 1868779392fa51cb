"""Errors of the Hub's client as ckpt's: what, where, why, what to do. None contains a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt.errors import AbsentError, CkptError, ConfigError, DeniedError, FullError, StorageError, TransientError

_AGAIN = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 600.0  # seconds that the Hub may ask for
_LOGIN = "Log in with 'hf auth login', set HF_TOKEN, or give token=..."
_KEPT = "What was uploaded is kept there, and is not sent again."


class MovedError(TransientError):
    """The head of a branch is not the parent that a commit was made for: somebody else has committed."""


def is_transient(error: BaseException) -> bool:
    """Whether a retry may help: the Hub is busy, or was not reached."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = status_of(error)
    return status in _AGAIN if status else _is_unreachable(error) and not isinstance(error, OfflineModeIsEnabled)


@contextmanager
def translated_errors(verb: str, where: str) -> Iterator[None]:
    """Translate the errors that the client raises in this context."""
    try:
        yield
    except CkptError:
        raise
    except Exception as error:
        problem = translate_error(cause_of(error), f"could not {verb} {where}")
        raise problem from None  # the cause holds the request's headers


def translate_error(error: BaseException, what: str) -> Exception:
    """The error that a user sees in place of the client's."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = status_of(error)
    if isinstance(error, GatedRepoError):
        return DeniedError(f"{what}: it is gated. Ask for access on its page, with the account of your token. {_LOGIN}")
    if isinstance(error, RepositoryNotFoundError) and status != 401:
        return AbsentError(f"{what}: there is no such repository, or the token may not see it. {_LOGIN}")
    if isinstance(error, RevisionNotFoundError):
        return AbsentError(f"{what}: the repository has no such revision. Name a branch, a tag or a commit of it.")
    if isinstance(error, EntryNotFoundError):
        return AbsentError(f"{what}: it does not exist.")
    if status:
        return _by_status(status, error, what)
    if _is_unreachable(error):
        return TransientError(
            f"{what}: the Hub cannot be reached ({type(error).__name__}: {error}). Look at the network, at HF_ENDPOINT "
            f"and HF_HUB_OFFLINE, then try again. {_KEPT}"
        )
    if isinstance(error, ValueError):  # what the client itself refuses: a name, the front matter of a card
        advice = " Correct its front matter, or push with card=False." if "README.md" in str(error) else ""
        return ConfigError(f"{what}: {error}{advice}")
    return StorageError(f"{what}: {type(error).__name__}: {error}")


def _by_status(status: int, error: BaseException, what: str) -> Exception:
    said = getattr(error, "server_message", None)
    about = f"{what}: the Hub answered {status}" + (f" ({said})" if said else "")
    if status == 401:
        return DeniedError(
            f"{about}: there is no token, or it is not valid, or there is no such repository (without a token the Hub "
            f"does not tell which). {_LOGIN}"
        )
    if status == 403:
        return DeniedError(
            f"{about}: the token may not do that. Give it write access to this repository at "
            "https://huggingface.co/settings/tokens, or use another."
        )
    if status == 404:
        return AbsentError(f"{about}. Is the name right, and may the token see it? {_LOGIN}")
    if status in (409, 412):
        return MovedError(f"{about}: somebody else has changed the repository meanwhile. Try again.")
    if status == 413:
        return FullError(f"{about}: it is too large. Use a smaller max_shard_size.")
    if status == 429:
        return TransientError(
            f"{about}: too many requests or commits for now, also after waiting. Try again later, or save less often. "
            f"{_KEPT}"
        )
    if status in _AGAIN:
        return TransientError(f"{about}, also when asked again. Try again later. {_KEPT}")
    return StorageError(f"{about}.")


def cause_of(error: BaseException) -> BaseException:
    """The original error: the client wraps that of a file among many, and that of one which is not in its cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def status_of(error: BaseException) -> int:
    """The HTTP status of the Hub's answer; 0 if there was none."""
    response = getattr(error, "response", None)
    return int(getattr(response, "status_code", 0) or 0)


def asked_to_wait(error: BaseException) -> float | None:
    """The seconds of a Retry-After header; None if there is none."""
    headers: Any = getattr(getattr(error, "response", None), "headers", {})
    asked = headers.get("Retry-After", "")
    return min(float(asked), _LONGEST_WAIT) if asked.isdigit() else None


def _is_unreachable(error: BaseException) -> bool:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    http_error = HfHubHTTPError.__bases__[0]  # of whichever HTTP library the client uses
    return isinstance(error, http_error | OfflineModeIsEnabled | ConnectionError | TimeoutError)
