"""Of many ranks, each writes its own document; of few, the main rank writes all of them."""

from __future__ import annotations

import pytest

import ckpt
from ckpt.save import transaction
from ckpt.storage import open_storage
from tests.helpers.pipelines import WAYS
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import fsdp2

pytestmark = pytest.mark.slow


def _recorded(root: str) -> list[str]:
    """The keys that this rank writes from now on."""
    kind = type(open_storage(root))
    written: list[str] = []
    write = kind.write

    def recorded(self: object, key: str, pieces: object, **options: object) -> object:
        written.append(key)
        return write(self, key, pieces, **options)  # type: ignore[arg-type]

    kind.write = recorded  # type: ignore[method-assign, assignment]
    return written


def _documents(written: list[str]) -> set[int]:
    """The ranks whose documents are among them."""
    return {int(key.removeprefix("a/rank-")[:5]) for key in written if key.startswith("a/rank-")}


def _save_and_load(rank: int, root: str, most: int) -> None:
    transaction.MAIN_WRITES = most
    written = _recorded(root)
    with ckpt.StateManager(root, model=fsdp2(0)) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        manager.save_state("a", wait=True)  # replaces it, under other paths
        manager.load_state("a")
    assert _documents(written) == ({rank} if most == 1 else {0, 1} if rank == 0 else set())
    assert ckpt.verify(f"{root}/a") == {"a": []}


@pytest.mark.parametrize("most", [1, 2])
def test_each_rank_writes_its_own_document_where_they_are_many(root: Place, most: int) -> None:
    assert run_ranks(2, _save_and_load, str(root), most) == [0, 0]


def _save_and_load_a_pipeline(rank: int, root: str) -> None:
    transaction.MAIN_WRITES = 1
    written, job = _recorded(root), WAYS["pp2-fsdp"](0)
    with ckpt.StateManager(root, model=job.parts[0], optimizer=job.optimizers[0]) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        before = job.digests()
        job.step(0)
        manager.load_state("a")
    assert job.digests() == before
    assert _documents(written) == {rank}


def test_each_rank_of_a_pipeline_writes_its_own_document_where_they_are_many(root: Place) -> None:
    run_ranks(4, _save_and_load_a_pipeline, str(root))
    assert ckpt.verify(root) == {"a": []}
