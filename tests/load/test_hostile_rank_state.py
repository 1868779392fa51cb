"""A rank's own state that somebody has altered: refused before anything is written, and an older one is taken."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ckpt
from ckpt.errors import DamagedError
from ckpt.formats.native.documents import rank_document
from ckpt.load.reader import check_rank_state
from ckpt.state import rng
from tests.helpers.forgery import alter_json

Change = Callable[[dict[str, Any]], Any]


def twelve() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)


def loop(root: Path, steps: int) -> None:
    """Trains that many steps; saves after each but the first."""
    model, loader = nn.Linear(2, 2), twelve()
    with ckpt.StateManager(root, model=model, dataloader=loader) as manager:
        for _ in manager.epochs(1):
            for step, _ in enumerate(manager.batches(loader)):
                nn.init.constant_(model.weight, step)
                manager.step()
                if step:
                    manager.save_state()
                if step == steps:
                    return


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """step-00000002 and step-00000003, both in the middle of an epoch."""
    loop(tmp_path, 2)
    return tmp_path


def state_of(document: dict[str, Any], key: str) -> dict[str, Any]:
    found: dict[str, Any] = document["state"][key]["values"]
    return found


def position_of(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state_of(document, "loaders")["dataloader"]
    return found


CHANGES: dict[str, Change] = {
    "no state": lambda document: document.pop("state"),
    "a state that is text": lambda document: document.update(state="x"),
    "no own parts": lambda document: document.pop("own"),
    "no generators": lambda document: document["state"].pop("rng"),
    "generators that are a number": lambda document: document["state"].update(rng={"values": 3, "tensors": {}}),
    "Python's generator cut short": lambda document: state_of(document, "rng").update(python={"$tuple": [3]}),
    "Python's generator of text": lambda document: state_of(document, "rng").update(python={"$tuple": [3, "a", None]}),
    "torch's generator of a byte": lambda document: state_of(document, "rng").update(torch=7),
    "loaders that are a list": lambda document: document["state"]["loaders"].update(values=[]),
    "a position that is a number": lambda document: state_of(document, "loaders").update(dataloader=3),
    "batches below zero": lambda document: position_of(document).update(batches=-1),
    "batches beyond counting": lambda document: position_of(document).update(batches=10**30),
    "batches that are text": lambda document: position_of(document).update(batches="many"),
    "a generator of the epoch": lambda document: position_of(document)["rng"].update(python={"$tuple": [3, [], None]}),
    "samplers that are a number": lambda document: position_of(document).update(samplers=1),
    "a layout with a window of zero": lambda document: position_of(document).update(layout={"window": 0}),
    "a layout with a field too many": lambda document: position_of(document).update(layout={"other": 1}),
    "digests that are numbers": lambda document: position_of(document).update(contents={"a": 1}),
    "a loop that is text": lambda document: document["state"]["loop"].update(values="x"),
    "remarks that are numbers": lambda document: state_of(document, "loop").update(remarks={"data": 3}),
    "epochs that are text": lambda document: state_of(document, "loop").update(plain_epochs="x"),
    "an accelerator without a step": lambda document: document["state"]["source"].update(values={"saves": 1}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_altered_rank_document_is_damage_and_the_older_checkpoint_is_taken(root: Path, change: Change) -> None:
    alter_json(root / "step-00000003" / rank_document(0), lambda document: change(document) and None)
    model, before = nn.Linear(2, 2), random.getstate()
    loader = twelve()
    kept = model.weight.detach().clone()
    with ckpt.StateManager(root, model=model, dataloader=loader) as manager:
        with pytest.raises(DamagedError, match=r"step-00000003/rank-00000\.json"):
            manager.load_state("step-00000003")
        assert torch.equal(model.weight, kept)
        assert random.getstate() == before
        restored = manager.resume()
        assert restored is not None
        assert restored.name == "step-00000002"
        assert "rank-00000.json" in restored.passed_over["step-00000003"]
        assert len(list(manager.batches(loader))) == 4


def numpy_state(**changes: Any) -> dict[str, Any]:
    state: dict[str, Any] = np.random.RandomState(0).get_state(legacy=False)
    return {**state, "state": {**state["state"], **changes}}


@pytest.mark.parametrize("position", [-1, 625, 10**6, 2**40])
def test_a_generator_of_numpy_does_not_read_beyond_its_buffer(position: int) -> None:
    state = {**rng.capture(), "numpy": numpy_state(pos=position)}
    assert not rng.is_state(state)
    with pytest.raises(DamagedError, match="pos"):
        rng.restore_one(np.random.RandomState(1), numpy_state(pos=position))
    philox = np.random.Generator(np.random.Philox(1))
    with pytest.raises(DamagedError, match="buffer_pos"):
        rng.restore_one(philox, {**philox.bit_generator.state, "buffer_pos": position})


def test_every_offender_is_named_at_once() -> None:
    position = {"batches": -1, "done": 3, "layout": 1}
    state = {"rng": rng.capture(), "generators": {}, "loaders": {"train": position}, "loop": {"plain_epochs": None}}
    with pytest.raises(DamagedError) as caught:
        check_rank_state(state, "it")
    for name in ("train: batches", "train: done", "train: layout", "loop: plain_epochs"):
        assert name in str(caught.value)


@pytest.mark.parametrize("kind", ["torch", "python", "numpy"])
def test_a_state_of_a_registered_generator_that_is_not_its_own_is_damage(kind: str) -> None:
    generators = {"torch": torch.Generator(), "python": random.Random(), "numpy": np.random.default_rng()}
    for state in (None, 3, "x", (), {}, {"state": 3}, torch.zeros(3)):
        with pytest.raises(DamagedError, match="the saved state of a generator"):
            rng.restore_one(generators[kind], state)
