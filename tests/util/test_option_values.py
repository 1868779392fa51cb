"""Options as people write them: sizes, times, names, and what each may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from ckpt.errors import ConfigError
from ckpt.util.option_values import (
    Flag,
    Maybe,
    Must,
    Options,
    Period,
    Seconds,
    Settings,
    Size,
    Steps,
    UnknownOptionError,
    is_count,
    is_kind,
    is_number,
    is_one_of,
    is_path,
    is_rate,
    is_seconds,
    is_settings,
    is_size,
    one_of,
    optional,
    parse_duration,
    parse_size,
    path_text,
    refuse_unknown,
    said,
    settings,
)

TEN_YEARS = 10 * 365 * 86400
SIZES: dict[Any, int | None] = {
    1: 1, 7: 7, 2**63 - 1: 2**63 - 1, "1": 1, "12": 12, "12b": 12, " 5GB ": 5 * 10**9, "1.5 kb": 1500, "2k": 2000,
    "3M": 3 * 10**6, "1T": 10**12, "1KiB": 1024, "512MiB": 512 * 2**20, "1gi": 2**30, "2TiB": 2**41,
    0: None, -1: None, 2**63: None, "0": None, "0.5": None, "0GB": None, "-1": None, "": None, "GB": None,
    "5 GBs": None, "1e3": None, "9223372036854775808": None, "9999999TiB": None, 1.5: None, None: None,
}  # fmt: skip
DURATIONS: dict[Any, float | None] = {
    "90s": 90.0, "1 sec": 1.0, "10min": 600.0, "2h": 7200.0, "1h30min": 5400.0, " 1 H 30 Minutes ": 5400.0,
    "0.5m": 30.0, "1d": 86400.0, "2 days 1 second": 172801.0, "3650d": float(TEN_YEARS),
    "3650d1s": None, "0s": None, "": None, "5": None, "min": None, "10 minuets": None, "1h 5 x": None, "-1s": None,
    5: None, None: None, b"1s": None,
}  # fmt: skip


def test_sizes_and_times_are_read_as_people_write_them_or_not_at_all() -> None:
    assert {size: parse_size(size) for size in SIZES} == SIZES
    assert parse_size(True) is None
    assert {text: parse_duration(text) for text in DURATIONS} == DURATIONS


CHECKS: dict[Callable[[Any], bool], tuple[list[Any], list[Any]]] = {
    is_count: ([1, 2**63 - 1], [0, -1, 2**63, True, 1.0, "1", None]),
    is_number: ([1, 0.5, 1e299, 2**63], [0, -1, 1e300, float("nan"), float("inf"), True, "1", None]),
    is_seconds: ([0.1, TEN_YEARS], [0, TEN_YEARS + 1, True, "1s"]),
    is_size: ([0, 1, "0", " 0 ", "5GB"], [-1, 1.5, "", "00", "much", True, None]),
    is_rate: ([1, 0.5, "5GB"], [0, "0", "fast", True, None]),
    is_settings: ([{}, {"key": 1}], [{1: 2}, {"a": 1, 2: 2}, [], "key", None]),
    is_path: (["a", "s3://b/c", Path("a")], ["", "a\0b", "\ud800", b"a", 5, None]),
    is_kind(int, str): ([1, "a"], [1.0, None]),
    optional(is_count): ([None, 1], [0, "a"]),
    is_one_of("full", 1): (["full", 1], ["Full", True, 1.0, None]),
    one_of("a", "b").hold: (["a", "b"], ["c", None]),
}


@pytest.mark.parametrize("check", CHECKS)
def test_an_option_may_be_these_values_and_not_those(check: Callable[[Any], bool]) -> None:
    right, wrong = CHECKS[check]
    assert [value for value in right if not check(value)] == []
    assert [value for value in wrong if check(value)] == []


def test_an_unknown_option_is_named_with_the_nearest_that_exists() -> None:
    refuse_unknown("It", ["last"], ["last", "best"])
    with pytest.raises(UnknownOptionError) as raised:
        refuse_unknown("It", ["last", "lst", "zzz", "metric"], ["last", "best"], {"metric": "keep=Keep(metric=...)"})
    assert str(raised.value) == (
        "It has no option 'lst' (did you mean 'last'?), 'zzz', 'metric' (write keep=Keep(metric=...)). "
        "It has: best, last."
    )
    with pytest.raises(UnknownOptionError, match=r"no option 'metrics' \(write keep=Keep\)"):
        refuse_unknown("It", ["metrics"], ["last"], {"metric": "keep=Keep"})


@dataclass(frozen=True, kw_only=True)
class Everything(Options):
    steps: Steps = 1
    seconds: Seconds | None = None
    time: Period = "1s"
    size: Size = 0
    flag: Flag = True
    maybe: Maybe = None
    settings: Settings | None = None
    mode: Annotated[str, one_of("full", "sharded")] = "full"

    def contradictions(self, wrong: Any) -> list[str]:
        return ["steps and size may not both be 7"] if not wrong and self.steps == self.size == 7 else []


def test_an_option_object_refuses_nonsense_when_it_is_built_and_all_of_it_at_once() -> None:
    Everything(seconds=2, maybe=False, settings={"key": "x"}, mode="sharded")
    with pytest.raises(ConfigError) as raised:
        Everything(steps=0, seconds=-1, time="soon", size="x", flag=None, maybe=1, settings="pa55", mode="x")  # type: ignore[arg-type]
    assert str(raised.value) == (
        "Everything: steps=0 must be a number of steps, 1 or more; seconds=-1 must be a number of seconds, up to ten "
        "years; time='soon' must be a time such as '10min', '90s' or '2h', or 'auto'; size='x' must be a size such as "
        "'8GB', or a number of bytes; flag=None must be True or False; maybe=1 must be True, False or None; settings=a "
        "str must be a dict of options for the storage; mode='x' must be one of full, sharded."
    )
    with pytest.raises(ConfigError, match=r"^Everything: steps and size may not both be 7\.$"):
        Everything(steps=7, size=7)
    with pytest.raises(UnknownOptionError, match=r"Everything has no option 'step' \(did you mean 'steps'\?\)"):
        Everything(step=7)  # type: ignore[call-arg]
    assert Everything.of(5) == 5
    assert not Must(is_count, "a number").secret


def test_a_value_is_shown_as_it_was_written_and_shortened() -> None:
    class Mute:
        def __repr__(self) -> str:
            raise RuntimeError

    assert said("a" * 98) == repr("a" * 98)  # 100 characters
    assert said("a" * 99) == f"'{'a' * 99}..."
    assert said(Mute()) == "a Mute"


def test_paths_and_settings_are_taken_as_text_and_as_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert [path_text(path, "root") for path in ("a", Path("b"), "~/c")] == ["a", "b", "/home/me/c"]
    with pytest.raises(ConfigError, match=r"^root must be a path or a URL, not 5\.$"):
        path_text(5, "root")
    given = {"key": 1}
    assert (settings(None), settings({}), settings(given)) == ({}, {}, given)
    assert settings(given) is not given
    nonsense: list[Any] = [[], "pa55", {1: 2}, 0, False]
    for wrong in nonsense:
        with pytest.raises(ConfigError, match=r"^storage_options must be a dict .* not a \w+\.$"):
            settings(wrong)
