"""The last step boundary case by case: when it may be saved after an exception, and what ranks say to each other."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.errors import CkptError, RanksError
from ckpt.ranks.consensus import SingleProcess
from ckpt.save import last_boundary
from ckpt.save.capture import LivePart, StateCapture
from ckpt.save.last_boundary import LastBoundary, _judged, _tensors_in, _tensors_of, _UnknownError, _with_copies
from ckpt.save.transaction import SaveRequest
from ckpt.state import rng
from ckpt.state.model import ModelPart
from ckpt.state.parts import ObjectPart
from tests.helpers.stateful import Stateful


class Several(SingleProcess):
    """One of three ranks, which sees these notes, and what all have settled on."""

    world_size, timeout = 3, 7.0

    def __init__(self, notes: dict[int, Any] | None = None, settled: str | None = None) -> None:
        super().__init__()
        self.said, self.settled = notes or {}, settled
        self.noted: list[tuple[str, Any]] = []
        self.offered: list[tuple[str, str]] = []

    def note(self, key: str, value: str) -> None:
        self.noted.append((key, json.loads(value)))

    def notes(self, key: str) -> dict[int, str]:
        return {rank: json.dumps(note) for rank, note in self.said.items()}

    def first_wins(self, key: str, value: str) -> str:
        self.offered.append((key, value))
        return self.settled or value


def registry(*steppers: Any, model: nn.Module | None = None) -> Any:
    parts = {} if model is None else {"model": ModelPart("model", model)}
    return SimpleNamespace(steppers=lambda: steppers, parts=parts)


def request_of(part: Any) -> SaveRequest:
    state = {"rng": rng.capture(), "generators": {}, "loaders": {}}
    return SaveRequest("a", lambda: StateCapture(SingleProcess()).capture([part], {}, state), {})


class Saver:
    """Notes what it is to save."""

    def __init__(self, error: Exception | None = None) -> None:
        self.saved: list[tuple[Any, bool]] = []
        self.error = error
        self.root = SimpleNamespace(storage=SimpleNamespace(url="runs/x"))

    def save(self, request: Any, *, wait: bool) -> None:
        self.saved.append((request, wait))
        if self.error is not None:
            raise self.error


class TestSaving:
    @pytest.fixture
    def tensor(self) -> torch.Tensor:
        return torch.ones(3)

    @pytest.fixture
    def boundary(self, tensor: torch.Tensor) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        made = LastBoundary(SingleProcess(), registry(optimizer))
        made.note(4, request_of(ObjectPart("x", Stateful({"t": tensor, "n": 1}))))
        yield made
        made.close()

    def test_what_has_not_changed_is_saved_once_all_is_noted(
        self, boundary: LastBoundary, capfd: pytest.CaptureFixture[str]
    ) -> None:
        saver: Any = Saver()
        boundary.save_after(ValueError("x"), saver)
        ((request, wait),) = saver.saved
        assert (request.name, wait) == ("a", True)
        assert "ValueError: saved step 4" in capfd.readouterr().err
        for step, given in ((5, None), (0, None)):
            boundary.note(step, given)
            boundary.save_after(ValueError("x"), saver)
        assert len(saver.saved) == 1

    def test_what_is_between_two_steps_is_not_saved_and_the_reason_is_said(
        self, boundary: LastBoundary, tensor: torch.Tensor, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert boundary._obstacle(ValueError()) == ""
        assert "ckpt itself" in boundary._obstacle(CkptError("x"))
        boundary._refusal = lambda: "not now"
        assert boundary._obstacle(ValueError()) == "not now"
        tensor.add_(1)
        assert boundary._obstacle(ValueError()).startswith("1 of 1 tensors")
        boundary._on_step()
        assert "has begun the next step" in boundary._obstacle(ValueError())
        saver: Any = Saver()
        boundary.save_after(ValueError("x"), saver)
        assert saver.saved == []
        assert "ValueError: ckpt could not save step 4: an optimizer has begun" in caplog.text
        boundary.note(5, request_of(ObjectPart("x", Stateful({"t": tensor}))))
        assert not boundary._has_begun

    def test_a_save_that_fails_is_logged_and_the_error_of_the_loop_comes_first(
        self, boundary: LastBoundary, caplog: pytest.LogCaptureFixture
    ) -> None:
        saver: Any = Saver(OSError("the disk is full"))
        boundary.save_after(ValueError("x"), saver)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "the disk is full" in caplog.text

    @pytest.mark.parametrize("rank", [0, 1])
    def test_where_a_change_could_not_be_noticed_it_is_off_for_good(
        self, rank: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        ranks = SingleProcess()
        ranks.rank = rank
        boundary = LastBoundary(ranks, registry(object()))
        boundary.note(1, request_of(ObjectPart("x", Stateful({"t": torch.ones(1)}))))
        assert caplog.text.count("has no effect: ckpt can't see when an engine") == (rank == 0)
        assert (boundary._request, boundary._tensors) == (None, [])
        boundary.note(2, request_of(ObjectPart("x", Stateful({"t": torch.ones(1)}))))
        assert caplog.text.count("has no effect") == (rank == 0)
        saver: Any = Saver()
        boundary.save_after(ValueError("x"), saver)
        assert "ValueError: ckpt could not save step 2: ckpt can't see when an engine" in caplog.text
        assert saver.saved == []
        boundary.close()

    def test_buffers_are_copied_because_a_forward_changes_them(self) -> None:
        model = nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        boundary = LastBoundary(SingleProcess(), registry(optimizer, model=model))
        boundary.note(1, request_of(ModelPart("model", model)))
        with torch.no_grad():
            model(torch.arange(4.0).view(2, 2))
        assert boundary._obstacle(ValueError()) == ""
        assert boundary._request is not None
        (part,) = boundary._request.capture().parts
        assert torch.equal(part.tree["running_mean"], torch.zeros(2))
        assert part.tree["weight"].data_ptr() == model.weight.data_ptr()
        with torch.no_grad():
            model.weight.add_(1)
        assert boundary._obstacle(ValueError()) != ""
        boundary.close()
        assert not boundary._tensors


class TestRanks:
    @pytest.mark.parametrize(
        ("notes", "patience", "found"),
        [
            ({0: [4, ""], 1: [4, ""], 2: [4, ""]}, 10.0, ""),
            ({0: [4, ""], 1: [5, ""], 2: [4, ""]}, 10.0, "ranks are at different steps (4, 5)"),
            ({0: [4, ""], 2: [4, "it has changed"]}, 10.0, "rank 2: it has changed"),
            ({0: [4, ""]}, -1.0, "ranks 1, 2 did not leave by an exception within -1 s"),
        ],
    )
    def test_all_must_have_left_after_the_same_step(
        self, notes: dict[int, Any], patience: float, found: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(last_boundary, "_PATIENCE", patience)
        assert _judged(Several(notes), "") == found

    def test_nobody_waits_longer_than_ranks_wait_for_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ranks = Several()
        ranks.timeout = -2.0
        assert _judged(ranks, "").endswith("within -2 s")

    def test_the_first_that_settles_it_decides_for_all(self) -> None:
        agreed = {0: [4, ""], 1: [4, ""], 2: [4, ""]}
        for notes, settled, offered, found in (
            (agreed, None, "save", ""),
            (agreed, "rank 1: no", "save", "rank 1: no"),
            ({0: [4, "no"]}, None, "rank 0: no", "rank 0: no"),
            ({0: [4, "no"]}, "save", "rank 0: no", ""),
        ):
            ranks = Several(notes, settled)
            boundary = LastBoundary(ranks, registry())
            boundary._step = 4
            assert boundary._agreed("mine") == found
            assert ranks.noted == [("exception", [4, "mine"])]
            assert ranks.offered == [("exception/settled", offered)]
            boundary.close()
        alone = LastBoundary(SingleProcess(), registry())
        assert alone._agreed("mine") == "mine"
        alone.close()

    def test_a_store_that_is_gone_keeps_all_from_saving(self) -> None:
        class Gone(Several):
            def note(self, key: str, value: str) -> None:
                raise RanksError("the store is gone")

        boundary = LastBoundary(Gone(), registry())
        assert boundary._agreed("") == "the store is gone"
        boundary.close()


class TestTensors:
    def test_all_in_containers_are_found_and_what_else_can_change_is_refused(self) -> None:
        one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
        tree = {"a": [one, (two, 1, "x", None, 2.5, b"", torch.float32)], "b": {"c": three, "d": True}}
        assert [len(tensor) for tensor in _tensors_in(tree, "x")] == [1, 2, 3]
        with pytest.raises(_UnknownError, match="the object in x"):
            list(_tensors_in({"a": object()}, "x"))

    @pytest.mark.parametrize(
        ("gathered", "encoded", "several", "refused"),
        [([], None, True, False), ([1], None, False, True), ([], 1, False, False), ([], 1, True, True)],
    )
    def test_what_must_be_gathered_or_encoded_at_every_step_is_not_kept(
        self, gathered: list[Any], encoded: Any, several: bool, refused: bool
    ) -> None:
        parts = [LivePart(key, "K", {"t": torch.ones(size)}) for size, key in enumerate("abc", 1)]
        live: Any = SimpleNamespace(
            gathered=gathered, encoded=encoded, parts=parts[:1], sharded=parts[1:2], own=parts[2:]
        )
        if refused:
            with pytest.raises(_UnknownError):
                list(_tensors_of(live, several=several))
        else:
            assert [len(tensor) for tensor in _tensors_of(live, several=several)] == [1, 2, 3]

    def test_only_tensors_at_the_addresses_are_copied(self) -> None:
        buffer, weight = torch.ones(2), torch.ones(3)
        part = LivePart("x", "K", {"b": buffer, "more": [(weight, buffer)], "n": 1})
        copied = _with_copies(part, {buffer.data_ptr()})
        assert copied.tree["b"] is not buffer
        assert torch.equal(copied.tree["b"], buffer)
        (inner,) = copied.tree["more"]
        assert inner[0] is weight
        assert inner[1] is not buffer
        assert copied.tree["n"] == 1
        odd = LivePart("x", "K", [buffer])
        assert _with_copies(odd, {buffer.data_ptr()}) is odd
