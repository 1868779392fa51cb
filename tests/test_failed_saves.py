"""A save that fails leaves its name usable, its root free, and no doubt about what was committed."""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import ckpt
from tests.places import Folder, Place


class Unsupported:
    def state_dict(self) -> dict[str, Any]:
        return {"value": self}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TestTheNameOfAFailedSave:
    @pytest.mark.also_on_s3
    def test_after_a_nan_under_keep_best_the_same_name_can_be_saved(self, root: Place) -> None:
        keep = ckpt.Keep(best=1, metric="loss")
        with ckpt.StateManager(root, model=nn.Linear(2, 2), keep=keep) as manager:
            manager.save_state("first", metrics={"loss": 2.0}, wait=True)
            with pytest.raises(ckpt.MetricError, match="NaN"):
                manager.save_state("step-00000100", metrics={"loss": float("nan")}, wait=True)
            assert not (root / "step-00000100").exists()
            manager.save_state("step-00000100", metrics={"loss": 1.0}, wait=True)
        assert ckpt.verify(root)["step-00000100"] == []

    def test_after_an_object_that_cannot_be_saved_the_same_name_can_be_saved(self, root: Place) -> None:
        state = Unsupported()
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
            manager.save_state("first", wait=True)
            manager.register(mine=state)
            with pytest.raises(ckpt.UnsupportedError):
                manager.save_state("latest", wait=True)
            state.state_dict = lambda: {"value": 1}  # type: ignore[method-assign]
            manager.save_state("latest", wait=True)
        assert ckpt.verify(root)["latest"] == []

    @pytest.mark.not_on_s3("an object store has no files where folders should be")
    def test_a_root_in_which_an_older_version_left_such_a_file_heals(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        root = Folder(tmp_path / "root")
        (root / "latest").write_bytes(b"")
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager, caplog.at_level(logging.WARNING, "ckpt"):
            manager.resume()
            manager.save_state("latest", wait=True)
        assert ckpt.verify(root) == {"latest": []}
        assert "latest was an empty lock file" in caplog.text

    @pytest.mark.not_on_s3("an object store has no files where folders should be")
    def test_a_file_with_content_or_one_that_somebody_holds_stays(self, tmp_path: Path) -> None:
        root = Folder(tmp_path / "root")
        (root / "mine").write_bytes(b"notes of a user")
        (root / "held").write_bytes(b"")
        (root / "link").symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").touch()
        with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager, open(root / "held") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for name in ("mine", "held", "link"):
                with pytest.raises(ckpt.CkptError):
                    manager.save_state(name, wait=True)
        assert (root / "mine").read_bytes() == b"notes of a user"
        assert (root / "held").is_file()
        assert (root / "link").is_symlink()
        assert (tmp_path / "elsewhere").is_file()
