"""States that are divided by name over ranks: put together, and reduced to what a rank has."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.state.division import (
    has_nameless,
    names_in,
    under_all_names,
    under_first_names,
    united,
    without,
    without_own_names,
)


def _ref(name: str) -> dict[str, str]:
    return {"$tensor": name}


def _model(*names: str) -> dict[str, Any]:
    return {name: _ref(name) for name in names}


def _optimizer(*groups: tuple[float, tuple[str, ...]], **extra: Any) -> dict[str, Any]:
    listed = [{"lr": rate, "params": list(names)} for rate, names in groups]
    state = {name: {"step": _ref(f"state.{name}.step")} for _, names in groups for name in names}
    return {"state": state, "param_groups": listed, **extra}


def test_models_are_one_with_the_names_of_all() -> None:
    assert united([_model("a", "b"), _model("b", "c")]) == _model("a", "b", "c")


def test_groups_of_optimizers_are_joined_one_by_one() -> None:
    parts = [_optimizer((0.1, ("a",)), (0.1, ("b",))), _optimizer((0.1, ("c",)), (0.1, ("d",)))]
    assert united(parts) == _optimizer((0.1, ("a", "c")), (0.1, ("b", "d")))


def test_groups_with_the_same_options_are_joined_where_one_optimizer_has_more() -> None:
    parts = [_optimizer((0.1, ("a",)), (0.2, ("b",))), _optimizer((0.2, ("c",)))]
    assert united(parts) == _optimizer((0.1, ("a",)), (0.2, ("b", "c")))


@pytest.mark.parametrize(
    "states",
    [
        [{"extra": 1}, {"extra": 2}],
        [_optimizer((0.1, ("a",))), _optimizer((0.2, ("b",)))],
        [_optimizer((0.1, ("a",)), (0.1, ("b",))), _optimizer((0.1, ("c",)))],
        [_optimizer((0.1, ("a",)), clip=1), _optimizer((0.1, ("b",)), clip=2)],
        [_model("a"), _optimizer((0.1, ("b",)))],
        [_model("a"), {"$items": [[1, 2]]}],
        [_model("a"), 3],
    ],
)
def test_states_that_contradict_each_other_are_not_put_together(states: list[Any]) -> None:
    assert united(states) is None


def test_a_state_is_reduced_to_the_names_of_a_rank() -> None:
    assert without(_model("a", "b"), {"b", "z"}) == _model("a")
    assert without(_optimizer((0.1, ("a", "b")), (0.2, ("c",))), {"b", "c"}) == _optimizer((0.1, ("a",)), (0.2, ()))
    assert without(_optimizer((0.1, ("a", "b")), (0.2, ("c",))), {"b", "c"}, groups=1) == _optimizer((0.1, ("a",)))
    assert without({"$items": []}, {"a"}) == {"$items": []}


def test_names_are_those_of_tensors_or_of_parameters() -> None:
    assert names_in(_model("a", "b")) == frozenset("ab")
    assert names_in(_optimizer((0.1, ("a",)), (0.2, ("b",)))) == frozenset("ab")
    assert names_in([1]) is None


def test_tied_parameters_are_there_under_each_of_their_names() -> None:
    state = _optimizer((0.1, ("a", "b")), (0.2, ("c",)), extra=1)
    tied = under_all_names(state, {"a.head": "a", "z": "c", "z2": "c"})
    assert [group["params"] for group in tied["param_groups"]] == [["a", "a.head", "b"], ["c", "z", "z2"]]
    assert tied["state"]["a.head"] is state["state"]["a"]
    assert sorted(tied["state"]) == ["a", "a.head", "b", "c", "z", "z2"]
    assert tied["extra"] == 1
    assert under_all_names(state, {}) == state
    assert under_all_names(state, {"b": "a"}) == state  # both are there: they are not one any more
    other = under_all_names(state, {"a": "first"})  # the name that it was saved under is another one
    assert other["param_groups"][0]["params"] == ["a", "first", "b"]
    nothing = _optimizer((0.1, ("a",)))
    nothing["state"] = {}
    assert under_all_names(nothing, {"x": "a"})["state"] == {}
    others: list[Any] = [_model("a"), {"$items": []}, 3, {"state": {"$items": []}, "param_groups": []}]
    for unnamed in others:
        assert under_all_names(unnamed, {"x": "a"}) is unnamed


def test_tied_parameters_are_there_once_under_the_name_to_keep() -> None:
    both = _optimizer((0.1, ("a", "head", "b")))
    kept = under_first_names(both, {"head": "a"})
    assert kept["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}]
    assert sorted(kept["state"]) == ["a", "b"]
    one = under_first_names(_optimizer((0.1, ("head", "b"))), {"head": "a", "other": "a"})
    assert one["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}]
    assert one["state"]["a"] == {"step": _ref("state.head.step")}
    twice = under_first_names(_optimizer((0.1, ("head", "other"))), {"head": "a", "other": "a"})
    assert twice["param_groups"][0]["params"] == ["a"]


def test_parameters_without_a_name_are_known_by_their_number() -> None:
    assert has_nameless(_optimizer((0.1, ("a", "@1"))))
    assert not has_nameless(_optimizer((0.1, ("a",))))
    assert not has_nameless({"@0": 1})
    assert without_own_names({"lr": 1, "param_names": ["a"]}) == {"lr": 1}


def test_a_state_with_names_to_leave_out_is_reduced_only_where_it_has_names() -> None:
    state = _optimizer((0.1, ("a",)), (0.2, ("b",)), extra=1)
    assert without(state, ()) is state
    assert without(3, {"a"}) == 3
    assert without(state, {"a"}, groups=2)["param_groups"] == [{"lr": 0.1, "params": []}, {"lr": 0.2, "params": ["b"]}]
    assert without(state, {"a"}, groups=1)["param_groups"] == [{"lr": 0.2, "params": ["b"]}]
    assert without(state, {"a"})["extra"] == 1
    assert united([]) is None
    assert united([state]) is state
    odd = {"state": {}, "param_groups": "none"}
    assert names_in(odd) == frozenset(odd)
    twice = united([_optimizer((0.1, ("a",)), (0.2, ("b",))), _optimizer((0.3, ("c",)))])
    assert twice is not None
    assert [group["lr"] for group in twice["param_groups"]] == [0.1, 0.2, 0.3]
