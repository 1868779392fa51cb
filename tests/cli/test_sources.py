"""Every command takes every source: a root, a checkpoint, a file, a folder of another tool, at a path or a URL."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.storage import open_storage
from tests.helpers.hub_server import HubServer
from tests.storage.test_read_only import serving

REPO = "me/model"
KINDS = {
    "root": "run",
    "checkpoint": "run/new",
    "file of safetensors": "model.safetensors",
    "file of torch.save": "last.pt",
    "folder of safetensors": "hf",
}
WITHOUT_HASHES = ("file of safetensors", "file of torch.save", "folder of safetensors")
_numbers = itertools.count()


def new_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def write(root: Path) -> None:
    """A run with two checkpoints, and the model of the newer one in files."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(root / "run", model=model, optimizer=optimizer) as manager:
        manager.save_state("old")
        model.load_state_dict(new_model().state_dict())
        manager.save_state("new")
    (root / "hf").mkdir()
    for file in ("model.safetensors", "hf/model.safetensors"):
        safetensors.torch.save_file(model.state_dict(), root / file)
    (root / "hf" / "config.json").write_text('{"model_type": "mine"}')
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "step": 30}
    torch.save(state, root / "last.pt")


@pytest.fixture(params=["path", "file", "memory", "http"])
def top(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the sources are: a folder, or a URL of it."""
    written = tmp_path / "sources"
    written.mkdir()
    write(written)
    monkeypatch.chdir(tmp_path)
    if request.param == "path":
        yield "sources"
    elif request.param == "file":
        yield f"file://{written}"
    elif request.param == "memory":
        url = f"memory://sources-{next(_numbers)}"
        for path in written.rglob("*"):
            if path.is_file():
                folder, _, name = path.relative_to(written).as_posix().rpartition("/")
                root, _, inside = folder.partition("/")
                storage = open_storage(f"{url}/{root}".rstrip("/"))
                storage.write(f"{inside}/{name}".lstrip("/"), [memoryview(path.read_bytes())])
        yield url
    else:
        with serving(written) as url:
            yield url


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def merged(source: str, hub: HubServer) -> None:
    result = run("merge", source, "out/model.safetensors")
    assert result.exit_code == 0, result.output
    assert_new(safetensors.torch.load_file("out/model.safetensors"))


def compared(source: str, hub: HubServer) -> None:
    assert run("diff", source, "sources/run/new").stdout == "There is no difference.\n"
    assert run("diff", "sources/model.safetensors", source).exit_code == 0
    result = run("diff", source, "sources/run/old", "--part", "model")
    assert result.exit_code == 1
    assert "model.weight" in result.output


def converted(source: str, hub: HubServer) -> None:
    result = run("convert", source, "out", "--name", "x")
    assert result.exit_code == 0, result.output
    model = nn.Linear(3, 2)
    ckpt.load_model("out/x", model)
    assert_new(model.state_dict())


def pushed(source: str, hub: HubServer) -> None:
    result = run("push", source, REPO)
    assert result.exit_code == 0, result.output
    assert_new(safetensors.torch.load(hub.files(REPO)["model.safetensors"]))


def displayed(source: str, hub: HubServer) -> None:
    result = run("show", source)
    assert result.exit_code == 0, result.output
    for word in ("model", "weight", "[2, 3]", "float32", "8"):
        assert word in result.output
    assert run("show", source, "--json").exit_code == 0


def assert_new(tensors: dict[str, torch.Tensor]) -> None:
    expected = new_model().state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


COMMANDS: dict[str, Callable[[str, HubServer], None]] = {
    "show": displayed, "merge": merged, "diff": compared, "convert": converted, "push": pushed,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_every_source(command: str, kind: str, top: str, hub: HubServer) -> None:
    COMMANDS[command](f"{top}/{KINDS[kind]}", hub)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_reads_all_checkpoints_of_a_root_and_says_where_there_are_no_hashes(kind: str, top: str) -> None:
    result = run("verify", f"{top}/{KINDS[kind]}")
    if kind in WITHOUT_HASHES:
        assert result.exit_code == 1
        assert "ckpt: " in result.output
        assert "hashes" in result.output
        return
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.output.splitlines()] == [
        [name, "intact"] for name in (("new", "old") if kind == "root" else ("new",))
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_pull_copies_every_source(kind: str, top: str) -> None:
    result = run("pull", f"{top}/{KINDS[kind]}", "out")
    assert result.exit_code == 0, result.output
    found = {path.relative_to("out").as_posix() for path in Path("out").rglob("*") if path.is_file()}
    wanted = {
        "root": {"old/manifest.json", "new/manifest.json"},
        "checkpoint": {"new/manifest.json"},
        "file of safetensors": {"model.safetensors"},
        "file of torch.save": {"last.pt"},
        "folder of safetensors": {"model.safetensors", "config.json"},
    }
    assert wanted[kind] <= found
    assert kind in ("root", "checkpoint") or found == wanted[kind]


def test_of_a_root_whose_newest_checkpoint_is_cut_short_the_one_before_is_taken_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    (tmp_path / "run" / "new" / "model.safetensors").write_bytes(b"")
    ckpt.merge(tmp_path / "run", tmp_path / "out.safetensors")
    assert any(
        text.startswith("ckpt skips the newer checkpoint new: model.safetensors is 0 bytes") for text in caplog.messages
    )
    found = ckpt.diff(tmp_path / "run", tmp_path / "run" / "old")
    assert not found
    assert found.first == f"{tmp_path}/run/old"
    (tmp_path / "run" / "old" / "model.safetensors").unlink()
    with pytest.raises(ckpt.DamagedError, match=r"new is damaged: model\.safetensors"):
        ckpt.merge(tmp_path / "run", tmp_path / "again.safetensors")
    with pytest.raises(ckpt.MissingError, match="there is nothing at"):
        ckpt.merge(tmp_path / "nowhere", tmp_path / "out.safetensors")


def test_show_lists_the_parts_of_a_file_of_torch_save_and_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    state = torch.load("last.pt", weights_only=True)
    torch.save({**state, "hook": Payload()}, "hooked.pt")
    text = run("show", "hooked.pt").output
    assert text.splitlines()[0] == "hooked.pt"
    for line in (
        r"saved by +torch\.save",
        r"progress +epoch 3, step 30",
        r"size +\d+\.\d kB in 1 file",
        r"not read +hook: .*posix\.system.*",
        r"model +- +2 +8 +float32 +32 bytes",
        r"optimizer +- +2 +8 +float32 +32 bytes",
        r"weight +1 +6 +24 bytes +float32 +\[2, 3\]",
    ):
        assert re.search(rf"(?m)^ *{line}$", text), (line, text)
    assert not Path("executed").exists()
    found = json.loads(run("show", "hooked.pt", "--json", "--tensors").stdout)
    assert found["tool"] == "torch.save"
    assert found["parts"]["model"]["listed"]["bias"] == {"dtype": "float32", "shape": [2]}
    assert run("diff", "last.pt", "hooked.pt").exit_code == 0
    assert run("diff", "last.pt", "hooked.pt", "--part", "optimizer").exit_code == 0


class Payload:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def test_show_prefers_checkpoints_to_weights_beside_them(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "run" / "model.safetensors")
    assert run("show", tmp_path / "run").output.splitlines()[0] == f"{tmp_path}/run/new"
    with pytest.raises(ckpt.ConfigError, match="holds saves in 2 formats"):
        ckpt.merge(tmp_path / "run", tmp_path / "out.safetensors")


def test_two_files_of_torch_save_are_compared_part_by_part_and_value_by_value(tmp_path: Path) -> None:
    write(tmp_path)
    state = torch.load(tmp_path / "last.pt", weights_only=True)
    state["epoch"] = 4
    state["optimizer"]["param_groups"][0]["lr"] = 0.5
    state["optimizer"]["state"][0]["momentum_buffer"] += 1
    torch.save(state, tmp_path / "next.pt")
    found = ckpt.diff(tmp_path / "last.pt", tmp_path / "next.pt")
    named = {each.name: (each.first, each.second) for each in found.differences}
    assert named.pop("progress.epoch") == ("3", "4")
    assert named.pop("optimizer.state.param_groups.0.lr") == ("0.001", "0.5")
    (tensor,) = named
    assert tensor.startswith("optimizer.state.")
    assert tensor.endswith(".momentum_buffer")
    assert not ckpt.diff(tmp_path / "last.pt", tmp_path / "next.pt", part="model")
    assert not ckpt.diff(tmp_path / "next.pt", tmp_path / "run")  # with another kind, the model alone
    for part in ("scheduler", "nothing"):
        with pytest.raises(ckpt.MissingError, match=f"has no part '{part}'. It has: model, optimizer"):
            ckpt.diff(tmp_path / "last.pt", tmp_path / "next.pt", part=part)
