"""What is copied when `save_state` is called: all that follows, from encoding on, happens while training continues."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.save.capture import NotPlainError, PlainTrees
from ckpt.save.snapshot.snapshots import Snapshots
from ckpt.save.snapshot.tensor_copies import Leaves, TensorCopies
from ckpt.save.transaction import SaveTransaction
from tests.helpers.places import Place
from tests.helpers.processes import DEADLINE
from tests.helpers.stateful import Stateful


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves wait for it before they do anything in the background."""
    opened, run = threading.Event(), SaveTransaction.run

    def run_behind_gate(save: SaveTransaction) -> None:
        assert opened.wait(DEADLINE)
        run(save)

    monkeypatch.setattr(SaveTransaction, "run", run_behind_gate)
    return opened


def test_containers_that_change_after_the_call_are_saved_as_they_were(root: Place, gate: threading.Event) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = {"list": [1, [2, {"deep": 3}]], "ordered": OrderedDict(a=1), 7: (1, [2])}
    other = Stateful(state)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.register(other=other)
        manager.save_state("a", wait=False)
        optimizer.param_groups[0]["lr"] = 9.0
        state["list"][1][1]["deep"] = 4  # type: ignore[index]
        state["ordered"]["b"] = 2  # type: ignore[index]
        state[7][1].append(3)  # type: ignore[index]
        state["new"] = 1  # type: ignore[assignment]
        gate.set()
        manager.wait()
        manager.load_state("a")
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert other.state == {"list": [1, [2, {"deep": 3}]], "ordered": OrderedDict(a=1), 7: (1, [2])}
    assert type(other.state["ordered"]) is OrderedDict


@pytest.mark.parametrize("shapes", [[(3,)], [(200, 2), (5,)], [(200, 200), (5,)]])
def test_tensors_that_change_after_the_call_are_saved_as_they_were(
    root: Place, gate: threading.Event, shapes: list[tuple[int, ...]]
) -> None:
    model = nn.ParameterList([torch.randn(shape) for shape in shapes])
    before = [parameter.detach().clone() for parameter in model]
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a", wait=False)
        for parameter in model:
            parameter.data.zero_()
        gate.set()
        manager.wait()
        manager.load_state("a")
    assert all(map(torch.equal, model, before))


def test_a_model_that_changes_its_dtype_after_the_call_is_saved_as_it_was(root: Place, gate: threading.Event) -> None:
    model = nn.Linear(3, 3).bfloat16()
    before = model.weight.detach().clone()
    with ckpt.StateManager(root, model=model) as manager:
        manager.save_state("a", wait=False)
        model.half()
        gate.set()
        manager.wait()
        model.bfloat16()
        manager.load_state("a")
    assert torch.equal(model.weight, before)
    assert ckpt.verify(root) == {"a": []}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.complex64])
def test_every_bit_is_kept_also_of_values_that_are_no_numbers(root: Place, dtype: torch.dtype) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = bits[: bits.numel() // dtype.itemsize * dtype.itemsize].view(torch.uint8).view(dtype)
    other = Stateful({"values": values.clone()})
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        manager.register(other=other)
        manager.save_state("a", wait=False)
        manager.wait()
        manager.load_state("a")
    assert torch.equal(other.state["values"].view(torch.uint8), values.view(torch.uint8))


def test_what_no_file_can_hold_is_refused_by_the_call(root: Place) -> None:
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        manager.register(other=Stateful({"deep": [1, {"f": print}]}))
        with pytest.raises(ckpt.UnsupportedError, match=r"other\.deep\[1\]\.f"):
            manager.save_state("a", wait=False)


def test_what_fails_while_it_is_copied_is_raised_by_the_call_and_the_next_save_is_whole(
    root: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 3)
    with ckpt.StateManager(root, model=model) as manager:
        snapshots = manager.session.saver.snapshots
        with monkeypatch.context() as patched:
            patched.setattr(snapshots, "_copy_on_host", _fail)
            with pytest.raises(RuntimeError, match="the device is lost"):
                manager.save_state("a", wait=False)
        manager.save_state("b", wait=False)
        manager.wait()
    assert ckpt.verify(root) == {"b": []}


def _fail(*_: object) -> None:
    raise RuntimeError("the device is lost")


def test_live_tensors_are_not_held_after_the_call(root: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, made = Snapshots.copy, list[TensorCopies | None]()

    def copy_and_note(self: Snapshots, leaves: Leaves | None) -> TensorCopies | None:
        made.append(copy(self, leaves))
        return made[-1]

    monkeypatch.setattr(Snapshots, "copy", copy_and_note)
    with ckpt.StateManager(root, model=nn.Linear(3, 3)) as manager:
        manager.save_state("a", wait=False)
    (copies,) = made
    assert copies is not None
    assert [group.tensors for group in copies.leaves.small] == [[]]


def test_tensors_that_share_memory_share_it_when_they_are_loaded(root: Place) -> None:
    base = torch.arange(12.0)
    other = Stateful({"first": base[:8], "second": base[4:], "tied": base[:8]})
    with ckpt.StateManager(root, model=nn.Linear(1, 1)) as manager:
        manager.register(other=other)
        manager.save_state("a", wait=False)
        manager.wait()
        manager.load_state("a")
    other.state["first"][4] = 99.0
    assert other.state["second"][0] == other.state["tied"][4] == 99.0


def copied(tree: Any) -> list[torch.Tensor]:
    trees = PlainTrees()
    trees.copy(tree)
    trees.require_dense()
    return trees.local


@pytest.mark.parametrize(
    "tree",
    [
        {1.5: 1},
        [object()],
        {"t": torch.zeros(2, 3).t()},
        [torch.zeros(2, dtype=torch.complex64).conj()],
        [torch.zeros(2, device="meta")],
        [torch.zeros(2, 2).to_sparse()],
    ],
)
def test_a_tree_with_anything_but_plain_values_is_not_copied(tree: Any) -> None:
    with pytest.raises(NotPlainError):
        copied(tree)


def test_a_tree_inside_itself_is_not_copied_for_ever() -> None:
    tree: list[Any] = []
    tree.append(tree)
    with pytest.raises(NotPlainError):
        PlainTrees().copy(tree)


def test_a_tensor_is_copied_once_under_several_names() -> None:
    tensor, empty = torch.randn(4), torch.empty(0)
    leaves = Leaves.of([tensor, tensor, empty, empty], [tensor, tensor, empty, empty], {})
    assert leaves is not None
    copies = TensorCopies(leaves)
    copies.add_on_host(torch.empty(leaves.host_size, dtype=torch.uint8), lambda: None)
    assert copies.of(tensor) is copies.of(tensor)
    assert copies.of(empty) is copies.of(empty)
    assert torch.equal(copies.of(tensor), tensor)
    assert copies.of(tensor).data_ptr() != tensor.data_ptr()
