"""`ckpt verify`: read every byte of checkpoints and compare it with its hash. `ckpt key`: make keys that sign them."""

from __future__ import annotations

from typing import Any

import click

from ckpt.cli.ls import listed_hosts, without_name
from ckpt.cli.output import Styled, checkpoint_or_path, echo, echo_json, with_trust
from ckpt.errors import CheckpointError, MissingError
from ckpt.formats.native.manifest import Manifest, short
from ckpt.formats.registry import foreign_hint
from ckpt.root import catalog
from ckpt.root import verify as repairing
from ckpt.root import verify as verifying
from ckpt.root.signing import Trust
from ckpt.root.verify import Verification, files_on_other_hosts
from ckpt.shown import shown
from ckpt.storage import Storage, open_storage
from ckpt.util.console import format_size, one_line


@click.command()
@click.argument("url", shell_complete=checkpoint_or_path)
@click.option("--repair", is_flag=True, help="Restore damaged files from intact copies.")
@click.option(
    "--from", "sources", metavar="URL", multiple=True, help="Another root with intact copies, such as the mirror."
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of JSON objects for other programs to read.")
@with_trust
def verify(url: str, *, repair: bool, sources: tuple[str, ...], as_json: bool, **trusted: Any) -> None:
    """Read every byte of the checkpoint at URL, or of all checkpoints in a root, and verify the hashes.

    Only ckpt checkpoints have hashes, so verify can't check other tools' files. Hashes find damage. Signatures reveal
    tampering: to check them, give --key or set CKPT_VERIFY_KEY. With --repair, verify restores a damaged file from any
    checkpoint that has an intact copy of it, in this root or in a root that you name with --from.

    The command exits with status 1 if a checkpoint is damaged or unreadable. A run may use the root at the same time:
    verify does not count a checkpoint as damaged while a run is saving or removing it.

    \b
    ckpt verify runs/mrpc/step-00001000
    ckpt verify /nvme/mrpc --repair --from s3://bucket/mrpc
    """
    if sources and not repair:
        raise click.UsageError("--from only works with --repair: add --repair")
    if repair and as_json:
        raise click.UsageError("--json can't be combined with --repair: repair first, then verify with --json")
    trust = verifying.required_by(**trusted)
    storage, names, pointed_at = catalog.resolve(url)
    others = [open_storage(source) for source in sources]
    if not names:
        hint = foreign_hint([entry.key for entry in storage.list()])
        raise MissingError(f"there are no checkpoints in {url}, so there are no hashes to verify.{hint}")
    width = max(len(shown(name)) for name in names)
    verdicts = []
    if as_json:
        verdicts = [verifying.verify_checkpoint(storage, name, trust) for name in names]
        echo_json([_record(verdict) for verdict in verdicts])
    for name in () if as_json else names:
        found = _show_verdict(storage, name, width, trust)
        if repair and found.state == verifying.DAMAGED and _repair(storage, name, width, others, trust):
            found = _show_verdict(storage, name, width, trust)
        verdicts.append(found)
    if any(verdict.is_fault or (pointed_at and verdict.state != verifying.INTACT) for verdict in verdicts):
        raise click.exceptions.Exit(1)


def _show_verdict(storage: Storage, name: str, width: int, trust: Trust) -> Verification:
    """Verify a checkpoint and print its line."""
    found = verifying.verify_checkpoint(storage, name, trust)
    colour = "red" if found.is_fault else "green" if found.state == verifying.INTACT else "yellow"
    echo(f"{shown(name):<{width}}  ", Styled(found.state, colour), f"  {one_line(_about(storage, found))}")
    return found


def _record(found: Verification) -> dict[str, Any]:
    """A verdict for other programs."""
    signature = found.manifest.signature if found.manifest else None
    return {
        "name": found.name,
        "state": found.state.lower(),
        "problems": list(found.problems),
        "bytes": found.manifest.size if found.manifest else None,
        "signed_by": short(signature.key) if signature else None,
        "signature_checked": bool(found.manifest and found.manifest.is_authentic),
    }


def _repair(storage: Storage, name: str, width: int, others: list[Storage], trust: Trust) -> bool:
    """Write back what is damaged, and print what was done. Returns whether anything was."""
    try:
        done = repairing.repair(storage, name, others, trust)
    except CheckpointError as error:
        about = without_name(str(error), name)
        echo(f"{shown(name):<{width}}  ", Styled("not repaired", "red"), f"  {one_line(about)}")
        return False
    if done.lost:
        about = f"ckpt found no intact copy of {', '.join(done.lost[:5])}; nothing was written"
        echo(f"{shown(name):<{width}}  ", Styled("not repaired", "red"), f"  {one_line(about)}")
        return False
    for path, source in done.written.items():
        echo(f"{shown(name):<{width}}  ", Styled("repaired", "yellow"), f"  {one_line(f'{path} from {source}')}")
    return bool(done.written)


def _about(storage: Storage, found: Verification) -> str:
    if found.state == verifying.REMOVED:
        return "by retention, or by hand, since it was listed"
    if found.state == verifying.UNDER_WAY:
        return "a process is saving or removing it right now, so it is not committed"
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


@click.group()
def key() -> None:
    """Make a key pair that signs and verifies checkpoints (ckpt.Signing(key=...), ckpt verify --key).

    \b
    ckpt key new ~/.ckpt/run.pem
    """


@key.command()
@click.argument("path")
def new(path: str) -> None:
    """Write a new private key, which only you can read, to PATH, and its public key to PATH.pub."""
    from ckpt.root.signing import find_verify_keys, new_key, shown

    public = new_key(path)
    echo(f"{path}: keep it secret, and give it to the run: ckpt.Signing(key={path!r}) or CKPT_SIGN_KEY")
    echo(f"{public}: give it to whoever loads: --key, verify_key= or CKPT_VERIFY_KEY")
    echo(f"named {shown(find_verify_keys(public))} in messages")
