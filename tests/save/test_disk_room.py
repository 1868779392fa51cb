"""A disk without room: noticed before anything is written, and cured by what retention would remove anyway."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.namespaces import with_tmpfs

pytestmark = pytest.mark.slow

SAVE = """
import sys
import ckpt
from torch import nn

root, last, metrics = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
keep = ckpt.Keep(last=last, best=1, metric="loss") if metrics else ckpt.Keep(last=last)
model = nn.Linear(1000, 500)  # 2 MB
frozen = nn.Linear(1000, 500).requires_grad_(False)
with ckpt.StateManager(root, model={"a": model, "frozen": frozen}, keep=keep) as manager:
    manager.resume()
    for number in range(1, 6):
        nn.init.constant_(model.weight, number)
        loss = {"loss": float(metrics[number - 1])} if metrics else None
        try:
            manager.save_state(f"s{number}", metrics=loss, wait=True)
        except ckpt.FullError as error:
            print(error)
            break
print(sorted(found.name for found in ckpt.list_checkpoints(root)), set(map(tuple, ckpt.verify(root).values())))
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    return folder


def _saved(small: Path, room: float, last: int, *metrics: float) -> str:
    words = ("-c", SAVE, str(small), str(last), *map(str, metrics))
    return with_tmpfs(small, int(room * (1 << 20)), *words, cwd=small.parent).run()


def test_what_retention_would_remove_is_removed_first_where_that_makes_the_room(small: Path) -> None:
    """Three checkpoints and the frozen weights, which all link to, take 8 MB: a fourth needs 2 MB more."""
    assert _saved(small, 9, 3) == "['s3', 's4', 's5'] {()}\n"


def test_the_best_one_is_no_room(small: Path) -> None:
    assert _saved(small, 9, 2, 0.1, 0.5, 0.4, 0.3, 0.2) == "['s1', 's4', 's5'] {()}\n"


def test_the_newest_intact_one_is_never_removed_and_nothing_is_written(small: Path) -> None:
    refused, left = _saved(small, 5, 1).splitlines()
    assert refused.startswith(f"{small}/s2 needs 2.0 MB, but only ")
    assert "is free there. Nothing was written or removed. Free some space" in refused
    assert left == "['s1'] {()}"


GROWING = """
import sys
import ckpt
import torch

class Replay:
    chunks = [torch.ones(1 << 19)]  # 2 MB

    def state_dict(self):
        return {"chunks": list(self.chunks)}

    def load_state_dict(self, state): ...

replay = Replay()
with ckpt.StateManager(sys.argv[1]) as manager:
    manager.register(replay=replay, chunked=True)
    for number in range(1, 5):
        try:
            manager.save_state(f"s{number}", wait=True)
        except ckpt.FullError as error:
            print(error)
            break
        replay.chunks.append(torch.ones(1 << 19))
print(sorted(found.name for found in ckpt.list_checkpoints(sys.argv[1])))
"""


def test_a_chunk_for_which_there_is_no_room_is_noticed_before_anything_is_written(small: Path) -> None:
    refused, left = with_tmpfs(small, 5 << 20, "-c", GROWING, str(small), cwd=small.parent).run().splitlines()
    assert refused.startswith(f"{small}/s3 needs 2.1 MB, but only ")
    assert "Nothing was written or removed" in refused
    assert left == "['s1', 's2']"


DAMAGED = """
import os
import sys
import ckpt
from torch import nn

root, model = sys.argv[1], nn.Linear(1000, 500)  # 2 MB
with ckpt.StateManager(root, model=model) as manager:
    manager.save_state("s1")
    nn.init.ones_(model.weight)
    manager.save_state("s2")
os.truncate(f"{root}/s2/model.safetensors", 100)
with open(f"{root}/other", "wb") as file:
    file.write(bytes(4 << 20))
with ckpt.StateManager(root, model=model, keep=ckpt.Keep(last=1)) as manager:
    print(manager.resume().name)
    nn.init.zeros_(model.weight)
    try:
        manager.save_state("s3", wait=True)
    except ckpt.FullError as error:
        print(error)
print(ckpt.verify(f"{root}/s1"))
"""


def test_the_newest_intact_one_is_no_room_though_a_newer_one_is_damaged(small: Path) -> None:
    said = with_tmpfs(small, 7 << 20, "-c", DAMAGED, str(small), cwd=small.parent).run()
    resumed, refused, left = said.splitlines()
    assert resumed == "s1"
    assert "Nothing was written or removed" in refused
    assert left == "{'s1': []}"


READ = """
import sys
import ckpt
from ckpt.storage import open_storage
from torch import nn

root, model = sys.argv[1], nn.Linear(1000, 500)  # 2 MB
with ckpt.StateManager(root, model=model) as manager:
    for name in ("s1", "s2"):
        nn.init.normal_(model.weight)
        manager.save_state(name)
with ckpt.StateManager(root, model=model, keep=ckpt.Keep(last=1)) as manager:
    manager.resume()
    nn.init.zeros_(model.weight)
    with open_storage(root).lock("s1", shared=True):
        try:
            manager.save_state("s3", wait=True)
        except ckpt.FullError as error:
            print(error)
print(ckpt.verify(root))
"""


def test_what_cannot_be_removed_to_make_room_is_named_before_anything_is_written(small: Path) -> None:
    refused, left = with_tmpfs(small, 5 << 20, "-c", READ, str(small), cwd=small.parent).run().splitlines()
    assert "is free there, and ckpt could not make room: s1 is being read. Nothing was written. Free some" in refused
    assert left == "{'s2': [], 's1': []}"
