"""Hashes find damage, signatures find tampering: what is loaded with a key is what its owner has saved.

The attacker of these tests can write to the root, and makes every hash anew. He has no private key, but for the test
that shows what the SHA-256 of a file is for.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.export import push
from ckpt.export.options import ExportOptions
from ckpt.formats.native.manifest import FILE_NAME, FileRecord, Manifest, digest, sha256
from ckpt.ranks import hosts as host_names
from ckpt.root.catalog import read_manifest
from ckpt.root.signing import Trust, find_signing_key, new_key, open_trust
from ckpt.storage import LocalStorage
from ckpt.tools.show import summarize
from tests.helpers.forgery import write_manifest
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, step

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def no_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKPT_SIGN_KEY", raising=False)
    monkeypatch.delenv("CKPT_VERIFY_KEY", raising=False)


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A private key; its public half is beside it."""
    path = str(tmp_path / "key.pem")
    new_key(path)
    return path


@pytest.fixture
def another_key(tmp_path: Path) -> str:
    path = str(tmp_path / "another.pem")
    new_key(path)
    return path


def train(root: Any, *names: str, first: int = 1, **options: Any) -> None:
    """Save checkpoints by these names, whose weights are their numbers."""
    model = nn.Linear(4, 4)
    with ckpt.StateManager(root, model=model, **options) as manager:
        manager.resume()
        for step, name in enumerate(names, first):
            nn.init.constant_(model.weight, step)
            manager.step()
            manager.save_state(name)


def weight(model: nn.Linear) -> float:
    return model.weight[0, 0].item()


def load(root: Any, name: str | None = None, **options: Any) -> tuple[ckpt.Restored, float]:
    model = nn.Linear(4, 4)
    with ckpt.StateManager(root, model=model, **options) as manager:
        return manager.load_state(name), weight(model)


@pytest.fixture
def run(tmp_path: Path, key: str) -> Path:
    """Two signed checkpoints: `a`, then `b`."""
    train(tmp_path / "run", "a", "b", signing=ckpt.Signing(key=key))
    return tmp_path / "run"


def altered_weights(root: Path, name: str) -> bytes:
    """Weights of 7 in place of those that were saved."""
    data = (root / name / WEIGHTS).read_bytes()
    saved, altered = (torch.full((4, 4), value).numpy().tobytes() for value in ({"a": 1.0, "b": 2.0}[name], 7.0))
    assert saved in data
    return data.replace(saved, altered)


