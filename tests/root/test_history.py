"""The history of a root: what every save said, also those that retention has removed, and how attempts went."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.formats.native.manifest import digest
from ckpt.root import catalog as histories
from ckpt.root.catalog import HISTORY, History, PastAttempt
from ckpt.storage import Storage, open_storage
from ckpt.storage.base import read_document
from ckpt.tools.prune import prune


def save(root: object, first: int, last: int, **options: object) -> None:
    with ckpt.StateManager(root, model=nn.Linear(2, 2), save_every=1, **options) as manager:  # type: ignore[arg-type]
        manager.resume()
        for step in range(first, last):
            manager.step(metrics={"loss": 10.0 - step})


def steps(root: Path) -> list[int]:
    return [save.summary.step for save in History.of(open_storage(root)).saves]


def listed(root: Path) -> str:
    return CliRunner().invoke(main, ["ls", "--all", str(root)]).output


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_root_in_which_no_step_was_made_and_nothing_removed_has_none(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2)) as manager:
        manager.resume()
        manager.wait()
    assert not (tmp_path / HISTORY).exists()
    assert "removed" not in listed(tmp_path)


def test_every_save_is_there_after_retention_and_restarts(tmp_path: Path) -> None:
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=1))
    save(tmp_path, 4, 6, keep=ckpt.Keep(last=1))
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path)] == [5]
    found = History.of(open_storage(tmp_path)).saves
    assert [(past.summary.step, past.summary.metrics["loss"]) for past in found] == [(n, 10.0 - n) for n in range(1, 6)]
    assert all(past.summary.size > 0 and past.seconds["blocked"] >= 0 < past.seconds["total"] for past in found)


def test_ls_shows_what_was_removed_when_asked(tmp_path: Path) -> None:
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=1))
    lines = listed(tmp_path).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["step-00000003", "step-00000002", "step-00000001"]
    assert [line.split()[-1] for line in lines[1:4]] == ["complete", "removed", "removed"]
    assert "loss=9" in lines[3]
    assert "removed" not in CliRunner().invoke(main, ["ls", str(tmp_path)]).output


def test_the_report_draws_metrics_of_removed_ones_too(tmp_path: Path) -> None:
    save(tmp_path, 1, 5, keep=ckpt.Keep(last=1))
    page = CliRunner().invoke(main, ["report", "--format", "md", str(tmp_path)]).output
    assert "| loss | █▆▃▁ | 9 | 6 | 6 | 9 |" in page
    assert "; 3 more were removed" in page
    assert page.count("| removed |") == 3
    assert "step 1," in page


def test_a_name_that_is_saved_again_stays_known(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2)) as manager:
        manager.resume()
        for step in range(1, 4):
            manager.step(metrics={"loss": 10.0 - step})
            manager.save_state("best", wait=True, metrics={"loss": 10.0 - step})
    assert steps(tmp_path) == [1, 2, 3]
    assert listed(tmp_path).count("removed") == 2


def test_prune_writes_it_too(tmp_path: Path) -> None:
    save(tmp_path, 1, 5)
    prune(tmp_path, keep=ckpt.Keep(last=1))
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path)] == [4]
    assert steps(tmp_path)[:3] == [1, 2, 3]


def test_so_does_the_retention_of_a_mirror(tmp_path: Path) -> None:
    mirror = ckpt.Mirror(tmp_path / "mirror", keep=ckpt.Keep(last=1))
    save(tmp_path / "root", 1, 4, mirror=mirror)
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path / "mirror")] == [3]
    assert steps(tmp_path / "mirror")[-1] == 3
    assert History.of(open_storage(tmp_path / "mirror")).attempts == []


def test_a_damaged_line_is_named_and_the_others_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 5, keep=ckpt.Keep(last=1))
    caplog.clear()
    path = tmp_path / HISTORY
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"step-00000002", b"step-00000007"), *lines[3:]]))
    assert steps(tmp_path) == [1, 3, 4]
    assert warnings_of(caplog) == [f"{tmp_path}/{HISTORY}: ckpt skips damaged lines (1)"]


def test_a_line_that_says_what_no_save_has_is_damaged_whatever_its_digest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 5, keep=ckpt.Keep(last=1))
    caplog.clear()
    path = tmp_path / HISTORY
    lines = path.read_bytes().splitlines(keepends=True)
    text = json.dumps({**json.loads(json.loads(lines[2])[1]), "step": "two"})
    lines[2] = json.dumps([digest(text.encode()), text]).encode() + b"\n"
    path.write_bytes(b"".join(lines))
    assert steps(tmp_path) == [1, 3, 4]
    assert warnings_of(caplog) == [f"{tmp_path}/{HISTORY}: ckpt skips damaged lines (1)"]


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]\n", b'["0", "{}"]\n', b"[[[[[[" * 1000], ids=range(5))
def test_one_that_cannot_be_read_is_named_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=2))
    (tmp_path / HISTORY).write_bytes(content)
    save(tmp_path, 4, 5, keep=ckpt.Keep(last=2))
    assert any("lacks earlier saves: the first line of the history is damaged" in text for text in warnings_of(caplog))
    assert steps(tmp_path) == [2, 3, 4]


def test_one_of_a_newer_version_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 3)
    text = json.dumps({"format": "ckpt history", "version": 2, "left_out": 0})
    line = json.dumps([digest(text.encode()), text]).encode()
    (tmp_path / HISTORY).write_bytes(line)
    save(tmp_path, 3, 5, keep=ckpt.Keep(last=1))
    assert (tmp_path / HISTORY).read_bytes() == line
    assert any("a newer version of ckpt wrote" in text for text in warnings_of(caplog))


def test_it_has_a_limit_and_counts_what_is_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MOST", 3)
    save(tmp_path, 1, 7, keep=ckpt.Keep(last=1))
    save(tmp_path, 7, 9, keep=ckpt.Keep(last=1))
    assert steps(tmp_path) == [6, 7, 8]
    assert History.of(open_storage(tmp_path)).left_out == 5
    assert "5 older ones are no longer known" in listed(tmp_path)


def test_it_is_never_larger_than_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "_LARGEST", 6000)  # a line has some 550 bytes
    save(tmp_path, 1, 9, keep=ckpt.Keep(last=1))
    left_out = History.of(open_storage(tmp_path)).left_out
    assert 0 < left_out < 8
    assert steps(tmp_path) == list(range(1 + left_out, 9))
    history = History.of(open_storage(tmp_path))
    history._attempts.clear()
    lines = list(history._lines.values())
    two = len(lines[-1]) + len(lines[-2])
    for room, kept in ((two, 2), (two - 1, 1), (two + len(lines[-3]), 3)):
        monkeypatch.setattr(histories, "_LARGEST", 2 * room)
        head, *rest = history._encoded().splitlines(keepends=True)
        assert rest == lines[-kept:]
        assert json.loads(json.loads(head)[1])["left_out"] == left_out + len(lines) - kept


def test_a_disk_that_cannot_take_it_does_not_keep_retention_from_making_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY).mkdir()
    (tmp_path / HISTORY / "x").touch()
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=1))
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path)] == [3]
    assert any(f"{HISTORY} now" in text or "could not write" in text for text in warnings_of(caplog))


def test_one_that_cannot_be_read_now_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=1))
    before = (tmp_path / HISTORY).read_bytes()
    with monkeypatch.context() as patch:

        def away(storage: Storage, key: str, *limits: int) -> bytes:
            if key == HISTORY:
                raise ckpt.TransientError("it is away.")
            return read_document(storage, key, *limits)

        patch.setattr(histories, "read_document", away)
        save(tmp_path, 4, 6, keep=ckpt.Keep(last=1))
    assert (tmp_path / HISTORY).read_bytes() == before
    assert any(" now, and leaves it unchanged" in text for text in warnings_of(caplog))
    save(tmp_path, 6, 7, keep=ckpt.Keep(last=1))
    assert steps(tmp_path) == [1, 2, 3, 5, 6]


def test_a_run_writes_metrics_that_json_has_no_number_for(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2), save_every=1, keep=ckpt.Keep()) as manager:
        manager.resume()
        for loss in (float("inf"), torch.tensor(float("nan")), 1.0):
            manager.step(metrics={"loss": float(loss)})
    found = History.of(open_storage(tmp_path)).saves
    assert [str(past.summary.metrics["loss"]) for past in found] == ["inf", "nan", "1.0"]


def attempt(number: int, points: int) -> PastAttempt:
    curve = [(step, 1.0) for step in range(points)]
    return PastAttempt(f"a{number}", "r", "2026-01-01T00:00:00+00:00", last=points, metrics={"loss": curve})


def test_attempts_are_there_again_in_their_order_with_what_json_has_no_number_for(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    said = replace(
        attempt(1, 0),
        ended="failed",
        reason="ValueError: no",
        seconds={"total": 2.5},
        metrics={"loss": [(1, 0.125), (2, float("inf")), (9, float("-inf"))]},
    )
    for one in (said, attempt(2, 3)):
        history = History(storage)
        history.note(one)
        history.store(())
    found = History.of(storage).attempts
    assert [one.id for one in found] == ["a1", "a2"]
    assert found[0] == replace(said, writer=list(said.writer))
    assert found[0].is_running is False
    assert found[1].is_running is True  # this process has said no end yet


@pytest.mark.parametrize(
    "wrong",
    [
        {"last": -1}, {"ended": "well"}, {"began": "today"}, {"seconds": {"total": -1.0}}, {"writer": [1]},
        {"metrics": {"loss": [[1, 2], [0.5]]}}, {"metrics": {"loss": [[1], ["high"]]}}, {"metrics": {"loss": 3}},
        {"metrics": {"loss": [[*range(401)], [0.5] * 401]}}, {"resumed": {"name": 1}}, {"reason": "x" * 5000},
    ],
    ids=str,
)  # fmt: skip
def test_an_attempt_that_says_what_none_does_is_damaged_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: dict[str, object]
) -> None:
    history = History(open_storage(tmp_path))
    for number in (1, 2):
        history.note(attempt(number, 2))
    history.store(())
    lines = (tmp_path / HISTORY).read_bytes().splitlines(keepends=True)
    text = json.dumps({**json.loads(json.loads(lines[1])[1]), **wrong})
    lines[1] = json.dumps([digest(text.encode()), text]).encode() + b"\n"
    (tmp_path / HISTORY).write_bytes(b"".join(lines))
    assert [one.id for one in History.of(open_storage(tmp_path)).attempts] == ["a2"]
    assert warnings_of(caplog) == [f"{tmp_path}/{HISTORY}: ckpt skips damaged lines (1)"]


def test_all_attempts_together_have_a_few_hundred_points_of_a_metric(tmp_path: Path) -> None:
    history = History(open_storage(tmp_path))
    for number in range(1, 6):
        history.note(attempt(number, 400))
    history.store(())
    found = [one.metrics["loss"] for one in History.of(open_storage(tmp_path)).attempts]
    assert 200 < sum(map(len, found)) <= 400
    assert all(points[0][0] == 0 and len({b - a for (a, _), (b, _) in pairwise(points)}) == 1 for points in found)


def test_of_many_attempts_the_newest_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MOST_ATTEMPTS", 2)
    history = History(open_storage(tmp_path))
    for number in range(4):
        history.note(attempt(number, 1))
    history.store(())
    assert [one.id for one in History.of(open_storage(tmp_path)).attempts] == ["a2", "a3"]


def test_what_is_the_same_is_not_written_again(tmp_path: Path) -> None:
    history = History(open_storage(tmp_path))
    history.note(attempt(1, 1))
    history.store(())
    (tmp_path / HISTORY).unlink()
    history.store(())
    assert not (tmp_path / HISTORY).exists()
    history.note(attempt(2, 1))
    history.store(())
    assert len(History.of(open_storage(tmp_path)).attempts) == 2
