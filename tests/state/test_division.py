"""States that are divided by name over ranks: put together, and reduced to what a rank has."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.state.division import names_in, united, without


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
