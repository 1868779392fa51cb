"""`ckpt verify`: read every byte of checkpoints and compare it with its hash."""

from __future__ import annotations

import click

from ckpt.cli.ls import listed_hosts, without_name
from ckpt.cli.output import Styled, echo
from ckpt.errors import MissingError
from ckpt.formats.native.manifest import Manifest
from ckpt.formats.native.signature import short
from ckpt.root import catalog
from ckpt.root import verify as verifying
from ckpt.root.foreign_kind import reads_instead
from ckpt.root.trust import Trust
from ckpt.root.verify import Verification, files_on_other_hosts
from ckpt.shown import shown
from ckpt.storage import Storage
from ckpt.util.console import format_size, one_line


@click.command()
@click.argument("url")
@click.option("--key", metavar="PATH", help="Also check that this key (PEM, public or private) has signed it.")
def verify(url: str, key: str | None) -> None:
    """Read every byte of the checkpoint at URL, or of all below it.

    Hashes find damage; signatures, checked with --key or CKPT_VERIFY_KEY, find tampering.

    Exits with status 1 if one is damaged or cannot be read. A run may use the root meanwhile: below a root, a
    checkpoint that is just being saved or removed is no fault.
    """
    trust = verifying.required_by(key)
    storage, names, pointed_at = catalog.resolve(url)
    if not names:
        raise MissingError(f"there are no checkpoints in {url}.{reads_instead(storage)}")
    width = max(len(shown(name)) for name in names)
    verdicts = [_show_verdict(storage, name, width, trust) for name in names]
    if any(verdict.is_fault or (pointed_at and verdict.state != verifying.INTACT) for verdict in verdicts):
        raise click.exceptions.Exit(1)


def _show_verdict(storage: Storage, name: str, width: int, trust: Trust) -> Verification:
    """Verify a checkpoint and print its line."""
    found = verifying.verify_checkpoint(storage, name, trust)
    colour = "red" if found.is_fault else "green" if found.state == verifying.INTACT else "yellow"
    echo(f"{shown(name):<{width}}  ", Styled(found.state, colour), f"  {one_line(_about(storage, found))}")
    return found


def _about(storage: Storage, found: Verification) -> str:
    if found.state == verifying.REMOVED:
        return "by retention, or by hand, since it was listed"
    if found.state == verifying.UNDER_WAY:
        return "a process is just saving or removing it: it is not committed"
    if found.manifest is None or found.is_fault:
        return without_name("; ".join(found.problems), found.name)
    others = files_on_other_hosts(storage, found.manifest)
    here = format_size(sum(file.size for file in found.manifest.files if file.path not in others))
    here += _signed_by(found.manifest)
    return f"{here}; the rest is on {listed_hosts(others)}" if others else here


def _signed_by(manifest: Manifest) -> str:
    if manifest.signature is None:
        return ""
    by = f", signed by {short(manifest.signature.key)}"
    return by if manifest.is_authentic else f"{by}, which was not checked: give its public key with --key"
