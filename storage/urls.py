"""From a path or URL to its storage: the built-in schemes, fsspec's, and those of entry points."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from ckpt.errors import ConfigError, SchemeError
from ckpt.shown import masked_url, remember_secrets
from ckpt.storage.base import Objects, Storage
from ckpt.storage.hub.storage import HubStorage
from ckpt.storage.local.storage import LocalStorage
from ckpt.storage.memory import MemoryStorage
from ckpt.storage.object_storage import ObjectStorage
from ckpt.util.filesystem import expand_home
from ckpt.util.option_values import is_path, path_text, said

ENTRY_POINTS = "ckpt.storage"
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_ARCHIVE = re.compile(r"zip(://[^:]*)?::")  # what is in a zip file: zip::run.zip, zip://folder::run.zip
_CHAINED = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+::")
_LOST_BOTH = re.compile(r"(s3a?|gs|gcs|az|abfss?|hub|hf):(?=[^:/])", re.IGNORECASE)  # s3:bucket/run
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def is_storage(value: object) -> bool:
    """Whether this is a storage: by the protocol, whoever wrote it."""
    return isinstance(value, Storage)


def open_storage(root: str | os.PathLike[str] | Storage, **options: Any) -> Storage:
    """The storage that `root` names: a path, a URL, or a storage already.

    `options` are passed to the backend, under the names of its fsspec filesystem: `endpoint_url`, `profile`, `key` or
    `secret` for `s3://`, for instance. Three are ckpt's own: `deadline`, the seconds for which a failing request is
    retried, `stall`, the seconds without a byte moved after which it has failed, and `allow_unconditional`, for a store
    that ignores the conditions of a write and has a single writer. `hub://` takes `token`, `deadline`, `stall`, and
    `interval`: the seconds between two commits.
    """
    if isinstance(root, Storage):
        return root
    if not is_path(root):
        raise ConfigError(f"the root must be a path or a URL, not {said(root)}.")
    url = os.fspath(root)
    if _ARCHIVE.match(url):
        return _open_read_only(url, options)
    match = _URL.fullmatch(url)
    if match is None:
        refuse_broken_url(url)
        _refuse_options("a plain path", options)
        return LocalStorage(expand_home(url))
    scheme, rest = match.group(1).lower(), match.group(2)
    factory = None if scheme in _BUILT_IN else _installed(scheme, url)
    _refuse_secrets(url)
    if scheme in _OBJECT_STORES:
        _refuse_dots(url, rest)
    remember_secrets(options)
    return _open_built_in(scheme, rest, options) if factory is None else factory(rest, **options)


def refuse_broken_url(path: str) -> None:
    """A folder of that name on the local disk is not what anybody means by it. One that is meant begins with `./`."""
    lost = _LOST_SLASH.match(path)
    if lost is not None:
        top = "/" if lost.group(1).lower() == "file" else ""
        url = f"{lost.group(1)}://{top}{path[lost.end() :].lstrip('/')}"
        raise ConfigError(f"{path!r} is a URL that lost a slash in Path(). Pass the URL as a string: {url!r}.")
    if (lost := _LOST_BOTH.match(path)) is not None:
        url = f"{lost.group(1)}://{path[lost.end() :]}"
        raise ConfigError(
            f"{path!r} is a URL without its slashes. Write {url!r}, or './{path}' for a folder of that name."
        )
    if "://" in path or _CHAINED.match(path):
        raise ConfigError(f"{path!r} is not a URL that ckpt can open. Name only the store, as in 's3://bucket/run'.")


def disk_path(path: Any, what: str) -> str:
    """A path, or a `file://` URL as one, for `what` is written to a disk alone. Any other URL is refused."""
    url = path_text(path, what)
    match = _URL.fullmatch(url)
    if match is not None and match.group(1).lower() == "file":
        return _file_path(match.group(2))
    if match is not None or _ARCHIVE.match(url):
        raise ConfigError(
            f"{masked_url(url)} is a URL, but ckpt writes {what} only to a disk. Give a local path, then copy the "
            "result to the URL."
        )
    refuse_broken_url(url)
    return url


def _refuse_dots(url: str, rest: str) -> None:
    """A store of objects has names, and no folders that `..` could leave: clients and servers differ on what it is."""
    _, *names = rest.split("/")
    if "." in names or ".." in names:
        where = f"{url.partition('://')[0]}://{posixpath.normpath(rest)}"
        raise ConfigError(f"{url!r} contains '.' or '..', which object stores don't resolve. Did you mean {where!r}?")


def _open_read_only(url: str, options: dict[str, Any]) -> Storage:
    from ckpt.storage.fsspec_stores import ReadOnlyStorage

    _refuse_secrets(url)
    remember_secrets(options)
    return ReadOnlyStorage(url, options)


def _refuse_secrets(url: str) -> None:
    if masked_url(url) != url:
        raise ConfigError(
            f"{masked_url(url)} contains a password, a token or a signature, which logs would show. Give credentials "
            "in the environment, in a profile, or in storage_options."
        )


def place_of(storage: Storage) -> str:
    """Equal for two storages of the same root, however their paths were spelled."""
    return storage.place if isinstance(storage, LocalStorage) else storage.url


def _refuse_options(where: str, options: dict[str, Any]) -> None:
    if options:
        raise ConfigError(f"{where} accepts no storage_options, but you gave {', '.join(sorted(options))}.")


def _file_path(rest: str) -> str:
    path = rest.removeprefix("localhost")
    if not path.startswith("/"):
        raise ConfigError(f"file://{rest} is not a file URL. Write file:///absolute/path, or a plain path.")
    return unquote(path)


def _open_hub(rest: str, options: dict[str, Any]) -> Storage:
    known = {"token", "interval", "deadline", "stall"}
    if options.keys() - known:
        wrong = ", ".join(sorted(options.keys() - known))
        raise ConfigError(f"hub:// accepts the storage_options {', '.join(sorted(known))}, but not {wrong}.")
    return HubStorage(rest, **options)


def _open_objects(scheme: str, rest: str, options: dict[str, Any]) -> Storage:
    """An object store. Its client is imported when it is used."""
    given = dict(options)
    allow = given.pop("allow_unconditional", False)
    if not isinstance(allow, bool):
        raise ConfigError(f"storage_options: allow_unconditional={said(allow)} must be True or False.")
    return ObjectStorage(_objects(scheme, rest, given), allow_unconditional=allow)


def _objects(scheme: str, rest: str, options: dict[str, Any]) -> Objects:
    if scheme in _S3:
        from ckpt.storage.clouds.s3 import S3Objects

        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise ConfigError(f"s3://{rest} names no bucket: write s3://bucket/folder.")
        return S3Objects(bucket, prefix.strip("/"), options)
    if scheme in _AZURE:
        from ckpt.storage.clouds.azure import open_azure

        return open_azure(scheme, rest, options)
    if scheme in _GCS:
        from ckpt.storage.clouds.gcs import open_gcs

        return open_gcs(scheme, rest, options)
    from ckpt.storage.fsspec_stores import FilesystemObjects

    return FilesystemObjects(scheme, rest.rstrip("/"), options)


_S3, _AZURE, _GCS = ("s3", "s3a"), ("abfs", "abfss", "az"), ("gcs", "gs")
_OBJECT_STORES = (*_S3, *_AZURE, *_GCS, "oci", "oss")
_READ_ONLY = ("hf", "http", "https", "sftp", "ssh")
# local: as an object store through fsspec, where an object appears only when it is complete: not ftp, for instance
_BUILT_IN = (*_OBJECT_STORES, *_READ_ONLY, "file", "hub", "local", "memory")


def _open_built_in(scheme: str, rest: str, options: dict[str, Any]) -> Storage:
    if scheme in _READ_ONLY:
        return _open_read_only(f"{scheme}://{rest}", options)
    if scheme == "hub":
        return _open_hub(rest, options)
    if scheme in ("file", "memory"):
        _refuse_options(f"{scheme}://", options)
        return LocalStorage(_file_path(rest)) if scheme == "file" else MemoryStorage(rest)
    return _open_objects(scheme, rest, options)


def _installed(scheme: str, url: str) -> Callable[..., Storage]:
    """What an installed package opens a scheme with."""
    from importlib.metadata import entry_points  # only here: the command starts faster

    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if scheme in installed:
        factory: Callable[..., Storage] = installed[scheme].load()
        return factory
    known = ", ".join(["a plain path", *(f"{name}://" for name in sorted({*_BUILT_IN, *installed}))])
    raise SchemeError(
        f"ckpt has no storage for {scheme}:// (in {masked_url(url)!r}). It knows {known}. For another scheme, install "
        f"a package that provides it through the entry point group {ENTRY_POINTS!r}."
    )
