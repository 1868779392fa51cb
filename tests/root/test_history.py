"""The history of a root: steps, metrics, sizes and waits of every save, also of those that retention has removed."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.export.card import Training
from ckpt.export.push import _training
from ckpt.formats.native.manifest import digest
from ckpt.root import catalog as histories
from ckpt.root.catalog import HISTORY, History
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


def test_a_root_in_which_nothing_was_removed_has_none(tmp_path: Path) -> None:
    save(tmp_path, 1, 4)
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
    page = CliRunner().invoke(main, ["report", str(tmp_path)]).output
    assert "| loss | █▆▃▁ | 9 | 6 | 6 | 9 |" in page
    assert "; 3 more were removed" in page
    assert page.count("| removed |") == 3
    assert "step 1," in page


def test_a_model_card_has_the_whole_curve(tmp_path: Path) -> None:
    save(tmp_path, 1, 5, keep=ckpt.Keep(last=1))
    (newest,) = ckpt.list_checkpoints(tmp_path)
    training = _training(newest.url, newest.manifest, None)
    assert isinstance(training, Training)
    assert list(training.curves["loss"]) == [(1, 9.0), (2, 8.0), (3, 7.0), (4, 6.0)]


def test_a_name_that_is_saved_again_stays_known(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2)) as manager:
        manager.resume()
        for step in range(1, 4):
            manager.step(metrics={"loss": 10.0 - step})
            manager.save_state("best", wait=True, metrics={"loss": 10.0 - step})
        written = (tmp_path / HISTORY).stat().st_mtime_ns
        manager.save_state("other", wait=True)
        assert (tmp_path / HISTORY).stat().st_mtime_ns == written  # nothing was replaced since
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
    assert not (tmp_path / "root" / HISTORY).exists()


def test_a_damaged_line_is_named_and_the_others_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 5, keep=ckpt.Keep(last=1))
    caplog.clear()
    path = tmp_path / HISTORY
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2].replace(b"step-00000002", b"step-00000007"), *lines[3:]]))
    assert steps(tmp_path) == [1, 3, 4]
    assert warnings_of(caplog) == [f"{tmp_path}/{HISTORY}: 1 of its lines are damaged, and left out"]


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
    assert warnings_of(caplog) == [f"{tmp_path}/{HISTORY}: 1 of its lines are damaged, and left out"]


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[]\n", b'["0", "{}"]\n', b"[[[[[[" * 1000], ids=range(5))
def test_one_that_cannot_be_read_is_named_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=2))
    (tmp_path / HISTORY).write_bytes(content)
    save(tmp_path, 4, 5, keep=ckpt.Keep(last=2))
    assert any("saves before these are not known: its first line is damaged" in text for text in warnings_of(caplog))
    assert steps(tmp_path) == [2, 3, 4]


def test_one_of_a_newer_version_is_left_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 3)
    text = json.dumps({"format": "ckpt history", "version": 2, "left_out": 0})
    line = json.dumps([digest(text.encode()), text]).encode()
    (tmp_path / HISTORY).write_bytes(line)
    save(tmp_path, 3, 5, keep=ckpt.Keep(last=1))
    assert (tmp_path / HISTORY).read_bytes() == line
    assert any("is of a newer version of ckpt" in text for text in warnings_of(caplog))


def test_it_has_a_limit_and_counts_what_is_beyond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MOST", 3)
    save(tmp_path, 1, 7, keep=ckpt.Keep(last=1))
    save(tmp_path, 7, 9, keep=ckpt.Keep(last=1))
    assert steps(tmp_path) == [6, 7, 8]
    assert History.of(open_storage(tmp_path)).left_out == 5
    assert "5 older ones are not known any more" in listed(tmp_path)


def test_it_is_never_larger_than_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "_LARGEST", 4000)  # of a save, the line has some 550 bytes
    save(tmp_path, 1, 9, keep=ckpt.Keep(last=1))
    left_out = History.of(open_storage(tmp_path)).left_out
    assert 0 < left_out < 8
    assert steps(tmp_path) == list(range(1 + left_out, 9))


def test_a_disk_that_cannot_take_it_does_not_keep_retention_from_making_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / HISTORY).mkdir()
    (tmp_path / HISTORY / "x").touch()
    save(tmp_path, 1, 4, keep=ckpt.Keep(last=1))
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(tmp_path)] == [3]
    assert any(f"{HISTORY} cannot be read now" in text or "was not written" in text for text in warnings_of(caplog))


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
    assert any("cannot be read now, and is left as it is" in text for text in warnings_of(caplog))
    save(tmp_path, 6, 7, keep=ckpt.Keep(last=1))
    assert steps(tmp_path) == [1, 2, 3, 5, 6]


def test_a_run_writes_metrics_that_json_has_no_number_for(tmp_path: Path) -> None:
    with ckpt.StateManager(tmp_path, model=nn.Linear(2, 2), save_every=1, keep=ckpt.Keep()) as manager:
        manager.resume()
        for loss in (float("inf"), torch.tensor(float("nan")), 1.0):
            manager.step(metrics={"loss": float(loss)})
    found = History.of(open_storage(tmp_path)).saves
    assert [str(past.summary.metrics["loss"]) for past in found] == ["inf", "nan", "1.0"]
