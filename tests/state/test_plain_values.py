"""Plain values of a script are in the checkpoint, and are as they were after a resume."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import ConfigError
from tests.helpers.processes import run_ranks


def manager(root: Path | str) -> ckpt.StateManager:
    torch.manual_seed(0)
    return ckpt.StateManager(root, model=nn.Linear(2, 2))


def saved(root: Path, **values: Any) -> None:
    with manager(root) as run:
        run.values.update(values)
        run.save_state("a")


def test_values_are_back_after_a_resume(tmp_path: Path) -> None:
    given = {"best": 0.25, "name": "adam", "stages": [1, (2, None)], "by_epoch": {0: 0.5, "x": True}, "bound": math.inf}
    saved(tmp_path, **given)
    with manager(tmp_path) as run:
        restored = run.resume()
        assert dict(run.values) == given
        assert restored is not None
        assert "values" in restored.restored


def test_a_list_is_saved_as_it_is_at_the_save(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.values["losses"] = []
        run.values["losses"].append(1.5)
        run.save_state("a", wait=True)
        run.values["losses"].append(2.5)
    with manager(tmp_path) as run:
        run.resume()
        assert run.values["losses"] == [1.5]


def test_what_is_registered_holds_until_a_load_brings_another(tmp_path: Path) -> None:
    saved(tmp_path, best=0.25)
    with manager(tmp_path) as run:
        run.register(best=1e9, patience=3)
        restored = run.resume()
        assert dict(run.values) == {"best": 0.25, "patience": 3}
        assert restored is not None
        assert "patience" in restored.skipped


def test_what_is_registered_after_the_load_does_not_undo_it(tmp_path: Path) -> None:
    saved(tmp_path, best=0.25)
    with manager(tmp_path) as run:
        run.resume()
        run.register(best=1e9)
        assert run.values["best"] == 0.25


def test_scalars_of_torch_and_numpy_become_numbers(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.values.update(loss=torch.tensor(0.5), count=np.int64(3), flag=torch.tensor(True))
        assert {name: type(value) for name, value in run.values.items()} == {"loss": float, "count": int, "flag": bool}


NOT_PLAIN = {
    "an object": object(),
    "a module": nn.Linear(1, 1),
    "a tensor": torch.zeros(3),
    "a set": {1, 2},
    "a dict by tuples": {(1, 2): 3},
    "bytes": [[b"bytes"]],
}


@pytest.mark.parametrize("what", NOT_PLAIN)
def test_what_is_not_plain_is_refused_with_the_way_out(what: str, tmp_path: Path) -> None:
    with manager(tmp_path) as run, pytest.raises(ConfigError, match="register"):
        run.values["x"] = NOT_PLAIN[what]


def test_what_has_come_into_a_list_since_is_refused_by_the_save(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.values["all"] = []
        run.values["all"].append(object())
        with pytest.raises(ckpt.CkptError, match="values"):
            run.save_state("a", wait=True)
        run.values["all"].clear()


def test_a_value_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.values["best"] = 1
        with pytest.raises(KeyError, match="best"):
            run.values["bset"]
        assert run.values.get("bset", 7) == 7


def test_an_object_cannot_take_the_name_of_a_value(tmp_path: Path) -> None:
    with manager(tmp_path) as run:
        run.register(best=1.0)
        with pytest.raises(ConfigError, match="value of that name"):
            run.register(best=nn.Linear(1, 1))


def test_a_checkpoint_without_values_is_what_it_was_before_there_were_any(tmp_path: Path) -> None:
    saved(tmp_path)
    assert all(b'"values":{"best"' not in path.read_bytes() for path in (tmp_path / "a").iterdir())
    with manager(tmp_path) as run:
        restored = run.resume()
        assert restored is not None
        assert "values" not in restored.restored


def _ranks_save(rank: int, root: str) -> None:
    with manager(root) as run:
        run.values["mine"] = rank
        run.save_state("a")


def _ranks_load(rank: int, root: str) -> None:
    with manager(root) as run:
        run.resume()
        assert run.values["mine"] == rank


@pytest.mark.slow
@pytest.mark.slow
def test_each_rank_has_its_own_and_one_process_the_main_ranks(tmp_path: Path) -> None:
    assert not any(run_ranks(2, _ranks_save, str(tmp_path)))
    assert not any(run_ranks(2, _ranks_load, str(tmp_path)))
    with manager(tmp_path) as run:
        restored = run.resume()
        assert run.values["mine"] == 0
        assert restored is not None
        assert "values" in restored.approximated


def test_every_counts_true_steps_across_a_resume(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        with manager(tmp_path) as run:
            run.resume()
            for _ in range(3):
                run.step()
                seen += [run.progress.step] if run.every(2) else []
                assert run.every(1)
            run.save_state()
    assert seen == [2, 4, 6]
    with manager(tmp_path) as run, pytest.raises(ConfigError, match="every"):
        run.every(0)
