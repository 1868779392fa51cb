"""Bits flip, files are cut short or vanish: it is noticed, and the checkpoint before is taken."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from tests.helpers.places import Folder, Place

MANIFESTS = ("manifest.json", "manifest.copy.json")


@pytest.fixture
def run(root: Place) -> Place:
    """Two checkpoints: step 1 and step 2."""
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        for step in (1, 2):
            model(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            nn.init.constant_(model.weight, step)
            manager.step()
            manager.save_state()
    return root


def _load(root: Place, name: str | None = None) -> tuple[ckpt.Restored, nn.Linear]:
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        return manager.load_state(name), model


@pytest.mark.slow
def test_a_hundred_random_flips_and_truncations_are_all_noticed(run: Place) -> None:
    chance = random.Random(7)
    files = sorted((run / "step-00000002").files())
    assert len(files) == 6
    for _ in range(100):
        hurt = run / "step-00000002" / chance.choice(files)
        whole = hurt.read_bytes()
        data = bytearray(whole)
        if chance.random() < 0.7:
            bit = chance.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            hurt.write_bytes(data)
        else:
            hurt.write_bytes(data[: chance.randrange(len(data))])
        restored, model = _load(run)
        if hurt.name in MANIFESTS:  # each is the copy of the other
            assert restored.name == "step-00000002", hurt.name
            assert hurt.name in ckpt.verify(run / "step-00000002")["step-00000002"][0]
        else:
            assert restored.name == "step-00000001", hurt.name
            assert hurt.name in restored.passed_over["step-00000002"]
        assert torch.equal(model.weight, torch.full((40, 40), float(restored.step)))
        hurt.write_bytes(whole)
    assert _load(run)[0].name == "step-00000002"


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "rank-00000.json"])
def test_a_missing_file_is_named_and_the_checkpoint_before_is_taken(run: Place, file: str) -> None:
    (run / "step-00000002" / file).unlink()
    restored, _ = _load(run)
    assert restored.name == "step-00000001"
    assert restored.passed_over == {"step-00000002": f"step-00000002 is damaged: {file} is missing."}
    assert "passed over" in str(restored)


def test_without_its_manifest_and_the_copy_of_it_a_checkpoint_is_passed_over_and_named(run: Place) -> None:
    for name in MANIFESTS:
        (run / "step-00000002" / name).unlink()
    restored, _ = _load(run)
    assert restored.name == "step-00000001"
    assert "has lost manifest.json and manifest.copy.json" in restored.passed_over["step-00000002"]


def _flip(file: Place) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def _cut(file: Place) -> None:
    file.write_bytes(file.read_bytes()[:-9])


HARM: dict[str, Callable[[Place], object]] = {
    "flipped": _flip,
    "cut": _cut,
    "removed": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
}


class TestTheManifestOfTheOnlyCheckpoint:
    """One bit may cost neither the checkpoint nor the run."""

    @pytest.fixture
    def only(self, root: Place) -> Place:
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, 7)
        with ckpt.StateManager(root, model=model, keep=ckpt.Keep(last=1)) as manager:
            manager.resume()
            for _ in range(2):
                manager.step()
                manager.save_state()
        return root / "step-00000002"

    @pytest.mark.also_on_s3
    @pytest.mark.parametrize("harm", HARM)
    def test_is_read_from_its_copy_named_and_repaired_by_the_next_run(
        self, only: Place, harm: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        whole = (only / "manifest.json").read_bytes()
        assert (only / "manifest.copy.json").read_bytes() == whole
        HARM[harm](only / "manifest.json")
        model = nn.Linear(4, 4)
        with ckpt.StateManager(only.parent, model=model) as manager:
            restored = manager.resume()
        assert restored is not None
        assert restored.step == 2
        assert torch.equal(model.weight, torch.full((4, 4), 7.0))
        assert "manifest.json" in caplog.text
        assert "Its copy manifest.copy.json is used" in caplog.text
        assert "ckpt restored it from its copy" in caplog.text
        assert (only / "manifest.json").read_bytes() == whole
        assert ckpt.verify(only.parent) == {only.name: []}

    @pytest.mark.parametrize("harm", ["cut", "removed"])
    def test_has_its_copy_written_again_by_the_next_run(self, only: Place, harm: str) -> None:
        HARM[harm](only / "manifest.copy.json")
        with ckpt.StateManager(only.parent, model=nn.Linear(4, 4)) as manager:
            assert manager.resume() is not None
        assert (only / "manifest.copy.json").read_bytes() == (only / "manifest.json").read_bytes()

    @pytest.mark.also_on_s3
    @pytest.mark.parametrize("harm", HARM)
    def test_damaged_with_its_copy_is_an_error_and_never_a_fresh_start(self, only: Place, harm: str) -> None:
        for name in MANIFESTS:
            HARM[harm](only / name)
        before = (only.parent).files()
        with ckpt.StateManager(only.parent, model=nn.Linear(4, 4)) as manager:
            with pytest.raises(ckpt.DamagedError, match=r"(?s)no checkpoint .* is intact.*step-00000002.*backup"):
                manager.resume()
            with pytest.raises(ckpt.ConfigError, match="saves nothing, because the last load failed"):
                manager.save_state("another", wait=True)
        with (
            ckpt.StateManager(only.parent, model=nn.Linear(4, 4)) as manager,
            pytest.raises(ckpt.ConfigError, match="committed checkpoints that ckpt can't read"),
        ):
            manager.save_state("another", wait=True)
        assert only.parent.files() == before

    def test_flipped_in_the_root_and_in_the_mirror_with_their_copies_is_an_error(self, tmp_path: Path) -> None:
        root, mirror = tmp_path / "root", tmp_path / "mirror"
        with ckpt.StateManager(root, model=nn.Linear(4, 4), mirror=mirror) as manager:
            manager.save_state("a", wait=True)
        for name in MANIFESTS:
            _flip(Folder(mirror / "a" / name))
        shutil.rmtree(root / "a")
        with (
            ckpt.StateManager(root, model=nn.Linear(4, 4), mirror=mirror) as manager,
            pytest.raises(ckpt.DamagedError, match="its bytes do not match its digest"),
        ):
            manager.resume()


def test_weights_without_a_manifest_are_named_by_ls_and_kept(run: Place) -> None:
    for name in (*MANIFESTS, "state.json", "rank-00000.json"):
        (run / "step-00000002" / name).unlink()
    before = run.files()
    assert _load(run)[0].name == "step-00000001"
    shown = CliRunner().invoke(main, ["ls", str(run)]).output
    assert re.search(r"step-00000002 .*has lost manifest\.json", shown), shown
    assert run.files() == before


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(run: Place) -> None:
    (run / "step-00000002" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors is 5 bytes of"):
        _load(run, "step-00000002")


def test_when_none_is_intact_it_says_so_and_never_starts_afresh(run: Place) -> None:
    for name in ("step-00000001", "step-00000002"):
        (run / name / "model.safetensors").write_bytes(b"")
    model = nn.Linear(40, 40)
    with (
        ckpt.StateManager(run, model=model) as manager,
        pytest.raises(ckpt.DamagedError, match=r"no checkpoint in .* is intact") as caught,
    ):
        manager.resume()
    assert "step-00000001" in str(caught.value)
    assert "step-00000002" in str(caught.value)


@pytest.mark.also_on_s3
def test_a_damaged_checkpoint_is_replaced_when_training_comes_to_its_step_again(run: Place) -> None:
    (run / "step-00000002" / "model.safetensors").write_bytes(b"")
    model = nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(run, model=model, optimizer=optimizer) as manager:
        manager.resume()
        manager.step()
        assert manager.save_state() == "step-00000002"
    assert ckpt.verify(run) == {"step-00000002": [], "step-00000001": []}


def test_verify_names_what_is_wrong(run: Place) -> None:
    data = bytearray((run / "step-00000001" / "state.json").read_bytes())
    data[10] ^= 1
    (run / "step-00000001" / "state.json").write_bytes(data)
    report = ckpt.verify(run)
    assert report["step-00000002"] == []
    assert report["step-00000001"] == [f"state.json was altered (bytes 0 to {len(data)})"]
    assert ckpt.verify(run / "step-00000001").keys() == {"step-00000001"}


@pytest.mark.parametrize("more", [1, 5000])
def test_a_file_that_is_too_long_is_damaged(run: Place, more: int) -> None:
    file = run / "step-00000002" / "model.safetensors"
    size = len(file.read_bytes())
    file.write_bytes(file.read_bytes() + bytes(more))
    (problem,) = ckpt.verify(run)["step-00000002"]
    assert problem.startswith("model.safetensors is ")
    assert problem.endswith(f" ({size + more} bytes)")
    shown = CliRunner().invoke(main, ["ls", str(run)]).output
    assert re.search(r"step-00000002 .*DAMAGED", shown), shown
    assert _load(run)[0].name == "step-00000001"


def _large(seed: int) -> nn.Linear:
    """Longer than a block, so that damage at its end is found when its beginning has been read."""
    torch.manual_seed(seed)
    return nn.Linear(3000, 3000, bias=False)


@pytest.fixture(scope="module")
def damaged_at_its_end(new_root: Callable[[], Place]) -> Place:
    root = new_root()
    with ckpt.StateManager(root, model=_large(1)) as manager:
        manager.save_state("old")
        manager.save_state("new")
    file = root / "new" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    return root


def test_what_was_trained_stays_as_it_is_when_a_load_fails(damaged_at_its_end: Place) -> None:
    model = _large(2)
    with ckpt.StateManager(damaged_at_its_end, model=model) as manager:
        manager.load_state("old")
        with torch.no_grad():
            model.weight.add_(1)
        before = model.weight.clone()
        with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors was altered"):
            manager.load_state("new")
        assert torch.equal(model.weight, before)


def test_fresh_objects_take_the_newest_that_is_intact(damaged_at_its_end: Place) -> None:
    model = _large(2)
    with ckpt.StateManager(damaged_at_its_end, model=model) as manager:
        assert manager.load_state().name == "old"
        manager.step()
    assert torch.equal(model.weight, _large(1).weight)


def test_what_was_loaded_in_part_is_neither_saved_nor_trained_on(damaged_at_its_end: Place) -> None:
    with ckpt.StateManager(damaged_at_its_end, model=_large(2)) as manager:
        with pytest.raises(ckpt.DamagedError):
            manager.load_state("new")
        with pytest.raises(ckpt.StateError, match="a load of new failed halfway"):
            manager.save_state("mixed")
        with pytest.raises(ckpt.StateError, match="a load of new failed halfway"):
            next(manager.epochs(1))
        manager.load_state("old")
        manager.step()
