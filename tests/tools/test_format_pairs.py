"""From every format to every other: files that the real libraries wrote, read by the real libraries, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.format_pairs import KEEPS_THE_OPTIMIZER, SOURCES, TARGETS, Written, difference
from tests.helpers.second_process import slow_where

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # every library is imported


@pytest.fixture(scope="module", params=slow_where("sharded", SOURCES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return SOURCES[request.param](tmp_path_factory.mktemp("written") / "saved")


@pytest.mark.parametrize("target", TARGETS)
def test_every_bit_that_the_other_format_holds_arrives(written: Written, target: str, tmp_path: Path) -> None:
    found = TARGETS[target](written, tmp_path / "out")
    assert difference(written, found, whole=target in KEEPS_THE_OPTIMIZER) == []