def reseal(root: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a manifest says, with its signature line as it was and its digest made anew."""
    path = root / name / FILE_NAME
    _, _, signature, rest = path.read_bytes().split(b"\n", 3)
    fields = json.loads(b"{" + rest)
    change(fields)
    lines = signature + b"\n" + json.dumps(fields, indent=1).encode().removeprefix(b"{\n")
    write_manifest(path.parent, with_digest(lines))


def with_digest(lines: bytes) -> bytes:
    return b'{\n "digest": "xxh3-128:' + digest(lines).encode() + b'",\n' + lines


def hashes_of(record: dict[str, Any], data: bytes) -> None:
    record["blocks"], record["sha256"] = [digest(data)], [sha256(data)]
    if record["head"]:
        head = data[: record["head"][0]]
        record["head"], record["head_sha256"] = [len(head), digest(head)], sha256(head)


def tamper_with_weights(root: Path, name: str) -> None:
    """Replace the weights, and make all hashes and the digest anew."""
    data = altered_weights(root, name)
    (root / name / WEIGHTS).write_bytes(data)

    def change(fields: dict[str, Any]) -> None:
        hashes_of(next(file for file in fields["files"] if file["name"] == WEIGHTS), data)

    reseal(root, name, change)


def strip_signature(root: Path, name: str) -> None:
    manifest = replace(read_manifest(LocalStorage(root), name), signature=None)
    write_manifest(root / name, manifest.to_bytes())


class TestWhatIsSigned:
    @pytest.mark.also_on_s3
    def test_it_loads_with_the_public_key_alone(self, root: Place, key: str) -> None:
        train(root, "a", "b", signing=ckpt.Signing(key=key))
        restored, value = load(root, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))
        assert (restored.name, value, dict(restored.passed_over)) == ("b", 2.0, {})
        assert ckpt.verify(root, verify_key=f"{key}.pub") == {"b": [], "a": []}

    def test_who_has_no_key_loads_it_as_any_other(self, run: Path) -> None:
        assert load(run)[1] == 2.0
        assert ckpt.verify(run) == {"b": [], "a": []}

    def test_an_older_ckpt_reads_it_too(self, run: Path) -> None:
        """Its reader takes everything after the line of the digest for JSON, and ignores fields it does not know."""
        text = (run / "a" / FILE_NAME).read_bytes()
        claimed, lines = text.split(b"\n", 2)[1:]
        assert claimed == b' "digest": "xxh3-128:' + digest(lines).encode() + b'",'
        assert json.loads(b"{" + lines)["name"] == "a"

    def test_the_manifest_of_an_unsigned_one_has_no_field_more_than_before(self, tmp_path: Path) -> None:
        train(tmp_path / "plain", "a")
        fields = json.loads((tmp_path / "plain" / "a" / FILE_NAME).read_bytes())
        assert "signature" not in fields
        assert {"sha256", "head_sha256"}.isdisjoint(fields["files"][0])

    def test_a_copy_is_written_as_it_was_signed_also_with_fields_of_a_newer_ckpt(self, run: Path, key: str) -> None:
        manifest = replace(read_manifest(LocalStorage(run), "a"), signature=None)
        signed = find_signing_key(key)
        assert signed is not None
        newer = manifest.unsigned_bytes().replace(b'"version": 1,', b'"version": 1,\n "of_a_newer_ckpt": 5,')
        again = signed.sign(replace(manifest, hardware="x"))
        assert again.signature is not None
        text = replace(again, signature=replace(again.signature, text=newer)).to_bytes()
        assert Manifest.from_bytes(text, "a").to_bytes() == text

    def test_every_run_that_resumes_signs_with_the_key_of_its_own(
        self, run: Path, key: str, another_key: str, tmp_path: Path
    ) -> None:
        both = tmp_path / "both.pub"
        both.write_text(Path(f"{key}.pub").read_text() + Path(f"{another_key}.pub").read_text())
        train(run, "c", first=3, signing=ckpt.Signing(key=another_key, verify_key=both, required=True))
        assert ckpt.verify(run, verify_key=both) == {"c": [], "b": [], "a": []}
        assert load(run, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))[0].name == "b"

    def test_the_mirror_has_the_same_bytes_and_stands_in_for_the_root(self, tmp_path: Path, key: str) -> None:
        root, mirror = tmp_path / "run", tmp_path / "mirror"
        train(root, "a", "b", signing=ckpt.Signing(key=key), mirror=mirror)
        assert (root / "b" / FILE_NAME).read_bytes() == (mirror / "b" / FILE_NAME).read_bytes()
        shutil.rmtree(root / "b")
        restored, value = load(root, mirror=mirror, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))
        assert (restored.name, value) == ("b", 2.0)

    def test_files_that_are_linked_are_signed_with_their_sha256(self, tmp_path: Path, key: str) -> None:
        model = nn.Sequential(nn.Linear(900, 900), nn.Linear(900, 8))
        model[0].requires_grad_(False)
        root = tmp_path / "run"
        for sign in (None, key):  # the first one has no SHA-256
            with ckpt.StateManager(root, model=model, signing=ckpt.Signing(key=sign)) as manager:
                manager.resume()
                manager.save_state("signed" if sign else "unsigned")
        frozen = "model+frozen.safetensors"
        assert os.stat(root / "signed" / frozen).st_ino == os.stat(root / "unsigned" / frozen).st_ino
        assert ckpt.verify(root / "signed", verify_key=f"{key}.pub") == {"signed": []}


def _change(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update({name: value})


def _change_file(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["files"][0].update({name: value})


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "name": _change("name", "c"),
    "sequence": _change("sequence", 99),
    "run": _change("run", "another"),
    "step": _change("progress", {"epoch": 0, "batch": 0, "step": 99, "samples": 0}),
    "metrics": _change("metrics", {"loss": 0.0}),
    "files": _change("files", []),
    "path": _change_file("path", "other.safetensors"),
    "sha256": _change_file("sha256", ["0" * 64]),
    "a field of no meaning": _change("extra", 1),
}


class TestTampering:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    def test_whatever_is_changed_in_a_manifest_is_noticed(
        self, run: Path, key: str, change: Callable[[dict[str, Any]], None]
    ) -> None:
        reseal(run, "b", change)
        restored, value = load(run, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))
        assert (restored.name, value) == ("a", 1.0)
        assert "its content does not match its signature" in restored.passed_over["b"]
        assert not ckpt.verify(run, verify_key=f"{key}.pub")["a"]
        assert "signature" in ckpt.verify(run, verify_key=f"{key}.pub")["b"][0]

    def test_weights_whose_hashes_were_made_anew_are_loaded_without_a_key_and_refused_with_one(
        self, run: Path, key: str
    ) -> None:
        tamper_with_weights(run, "b")
        assert ckpt.verify(run)["b"] == []
        assert load(run)[1] == 7.0
        with pytest.raises(ckpt.UntrustedError, match="ckpt refuses b: its content does not match its signature"):
            load(run, "b", signing=ckpt.Signing(verify_key=f"{key}.pub"))
        assert load(run, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))[1] == 1.0

    def test_without_its_signature_it_is_refused_where_one_is_required(self, run: Path, key: str) -> None:
        strip_signature(run, "b")
        restored, value = load(run, signing=ckpt.Signing(key=key, required=True))
        assert value == 1.0
        assert "ckpt refuses b: it is not signed, but you require a signature by" in restored.passed_over["b"]

    def test_where_none_is_required_what_is_not_signed_is_loaded_with_a_warning(
        self, run: Path, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """So that a run can begin to sign."""
        load(run, signing=ckpt.Signing(key=key))
        assert "is not signed" not in caplog.text
        strip_signature(run, "b")
        assert load(run, signing=ckpt.Signing(key=key))[1] == 2.0
        assert caplog.text.count("b is not signed by a key that is trusted here") == 1

    def test_the_signature_of_another_is_refused_where_one_is_required(
        self, run: Path, key: str, another_key: str
    ) -> None:
        with pytest.raises(ckpt.UntrustedError, match=r"refuses b: it is signed by [0-9a-f]{16}, but you require"):
            load(run, signing=ckpt.Signing(verify_key=f"{another_key}.pub", required=True))

    def test_an_older_one_under_a_newer_name_is_refused(self, run: Path, key: str) -> None:
        shutil.rmtree(run / "b")
        shutil.copytree(run / "a", run / "b")
        with pytest.raises(ckpt.UntrustedError, match="refuses b: it was signed as 'a'"):
            load(run, "b", signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))
        assert load(run, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))[0].name == "a"

    def test_a_manifest_in_another_checkpoints_folder_is_refused(self, run: Path, key: str) -> None:
        write_manifest(run / "b", (run / "a" / FILE_NAME).read_bytes())
        assert load(run, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))[0].name == "a"

    def test_where_nothing_is_signed_a_resume_does_not_begin_afresh(self, tmp_path: Path, key: str) -> None:
        train(tmp_path / "run", "a")
        with (
            ckpt.StateManager(
                tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(key=key, required=True)
            ) as manager,
            pytest.raises(ckpt.UntrustedError, match="refuses a: it is not signed"),
        ):
            manager.resume()

    def test_retention_does_not_take_what_is_refused_for_damaged(self, tmp_path: Path, key: str) -> None:
        root = tmp_path / "run"
        train(root, "a", signing=ckpt.Signing(key=key))
        train(root, "unsigned", first=2)
        train(root, "c", first=3, signing=ckpt.Signing(key=key, required=True), keep=ckpt.Keep(last=2))
        assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["c", "unsigned"]

    def test_what_another_tool_wrote_is_refused_where_a_signature_is_required(self, tmp_path: Path, key: str) -> None:
        safetensors = tmp_path / "model"
        safetensors.mkdir()
        with ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4)) as manager:
            manager.save_model(safetensors)
        required: dict[str, Any] = {"verify_key": f"{key}.pub", "require_signed": True}
        for do in (
            lambda: ckpt.load_model(safetensors, nn.Linear(4, 4), **required),
            lambda: ckpt.merge(safetensors, tmp_path / "merged" / WEIGHTS, **required),
            lambda: ckpt.pull(safetensors, tmp_path / "pulled", **required),
        ):
            with pytest.raises(ckpt.UntrustedError, match="it has no manifest, so nothing in it is signed"):
                do()
        assert not (tmp_path / "merged").exists()
        assert not (tmp_path / "pulled").exists()


USERS: dict[str, Callable[[Path, Path, dict[str, Any]], object]] = {
    "load_model": lambda source, to, trust: ckpt.load_model(source, nn.Linear(4, 4), **trust),
    "merge": lambda source, to, trust: ckpt.merge(source, to / "x.safetensors", **trust),
    "pull": lambda source, to, trust: ckpt.pull(source, to / "pulled", **trust),
    "convert": lambda source, to, trust: ckpt.convert(source, to / "x.pt", to="torch", **trust),
    "diff": lambda source, to, trust: ckpt.diff(source, source, **trust),
    "show": lambda source, to, trust: summarize(source, trust=open_trust(**_renamed(trust))),
    "push": lambda source, to, trust: _prepared(str(source), open_trust(**_renamed(trust))),
}


def _renamed(trust: dict[str, Any]) -> dict[str, Any]:
    return {"verify_key": trust["verify_key"], "required": trust.get("require_signed", False)}


def _prepared(source: str, trust: Trust) -> None:
    """What `push_to_hub` does before it speaks to the Hub."""
    request = push._PushRequest(ExportOptions.parse(None, "5GB"), (), None, trust)
    with push._prepare(source, "model", None, request, None):
        pass


@pytest.mark.parametrize("use", USERS)
class TestEveryReaderAsksTheSameTrust:
    @pytest.mark.parametrize("signer", ["nobody", "another"])
    def test_what_no_trusted_key_has_signed_is_used_with_a_warning_or_refused(
        self, tmp_path: Path, key: str, another_key: str, use: str, signer: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        train(tmp_path / "theirs", "a", signing=ckpt.Signing(key=another_key if signer == "another" else False))
        source, public = tmp_path / "theirs" / "a", f"{key}.pub"
        caplog.clear()
        USERS[use](source, tmp_path, {"verify_key": public})
        warned = [one for one in caplog.messages if "a is not signed by a key that is trusted" in one]
        assert len(warned) == (2 if use == "diff" else 1)
        with pytest.raises(ckpt.UntrustedError, match="refuses a"):
            USERS[use](source, tmp_path / "again", {"verify_key": public, "require_signed": True})

    def test_what_a_trusted_key_has_signed_is_used_without_a_word(
        self, run: Path, key: str, tmp_path: Path, use: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.clear()
        USERS[use](run / "a", tmp_path, {"verify_key": f"{key}.pub", "require_signed": True})
        assert "signed" not in caplog.text


def head_of(root: Path, name: str) -> str:
    manifest = read_manifest(LocalStorage(root), name)
    return f"{manifest.run}:{manifest.sequence}"


@pytest.mark.parametrize("use", [*USERS, "load_state", "verify"])
class TestEveryReaderAsksForTheRun:
    def test_another_run_of_the_same_key_is_refused_and_so_is_what_is_older(
        self, run: Path, key: str, tmp_path: Path, use: str
    ) -> None:
        public, mine = f"{key}.pub", head_of(run, "b")
        train(tmp_path / "theirs", *"abcd", signing=ckpt.Signing(key=key))
        self._use(use, run / "b", tmp_path / "0", public, mine)
        self._use(use, run / "a", tmp_path / "1", public, mine.partition(":")[0])
        with pytest.raises(ckpt.UntrustedError, match=f"ckpt refuses d: it belongs to run .*, not to {mine[:32]}"):
            self._use(use, tmp_path / "theirs" / "d", tmp_path / "2", public, mine)
        older = "ckpt refuses a: it is number 1 of its run, which had reached number 2: somebody removed newer ones"
        with pytest.raises(ckpt.UntrustedError, match=older):
            self._use(use, run / "a", tmp_path / "3", public, mine)

    def _use(self, use: str, source: Path, to: Path, public: str, head: str) -> None:
        if use == "verify":
            for problem in ckpt.verify(source, verify_key=public, require_signed=head)[source.name]:
                raise ckpt.UntrustedError(problem)
        elif use == "load_state":  # as the newest: what is named may be older
            others = [path for path in source.parent.iterdir() if path.is_dir() and path != source]
            to.mkdir()
            for path in others:
                path.rename(to / path.name)
            load(source.parent, signing=ckpt.Signing(verify_key=public, required=head))
            for path in others:
                (to / path.name).rename(path)
        else:
            USERS[use](source, to, {"verify_key": public, "require_signed": head})


def test_commands_take_the_run_too(run: Path, key: str) -> None:
    head, command = head_of(run, "b"), ["verify", str(run), "--key", f"{key}.pub", "--run"]
    assert CliRunner().invoke(main, [*command, head[:32]]).exit_code == 0
    refused = CliRunner().invoke(main, [*command, head])
    assert (refused.exit_code, "had reached number 2" in refused.output) == (1, True)
    wrong = CliRunner().invoke(main, ["show", str(run), "--key", f"{key}.pub", "--run", "b"])
    assert "must be RUN or RUN:NUMBER" in wrong.output


class TestTheHeadThatAManagerRemembers:
    @pytest.fixture
    def signing(self, tmp_path: Path, key: str) -> ckpt.Signing:
        return ckpt.Signing(key=key, head=tmp_path / "mine" / "head")

    @pytest.fixture
    def root(self, tmp_path: Path, signing: ckpt.Signing) -> Path:
        train(tmp_path / "run", "a", "b", signing=signing)
        return tmp_path / "run"

    def test_it_grows_with_every_save_and_load_and_the_run_goes_on(
        self, tmp_path: Path, root: Path, signing: ckpt.Signing, key: str
    ) -> None:
        assert (tmp_path / "mine" / "head").read_text().strip() == head_of(root, "b")
        train(root, "c", first=3, signing=signing)
        assert (tmp_path / "mine" / "head").read_text().strip() == head_of(root, "c")
        reader = ckpt.Signing(verify_key=f"{key}.pub", head=tmp_path / "mine" / "another")
        load(root, signing=reader)
        assert (tmp_path / "mine" / "another").read_text().strip() == head_of(root, "c")

    def test_when_newer_ones_were_removed_it_is_no_longer_silent(self, root: Path, signing: ckpt.Signing) -> None:
        shutil.rmtree(root / "b")
        with pytest.raises(ckpt.UntrustedError, match=r"refuses a: it is number 1 .* name a checkpoint"):
            train(root, "c", signing=signing)
        assert load(root, "a", signing=signing)[1] == 1.0  # on purpose

    def test_after_going_back_on_purpose_the_run_goes_on_above_what_was_lost(
        self, root: Path, signing: ckpt.Signing
    ) -> None:
        shutil.rmtree(root / "b")
        model = nn.Linear(4, 4)
        with ckpt.StateManager(root, model=model, signing=signing) as manager:
            manager.load_state("a")
            nn.init.constant_(model.weight, 7.0)
            manager.save_state("c", wait=True)
        restored, value = load(root, signing=signing)
        assert (restored.name, value) == ("c", 7.0)
        assert head_of(root, "c").endswith(":3")

    def test_an_older_one_that_is_put_back_under_its_own_name_is_refused(
        self, tmp_path: Path, root: Path, signing: ckpt.Signing
    ) -> None:
        shutil.copytree(root / "b", tmp_path / "older")
        train(root, "b", first=3, signing=signing)
        shutil.rmtree(root / "b")
        shutil.copytree(tmp_path / "older", root / "b")
        with pytest.raises(ckpt.UntrustedError, match=r"refuses b: it is number 2 .* had reached number 3"):
            load(root, signing=signing)

    def test_another_run_of_the_same_key_is_passed_over_however_new_it_is(
        self, tmp_path: Path, root: Path, signing: ckpt.Signing, key: str
    ) -> None:
        train(tmp_path / "theirs", *"vwxyz", signing=ckpt.Signing(key=key))
        shutil.copytree(tmp_path / "theirs" / "z", root / "z")
        restored, value = load(root, signing=signing)
        assert (restored.name, value) == ("b", 2.0)
        assert "it belongs to run" in restored.passed_over["z"]
        with pytest.raises(ckpt.UntrustedError, match="ckpt refuses z: it belongs to run"):
            load(root, "z", signing=signing)

    @pytest.mark.parametrize("resumes", [True, False])
    def test_no_run_begins_where_another_one_was(self, root: Path, signing: ckpt.Signing, resumes: bool) -> None:
        shutil.rmtree(root)
        with (
            ckpt.StateManager(root, model=nn.Linear(4, 4), signing=signing) as manager,
            pytest.raises(ckpt.UntrustedError, match="up to number 2, but this run loaded none of them"),
        ):
            manager.resume() if resumes else manager.save_state("c", wait=True)
        assert not (root / "c").exists()

    def test_it_needs_a_key_and_a_file_that_can_be_understood(self, tmp_path: Path, key: str) -> None:
        (tmp_path / "head").write_text("nonsense")
        for signing in (ckpt.Signing(head=tmp_path / "new"), ckpt.Signing(key=key, head=tmp_path / "head")):
            with pytest.raises(ckpt.ConfigError, match=r"no key to verify|must be RUN or RUN:NUMBER, .* 'nonsense'"):
                ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=signing)
        with pytest.raises(ckpt.ConfigError, match="leave the run out of required="):
            ckpt.Signing(key=key, head=tmp_path / "new", required="0" * 32)

    def test_snapshots_in_memory_are_not_remembered_as_they_may_be_lost(
        self, tmp_path: Path, root: Path, signing: ckpt.Signing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CKPT_MEMORY_KEEPER", "off")
        with ckpt.StateManager(root, model=nn.Linear(4, 4), signing=signing, memory=1) as manager:
            manager.resume()
            for _ in range(3):
                manager.step()
            assert (tmp_path / "mine" / "head").read_text().strip() == head_of(root, "b")


class TestConvert:
    def test_signs_what_it_has_verified(self, run: Path, key: str, another_key: str, tmp_path: Path) -> None:
        ckpt.convert(run / "a", tmp_path / "own", sign=key)
        ckpt.convert(run / "a", tmp_path / "other", sign=another_key, verify_key=f"{key}.pub")
        assert ckpt.verify(tmp_path / "other", verify_key=f"{another_key}.pub") == {"a": []}

    def test_signs_nothing_that_nobody_has_verified(self, run: Path, another_key: str, tmp_path: Path) -> None:
        tamper_with_weights(run, "a")
        train(tmp_path / "unsigned", "a")
        for source in (run / "a", tmp_path / "unsigned" / "a"):
            with pytest.raises(ckpt.UntrustedError, match="no key that you trust has signed"):
                ckpt.convert(source, tmp_path / "signed", sign=another_key)
        assert not (tmp_path / "signed" / "a").exists()


@pytest.mark.parametrize("use", ["merge", "convert", "push", "pull", "load_model", "load_state", "diff"])
def test_what_is_used_is_what_was_verified_whoever_alters_files_in_between(
    run: Path, key: str, tmp_path: Path, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is altered as soon as its weights were read once."""
    true, false = (run / "a" / WEIGHTS).read_bytes(), altered_weights(run, "a")
    read, seen = LocalStorage.read_into, []

    def altered(storage: LocalStorage, key: str, start: int, *buffers: memoryview, **how: Any) -> None:
        read(storage, key, start, *buffers, **how)
        if key == f"a/{WEIGHTS}":
            seen.append(start)
            (run / "a" / WEIGHTS).write_bytes(false)

    monkeypatch.setattr(LocalStorage, "read_into", altered)
    model = nn.Linear(4, 4)
    trust: dict[str, Any] = {"verify_key": f"{key}.pub", "require_signed": True}
    users: dict[str, Callable[[], object]] = {
        "load_model": lambda: ckpt.load_model(run / "a", model, **trust),
        "load_state": lambda: _load_trained(run, model, ckpt.Signing(verify_key=f"{key}.pub", required=True)),
        "diff": lambda: _differs(ckpt.diff(model, run / "a", **trust)),
    }
    nn.init.constant_(model.weight, 7.0 if use == "diff" else 5.0)
    try:
        users.get(use, lambda: USERS[use](run / "a", tmp_path, trust))()
    except ckpt.DamagedError:  # it was read again, and verified again
        assert not (tmp_path / "x.safetensors").exists()
        assert not (tmp_path / "pulled").exists() or "a" not in ckpt.verify(tmp_path / "pulled")
        return
    assert seen
    assert true != false
    if use == "merge":
        assert set(load_file(tmp_path / "x.safetensors")["weight"].flatten().tolist()) == {1.0}
    elif use == "convert":
        assert set(torch.load(tmp_path / "x.pt")["model"]["weight"].flatten().tolist()) == {1.0}
    elif use == "pull":
        assert (tmp_path / "pulled" / "a" / WEIGHTS).read_bytes() == true
    elif use.startswith("load"):
        assert weight(model) == 1.0


def _load_trained(root: Path, model: nn.Linear, signing: ckpt.Signing) -> None:
    """Into a model that has trained; what a load has left half-way is never saved."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(root, model=model, signing=signing) as manager:
        try:
            manager.load_state("a")
        except ckpt.DamagedError:
            if weight(model) == 7.0:
                with pytest.raises(ckpt.StateError, match="failed halfway"):
                    manager.save_state("c", wait=True)
            raise


def _differs(found: ckpt.Diff) -> None:
    assert [one.name for one in found.differences if "weight" in one.name]


@pytest.fixture
def collision(run: Path, key: str) -> Path:
    """Weights of 7 in `b` with the same xxh3-128 as those that were saved, as far as its signed manifest says.

    xxh3 was not made to withstand whoever looks for two files with one hash. Here the owner's key stands for the work
    of finding them.
    """
    manifest, data = read_manifest(LocalStorage(run), "b"), altered_weights(run, "b")

    def collided(file: FileRecord) -> FileRecord:
        same = file.name != WEIGHTS
        return file if same else replace(file, blocks=(digest(data),))

    signing = find_signing_key(key)
    assert signing is not None
    altered = replace(manifest, files=tuple(map(collided, manifest.files)), signature=None)
    write_manifest(run / "b", signing.sign(altered).to_bytes())
    (run / "b" / WEIGHTS).write_bytes(data)
    return run


class TestFilesAreComparedBySha256:
    def test_by_a_load_into_fresh_objects(self, collision: Path, key: str) -> None:
        assert load(collision)[1] == 7.0
        restored, value = load(collision, signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))
        assert (restored.name, value) == ("a", 1.0)
        assert "model.safetensors was altered" in restored.passed_over["b"]

    def test_by_a_load_into_what_was_trained_which_is_left_as_it_was(self, collision: Path, key: str) -> None:
        model = nn.Linear(4, 4)
        with ckpt.StateManager(collision, model=model, signing=ckpt.Signing(key=key)) as manager:
            manager.load_state("a")
            manager.step()
            nn.init.constant_(model.weight, 5)
            with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors was altered"):
                manager.load_state("b")
        assert weight(model) == 5.0

    def test_by_verify_also_without_a_key(self, collision: Path, key: str) -> None:
        for verify_key in (None, f"{key}.pub"):
            assert "model.safetensors was altered" in ckpt.verify(collision / "b", verify_key=verify_key)["b"][0]

    def test_by_merge_and_pull_and_load_model(self, collision: Path, key: str, tmp_path: Path) -> None:
        model, b = nn.Linear(4, 4), collision / "b"
        before = weight(model)
        required: dict[str, Any] = {"verify_key": f"{key}.pub", "require_signed": True}
        for do in (
            lambda: ckpt.load_model(b, model, **required),
            lambda: ckpt.merge(b, tmp_path / "merged" / WEIGHTS, **required),
            lambda: ckpt.pull(b, tmp_path / "pulled", **required),
        ):
            with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors was altered"):
                do()
        assert weight(model) == before
        assert not (tmp_path / "pulled" / "b" / FILE_NAME).exists()

    def test_by_a_repair_which_takes_the_file_from_nowhere_then(self, collision: Path, tmp_path: Path) -> None:
        shutil.copytree(collision, tmp_path / "mirror")
        (collision / "b" / WEIGHTS).unlink()
        done = CliRunner().invoke(main, ["verify", str(collision), "--repair", "--from", str(tmp_path / "mirror")])
        assert done.exit_code == 1
        assert f"ckpt found no intact copy of {WEIGHTS}; nothing was written" in done.output
        assert not (collision / "b" / WEIGHTS).exists()

    def test_what_was_copied_before_is_read_again_by_a_pull_with_a_key(
        self, collision: Path, key: str, tmp_path: Path
    ) -> None:
        ckpt.pull(collision / "b", tmp_path / "pulled")
        with pytest.raises(ckpt.DamagedError, match="is damaged"):
            ckpt.pull(collision / "b", tmp_path / "pulled", verify_key=f"{key}.pub", require_signed=True)

    def test_a_pull_with_a_key_links_nothing_to_copies_that_only_claim_to_be_the_same(
        self, tmp_path: Path, key: str
    ) -> None:
        with ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(key=key)) as manager:
            manager.save_state("a")
            manager.save_state("b")
        required: dict[str, Any] = {"verify_key": f"{key}.pub", "require_signed": True}
        ckpt.pull(tmp_path / "run" / "a", tmp_path / "pulled", **required)
        (tmp_path / "pulled" / "a" / WEIGHTS).write_bytes(
            altered := (tmp_path / "run" / "a" / WEIGHTS).read_bytes()[:-1] + b"?"
        )
        ckpt.pull(tmp_path / "run" / "b", tmp_path / "pulled", **required)
        assert (tmp_path / "pulled" / "b" / WEIGHTS).read_bytes() != altered
        assert ckpt.verify(tmp_path / "pulled" / "b") == {"b": []}

    def test_what_was_verified_is_not_read_a_second_time(
        self, run: Path, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Or its values could be altered between the two."""
        reads: list[str] = []

        def noting(real: Callable[..., Any]) -> Callable[..., Any]:
            def read(self: LocalStorage, name: str, *args: Any, **options: Any) -> Any:
                reads.append(name)
                return real(self, name, *args, **options)

            return read

        monkeypatch.setattr(LocalStorage, "read", noting(LocalStorage.read))
        monkeypatch.setattr(LocalStorage, "read_into", noting(LocalStorage.read_into))
        load(run, "b", signing=ckpt.Signing(verify_key=f"{key}.pub", required=True))
        documents = [name for name in reads if name.endswith(".json") and not name.endswith(FILE_NAME)]
        assert sorted(documents) == ["b/rank-00000.json", "b/state.json"]


class TestOtherCommands:
    def test_what_is_signed_is_merged_pulled_and_loaded(self, run: Path, key: str, tmp_path: Path) -> None:
        required: dict[str, Any] = {"verify_key": f"{key}.pub", "require_signed": True}
        model = nn.Linear(4, 4)
        ckpt.load_model(run, model, **required)
        assert weight(model) == 2.0
        assert ckpt.merge(run / "a", tmp_path / "merged" / WEIGHTS, **required)
        ckpt.pull(run, tmp_path / "pulled", **required)
        assert ckpt.verify(tmp_path / "pulled", verify_key=f"{key}.pub") == {"b": [], "a": []}

    def test_a_pull_copies_what_is_signed_and_names_what_is_not(self, run: Path, key: str, tmp_path: Path) -> None:
        strip_signature(run, "b")
        with pytest.raises(ckpt.DamagedError, match=r"could not copy all of .*: ckpt refuses b: it is not signed"):
            ckpt.pull(run, tmp_path / "pulled", verify_key=f"{key}.pub", require_signed=True)
        assert ckpt.verify(tmp_path / "pulled", verify_key=f"{key}.pub") == {"a": []}

    def test_verify_says_who_signed(self, run: Path, key: str) -> None:
        public = f"{key}.pub"
        shown = CliRunner().invoke(main, ["verify", str(run)])
        assert shown.exit_code == 0
        assert "which was not checked: give its public key with --key" in shown.output
        shown = CliRunner().invoke(main, ["verify", str(run), "--key", public])
        assert (shown.exit_code, shown.output.count("intact"), shown.output.count("not checked")) == (0, 2, 0)
        strip_signature(run, "b")
        shown = CliRunner().invoke(main, ["verify", str(run), "--key", public])
        assert shown.exit_code == 1
        assert "UNTRUSTED" in shown.output
        assert "intact" in shown.output

    @pytest.mark.parametrize("tamper", [tamper_with_weights, strip_signature])
    def test_a_repair_takes_nothing_that_the_key_has_not_signed(
        self, run: Path, key: str, tmp_path: Path, tamper: Callable[[Path, str], None]
    ) -> None:
        mirror = tmp_path / "mirror"
        shutil.copytree(run, mirror)
        tamper(mirror, "b")
        for path in (run / "b").glob("manifest*"):
            path.write_bytes(path.read_bytes()[:-9])
        before = {path: path.read_bytes() for path in (run / "b").iterdir()}
        command = ["verify", str(run / "b"), "--repair", "--from", str(mirror), "--key", f"{key}.pub"]
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 1
        assert "not repaired" in done.output
        assert {path: path.read_bytes() for path in (run / "b").iterdir()} == before

    def test_the_environment_has_the_key_for_all_of_them(
        self, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = tmp_path / "run"
        monkeypatch.setenv("CKPT_SIGN_KEY", Path(key).read_text())
        train(root, "a", signing=ckpt.Signing(key=True))
        train(root, "b", first=2, signing=ckpt.Signing(key=False))
        train(root, "c", first=3)
        monkeypatch.delenv("CKPT_SIGN_KEY")
        monkeypatch.setenv("CKPT_VERIFY_KEY", f"{key}.pub")
        assert CliRunner().invoke(main, ["verify", str(root / "a")]).exit_code == 0
        assert CliRunner().invoke(main, ["verify", str(root / "b")]).exit_code == 1
        assert load(root, signing=ckpt.Signing(required=True))[0].name == "c"

    def test_merge_and_pull_refuse_what_the_key_has_not_signed(
        self, run: Path, another_key: str, tmp_path: Path
    ) -> None:
        for command in (["merge", str(run / "a"), str(tmp_path / WEIGHTS)], ["pull", str(run), str(tmp_path / "copy")]):
            shown = CliRunner().invoke(main, [*command, "--key", f"{another_key}.pub"])
            assert (shown.exit_code, "it is signed by" in shown.output) == (1, True)


class TestSha256:
    def test_it_is_beside_the_other_hash_without_any_key(self, tmp_path: Path) -> None:
        train(tmp_path / "run", "a", saving=ckpt.SaveOptions(sha256=True))
        manifest = read_manifest(LocalStorage(tmp_path / "run"), "a")
        for file in manifest.files:
            data = (tmp_path / "run" / "a" / file.path).read_bytes()
            assert (file.blocks, file.sha256) == ((digest(data),), (sha256(data),))
            assert file.head is None or file.head_sha256 == sha256(data[: file.head[0]])

    def test_verify_compares_it(self, tmp_path: Path) -> None:
        root = tmp_path / "run"
        train(root, "a", saving=ckpt.SaveOptions(sha256=True))
        assert ckpt.verify(root) == {"a": []}
        manifest = read_manifest(LocalStorage(root), "a")
        files = tuple(replace(file, sha256=("0" * 64,)) for file in manifest.files)
        write_manifest(root / "a", replace(manifest, files=files).to_bytes())
        assert all("was altered" in problem for problem in ckpt.verify(root)["a"])
        assert len(ckpt.verify(root)["a"]) == len(files)

    @pytest.mark.parametrize("wrong", [["0" * 63], ["0" * 64] * 2, "0" * 64, [5], {"a": 1}, 7])
    def test_a_manifest_with_nonsense_in_its_place_is_damaged(self, tmp_path: Path, wrong: Any) -> None:
        train(tmp_path / "run", "a", saving=ckpt.SaveOptions(sha256=True))
        path = tmp_path / "run" / "a" / FILE_NAME
        fields = json.loads(path.read_bytes())
        fields["files"][0]["sha256"] = wrong
        del fields["digest"]
        lines = json.dumps(fields, indent=1).encode().removeprefix(b"{\n")
        write_manifest(path.parent, with_digest(lines))
        with pytest.raises(ckpt.DamagedError):
            load(tmp_path / "run", "a")


def _save_in_ranks(rank: int, root: str, kind: str, key: str) -> None:
    """Two ranks save twice. The main rank alone has the key."""
    with _managed(rank, root, kind, signing=ckpt.Signing(key=key if rank == 0 else False)) as (manager, model):
        manager.resume()
        for name in ("a", "b"):
            step(model, manager.session.registry.optimizers[0], int(name == "b"))
            manager.save_state(name)


def _load_in_ranks(rank: int, root: str, kind: str, public: str, expected: str, why: str) -> None:
    with _managed(rank, root, kind, signing=ckpt.Signing(verify_key=public, required=True)) as (manager, _):
        restored = manager.load_state()
        assert restored.name == expected
        assert why in restored.passed_over.get("b", "")


@contextmanager
def _managed(rank: int, root: str, kind: str, **options: Any) -> Iterator[tuple[ckpt.StateManager, nn.Module]]:
    own_roots = kind == "roots of their own"
    model = MODELS["ddp" if kind == "broadcast" else "fsdp2"](1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if own_roots:
        host_names.host_name = lambda: f"host-{rank}"
    where = f"{root}/{rank}" if own_roots else root
    ranks = ckpt.RankOptions(shared=not own_roots, broadcast=kind == "broadcast", timeout=60)
    with ckpt.StateManager(where, model=model, optimizer=optimizer, ranks=ranks, **options) as manager:
        yield manager, model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one root", "broadcast", "roots of their own"])
def test_what_many_ranks_saved_is_signed_by_the_main_one_and_verified_by_all(
    tmp_path: Path, key: str, kind: str
) -> None:
    root, public = tmp_path / "run", f"{key}.pub"
    run_ranks(2, _save_in_ranks, str(root), kind, key)
    run_ranks(2, _load_in_ranks, str(root), kind, public, "b", "")
    own_roots = kind == "roots of their own"
    if not own_roots:
        _collide_weights(root, key)
        run_ranks(2, _load_in_ranks, str(root), kind, public, "a", "was altered")
    for folder in (root / "0", root / "1") if own_roots else (root,):
        reseal(folder, "b", CHANGES["step"])
    run_ranks(2, _load_in_ranks, str(root), kind, public, "a", "does not match its signature")


def _begin_in_ranks(rank: int, root: str, key: str, head: str) -> None:
    """The main rank's host alone has the file, and all ranks are refused."""
    signing = ckpt.Signing(key=key, head=f"{head}-{rank}")
    with (
        _managed(rank, root, "one root", signing=signing) as (manager, _),
        pytest.raises(ckpt.UntrustedError, match=r"this run loaded none of them|had reached number 2"),
    ):
        manager.resume()


@pytest.mark.slow
def test_where_the_main_rank_alone_remembers_the_head_all_ranks_are_refused(tmp_path: Path, key: str) -> None:
    root, head = tmp_path / "run", tmp_path / "head"
    run_ranks(2, _save_in_ranks, str(root), "one root", key)
    Path(f"{head}-0").write_text(head_of(root, "b"))
    for name in ("b", "a"):
        shutil.rmtree(root / name)
        run_ranks(2, _begin_in_ranks, str(root), key, str(head))


def _collide_weights(root: Path, key: str) -> None:
    """Alter the last byte of the weights of `b`, whose xxh3 is then that of a manifest which is signed once more."""
    manifest, signing = read_manifest(LocalStorage(root), "b"), find_signing_key(key)
    assert signing is not None

    def collided(file: FileRecord) -> FileRecord:
        path = root / "b" / file.path
        if not file.name.startswith("model"):
            return file
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return replace(file, blocks=(digest(path.read_bytes()),))

    altered = replace(manifest, files=tuple(map(collided, manifest.files)), signature=None)
    write_manifest(root / "b", signing.sign(altered).to_bytes())


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG):
        yield caplog


def secret_of(key: str) -> str:
    return Path(key).read_text().splitlines()[1]


class TestKeys:
    def test_a_new_one_is_its_owners_alone_and_overwrites_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "k"
        made = CliRunner().invoke(main, ["key", "new", str(path)])
        assert made.exit_code == 0
        assert (path.stat().st_mode & 0o777, (tmp_path / "k.pub").stat().st_mode & 0o077) == (0o600, 0o044)
        before = path.read_bytes()
        again = CliRunner().invoke(main, ["key", "new", str(path)])
        assert (again.exit_code, path.read_bytes()) == (1, before)
        path.unlink()
        assert CliRunner().invoke(main, ["key", "new", str(path)]).exit_code == 1
        assert not path.exists()
        path.write_bytes(before)
        assert secret_of(str(path)) not in made.output + again.output

    def test_no_new_one_is_written_through_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "k").symlink_to(tmp_path / "elsewhere")
        assert CliRunner().invoke(main, ["key", "new", str(tmp_path / "k")]).exit_code == 1
        assert not (tmp_path / "elsewhere").exists()

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
    def test_one_that_others_may_read_is_refused(self, tmp_path: Path, key: str, mode: int) -> None:
        os.chmod(key, mode)
        each: list[dict[str, Any]] = [{"key": key}, {"verify_key": key}]
        for options in each:
            with pytest.raises(
                ckpt.ConfigError, match=f"other users can read or write the private key .*mode 0{mode:o}"
            ):
                ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(**options))
        assert not (tmp_path / "run").exists()

    def test_the_private_key_verifies_too(self, run: Path, key: str) -> None:
        assert ckpt.verify(run, verify_key=key) == {"b": [], "a": []}

    @pytest.mark.parametrize("option", ["key", "verify_key"])
    @pytest.mark.parametrize(
        "source", ["no/such/file", "-----BEGIN PRIVATE KEY-----\nnonsense\n", "\0", "", "encrypted", "rsa", "a folder"]
    )
    def test_what_is_no_key_is_refused_before_anything_is_made_and_never_shown(
        self, tmp_path: Path, option: str, source: str
    ) -> None:
        make: dict[str, Callable[[], str]] = {
            "encrypted": lambda: _pem(_new_private("ed25519"), b"secret"),
            "rsa": lambda: _pem(_new_private("rsa"), None),
            "a folder": lambda: str(tmp_path),
        }
        given = make.get(source, lambda: source)()
        options: dict[str, Any] = {option: given, "required": option == "verify_key"}
        with pytest.raises(ckpt.ConfigError) as raised:
            ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(**options))
        assert not (tmp_path / "run").exists()
        shown = f"{raised.value}{raised.value.__cause__}"
        assert not any(line in shown for line in given.splitlines()[1:] if line)

    def test_no_part_of_it_is_ever_shown(
        self, tmp_path: Path, key: str, logged: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
    ) -> None:
        text = Path(key).read_text()
        model = nn.Linear(4, 4)
        with ckpt.StateManager(
            tmp_path / "run", model=model, signing=ckpt.Signing(key=text, verify_key=text)
        ) as manager:
            manager.save_state("a")
            shown = repr(manager) + repr(manager.session.options) + repr(manager.session.saver.root)
        with pytest.raises(ckpt.ConfigError) as raised:
            ckpt.StateManager(tmp_path / "run", model=model, signing=ckpt.Signing(key=text.encode()))  # type: ignore[arg-type]
        printed = capsys.readouterr()
        everything = shown + str(raised.value) + logged.text + printed.out + printed.err
        everything += "".join(path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*.json"))
        assert secret_of(key) not in everything
        assert "key=a bytes must be" in str(raised.value)

    def test_to_require_signatures_needs_a_key(self, tmp_path: Path) -> None:
        for do in (
            lambda: ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(required=True)),
            lambda: ckpt.merge(tmp_path, tmp_path / WEIGHTS, require_signed=True),
            lambda: ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(key=True)),
        ):
            with pytest.raises(ckpt.ConfigError, match=r"key|CKPT_SIGN_KEY"):
                do()

    def test_without_the_package_the_error_says_what_to_install(
        self, tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "cryptography.exceptions", None)
        with pytest.raises(ckpt.ConfigError, match=r"pip install 'torch-ckpt\[sign\]'"):
            ckpt.StateManager(tmp_path / "run", model=nn.Linear(4, 4), signing=ckpt.Signing(key=key))


def _new_private(kind: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

    return ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else rsa.generate_private_key(65537, 2048)


def _pem(private: Any, passphrase: bytes | None) -> str:
    from cryptography.hazmat.primitives import serialization as ways

    hidden = ways.BestAvailableEncryption(passphrase) if passphrase else ways.NoEncryption()
    pem: bytes = private.private_bytes(ways.Encoding.PEM, ways.PrivateFormat.PKCS8, hidden)
    return pem.decode()
