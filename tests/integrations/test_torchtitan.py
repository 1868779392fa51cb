"""torchtitan trains with ckpt in place of its checkpointer: killed, stopped, resumed, and spread in other ways."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import ckpt
from tests.helpers import processes, titan
from tests.helpers.pipelines import digest, missing, read, write
from tests.helpers.processes import run_alone, run_ranks

WHY = "torchtitan is not installed: it needs datasets<4.8, so it is in no extra (CONTRIBUTING.md says how to try it)"
needs_torchtitan = pytest.mark.skipif(not titan.is_installed(), reason=WHY)
KILLED, STOPPED = titan.TRAINED
STEPS = 6


def test_where_torchtitan_is_not_installed_one_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ckpt.integrations.torchtitan", raising=False)
    monkeypatch.setitem(sys.modules, "torchtitan", None)  # as if it were not
    with pytest.raises(ImportError, match=r"needs torchtitan 0\.3, but .*: pip install 'torchtitan==0\.3\.\*'"):
        __import__("ckpt.integrations.torchtitan")


def _train(rank: int, folder: str) -> None:
    """Both ways straight to their end. Then again: one is stopped by SIGTERM, the other killed after step 3."""
    for way in titan.TRAINED:
        made = titan.trainer(
            titan.folder_of(folder, f"{way}-straight"), way, steps=STEPS, keep_latest_k=2, last_save_model_only=True
        )
        titan.after_each_step(made, partial(_note, folder, way))
        made.train()
        made.close()
    made = titan.trainer(titan.folder_of(folder, STOPPED), STOPPED, steps=STEPS, async_mode="disabled")
    titan.after_each_step(made, partial(_end, signal.SIGTERM, 1))
    with pytest.raises(SystemExit) as stopped:
        made.train()
    assert stopped.value.code == 128 + signal.SIGTERM
    made = titan.trainer(titan.folder_of(folder, KILLED), KILLED, steps=STEPS)
    titan.after_each_step(made, partial(_end, signal.SIGKILL, 3))
    made.train()


def _note(folder: str, way: str, made: Any) -> None:
    write(folder, f"{way}-{made.step}", titan.digests(made))


def _end(signal_number: int, step: int, made: Any) -> None:
    """Send every rank a signal after a step. What was saved before is committed."""
    if made.step == step:
        made.checkpointer.manager.wait()
        titan.synchronise()
        os.kill(os.getpid(), signal_number)


def _resume(rank: int, folder: str) -> None:
    for way in titan.TRAINED:
        made = titan.trainer(titan.folder_of(folder, way), way, steps=STEPS, seed=2)
        made.train()
        restored = made.checkpointer.manager.restored
        assert restored is not None
        assert restored.step == 2 if way == KILLED else 2 <= restored.step < STEPS, restored
        assert not restored.approximated, restored
        assert not missing(titan.digests(made), read(folder, f"{way}-{STEPS}")), way
        made.close()


def _spread(rank: int, folder: str, ways: dict[str, str]) -> None:
    """Train on from step 4 of each run, in another way."""
    for saved, way in ways.items():
        options = {"load_step": 4, "load_only": True, "exclude_from_loading": ["dataloader"]}
        made = titan.trainer(titan.folder_of(folder, f"{saved}-straight"), way, steps=5, seed=3, **options)
        assert made.checkpointer.load(4)
        assert not missing(titan.digests(made), read(folder, f"{saved}-4")), (saved, way)
        made.train()
        assert made.step == 5
        made.close()


def _begin_from(rank: int, folder: str, saved: str) -> None:
    """New runs begin with the model of another: of its checkpoint, and of what it wrote of its model alone."""
    straight, known = titan.folder_of(folder, f"{saved}-straight"), read(folder, f"{saved}-{STEPS}")
    for number, source in enumerate(("checkpoint", "checkpoint-model")):
        options = {"initial_load_path": f"{straight}/{source}/step-{STEPS:08d}", "memory": 1, "interval": 500}
        made = titan.trainer(titan.folder_of(folder, f"new-{number}"), "fsdp", steps=1, seed=4, **options)
        assert made.checkpointer.load()
        assert made.step == 0
        assert _of_model(folder, saved).items() <= titan.digests(made).items()
        made.train()
        made.close()
        (last,) = ckpt.list_checkpoints(made.checkpointer.manager.url)
        assert last.step == 1
    _train_on_with_another_schedule(titan.folder_of(folder, "all"), f"{straight}/checkpoint/step-{STEPS:08d}", known)
    _do_without(titan.folder_of(folder, "none"))


def _of_model(folder: str, way: str) -> dict[str, str]:
    return {name: value for name, value in read(folder, f"{way}-{STEPS}").items() if name.endswith("weight")}


def _train_on_with_another_schedule(folder: str, path: str, known: dict[str, str]) -> None:
    options = {"initial_load_path": path, "initial_load_model_only": False, "exclude_from_loading": ["lr_scheduler"]}
    made = titan.trainer(folder, "fsdp", steps=STEPS + 1, seed=4, **options)
    schedule = titan.digests(made)["schedule"]
    assert made.checkpointer.load()
    assert made.step == STEPS
    assert titan.digests(made) == {**known, "schedule": schedule} != known
    made.train()
    made.close()
    assert [found.step for found in ckpt.list_checkpoints(made.checkpointer.manager.url)] == [STEPS + 1]


def _do_without(folder: str) -> None:
    """Without checkpoints, and where torchtitan's own checkpoints would be passed over."""
    made = titan.trainer(folder, "fsdp", steps=1, enable=False)
    made.train()
    made.close()
    made = titan.trainer(folder, "fsdp", steps=1)
    titan.synchronise()
    titan.folder_of(folder, "checkpoint/step-2")
    Path(folder, "checkpoint/step-2/.metadata").touch()
    with pytest.raises(ckpt.ConfigError, match=r"has torchtitan's own checkpoints \(step-2\)"):
        made.checkpointer.load()
    made.close()


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
def test_torchtitan_is_killed_resumed_bit_for_bit_and_spread_in_other_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEADLINE", 600.0)  # every process imports torchtitan
    folder = str(tmp_path)
    assert run_ranks(4, _train, folder, dies=True) == [-9] * 4
    for way in titan.TRAINED:
        straight = tmp_path / f"{way}-straight"
        steps = [found.step for found in ckpt.list_checkpoints(straight / "checkpoint")]
        assert steps == [6, 4]
        (file,) = (straight / "checkpoint-model").rglob("*.safetensors")
        assert {name: digest(value) for name, value in load_file(file).items()} == _of_model(folder, way)
    run_ranks(4, _resume, folder)
    run_ranks(4, _spread, folder, {"pp2-fsdp": "pp2-tp", "tp2-fsdp": "pp2-fsdp"})
    run_ranks(2, _spread, folder, dict.fromkeys(titan.TRAINED, "fsdp"))
    run_ranks(2, _begin_from, folder, KILLED)


