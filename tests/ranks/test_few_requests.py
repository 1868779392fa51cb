"""How often thousands of ranks exchange something, and what rank 0 asks an object store to list: as the docs say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

import ckpt
from benchmarks.shared.counted_objects import CountedObjects
from ckpt.ranks.consensus import Result, decide_together
from ckpt.ranks.store_group import StoreGroup
from ckpt.root.catalog import Overview
from ckpt.storage.object_storage import ObjectStorage
from tests.helpers.processes import run_alone
from tests.ranks.test_in_one_process import Job

RANKS = 1100  # more files than a server lists at once
DOCS = Path(__file__).parents[2] / "docs" / "performance.md"


def stated(what: str) -> tuple[int, int]:
    """The numbers of exchanges and of LIST requests in the docs."""
    row = re.search(rf"^\| {what} \| (\d+) \| (\d+)", DOCS.read_text(), re.MULTILINE)
    assert row is not None, what
    return int(row[1]), int(row[2])


def counted(rank: int) -> None:
    from benchmarks import scale

    figures = scale.measure(RANKS, 2)
    found = {phase: (figures[phase]["exchanges"], figures[phase]["list"]) for phase in scale.PHASES}
    assert found == {scale.SAVE: stated("save"), scale.AGAIN: stated("save"), scale.RESUME: stated("resume")}


@pytest.mark.slow
def test_a_save_and_a_resume_of_many_ranks_take_as_few_exchanges_and_listings_as_the_docs_say() -> None:
    run_alone(counted)


def test_a_root_of_large_checkpoints_is_listed_by_one_request_for_each() -> None:
    objects = CountedObjects("bucket/run")
    with ckpt.StateManager(ObjectStorage(objects), model=nn.Linear(2, 2)) as manager:
        for step in range(3):
            manager.save_state(f"step-{step}", wait=True)
    for step in range(3):
        objects.content.update({f"step-{step}/model/{number:05}.safetensors": b"" for number in range(5_000)})
    objects.content["step-9/.saving"] = b""
    objects.content.update({f"step-9/model/{number:05}.safetensors": b"" for number in range(1_500)})
    objects.requests.clear()
    found = Overview.of(ObjectStorage(objects))
    assert [summary.name for summary in found.committed] == ["step-2", "step-1", "step-0"]
    assert len(found.files["step-9"]) == 1_501  # it has no manifest: all that is left of it must be known
    assert objects.requests["list"] == 3 + 2
    assert not found.to_mend


def test_a_server_that_begins_no_listing_after_a_key_is_asked_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = CountedObjects("bucket/run")
    objects.content = {f"{name}/{file}": b"" for name in "abc" for file in ("manifest.json", *map(str, range(1_200)))}
    objects.content |= {f"{name}/z{number}": b"" for name in "abc" for number in range(1_200)}
    everything = {entry.key for entry in ObjectStorage(objects).list()}
    skimmed = {entry.key for entry in ObjectStorage(objects).skim("manifest.json")}
    assert skimmed < everything
    page = CountedObjects.page
    monkeypatch.setattr(CountedObjects, "page", lambda self, after: page(self, ""))
    assert {entry.key for entry in ObjectStorage(objects).skim("manifest.json")} == everything


def test_what_ranks_have_alike_one_of_them_says_and_the_store_forgets_who() -> None:
    job = Job(4)

    def say(ranks: StoreGroup) -> list[bool]:
        speaks = []
        for _ in range(3):
            speaks.append(ranks.speaks_for("ab"[ranks.rank % 2]))
            decide_together(ranks, "call", Result(None), lambda _: None)
        return speaks

    said = job.run(say)
    assert [sum(each) for each in zip(*said, strict=True)] == [2, 2, 2]
    for rank in job.ranks:
        assert all(key.startswith(("4.", "5.")) for key in rank._spoken_for)
