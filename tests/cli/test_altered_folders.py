"""Commands on folders that somebody has altered: one line, the right exit status, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import FAULT, main
from ckpt.formats.native.documents import STATE, rank_document
from ckpt.formats.native.manifest import ALGORITHM, FILE_NAME, Manifest, digest
from tests.helpers.forgery import alter_json, write_manifest

SHARDED = Path(__file__).parents[1] / "guarantees" / "written_before" / "fsdp2"
Change = Callable[[dict[str, Any]], Any]


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit | None), result.exception
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(tmp_path / "run", model=model, optimizer=optimizer) as manager:
        manager.resume()
        manager.step()
        manager.save_state()
    return tmp_path / "run" / "step-00000001"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SHARDED, tmp_path / "sharded")) / "saved"


TABLES: dict[str, Change] = {
    "no tensors": lambda table: table.pop("tensors"),
    "a row too short": lambda table: table["tensors"].update({"0.weight": ["F32"]}),
    "a shape of text": lambda table: table["tensors"].update({"0.weight": ["float32", "ab", 0, 0]}),
    "a shape below zero": lambda table: table["tensors"].update({"0.weight": ["float32", [-1], 0, 0]}),
    "a dtype that is a number": lambda table: table["tensors"].update({"0.weight": [1, [2], 0, 0]}),
    "an alias of nothing": lambda table: table["aliases"].update(a="nothing"),
    "aliases that are a list": lambda table: table.update(aliases=[1]),
}


@pytest.mark.parametrize("change", TABLES.values(), ids=TABLES)
def test_show_names_a_table_of_shards_that_is_none(sharded: Path, change: Change) -> None:
    alter_json(sharded / STATE, lambda document: change(document["parts"]["model"]["spread"]) and None)
    result = run("show", "--tensors", sharded)
    assert result.exit_code == 1
    assert "saved: model is not a valid shard table" in result.output
    assert run("show", "--json", sharded).exit_code == 1


DOCUMENTS: dict[str, Change] = {
    "no parts": lambda document: document.pop("parts"),
    "parts that are a list": lambda document: document.update(parts=[1]),
    "a part that is a number": lambda document: document["parts"].update(model=3),
    "values that cannot be": lambda document: document["parts"]["optimizer"].update(state={"$tuple": 3}),
    "groups that are numbers": lambda document: document["parts"]["optimizer"]["state"].update(param_groups=[1]),
    "a model that is a number": lambda document: document["parts"]["model"].update(state=3),
}


@pytest.mark.parametrize("change", DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_command_answers_an_altered_document_with_one_line(saved: Path, tmp_path: Path, change: Change) -> None:
    intact = shutil.copytree(saved, tmp_path / "intact" / "step-00000001")
    alter_json(saved / STATE, lambda document: change(document) and None)
    for command in (
        ("show", saved),
        ("show", "--json", saved),
        ("merge", saved, tmp_path / "out.safetensors"),
        ("convert", saved, tmp_path / "converted", "--to", "accelerate"),
        ("diff", saved, intact),
        ("ls", saved.parent),
        ("report", saved.parent),
    ):
        result = run(*command)
        assert result.exit_code in (0, 1, 2), (command, result.output)
        if command[0] in ("merge", "convert") and result.exit_code:
            assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize("state", [3, {"rng": 3}, {"rng": {"values": float("nan"), "tensors": 1}}])
def test_diff_answers_an_altered_rank_document_with_status_2(saved: Path, tmp_path: Path, state: Any) -> None:
    intact = shutil.copytree(saved, tmp_path / "intact" / "step-00000001")
    alter_json(saved / rank_document(0), lambda document: document.update(state=state))
    result = run("diff", saved, intact)
    assert result.exit_code == 2
    assert "rank-00000.json" in result.output


@pytest.mark.parametrize(
    "index",
    [[], {}, {"weight_map": 3}, {"weight_map": ["a"]}, {"weight_map": {"w": 1}}, {"weight_map": {"w": ["a"]}},
     {"weight_map": {"w": "../model.safetensors"}}, {"weight_map": {"w": "/etc/passwd"}}],
)  # fmt: skip
def test_an_index_that_is_none_is_named(tmp_path: Path, index: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    result = run("merge", tmp_path, tmp_path / "out.safetensors")
    assert result.exit_code == 1
    assert "model.safetensors.index.json" in result.output
    with pytest.raises(ckpt.DamagedError, match=r"model\.safetensors\.index\.json"):
        ckpt.load_model(tmp_path, nn.Linear(2, 2))


def test_an_error_that_ckpt_does_not_expect_says_how_to_report_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("by \x1b[2Jzero")

    monkeypatch.setattr("ckpt.root.catalog.Overview.of", fail)
    result = run("ls", saved.parent)
    assert result.exit_code == FAULT
    assert r"ckpt: ZeroDivisionError: by \x1b[2Jzero (" in result.output
    assert "please report this line" in result.output


FIELDS: dict[str, dict[str, Any]] = {
    "before the first year": {"created": "0001-01-01T00:00:00+23:59"},
    "after the last year": {"created": "9999-12-31T23:59:59-23:59"},
    "without end": {"memory": {"snapshots": 1e308, "left_out": 1e308}, "seconds": {"blocked": 1e308}},
    "the largest metrics": {"metrics": {"a": 1e308, "b": -1e308, "": "nan"}},
    "other counters": {"progress": {"x": 1}},
    "the largest counters": {"progress": dict.fromkeys(("step", "epoch", "batch", "samples"), 2**53 - 1)},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_no_value_of_a_manifest_is_too_much_for_a_command_or_a_load(saved: Path, fields: dict[str, Any]) -> None:
    manifest = replace(Manifest.from_bytes((saved / FILE_NAME).read_bytes(), "it"), metrics={"loss": 1.0})
    text = {**json.loads(manifest.to_bytes()), **fields}
    lines = json.dumps({key: value for key, value in text.items() if key != "digest"}, indent=1).encode()[2:]
    write_manifest(saved, manifest.to_bytes().partition(b":")[0] + sealed(lines))
    for command in (["ls"], ["show"], ["show", "--json"], ["report"], ["verify"], ["prune", "--dry-run"]):
        assert run(*command, saved.parent).exit_code in (0, 1), command
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(saved.parent, model=model, optimizer=optimizer) as manager, suppress(ckpt.DamagedError):
        manager.resume()


def sealed(lines: bytes) -> bytes:
    return f': "{ALGORITHM}:{digest(lines)}",\n'.encode() + lines
