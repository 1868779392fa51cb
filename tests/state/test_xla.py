"""torch_xla's tensors are refused by name: no torch_xla that can be installed fits a torch that ckpt is tested with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.formats.tensors import device_obstacle
from ckpt.state.registry import refuse_devices


def test_a_model_on_an_xla_device_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        ckpt.UnsupportedError, match=r"model\.b has parameters on an XLA device \(TPU\).*Copy the state"
    ):
        refuse_devices({"model.a": [torch.device("cpu")], "model.b": [torch.device("cpu"), torch.device("xla")]})


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "mps", "xpu", "meta"])
def test_other_devices_are_not(device: str) -> None:
    assert device_obstacle(torch.device(device)) is None
    refuse_devices({"model": [torch.device(device)]})


def test_real_tensors_of_torch_xla_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    xla: Any = pytest.importorskip("torch_xla", exc_type=ImportError)
    with pytest.raises(ckpt.UnsupportedError, match="on an XLA device"):
        ckpt.StateManager(tmp_path, model=nn.Linear(2, 2).to(xla.device()))
    assert not ckpt.list_checkpoints(tmp_path)
