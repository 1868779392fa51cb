"""Authenticity: keys, how manifests are sealed when they are written, and which are believed when they are read.

Hashes find damage, signatures find tampering: whoever alters a file can make its hashes anew, and not its signature.
`cryptography` is imported where it is needed: it is an optional dependency. No key is ever part of a message.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from ckpt.errors import CkptError, ConfigError, UntrustedError
from ckpt.formats.native.manifest import Manifest, Signature, short
from ckpt.storage import LocalStorage
from ckpt.storage.local.files import open_regular

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


_log = logging.getLogger("ckpt")

SIGN_VARIABLE = "CKPT_SIGN_KEY"
VERIFY_VARIABLE = "CKPT_VERIFY_KEY"

_BEGIN = "-----BEGIN "
_LARGEST = 1 << 16  # bytes of a key file: more are not read
_OTHERS = 0o077  # rights of the group and of everybody

KeySource = str | os.PathLike[str]


@dataclass(frozen=True)
class SigningKey:
    """A private key. Its repr shows the public half."""

    id: str
    _key: Ed25519PrivateKey = field(repr=False)

    def sign(self, manifest: Manifest) -> Manifest:
        """The manifest with a signature over all that it says."""
        signature = Signature(self.id, "", manifest.unsigned_bytes(), manifest.name)
        signature = replace(signature, value=self._key.sign(signature.message).hex())
        return replace(manifest, signature=signature)


def has_signed(key: str, signature: Signature) -> bool:
    """Whether the signature was made by the private half of this public key."""
    public = _cryptography().ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
    try:
        public.verify(bytes.fromhex(signature.value), signature.message)
    except _cryptography().InvalidSignature:
        return False
    return True


def find_signing_key(source: KeySource | bool | None) -> SigningKey | None:
    """The private key in a PEM file or text, or in `CKPT_SIGN_KEY`, which True demands; None for none, or if False."""
    if source is False:
        return None
    what, found = "the key to sign with", source
    if source is None or source is True:
        what, found = SIGN_VARIABLE, os.environ.get(SIGN_VARIABLE) or None
    if source is True and found is None:
        raise ConfigError(
            f"ckpt should sign with the key in {SIGN_VARIABLE}, but {SIGN_VARIABLE} is not set. Set the variable, or "
            "give the path of a key."
        )
    if found is None:
        return None
    private = _loaded(_read(found, what, private=True), what, private=True)
    return SigningKey(_id_of(private.public_key()), private)


def find_verify_keys(source: KeySource | None) -> tuple[str, ...]:
    """The public keys in a PEM file or text, or in `CKPT_VERIFY_KEY`: several where keys have changed.

    A private key stands for its public half.
    """
    what = "the key to verify with" if source is not None else VERIFY_VARIABLE
    source = source if source is not None else os.environ.get(VERIFY_VARIABLE) or None
    if source is None:
        return ()
    blocks = list(_blocks(_read(source, what, private=False)))
    if not blocks:
        raise ConfigError(
            f"{what} contains no key. A key must be in PEM format, as 'ckpt key new' and openssl write it."
        )
    return tuple(dict.fromkeys(_public_id(block, what) for block in blocks))


def new_key(path: KeySource) -> str:
    """Write a new private key to `path`, for its owner alone, and its public half to `path.pub`. Returns the latter."""
    crypto = _cryptography()
    private = crypto.ed25519.Ed25519PrivateKey.generate()
    pem, ways = crypto.serialization.Encoding.PEM, crypto.serialization
    secret = private.private_bytes(pem, ways.PrivateFormat.PKCS8, ways.NoEncryption())
    public = private.public_key().public_bytes(pem, ways.PublicFormat.SubjectPublicKeyInfo)
    beside = f"{os.fspath(path)}.pub"
    if os.path.lexists(beside):  # before the private half is written, which would belong to no public one
        raise ConfigError(f"{beside} already exists, and ckpt never overwrites a key. Choose another path.")
    _write_new(os.fspath(path), secret, 0o600)
    _write_new(beside, public, 0o644)
    return beside


def _write_new(path: str, data: bytes, mode: int) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise ConfigError(f"could not write {path}: {error.strerror}. ckpt never overwrites a key.") from None


def _public_id(block: str, what: str) -> str:
    if "PRIVATE" in block.partition("\n")[0]:
        return _id_of(_loaded(block, what, private=True).public_key())
    return _id_of(_loaded(block, what, private=False))


def _id_of(public: Ed25519PublicKey) -> str:
    raw = _cryptography().serialization
    return public.public_bytes(raw.Encoding.Raw, raw.PublicFormat.Raw).hex()


def _blocks(text: str) -> Iterator[str]:
    """The PEM blocks of a text, one for each key."""
    for part in text.split(_BEGIN)[1:]:
        yield _BEGIN + part


def _loaded(text: str, what: str, *, private: bool) -> Any:
    """The Ed25519 key in a PEM text. The text is in no error: it may be a secret, also where it is none of ours."""
    crypto = _cryptography()
    kind = crypto.ed25519.Ed25519PrivateKey if private else crypto.ed25519.Ed25519PublicKey
    with _without_cause(what):
        load = crypto.serialization.load_pem_private_key if private else crypto.serialization.load_pem_public_key
        key = load(text.encode(), None) if private else load(text.encode())
    if not isinstance(key, kind):
        raise ConfigError(f"{what} is not an Ed25519 key. 'ckpt key new PATH' makes one.")
    return key


@contextmanager
def _without_cause(what: str) -> Iterator[None]:
    try:
        yield
    except TypeError:
        raise ConfigError(
            f"{what} is encrypted, but there is no terminal where ckpt could ask for its passphrase."
        ) from None
    except Exception:  # of any kind that a parser raises on any text
        raise ConfigError(f"{what} is not a PEM key of the right kind. 'ckpt key new PATH' makes keys.") from None


def _read(source: KeySource | bool, what: str, *, private: bool) -> str:
    """The PEM text itself, or that of the file at a path. A private key that others can read is refused."""
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else ""
    if _BEGIN in text:
        return text
    try:
        descriptor = open_regular(os.path.expanduser(text))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no path"
        raise ConfigError(
            f"{what} must be the path of a PEM file, or the text of one, but ckpt could not read it: {why}."
        ) from None
    try:
        return _read_file(descriptor, text, private=private).decode("ascii", "replace")
    finally:
        os.close(descriptor)


def _read_file(descriptor: int, path: str, *, private: bool) -> bytes:
    about, data = os.fstat(descriptor), os.read(descriptor, _LARGEST)
    if about.st_mode & _OTHERS and (private or b"PRIVATE" in data):
        raise ConfigError(
            f"other users can read or write the private key {path} (mode {about.st_mode & 0o777:04o}), so its "
            "signatures prove nothing. Make a new key with 'ckpt key new'. If you know that nobody has read the key: "
            f"chmod 600 {path}."
        )
    return data


class _Cryptography:
    """The names of `cryptography` that are used here."""

    def __init__(self) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519

        self.InvalidSignature = InvalidSignature
        self.serialization = serialization
        self.ed25519 = ed25519


def _cryptography() -> _Cryptography:
    try:
        return _Cryptography()
    except ImportError:
        raise ConfigError("signatures need another package: pip install 'torch-ckpt[sign]'.") from None


def shown(keys: tuple[str, ...]) -> str:
    """Public keys as they are named in messages."""
    return ", ".join(map(short, keys))


@dataclass(frozen=True)
class Seal:
    """What a manifest gets beside the hashes that find damage: a SHA-256 of every block, and a signature over all."""

    with_sha256: bool = False
    key: SigningKey | None = None

    @property
    def sha256(self) -> bool:
        """Whether files are hashed by SHA-256: a signature over other hashes would cover nothing."""
        return self.with_sha256 or self.key is not None

    def sealed(self, manifest: Manifest) -> Manifest:
        return manifest if self.key is None else self.key.sign(manifest)


_HEAD = re.compile(r"([0-9a-f]{32})(?::([0-9]{1,15}))?\s?")


def is_head(text: object) -> bool:
    """Whether this is `RUN` or `RUN:NUMBER`."""
    return isinstance(text, str) and _HEAD.fullmatch(text) is not None


@dataclass
class Head:
    """A run, and the number of the newest checkpoint that is known of it: other runs' are refused, and older ones.

    A genuine signature says neither whether a checkpoint is of this run nor whether newer ones were removed. `path`: a
    file that remembers both from one process to the next. No head is known yet if `run` is empty.
    """

    run: str = ""
    number: int = 0
    path: str = ""

    @classmethod
    def parse(cls, text: str, path: str = "") -> Head:
        found = _HEAD.fullmatch(text)
        if found is None:
            where = path or "the run that is required"
            raise ConfigError(f"{where} must be RUN or RUN:NUMBER, as 'ckpt show' prints them, not {text[:100]!r}.")
        return cls(found[1], int(found[2] or 0), path)

    @classmethod
    def remembered(cls, path: KeySource) -> Head:
        """What a file says, which need not be there yet."""
        name = os.path.abspath(os.path.expanduser(os.fspath(path)))
        try:
            descriptor = open_regular(name)
        except FileNotFoundError:
            return cls(path=name)
        except OSError as error:
            raise ConfigError(
                f"could not read {name}, which records the number of the newest checkpoint: {error.strerror}."
            ) from None
        with os.fdopen(descriptor, "rb") as file:
            return cls.parse(file.read(_LARGEST).decode("ascii", "replace"), name)

    def problem(self, manifest: Manifest) -> str:
        """Why a checkpoint is not what it must be; empty if it is."""
        if self.run and manifest.run != self.run:
            return f"it belongs to run {manifest.run}, not to {self.run}"
        if self.run and manifest.sequence < self.number:
            return (
                f"it is number {manifest.sequence} of its run, which had reached number {self.number}: somebody "
                f"removed newer ones, or put an older one back. {self._way_back()}"
            )
        return ""

    def refuse_other(self, run: str, url: str) -> None:
        """Raise where a run that has not resumed begins, or saves, in place of the one that is known."""
        if self.run and self.run != run:
            raise UntrustedError(
                f"{url} had checkpoints of run {self.run}, up to number {self.number}, but this run loaded none of "
                f"them. Somebody removed those checkpoints, or this is a different root. {self._way_back()}."
            )

    def _way_back(self) -> str:
        if not self.path:
            return "To go back on purpose, require the run without a number"
        return f"To go back on purpose, name a checkpoint, as in load_state(name); to begin again, remove {self.path}"

    def advance(self, manifest: Manifest) -> None:
        """Remember a checkpoint that was saved, or loaded from the root or its mirror."""
        if not self.path or (self.run and (manifest.run != self.run or manifest.sequence <= self.number)):
            return
        self.run, self.number = manifest.run, manifest.sequence
        folder, name = os.path.split(self.path)
        try:
            LocalStorage(folder).write(name, [f"{self.run}:{self.number}\n".encode()])
        except CkptError as error:
            _log.warning("could not write %s, which records the number of the newest checkpoint: %s", self.path, error)


@dataclass(frozen=True)
class Trust:
    """The public keys whose signatures are believed, whether anything else is refused, and which run and head."""

    keys: tuple[str, ...] = ()
    required: bool = False
    head: Head | None = None

    def of_named(self) -> Trust:
        """The same for a checkpoint that was named by a user of a manager: it may be an older one."""
        return self if self.head is None else replace(self, head=Head(self.head.run, path=self.head.path))

    def checked(self, manifest: Manifest) -> Manifest:
        """The manifest, authentic if one of the keys has signed it; then its files are compared by SHA-256.

        What bears the name of one of the keys, and was not signed by it, is always refused; what is not signed, or by
        others, where a signature is required.
        """
        signature = manifest.signature
        if signature is None or signature.key not in self.keys:
            self._refuse_unknown(manifest)
            return manifest
        problem = "" if has_signed(signature.key, signature) else "its content does not match its signature"
        problem = problem or _problem(manifest, signature.name)
        problem = problem or (self.head.problem(manifest) if self.head is not None else "")
        if problem:
            raise UntrustedError(f"ckpt refuses {manifest.name}: {problem}.")
        return replace(manifest, signature=replace(signature, verified=True))

    def accepted(self, manifest: Manifest) -> Manifest:
        """The manifest as `checked` returns it, of a checkpoint that is then used: warns if none of the keys signed it.

        For whoever takes one checkpoint. Where several are looked at, `checked` each and `warn` of the one taken.
        """
        manifest = self.checked(manifest)
        self.warn(manifest)
        return manifest

    def warn(self, manifest: Manifest) -> None:
        """Say that a checkpoint that is used is not signed by one of the keys."""
        if self.keys and not manifest.is_authentic:
            by = f", but by {short(manifest.signature.key)}" if manifest.signature else ""
            self._warn(manifest.name, f"is not signed by a key that is trusted here{by}")

    def refuse_unsigned(self, where: str) -> None:
        """Raise where a signature is required, for a place that has no manifest which could have one; else warn."""
        if self.required:
            raise UntrustedError(
                f"ckpt refuses {where}: you require a signature, but it has no manifest, so nothing in it is signed."
            )
        if self.keys:
            self._warn(where, "has no manifest, so nothing in it is signed")

    def _warn(self, where: str, why: str) -> None:
        _log.warning(
            "%s %s, so anybody with write access may have altered it. To refuse such checkpoints, use "
            "Signing(required=True) or require_signed=True.", where, why,
        )  # fmt: skip

    def _refuse_unknown(self, manifest: Manifest) -> None:
        if not self.required:
            return
        by = f"it is signed by {short(manifest.signature.key)}" if manifest.signature else "it is not signed"
        raise UntrustedError(f"ckpt refuses {manifest.name}: {by}, but you require a signature by {shown(self.keys)}.")


BELIEVES_ALL = Trust()


def _problem(manifest: Manifest, signed_name: str) -> str:
    """Why a manifest with a good signature is refused all the same."""
    if signed_name != manifest.name:
        return f"it was signed as {signed_name!r}, but its folder has another name; if you renamed it, rename it back"
    without = [file.path for file in manifest.files if not file.has_sha256]
    return f"it lists no SHA-256 of {', '.join(without)}" if without else ""


def open_trust(
    verify_key: KeySource | None,
    *,
    required: bool | str = False,
    own: SigningKey | None = None,
    head: Head | None = None,
) -> Trust:
    """What is believed with these keys, or those of the environment, and the one that this process signs with.

    `required`: whether all else is refused; as text, the run, and the number, that it must have besides.
    """
    keys = find_verify_keys(verify_key)
    keys = tuple(dict.fromkeys([*keys, *([own.id] if own is not None else [])]))
    head = Head.parse(required) if isinstance(required, str) else head
    if (required or head) and not keys:
        raise ConfigError(
            "you require signatures, but gave no key to verify them. Give verify_key= (on the command line --key), or "
            "set CKPT_VERIFY_KEY. The run's own signing key works too."
        )
    return Trust(keys, bool(required) or head is not None, head)


class KeyOptions(Protocol):
    """The options of a manager that are about keys."""

    @property
    def key(self) -> KeySource | bool | None: ...

    @property
    def verify_key(self) -> KeySource | None: ...

    @property
    def required(self) -> bool | str: ...

    @property
    def head(self) -> KeySource | None: ...


def open_keys(options: KeyOptions, *, sha256: bool) -> tuple[Seal, Trust]:
    """How the checkpoints of a run are sealed, and which ones it believes."""
    key = find_signing_key(options.key)
    head = Head.remembered(options.head) if options.head is not None else None
    return Seal(sha256, key), open_trust(options.verify_key, required=options.required, own=key, head=head)
