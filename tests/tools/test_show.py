"""`ckpt show`: what is in a checkpoint, from its manifest and headers alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.storage import LocalStorage, open_storage
from tests.cli.test_main import flip_a_bit, truncate


class Tied(nn.Module):
    """Two names for one matrix, and a layer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.frozen = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)


def save(root: str | Path, steps: int = 2) -> None:
    model = Tied()
    optimizer = torch.optim.SGD([model.embedding.weight], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with ckpt.StateManager(
        root, model=model, optimizer=optimizer, scheduler=scheduler, saving=ckpt.SaveOptions(gradients=True)
    ) as manager:
        manager.resume()
        for _ in range(steps):
            model.embedding(torch.arange(4)).sum().backward()
            optimizer.step()
            manager.step(metrics={"loss": 0.5, "ratio": float("inf")})
            manager.save_state(wait=True)


def show(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


def shown(*arguments: object) -> dict[str, Any]:
    result = show(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def test_of_a_root_the_newest_is_shown_with_all_that_is_known(root: str) -> None:
    save(root)
    text = show(root).output
    assert text.splitlines()[0] == f"{root}/step-00000002"
    for line in (
        r"progress +step 2, epoch 0, batch 0, samples 0",
        r"metrics +loss 0\.5, ratio inf",
        r"size +\d+\.\d kB in 5 files",
        r"saved by +one process, full layout, \S.*",
        r"took +training waited \d+\.\d\d s, durable after \d+\.\d\d s",
        r"continues +step-00000001",
        r"versions +ckpt \S+, torch \S+, python \S+",
        r"model +Tied +3 +384 +float32, bfloat16 +\d+\.\d kB",
        r"optimizer +SGD +1 +320 +float32 +\d+\.\d kB",
        r"scheduler +StepLR +0 +0 +- +0 bytes",
        r"gradients \(of each rank\) +- +1 +320 +float32 +\d+\.\d kB",
        r"rank-00000\.json +\d+\.\d kB",
    ):
        assert re.search(rf"(?m)^ *{line}$", text), line


def test_tensors_are_listed_with_dtype_and_shape(root: str) -> None:
    save(root, 1)
    text = show(f"{root}/step-00000001", "--tensors").output
    assert re.search(r"(?m)^embedding\.weight +float32 +\[40, 8\]$", text)
    assert re.search(r"(?m)^frozen\.weight +bfloat16 +\[8, 8\]$", text)


def test_json_has_the_same(root: str) -> None:
    save(root)
    found = shown(root, "--tensors")
    assert (found["name"], found["step"], found["parent_name"]) == ("step-00000002", 2, "step-00000001")
    assert found["metrics"] == {"loss": 0.5, "ratio": "inf"}
    assert found["parts"]["model"]["listed"]["head.weight"] == {"dtype": "float32", "shape": [40, 8]}
    assert found["parts"]["model"]["dtypes"] == {"float32": 2, "bfloat16": 1}
    assert found["size"] == sum(file["size"] for file in found["files"])


@pytest.mark.slow
def test_on_s3_no_tensor_is_read(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1000, 1000)
    with ckpt.StateManager(s3, model=model) as manager:
        manager.save_state("a", wait=True)
    kind = type(open_storage(s3))
    read = 0
    original = kind.read

    def counted(self: Any, key: str, start: int = 0, stop: int | None = None) -> bytes:
        nonlocal read
        data: bytes = original(self, key, start, stop)
        read += len(data)
        return data

    def refused(self: Any, key: str, start: int, *buffers: memoryview, again: bool = False) -> None:
        assert key.endswith(".json"), key
        original_into(self, key, start, *buffers, again=again)

    original_into = kind.read_into
    monkeypatch.setattr(kind, "read", counted)
    monkeypatch.setattr(kind, "read_into", refused)
    assert shown(s3)["parts"]["model"]["elements"] == 1_001_000
    assert read < 100_000


def test_a_newer_checkpoint_that_is_not_intact_is_skipped_and_named(tmp_path: Path) -> None:
    save(tmp_path)
    truncate(tmp_path / "step-00000002" / "model.safetensors")
    result = show(tmp_path)
    first, second, *_ = result.output.splitlines()
    assert re.fullmatch(r"step-00000002 is skipped: model\.safetensors is .* of .*", first)
    assert second == f"{tmp_path}/step-00000001"
    assert result.exit_code == 0


def test_a_damaged_one_shows_what_is_left_of_it(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "step-00000002" / "optimizer.safetensors").unlink()
    result = show(tmp_path / "step-00000002")
    assert "NO: optimizer.safetensors is missing" in result.output
    assert re.search(r"(?m)^model +Tied +3 ", result.output)
    assert result.exit_code == 1


def test_an_altered_header_is_not_believed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"[40,8]", b"[80,4]"))
    result = show(tmp_path)
    assert "NO: step-00000001 is damaged: model.safetensors was altered (bytes 0 to " in result.output
    assert result.exit_code == 1


def test_a_flipped_bit_in_the_state_is_noticed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_a_bit(tmp_path / "step-00000001" / "state.json")
    result = show(tmp_path)
    assert "state.json was altered" in result.output
    assert result.exit_code == 1


def test_what_is_read_cannot_be_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    held = []
    original = LocalStorage.read

    def look(self: LocalStorage, key: str, start: int = 0, stop: int | None = None) -> bytes:
        if key.endswith("model.safetensors"):
            with pytest.raises(ckpt.LockedError), LocalStorage(tmp_path).lock("step-00000001"):
                pass
            held.append(key)
        return original(self, key, start, stop)

    monkeypatch.setattr(LocalStorage, "read", look)
    assert show(tmp_path).exit_code == 0
    assert held


@pytest.mark.parametrize("where", ["nothing/here", "."])
def test_where_there_is_none_it_says_so(where: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    result = show(tmp_path / where)
    assert result.exit_code == 1
    assert re.match("ckpt: (there is nothing at|ckpt can't read the format of)", result.output)
