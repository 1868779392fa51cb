"""A checkpoint that cannot be read now may be as intact as ever: no older one is taken in its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from torch import nn

import ckpt
from ckpt.storage import Entry, open_storage
from tests.helpers.faulty_proxy import FaultyProxy
from tests.helpers.places import PassedOn, Place
from tests.helpers.processes import run_ranks
from tests.helpers.seaweed import Server

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("file", ["manifest.json", "model.safetensors", "state.json"])
def test_a_newest_checkpoint_that_may_not_be_read_is_not_passed_over_for_an_older_one(
    server: Server, s3: str, file: str
) -> None:
    with FaultyProxy(server.port) as proxy:
        options = {"endpoint_url": proxy.url, "deadline": 60.0, "stall": 30.0}
        with ckpt.StateManager(s3, model=nn.Linear(2, 2), storage_options=options) as manager:
            for name in ("older", "newest"):
                manager.save_state(name, wait=True)
            proxy.plan = lambda method, path: "denied" if method == "GET" and f"newest/{file}" in path else None
            with pytest.raises(ckpt.StorageError, match="AccessDenied"):
                manager.load_state()
            proxy.plan = lambda method, path: "denied" if method == "GET" and f"older/{file}" in path else None
            if file != "manifest.json":  # without that nobody knows which is the newer one
                assert manager.load_state().name == "newest"


class _SeenBy(PassedOn):
    """The newest checkpoint as two ranks see it: for one it cannot be reached, for the other a file is too short."""

    def __init__(self, root: str, *, reached: bool) -> None:
        super().__init__(root)
        self.reached, self.looking = reached, False

    def lock(self, key: str, *, shared: bool = False, note: str = "") -> AbstractContextManager[None]:
        if self.looking and key == "newest" and not self.reached:
            raise ckpt.TransientError("the server is away")
        return super().lock(key, shared=shared, note=note)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in super().list(prefix):
            short = self.looking and entry.key == "newest/model.safetensors"
            yield Entry(entry.key, 1) if short else entry


def _load_what_ranks_see_differently(rank: int, root: str, unreached_by: int) -> None:
    storage = _SeenBy(root, reached=rank != unreached_by)
    with ckpt.StateManager(storage, model=nn.Linear(2, 2), ranks=ckpt.RankOptions(timeout=60.0)) as manager:
        for name in ("older", "newest"):
            manager.save_state(name, wait=True)
        storage.looking = True
        with pytest.raises(ckpt.TransientError, match="ckpt can't read newest now"):
            manager.load_state()


@pytest.mark.parametrize("unreached_by", [0, 1])
def test_a_checkpoint_that_any_rank_cannot_reach_is_not_passed_over_whatever_the_other_says(
    root: Place, unreached_by: int
) -> None:
    assert run_ranks(2, _load_what_ranks_see_differently, str(root), unreached_by) == [0, 0]


def test_a_denied_read_is_told_at_once(server: Server, s3: str) -> None:
    with FaultyProxy(server.port) as proxy:
        storage = open_storage(s3, endpoint_url=proxy.url, deadline=5.0, stall=30.0)
        storage.write("object", [b"x"])
        tries: list[str] = []

        def deny(method: str, path: str) -> str:
            tries.append(method)
            return "denied"

        proxy.plan = deny
        with pytest.raises(ckpt.DeniedError, match="AccessDenied"):
            storage.read("object")
    assert len(tries) == 1
