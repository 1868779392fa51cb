"""Of many ranks, each writes its own document; of few, the main rank writes all of them."""

from __future__ import annotations

import pytest

import ckpt
from ckpt.save import transaction
from ckpt.storage import open_storage
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import fsdp2

pytestmark = pytest.mark.slow


def _save_and_load(rank: int, root: str, most: int) -> None:
    transaction.MAIN_WRITES = most
    kind = type(open_storage(root))
    written: list[str] = []
    write = kind.write

    def recorded(self: object, key: str, pieces: object, **options: object) -> object:
        written.append(key)
        return write(self, key, pieces, **options)  # type: ignore[arg-type]

    kind.write = recorded  # type: ignore[method-assign, assignment]
    with ckpt.StateManager(root, model=fsdp2(0)) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        manager.save_state("a", wait=True)  # replaces it, under other paths
        manager.load_state("a")
    mine = {key for key in written if key.startswith("a/rank-")}
    ranks = {int(key.removeprefix("a/rank-")[:5]) for key in mine}
    assert ranks == ({rank} if most == 1 else {0, 1} if rank == 0 else set())
    assert ckpt.verify(f"{root}/a") == {"a": []}


@pytest.mark.parametrize("most", [1, 2])
def test_each_rank_writes_its_own_document_where_they_are_many(root: Place, most: int) -> None:
    assert run_ranks(2, _save_and_load, str(root), most) == [0, 0]
