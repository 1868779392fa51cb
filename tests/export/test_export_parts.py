"""The pieces of an export, each rule with its cases: what fits a model, names, destinations, folders and cards."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import ConfigError, LockedError, StorageError
from ckpt.export import load_model as loading
from ckpt.export.card import Training, _rows, known_fields, render
from ckpt.export.folders import (
    _sibling,
    _try_lock,
    as_storage_error,
    atomic_file,
    atomic_folder,
    belongs_beside,
    outdated_weights,
    refuse_checkpoints,
    scratch_folder,
)
from ckpt.export.load_model import _named_as_here, _Rules, misfits, other_state, rounded, with_aliases
from ckpt.export.merge import _Destination
from ckpt.formats.tensors import FilePlan


def stored(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(dtype=dtype, shape=shape)


class TestFit:
    def test_everything_that_does_not_fit_is_named(self) -> None:
        tied = torch.zeros(2)
        live = {
            "a": torch.zeros(2, 3), "tied": tied, "tied.too": tied, "lost": torch.zeros(1), "shape": torch.zeros(2),
            "whole": torch.zeros(1, dtype=torch.int32), "half": torch.zeros(1, dtype=torch.float16), "extra": "state",
        }  # fmt: skip
        saved = {
            "a": stored(2, 3), "tied": stored(2), "shape": stored(3), "whole": stored(1), "half": stored(1),
            "new": stored(1),
        }  # fmt: skip
        assert misfits(live, saved) == {
            "lost": "missing there",
            "new": "unexpected: the model has no such tensor",
            "shape": "shape [3] there, [2] here",
            "whole": "dtype float32 there, int32 here",
        }

    def test_values_are_cast_where_they_remain_what_they_are(self) -> None:
        kinds = (torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
        cast = {(a, b) for a in kinds for b in kinds if loading._is_castable(a, b)}
        floats, rest = kinds[:2], kinds[2:]
        assert {(a, b) for a in floats for b in floats} <= cast
        assert not {(a, b) for a in floats for b in rest} & cast
        assert {(torch.int32, torch.int64), (torch.uint8, torch.int32), (torch.bool, torch.uint8)} <= cast
        assert not {(torch.int64, torch.int32), (torch.int32, torch.uint8), (torch.uint8, torch.bool)} & cast
        told = rounded(torch.zeros(1, dtype=torch.float16), stored(1))
        assert told == "rounded from float32 to float16"
        assert rounded(torch.zeros(1), stored(1)) is None
        assert rounded(torch.zeros(1), stored(1, dtype=torch.float16)) is None

    def test_tied_names_and_state_that_is_no_tensor_are_known(self) -> None:
        tied = torch.zeros(1)
        live = {"a": tied, "b": tied, "c": torch.zeros(1), "x": {"k": 1}, "none": None}
        assert with_aliases({"a"}, live) == {"a", "b"}
        assert with_aliases({"c"}, live) == {"c"}
        assert other_state(live) == ["x"]
        source: Any = SimpleNamespace(
            tensors={"old": 1, "a": 2, "gone": 3}, other_names={"old": "c", "a": "b", "gone": "nowhere"}
        )
        here: Any = dict(_named_as_here(live, source))
        assert here == {"c": 1, "a": 2, "gone": 3}

    def test_a_tensor_is_renamed_unless_only_its_own_name_is_in_the_model(self) -> None:
        asked: list[tuple[str, list[Any]]] = []

        class Loading:
            def rename_source_key(self, name: str, renamings: Any, converters: Any, **about: Any) -> Any:
                assert about["base_model_prefix"] == "base"
                asked.append((name, renamings))
                return (f"new.{name}", "pattern") if renamings else (name, None)

        rules, model = _Rules(Loading(), ["rule"], []), SimpleNamespace(base_model_prefix="base")
        cases = [
            ({"new.w": 1}, ("new.w", "pattern"), 1),
            ({"new.w": 1, "w": 1}, ("new.w", "pattern"), 1),
            ({"w": 1}, ("w", None), 2),
            ({}, ("new.w", "pattern"), 1),
        ]
        for live, renamed, times in cases:
            asked.clear()
            assert rules.renamed("w", model, live) == renamed
            assert len(asked) == times
        converter = SimpleNamespace(source_patterns=["x", "y"])
        found = _Rules(None, [], [SimpleNamespace(source_patterns=["z"]), converter]).converter("y")
        assert found == converter
        assert found is not converter


class TestMerge:
    def test_the_output_is_a_file_in_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        for text in (f"{tmp_path}/a/m.safetensors", "m.safetensors", "b/m.safetensors"):
            found = _Destination.parse(text, None)
            assert (found.name, found.storage.url) == ("m.safetensors", os.path.dirname(text) or ".")
        (tmp_path / "dir.safetensors").mkdir()
        for wrong, message in (
            (f"{tmp_path}/", "is a folder. Name a file in that folder"),
            ("dir.safetensors", "is a folder. Name a file in that folder"),
            ("a/m.bin", "ckpt can't write to a/m.bin"), ("s3://m.safetensors", "ckpt can't write to s3://m.safetensors"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
                _Destination.parse(wrong, None)

    def test_neither_a_checkpoint_nor_an_older_output_is_mixed_up_with_it(self, tmp_path: Path) -> None:
        def there(*names: str, files: int = 1) -> None:
            folder = tmp_path / "-".join([*names, "x"]).replace("/", "_")
            for name in names:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).touch()
            plans = [FilePlan.of(str(number), b"") for number in range(files)]
            _Destination.parse(folder / "m.safetensors", None).check_free(plans)

        there()
        there("m.safetensors", "m.safetensors.index.json", "other")
        there("other", files=2)
        for names, files, message in (
            (("manifest.json",), 1, "is a checkpoint"), (("m.safetensors/x",), 1, "is a folder"),
            (("m.safetensors",), 2, "m.safetensors together"),
            (("m.safetensors.index.json",), 2, "index.json together"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=message):
                there(*names, files=files)

    def test_a_write_that_fails_takes_back_those_before_it(self, tmp_path: Path) -> None:
        def fails() -> Any:
            yield memoryview(b"x")
            raise OSError("full")

        plans: Any = [
            FilePlan.of("a", b"12"), SimpleNamespace(path="b", size=1, pieces=fails), FilePlan.of("c", b"3"),
        ]  # fmt: skip
        output = _Destination.parse(tmp_path / "out" / "m.safetensors", None)
        with pytest.raises(OSError, match="full"):
            output.write(plans)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        assert output.write([plans[0], plans[2]]) == [f"{tmp_path}/out/a", f"{tmp_path}/out/c"]


class TestFolders:
    def test_files_beside_weights_and_older_weights_are_told_apart(self) -> None:
        beside = {
            "config.json": True, "tokenizer.json": True, "model.safetensors": False, "a.bin": False, ".hidden": False,
            "model.safetensors.index.json": False, "sub/config.json": False, "x.gguf": False,
        }  # fmt: skip
        assert {name: belongs_beside(name) for name in beside} == beside
        old = [
            "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "notes.md",
            "adapter_model.safetensors", "my_model.safetensors",
        ]  # fmt: skip
        assert outdated_weights(old, ["model.safetensors"]) == {old[1], old[2]}
        assert outdated_weights(old, ["adapter_model-00001-of-00001.safetensors"]) == {"adapter_model.safetensors"}
        assert outdated_weights(old, ["config.json"]) == set()

    def test_a_folder_appears_when_it_is_complete_or_not_at_all(self, tmp_path: Path) -> None:
        final = tmp_path / "deep" / "out"
        with atomic_folder(final) as new:
            (new / "a").write_text("1")
            assert not final.exists()
            assert new.parent == final.parent
            assert new.name.startswith(".out.")
        assert (final / "a").read_text() == "1"
        with pytest.raises(ConfigError, match="already exists, and ckpt does not overwrite it"), atomic_folder(final):
            pass

        def interrupted() -> None:
            with atomic_folder(final, over=True) as new:
                (new / "a").write_text("2")
                raise RuntimeError

        with pytest.raises(RuntimeError):
            interrupted()
        (final / "sub").mkdir()
        (final / "sub" / "mine").write_text("kept")
        (final / "link").symlink_to("nowhere")
        for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
            (final / name).write_text("old")
        with atomic_folder(final, over=True) as new:
            (new / "a").write_text("2")
            (new / "model.safetensors").write_text("new")
        assert {path.relative_to(final).as_posix() for path in final.rglob("*")} == {
            "a", "sub", "sub/mine", "link", "model.safetensors",
        }  # fmt: skip
        assert (final / "a").read_text() == "2"
        assert [path.name for path in final.parent.iterdir()] == ["out"]

    def test_a_place_that_cannot_be_a_folder_of_its_own_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        monkeypatch.chdir(tmp_path / "real")
        for place, message in (
            (tmp_path / "file", "is a link, or is not a folder"), (tmp_path / "link", "is a link, or is not a folder"),
            (tmp_path / "real", "is or contains the current folder"), (tmp_path, "or contains the current folder"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=message), atomic_folder(place, over=True):
                pass
        refuse_checkpoints(tmp_path)
        (tmp_path / "real" / "manifest.json").touch()
        for folder in (tmp_path, tmp_path / "real"):
            with pytest.raises(ConfigError, match="contains checkpoints, which ckpt does not overwrite"):
                refuse_checkpoints(folder)

    def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(self, tmp_path: Path) -> None:
        final = tmp_path / "out"
        left, other = _sibling(final), tmp_path / ".out.mine.ckpt-tmp"
        for folder in (left, other):
            folder.mkdir()
        with atomic_folder(final):
            assert not left.exists()
        assert other.exists()  # nobody of ours makes such a name
        second, locked = tmp_path / "second", pytest.raises(LockedError, match="another process is writing")
        with atomic_folder(second), locked, atomic_folder(second):
            pass
        assert sorted(path.name for path in tmp_path.iterdir()) == [".out.mine.ckpt-tmp", "out", "second"]

    def test_a_folder_that_was_set_aside_comes_back_after_a_kill(self, tmp_path: Path) -> None:
        final = tmp_path / "out"
        aside = _sibling(final, ".old")
        aside.mkdir()
        (aside / "mine").write_text("kept")

        def interrupted() -> None:
            with atomic_folder(final, over=True):
                assert (final / "mine").read_text() == "kept"
                raise RuntimeError

        with pytest.raises(RuntimeError):
            interrupted()
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_a_file_appears_when_it_is_complete_and_replaces_none(self, tmp_path: Path) -> None:
        final = tmp_path / "deep" / "x.pt"
        with atomic_file(final) as new:
            new.write_text("1")
            assert not final.exists()
        assert final.read_text() == "1"
        with pytest.raises(ConfigError, match="already exists, and ckpt does not overwrite it"), atomic_file(final):
            pass

        def overtaken() -> None:
            with atomic_file(final.with_name("y")) as new:
                new.write_text("2")
                final.with_name("y").write_text("another's")

        with pytest.raises(StorageError, match="could not write"):
            overtaken()
        assert final.with_name("y").read_text() == "another's"
        assert sorted(path.name for path in final.parent.iterdir()) == ["x.pt", "y"]

    def test_errors_of_the_system_are_named_with_the_place(self) -> None:
        full = pytest.raises(StorageError, match=r"could not write /x: No space left on device\.")
        with full, as_storage_error(Path("/x")):
            raise OSError(28, "No space left on device")
        with pytest.raises(StorageError, match=r"^mine$"), as_storage_error(Path("/x")):
            raise StorageError("mine")

    def test_scratch_is_removed_with_what_killed_processes_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        abandoned, held = tmp_path / "ckpt-push-old", tmp_path / "ckpt-push-held"
        for folder in (abandoned, held):
            folder.mkdir()
        lock = _try_lock(held)
        assert lock is not None
        assert _try_lock(held) is None
        with scratch_folder() as folder:
            assert folder.is_dir()
            assert folder.name.startswith("ckpt-push-")
            assert {path.name for path in tmp_path.iterdir()} == {"ckpt-push-held", folder.name}
            with scratch_folder() as other:
                assert folder.is_dir()
            assert not other.exists()
        os.close(lock)
        assert [path.name for path in tmp_path.iterdir()] == ["ckpt-push-held"]


class TestCard:
    def manifest(self, number: int, **changes: Any) -> Any:
        known = {
            "name": f"s{number}", "id": f"{number:08}-id", "run": "r", "sequence": number, "step": number,
            "parent": f"{number - 1:08}-id", "metrics": {"loss": float(number)}, "progress": {"step": number},
            "versions": {"torch": "2"}, "hardware": "GPU", "world_size": 1,
        }  # fmt: skip
        return SimpleNamespace(**{**known, **changes})

    def test_fields_follow_from_the_model(self) -> None:
        tags = ["torch-ckpt"]
        assert known_fields({}, None) == {"tags": tags}
        training = Training(metrics={"loss": 1.0, "acc": 2.0})
        assert known_fields({"config": {"architectures": ["BertForMaskedLM"]}, "base": "me/base"}, training) == {
            "library_name": "transformers", "base_model": "me/base", "pipeline_tag": "fill-mask", "metrics": ["acc"],
            "tags": tags,
        }  # fmt: skip
        adapter = {"config": {"base_model_name_or_path": "me/base", "task_type": "CAUSAL_LM"}}
        assert known_fields({"adapters": {"default": adapter}, "base": "me/other"}, None) == {
            "library_name": "peft", "base_model": "me/base", "pipeline_tag": "text-generation", "tags": tags,
        }  # fmt: skip
        assert "base_model" not in known_fields({"base": "a/b/c"}, None)

    def test_rows_are_what_is_known(self) -> None:
        training = Training(
            progress={"step": 1200, "epoch": 0, "samples": 5}, metrics={"loss": 0.123456}, versions={"torch": "2"},
            hardware="GPU", world_size=2, lineage={"run": "r", "from": ""},
        )  # fmt: skip
        assert _rows(training) == [
            ("steps", "1,200"), ("samples", "5"), ("loss", "0.1235"), ("hardware", "2 ranks, GPU"),
            ("versions", "torch 2"), ("run", "r"),
        ]  # fmt: skip
        assert _rows(Training(hardware="GPU")) == [("hardware", "GPU")]
        assert _rows(Training()) == []

    def test_a_card_by_hand_keeps_its_text_and_a_section_is_replaced(self) -> None:
        first = render(None, "T", {"tags": ["a"]}, {}, None)
        assert first.startswith("---\ntags:\n- a\n---\n\n# T\n\n<!-- ckpt writes")
        mine = first.replace("# T", "# Mine") + "more\n"
        second = render(mine, "T", {"tags": ["b"]}, {"license": "mit"}, Training(hardware="GPU"))
        assert second.count("<!-- end of the section of ckpt -->") == 1
        assert "# Mine" in second
        assert second.endswith("more\n")
        assert "| hardware | GPU |" in second
        assert second.startswith("---\ntags:\n- a\nlicense: mit\n---\n")
        third = render(second, "T", {}, {"license": "apache"}, None)
        assert "license: apache" in third
        assert "license: mit" not in third


@pytest.mark.parametrize(("where", "given"), [("az://x/model", {"key": 1}), ("/cache/model", None)])
def test_storage_options_are_for_the_url_and_not_for_what_the_cache_has_of_it(
    where: str, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def at(*arguments: Any) -> Any:
        asked.append(arguments)
        return SimpleNamespace(is_ours=True, checkpoints=lambda: ("storage", ["a"]))

    monkeypatch.setattr(loading, "_reached", lambda shown, options: where)
    monkeypatch.setattr(loading, "Place", SimpleNamespace(at=at))
    monkeypatch.setattr(loading, "_load_checkpoint", lambda *arguments, strict: {"found": arguments[:2], "s": strict})
    found = loading.load_model("az://x/model", nn.Linear(1, 1), format="hf", storage_options={"key": 1}, strict=False)
    assert asked == [(where, given, "hf")]
    assert found == {"found": ("storage", ["a"]), "s": False}
