"""Scripts for Accelerate that find their place in the data by hand, as those of diffusers do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import skip_first_batches
from torch.utils.data import DataLoader

from ckpt.integrations.accelerate import attach
from tests.helpers.accelerated import SAMPLES, Numbers, build, new_accelerator, reseed, train_on
from tests.helpers.processes import run_ranks
from tests.helpers.training import exact

EPOCHS, WINDOW = 3, 2


class StopError(Exception):
    pass


def _train(root: Path, stop: int | None = None, run: int = 0, *, rank: int = 0, ranks: int = 1, **options: Any) -> Any:
    """What train_text_to_image.py and its like do: saved as `checkpoint-<step>`, found again by that name.

    Returns the samples of every batch that was trained on, then the final state and the manager.
    """
    reseed(rank, run)
    accelerator = new_accelerator(rank=rank, world_size=ranks, gradient_accumulation_steps=WINDOW)
    model, optimizer, scheduler, loader = accelerator.prepare(*build(), DataLoader(Numbers(), 2, shuffle=True))
    manager = attach(accelerator, root, **options)
    updates_per_epoch = math.ceil(len(loader) / WINDOW)
    global_step = first_epoch = resume_step = 0
    checkpoints = sorted(root.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    resumes = bool(checkpoints)
    if resumes:
        accelerator.load_state(str(checkpoints[-1]))
        global_step = int(checkpoints[-1].name.split("-")[1])
        first_epoch = global_step // updates_per_epoch
        resume_step = global_step * WINDOW % (updates_per_epoch * WINDOW)

    seen: list[Any] = []
    try:
        for epoch in range(first_epoch, EPOCHS):
            for step, batch in enumerate(loader):
                if resumes and epoch == first_epoch and step < resume_step:
                    continue
                loss = train_on(batch, accelerator, model, optimizer, scheduler)
                seen.append([epoch, step, batch[0].tolist(), loss.hex()])
                if accelerator.sync_gradients:
                    global_step += 1
                    if global_step == stop:
                        accelerator.save_state(str(root / f"checkpoint-{global_step}"))
                        raise StopError
        seen.append(exact([part.state_dict() for part in (model, optimizer, scheduler)]))
    except StopError:
        pass
    finally:
        manager.close()  # end_training would take the process group down as well
    return seen, manager


@pytest.mark.parametrize("stop", [1, 3, 5, 6, 7, 10, 12])
def test_a_script_of_diffusers_that_skips_by_hand_trains_on_every_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stop: int
) -> None:
    straight, _ = _train(tmp_path / "straight")
    seen, _ = _train(tmp_path / "stopped", stop)
    rest, manager = _train(tmp_path / "stopped", run=1)
    assert len(seen) + len(rest) == EPOCHS * math.ceil(SAMPLES / 2) + 1
    assert seen + rest == straight
    assert manager.restored.approximated == {}
    assert "data" not in caplog.text
    assert f"begins at batch {manager.restored.progress.batch} of dataloader.0" in str(manager.restored)


def test_the_function_of_accelerate_skips_once_and_not_in_the_epoch_after(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = new_accelerator()
    loader, model, optimizer, _ = accelerator.prepare(DataLoader(Numbers(), 2), *build())
    sizes = []
    for turn in range(2):
        with attach(accelerator, tmp_path) as manager:
            restored = bool(list(tmp_path.glob("four/manifest.json")))
            if restored:
                accelerator.load_state("four")
            for _ in range(2):
                seen = 0
                for batch in skip_first_batches(loader, 4) if restored else loader:
                    model(batch[1].float().reshape(-1, 1)).mean().backward()
                    optimizer.step()
                    seen += 1
                    if not turn and seen == 4:
                        accelerator.save_state("four")
                        break
                restored = False
                sizes.append(seen)
                if not turn:
                    break
    assert sizes == [4, 7, 11]
    assert manager.restored is not None
    assert manager.restored.approximated == {}
    assert not [record for record in caplog.records if "batches" in record.getMessage()]


def _train_on_ranks(rank: int, root: str) -> None:
    straight, _ = _train(Path(root) / "straight", rank=rank, ranks=2)
    seen, _ = _train(Path(root) / "stopped", 5, rank=rank, ranks=2)
    torch.distributed.barrier()
    rest, manager = _train(Path(root) / "stopped", run=1, rank=rank, ranks=2)
    assert seen + rest == straight
    assert manager.restored.approximated == {}


@pytest.mark.slow
def test_two_ranks_that_skip_by_hand_train_on_every_batch(tmp_path: Path) -> None:
    assert run_ranks(2, _train_on_ranks, str(tmp_path)) == [0, 0]
