"""Authenticity: how manifests are sealed when they are written, and which of them are believed when they are read.

Hashes find damage, signatures find tampering: whoever alters a file can make its hashes anew, and not its signature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from ckpt.errors import ConfigError, UntrustedError
from ckpt.formats.native.manifest import Manifest, short
from ckpt.root.keys import KeySource, SigningKey, find_signing_key, find_verify_keys, has_signed, shown


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


@dataclass(frozen=True)
class Trust:
    """The public keys whose signatures are believed, and whether anything else is refused."""

    keys: tuple[str, ...] = ()
    required: bool = False

    def checked(self, manifest: Manifest) -> Manifest:
        """The manifest, authentic if one of the keys has signed it; then its files are compared by SHA-256.

        What bears the name of one of the keys, and was not signed by it, is always refused; what is not signed, or by
        others, where a signature is required.
        """
        signature = manifest.signature
        if signature is None or signature.key not in self.keys:
            self._refuse_unknown(manifest)
            return manifest
        problem = "" if has_signed(signature.key, signature) else "what it says does not fit its signature"
        problem = problem or _problem(manifest, signature.name)
        if problem:
            raise UntrustedError(f"{manifest.name} is refused: {problem}.")
        return replace(manifest, signature=replace(signature, verified=True))

    def refuse_unsigned(self, where: str) -> None:
        """Raise where a signature is required, for a place that has no manifest which could have one."""
        if self.required:
            raise UntrustedError(
                f"{where} is refused: it has no manifest, so nothing in it is signed, and a signature is required."
            )

    def _refuse_unknown(self, manifest: Manifest) -> None:
        if not self.required:
            return
        by = f"it is signed by {short(manifest.signature.key)}" if manifest.signature else "it is not signed"
        raise UntrustedError(f"{manifest.name} is refused: {by}, and must be signed by {shown(self.keys)}.")


BELIEVES_ALL = Trust()


def _problem(manifest: Manifest, signed_name: str) -> str:
    """Why a manifest with a good signature is refused all the same."""
    if signed_name != manifest.name:
        return f"it was signed as {signed_name!r}, and its folder has another name: give it back, if you renamed it"
    without = [file.path for file in manifest.files if not file.has_sha256]
    return f"it has no SHA-256 of {', '.join(without)}" if without else ""


def open_trust(verify_key: KeySource | None, *, required: bool = False, own: SigningKey | None = None) -> Trust:
    """What is believed with these keys, or those of the environment, and the one that this process signs with."""
    keys = find_verify_keys(verify_key)
    keys = tuple(dict.fromkeys([*keys, *([own.id] if own is not None else [])]))
    if required and not keys:
        raise ConfigError(
            "signatures are required, and there is no key to verify them with: give verify_key= (on the command line "
            "--key), or set CKPT_VERIFY_KEY. The key that a run signs with will do, too."
        )
    return Trust(keys, required)


class KeyOptions(Protocol):
    """The options of a manager that are about keys."""

    @property
    def key(self) -> KeySource | bool | None: ...

    @property
    def verify_key(self) -> KeySource | None: ...

    @property
    def required(self) -> bool: ...


def open_keys(options: KeyOptions, *, sha256: bool) -> tuple[Seal, Trust]:
    """How the checkpoints of a run are sealed, and which ones it believes."""
    key = find_signing_key(options.key)
    return Seal(sha256, key), open_trust(options.verify_key, required=options.required, own=key)
