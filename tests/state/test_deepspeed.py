"""DeepSpeed: an engine goes on exactly where it was killed, and its model is there for everybody."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, DistributedSampler

import ckpt
from tests.helpers.processes import run_alone, run_ranks, seed_everything
from tests.helpers.training import exact

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"),
]

BATCHES = 2  # that were trained when everything was saved


def _trained_and_killed(rank: int, folder: str) -> None:
    from tests.helpers.engines import CASES, Loop

    seen = {case: Loop(f"{folder}/{case}", case, rank).run(save=BATCHES) for case in CASES}
    most = list(CASES)[-1]  # every parameter is gathered for a save, and divided again
    assert Loop(f"{folder}/not saved", most, rank).run()[0] == seen[most][0]
    assert Loop(f"{folder}/back", most, rank).run(save=BATCHES, back=True)[0] == seen[most][0]
    Path(folder, f"seen-{rank}.json").write_text(json.dumps(seen))
    os.kill(os.getpid(), signal.SIGKILL)


def _seen(folder: str, rank: int) -> Any:
    return json.loads(Path(folder, f"seen-{rank}.json").read_text())


def _resumed(rank: int, folder: str) -> None:
    from tests.helpers.engines import Loop

    for case, (straight, _) in _seen(folder, rank).items():
        resumed, _ = Loop(f"{folder}/{case}", case, rank).run(run=1)
        for before, after in zip(straight[BATCHES:], resumed, strict=True):
            assert after == before, case


def _resumed_by_one(rank: int, folder: str) -> None:
    """By another number of ranks: the model, and masters that are more exact than it."""
    from deepspeed.utils import safe_get_full_fp32_param

    from ckpt.integrations.accelerate import attach
    from tests.helpers.engines import CASES, new_accelerator, prepared, weights

    for case in [name for name in CASES if "ZeRO 2" in name or "ZeRO 3" in name]:
        accelerator = new_accelerator(0, 1, CASES[case])
        _, engine, *_ = prepared(accelerator, CASES[case])
        fresh = exact(weights(engine))
        manager = attach(accelerator, f"{folder}/{case}")
        restored = manager.load_state("here")
        assert "deepspeed-00000" in restored.resharded
        saved = weights(engine)
        assert fresh != exact(saved) == _seen(folder, 0)[case][1]
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                master = safe_get_full_fp32_param(parameter)
                assert exact(master.to(parameter.dtype)) == exact(saved[name])
        manager.close()


def _model_of(folder: Path, case: str) -> None:
    """The model of such a checkpoint, read by those who know nothing of DeepSpeed."""
    from tests.helpers.engines import build

    then = _seen(str(folder), 0)[case][1]
    net = build()
    dtype = torch.bfloat16 if "bf16" in case else torch.float16 if "fp16" in case else torch.float32
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
    ckpt.load_model(folder / case / "here", net)
    assert exact(net.state_dict()) == then, case
    ckpt.merge(folder / case / "here", folder / f"{case}.safetensors")
    for file in (folder / f"{case}.safetensors", folder / f"{case}-model" / "model.safetensors"):
        found = load_file(file)
        tied = found.get("words.weight", found.get("head.weight"))
        assert exact({**found, "words.weight": tied, "head.weight": tied}) == then, case


def test_a_killed_engine_goes_on_exactly_and_its_model_is_there_for_everybody(tmp_path: Path) -> None:
    from tests.helpers.engines import CASES

    assert run_ranks(2, _trained_and_killed, str(tmp_path), dies=True) == [-9, -9]
    for case in CASES:
        _model_of(tmp_path, case)
    assert run_alone(_resumed_by_one, str(tmp_path)) == 0
    assert run_ranks(2, _resumed, str(tmp_path)) == [0, 0]


PLAIN: dict[str, Any] = {  # a stage of ZeRO, and batches in a step
    "0": {"gradient_accumulation_steps": 1},
    "1": {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0},
}


def _interrupt() -> None:
    raise KeyboardInterrupt


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _train_without_accelerate(rank: int, folder: str, stage: str, end: Callable[[], object] = int) -> None:
    """With the engine alone, for two epochs, or until it comes to the third step from the last."""
    from tests.helpers.accelerated import Numbers
    from tests.helpers.engines import WORDS, build, everything
    from tests.helpers.zero_folders import start

    engine = start(build(), int(stage), rank, bf16={"enabled": False}, **PLAIN[stage])
    loader = DataLoader(Numbers(), batch_size=2, sampler=DistributedSampler(Numbers()))
    last = len(loader) * 2 // engine.gradient_accumulation_steps()
    with (
        Path(folder, f"losses-{rank}").open("a", buffering=1) as losses,
        ckpt.StateManager(f"{folder}/root", model=engine, save_every=1) as manager,
    ):
        for _ in manager.epochs(2):
            for words, noise in manager.batches(loader):
                loss = engine(words % WORDS, noise.float())
                engine.backward(loss)
                ends_step = engine.is_gradient_accumulation_boundary()
                engine.step()
                losses.write(f"{engine.micro_steps} {words.tolist()} {loss.item().hex()}\n")
                if ends_step:
                    manager.step()
                if manager.progress.step == last - 3:
                    end()
        assert manager.progress.step == last == engine.global_steps
        assert manager.restored is None or (manager.restored.progress.batch and not manager.restored.approximated)
    Path(folder, f"engine-{rank}").write_text(everything(engine))
    engine.destroy()


def _train_and_end_early(rank: int, folder: str) -> None:
    for stage, end in zip(PLAIN, (_interrupt, _kill), strict=True):
        _train_without_accelerate(rank, f"{folder}/{stage}/straight", stage)
        seed_everything(rank)
        with pytest.raises(KeyboardInterrupt):
            _train_without_accelerate(rank, f"{folder}/{stage}/again", stage, end)
        seed_everything(rank)


def _train_to_the_end(rank: int, folder: str) -> None:
    for stage in PLAIN:
        seed_everything(rank)
        _train_without_accelerate(rank, f"{folder}/{stage}/again", stage)


def test_an_engine_without_accelerate_that_ended_early_goes_on_exactly(tmp_path: Path) -> None:
    for stage in PLAIN:
        (tmp_path / stage / "straight").mkdir(parents=True)
        (tmp_path / stage / "again").mkdir()
    assert run_ranks(2, _train_and_end_early, str(tmp_path), dies=True) == [-9, -9]
    assert run_ranks(2, _train_to_the_end, str(tmp_path)) == [0, 0]
    for stage in PLAIN:
        for rank in range(2):
            straight, again = tmp_path / stage / "straight", tmp_path / stage / "again"
            lines = [dict.fromkeys((run / f"losses-{rank}").read_text().splitlines()) for run in (straight, again)]
            assert sorted(lines[0]) == sorted(lines[1])
            assert (again / f"engine-{rank}").read_text() == (straight / f"engine-{rank}").read_text()


def _given_what_cannot_be_kept(rank: int, folder: str) -> None:
    from tests.helpers.engines import WIDTH, WORDS, new_accelerator, prepared, train_on, weights

    config = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2}
    accelerator = new_accelerator(0, 1, config)
    _, engine, *others = prepared(accelerator, config)
    with pytest.raises(ckpt.ConfigError, match=r"a DeepSpeed engine trains model.*deepspeed.initialize\(\)"):
        ckpt.StateManager(f"{folder}/bare", model=engine.module)
    with pytest.raises(ckpt.UnsupportedError, match=r"gradients-00000: ckpt can't save gradients under DeepSpeed"):
        ckpt.StateManager(f"{folder}/gradients", model=engine, saving=ckpt.SaveOptions(gradients=True)).save_state(
            wait=True
        )
    engine.pipeline_parallelism = engine.has_moe_layers = True  # neither runs on two cores
    with pytest.raises(ckpt.UnsupportedError, match=r"pipeline parallelism or mixtures of experts"):
        ckpt.StateManager(f"{folder}/pipeline", model=engine)
    engine.pipeline_parallelism = engine.has_moe_layers = False

    batch = torch.arange(4) % WORDS, torch.ones(4)
    with ckpt.StateManager(f"{folder}/run", model=engine) as manager:  # an engine alone brings all that it has
        train_on(batch, accelerator, engine, *others)
        manager.save_state("inside-a-window", wait=True)
        with pytest.raises(ckpt.StateError, match=r"in the middle of an accumulation window.*Load at"):
            manager.load_state("inside-a-window")
        train_on(batch, accelerator, engine, *others)
        assert "without them" in manager.load_state("inside-a-window").approximated["gradients"]
        assert (engine.global_steps, manager.progress.step) == (0, 0)

    other = {"zero_optimization": {"stage": 3}}
    accelerator = new_accelerator(0, 1, other)
    _, engine, *_ = prepared(accelerator, other)
    manager = ckpt.StateManager(f"{folder}/run", accelerator=accelerator)
    with pytest.raises(ckpt.MismatchError, match=r"a DeepSpeedZeroOptimizer of AdamW in the checkpoint, a Deep"):
        manager.resume()

    before, bias = weights(engine), torch.full((WIDTH,), 2.0)
    Path(folder, "some").mkdir()
    save_file({"hidden.0.bias": bias}, f"{folder}/some/model.safetensors")
    ckpt.load_model(f"{folder}/some", engine, strict=False)
    assert exact(weights(engine)) == exact({**before, "hidden.0.bias": bias})  # what is not there stays as it was


def test_what_cannot_be_kept_of_an_engine_is_refused_with_the_remedy(tmp_path: Path) -> None:
    assert run_alone(_given_what_cannot_be_kept, str(tmp_path)) == 0
