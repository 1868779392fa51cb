"""What may be shown: one escape for terminals and logs, one for Markdown, one redaction of secrets.

Names, metrics, versions and messages come from files and servers that nobody vouches for. Whatever is printed, logged,
raised or written into a document passes through here: control characters, line breaks and bidirectional overrides are
shown as Python writes them (`\\x1b`), and passwords, tokens and signatures as `***`.
"""

from __future__ import annotations

import base64
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

MASK = "***"
MOST_LINES = 10  # of an error
LONGEST = 10_000  # characters of one text: an attacker's name may have megabytes
_SHORTEST = 6  # characters of a secret that is recognised wherever it occurs: shorter ones are parts of words
_known: list[str] = []  # the longest first: one secret may be a part of another
_ENVIRONMENT = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
    "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_CLIENT_SECRET", "OSS_ACCESS_KEY_SECRET", "OSS_SECURITY_TOKEN",
)  # fmt: skip

# Every repetition is bounded: a text of megabytes, as an attacker may send it, is searched in linear time.
_NAME = (
    r"(?:token|secret|passw(?:or)?d|signature|credentials?|authorization|connection[_-]?string"
    r"|(?:api|access|account|private|secret)[_-]?key(?:[_-]?id)?|secret[_-]?access[_-]?key)"
)
_USER_AND_PASSWORD = re.compile(r"(?<=://)[^\s/:@]{0,256}:\S{0,512}@")
_USER_ALONE = re.compile(r"(?<=://)[^\s/@]{1,256}@")
_IN_QUERY = rf"[\w.-]{{0,40}}{_NAME}|(?:[\w.-]{{0,40}}[_-])?(?:key|auth|jwt|sas|pwd?|code|session)|sig|apikey"
_QUERY = re.compile(rf"([?&;](?:{_IN_QUERY})=)[^&;#\s'\"\\<>]+", re.IGNORECASE)
_CONTAINER = re.compile(r"(?:abfss?|wasbs?|az|oci)$", re.IGNORECASE)  # `container@account` is how they begin
_ASSIGNED = re.compile(rf"({_NAME}=['\"]?)(?!\.\.\.)[^\s'\",;&)}}\]\\]{{8,}}", re.IGNORECASE)
_QUOTED = re.compile(rf"({_NAME}['\"]\s?:\s?['\"])[^'\"\\]{{1,4096}}", re.IGNORECASE)
_HEADER = re.compile(r"\b((?:bearer|basic|x-amz-security-token\s?:)\s{1,2})[\w.~+/=-]{8,}", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b()(?:hf_[A-Za-z0-9]{20,}|(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{20,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]+)"
)
_PRIVATE_KEY = re.compile(
    r"()-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[\s\S]{0,8192}?(?:-----END [A-Z ]{0,40}KEY-----|\Z)"
)
_PATTERNS = (
    (_PRIVATE_KEY, ("PRIVATE KEY",)),
    (_ASSIGNED, ("=",)),
    (_QUOTED, ("'", '"')),
    (_HEADER, ("earer ", "EARER ", "asic ", "ASIC ", "oken:", "OKEN:", "oken :")),
    (_TOKEN, ("hf_", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "glpat-", "eyJ")),
)  # each with signs of which one is there wherever it matches: to look for those takes a hundredth of the time
_SECRET_OPTION = re.compile(rf"{_NAME}|sas", re.IGNORECASE)

_PARTS = re.compile(r"\b(?:AccountKey|sig)=([^;&]+)", re.IGNORECASE)  # of connection strings and signed URLs
_SENT = {"headers", "cookies", "proxy_headers"}  # options whose every value is for the server alone
_LINE_BREAK = re.compile(r"[ \t]{0,100}[\r\n]{1,100}[ \t]{0,100}")
_MARKUP = re.compile(r"[`*\[\]<>|\\~&#@$]|://|www\.|(?<!\w)_|_(?!\w)", re.IGNORECASE)
_IN_CODE = {"|": r"\x7c", "`": r"\x60", "<!--": r"\x3c!--"}  # the last begins and ends what a push writes anew


class Lines(str):
    """Several lines of text whose line breaks were made by ckpt: `shown` leaves it as it is."""

    __slots__ = ()

    @classmethod
    def of(cls, lines: Iterable[str]) -> Lines:
        return cls("\n".join(map(shown, lines)))

    @classmethod
    def listing(cls, head: str, offenders: Iterable[str], tail: str = "") -> Lines:
        """A sentence, an indented line for each offender, and what to do: ten lines, and how many more there are."""
        listed = list(offenders)
        room = MOST_LINES - (2 if tail else 1)
        some = listed if len(listed) <= room else listed[: room - 1]
        more = [f"and {len(listed) - len(some):,} more"] if len(some) < len(listed) else []
        indented = [f"  {shown(line)}" for line in (*some, *more)]
        return cls.of([head, *indented, *([tail] if tail else [])])


def few(names: Sequence[str], most: int) -> str:
    """Names joined by commas: no more than `most` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def shown(text: str) -> str:
    """A text as it may be printed, logged or raised: on one line, escaped, without secrets."""
    return _shown(text, printable)


def sentence(text: str) -> str:
    """The same of an error's message: line breaks are spaces, as it may quote an error of another library."""
    return _shown(text, lambda safe: printable(_LINE_BREAK.sub(" ", safe.strip("\r\n"))))


def _shown(text: str, escaped: Callable[[str], str]) -> str:
    if isinstance(text, Lines):
        return text
    more = f"... ({len(text) - LONGEST:,} more characters)" if len(text) > LONGEST else ""
    return escaped(without_secrets(text[:LONGEST])) + more


def printable(text: str) -> str:
    """A text in which every character that is not printed is written as Python would: `\\x1b`, `\\n`, `\\u202e`."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def markdown(text: str) -> str:
    """A text inside Markdown, also in a cell of a table: as code, if it could be taken for markup, a link or a tag."""
    text = shown(text).replace("\n", " ")
    if not _MARKUP.search(text):
        return text
    for markup, escaped in _IN_CODE.items():
        text = text.replace(markup, escaped)
    return f"`{text}`"


def without_secrets(text: str) -> str:
    """A text with `***` in place of passwords, tokens and signatures, and of every secret that ckpt was given."""
    for secret in tuple(_known):  # another thread may open a storage meanwhile
        text = text.replace(secret, MASK)
    if "://" in text:
        text = masked_url(text)
    for pattern, signs in _PATTERNS:
        if any(sign in text for sign in signs):
            text = pattern.sub(rf"\g<1>{MASK}", text)
    return text


def masked_url(url: str) -> str:
    """A URL, or a text with URLs in it, without user names, passwords and signatures."""
    url = _USER_AND_PASSWORD.sub(f"{MASK}@", url)
    url = _USER_ALONE.sub(_masked_user, url)
    url = _TOKEN.sub(MASK, url)  # in a path
    return _QUERY.sub(rf"\g<1>{MASK}", url)


def _masked_user(found: re.Match[str]) -> str:
    scheme = found.string[max(0, found.start() - 9) : found.start() - 3]
    return found.group() if _CONTAINER.search(scheme) and not _TOKEN.match(found.group()) else f"{MASK}@"


def remember_secrets(options: Mapping[str, Any]) -> None:
    """Mask the values of options that are secrets by their names (`secret`, `token`, ...) wherever they occur.

    So are all headers and cookies, which a server may repeat, and the password of `auth`; and secrets in the
    environment, as it is now.
    """
    given = [*_secret_values(options), *(os.environ.get(name, "") for name in _ENVIRONMENT)]
    given += [part for value in given for part in _PARTS.findall(value)]  # a server may repeat them alone
    found = {form for value in given if len(value) >= _SHORTEST for form in (value, quote(value, safe=""))}
    _known[:] = sorted(found.union(_known), key=len, reverse=True)


def _secret_values(options: Mapping[str, Any], *, all_of_them: bool = False) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _secret_values(value, all_of_them=all_of_them or str(name).lower() in _SENT)
        elif isinstance(value, str) and (all_of_them or _SECRET_OPTION.search(str(name))):
            yield value
            yield value.rpartition(" ")[2]  # a server may repeat it without the word Bearer
        elif name in ("auth", "proxy_auth") and isinstance(value, tuple | list) and len(value) > 1:
            yield str(value[1])
            yield base64.b64encode(":".join(map(str, value[:2])).encode()).decode()


class _ShownRecords(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_shown_argument, record.args))
        if not record.args:
            record.msg = shown(str(record.msg))
        return True


def _shown_argument(argument: Any) -> Any:
    if isinstance(argument, int | float):
        return argument
    if isinstance(argument, BaseException):
        return sentence(str(argument))
    return shown(argument if isinstance(argument, str) else str(argument))  # of `Lines`, str() makes any text


def install_log_filter() -> None:
    """Escape and redact what ckpt logs. Every module of ckpt logs to the same logger."""
    remember_secrets({})
    logging.getLogger("ckpt").addFilter(_ShownRecords())