def _configure(rank: int) -> None:
    titan.run_on_cpu()
    from ckpt.integrations.torchtitan import CkptCheckpointer

    flags: dict[str, Any] = dict.fromkeys(("last_save_in_hf", "initial_load_in_hf", "create_seed_checkpoint"), True)
    others: dict[str, Any] = {"exclude_from_loading": ["optimizer", "dataloader"], "async_mode": "of", "memory": -1}
    with pytest.raises(ckpt.ConfigError) as refused:
        CkptCheckpointer.Config(last_save_model_only=True, **flags, **others)
    for setting in (*flags, "exclude_from_loading=['optimizer']", "async_mode='of'", "memory=-1"):
        assert setting in str(refused.value)
    config = CkptCheckpointer.Config(interval=7, keep_latest_k=0, async_mode="disabled", memory=10)
    options = config.own_options()
    assert options["save_every"] == ckpt.Every(steps=7)
    assert options["keep"] is None
    assert not options["saving"].background
    keep = CkptCheckpointer.Config(keep=ckpt.Keep(last=5)).own_options()["keep"]
    assert (keep, CkptCheckpointer.Config(keep_latest_k=3).own_options()["keep"].last) == (ckpt.Keep(last=5), 3)
    config.storage_options, config.signing = {"secret": "a secret"}, ckpt.Signing(key="a key")
    assert "a secret" not in str(config.to_dict())
    assert "a key" not in str(config.to_dict())
    assert config.to_dict()["memory"] == "10"


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.long
def test_settings_are_mapped_or_refused_all_at_once() -> None:
    run_alone(_configure)
