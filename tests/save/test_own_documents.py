"""Who writes the documents of ranks: the main rank those of few; of many, each its own, or one of them for all."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import DamagedError, StorageError
from ckpt.formats.native.documents import LONGEST_JOINED, joined_file
from ckpt.save import transaction
from ckpt.state.model import ModelPart
from ckpt.state.parts import RankObjectPart
from ckpt.storage import MemoryStorage, Storage, open_storage
from tests.helpers.pipelines import WAYS
from tests.helpers.places import Place
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import fsdp2
from tests.save.test_ranks_as_threads import (
    Counter,
    Rank,
    Replica,
    close,
    everywhere,
    job,
    linear,
    manifest_of,
    state_of,
)

SLOW = pytest.mark.slow


def join(monkeypatch: pytest.MonkeyPatch, *, longest: int = LONGEST_JOINED) -> None:
    """As if two ranks were many, and two documents filled a file."""
    for name, value in (("ALONE", 1), ("IN_A_FILE", 2), ("LONGEST_JOINED", longest)):
        monkeypatch.setattr(transaction, name, value)


def ranks_with_own_state(storage: Storage, size: int = 5) -> list[Rank]:
    ranks = job(size, lambda _: storage)
    for number, rank in enumerate(ranks):
        rank.own = {f"mine-{number:05}": RankObjectPart(f"mine-{number:05}", Counter(torch.full((2,), float(number))))}
    return ranks


def documents(storage: Storage, name: str = "a") -> list[str]:
    return [file.path for file in manifest_of(storage, name).files if file.name.startswith("rank")]


@pytest.fixture
def shared(request: pytest.FixtureRequest) -> Storage:
    return MemoryStorage(f"documents-{request.node.name}")


JOINED = ["ranks-00000-00001.jsonl", "ranks-00002-00003.jsonl", "ranks-00004-00004.jsonl"]


def test_the_documents_of_many_ranks_are_lines_of_a_few_files_that_their_last_ranks_write(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch)
    ranks = ranks_with_own_state(shared)
    assert everywhere(ranks, Rank.save) == [""] * 5
    wrote = {file: number for number, rank in enumerate(ranks) for file in rank.saver.root.links.files}
    assert everywhere(ranks, lambda rank: rank.save("b")) == [""] * 5
    close(ranks)
    assert (documents(shared), documents(shared, "b")) == (JOINED, JOINED)
    assert [wrote[file] for file in JOINED] == [1, 3, 4]
    for number in range(5):
        assert state_of(shared, number, f"mine-{number:05}", "b")["value"].tolist() == [number] * 2
    lines = [json.loads(line) for file in JOINED for line in shared.read(f"a/{file}").splitlines()]
    assert [line["state"]["values"]["values"] for line in lines] == [{"rank": number} for number in range(5)]
    assert ckpt.verify(shared.url) == {"a": [], "b": []}


def test_a_document_that_is_too_long_for_a_line_is_a_file(shared: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    join(monkeypatch, longest=100_000)
    ranks = ranks_with_own_state(shared)
    ranks[3].own["words-00003"] = RankObjectPart("words-00003", Counter("word" * 50_000))
    assert everywhere(ranks, Rank.save) == [""] * 5
    close(ranks)
    assert documents(shared) == ["rank-00003.json", *JOINED]
    assert shared.read("a/ranks-00002-00003.jsonl").splitlines()[1].strip() == b""
    for number in range(5):
        assert state_of(shared, number, f"mine-{number:05}")["value"].tolist() == [number] * 2
    assert state_of(shared, 3, "words-00003")["value"] == "word" * 50_000


def test_where_no_rank_writes_files_of_its_own_the_main_one_writes_the_documents(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch)
    ranks = job(4, lambda _: shared)
    for rank in ranks:
        rank.parts = [ModelPart("model", linear(1.0))]
    assert everywhere(ranks, Rank.save) == [""] * 4
    assert {*JOINED[:2]} <= ranks[0].saver.root.links.files.keys()
    assert not any(rank.saver.root.links.files for rank in ranks[1:])
    close(ranks)
    assert documents(shared) == JOINED[:2]


def test_a_rank_reads_only_its_own_line_which_has_a_hash_of_its_own(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch)
    ranks = ranks_with_own_state(shared)
    assert everywhere(ranks, Rank.save) == [""] * 5
    close(ranks)
    key = f"a/{JOINED[1]}"
    altered = bytearray(shared.read(key))
    altered[10] ^= 1
    shared.write(key, [altered])
    assert state_of(shared, 3, "mine-00003")["value"].tolist() == [3.0, 3.0]
    with pytest.raises(DamagedError, match=r"ranks-00002-00003\.jsonl was altered"):
        state_of(shared, 2, "mine-00002")
    assert len(ckpt.verify(shared.url)["a"]) == 1


def test_a_save_that_replaces_another_puts_the_joined_documents_beside_it_until_it_is_committed(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch)
    ranks = ranks_with_own_state(shared)
    for _ in range(2):
        assert everywhere(ranks, Rank.save) == [""] * 5
    close(ranks)
    manifest = manifest_of(shared)
    assert documents(shared) == [name.replace(".jsonl", f".{manifest.id[:8]}.jsonl") for name in JOINED]
    assert {entry.key for entry in shared.list("a")} >= {f"a/{path}" for path in documents(shared)}
    assert not {f"a/{name}" for name in JOINED} & {entry.key for entry in shared.list("a")}
    assert state_of(shared, 4, "mine-00004")["value"].tolist() == [4.0, 4.0]


def test_a_file_of_documents_that_cannot_be_written_fails_the_save_and_the_next_one_has_all_of_them(
    shared: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(MemoryStorage):
        def write(self, key: str, pieces: Any, **options: Any) -> None:
            if key == f"a/{JOINED[1]}":
                raise StorageError("no room for lines.")
            super().write(key, pieces, **options)

    join(monkeypatch)
    full = Full(f"full-{id(shared)}")
    ranks = ranks_with_own_state(full)
    raised = everywhere(ranks, Rank.save)
    assert all("rank 3: no room for lines." in text or text.endswith("no room for lines.") for text in raised)
    assert list(full.list("a")) == []
    assert everywhere(ranks, lambda rank: rank.save("b")) == [""] * 5
    close(ranks)
    assert [state_of(full, number, f"mine-{number:05}", "b")["value"][0] for number in range(5)] == [0, 1, 2, 3, 4]


def test_a_diff_compares_documents_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(tmp_path)
    ranks = ranks_with_own_state(storage, 3)
    assert everywhere(ranks, lambda rank: rank.save("alone")) == [""] * 3
    join(monkeypatch)
    assert everywhere(ranks, lambda rank: rank.save("joined")) == [""] * 3
    torch.manual_seed(1)
    assert everywhere(ranks, lambda rank: rank.save("later")) == [""] * 3
    close(ranks)
    assert documents(storage, "alone") == [f"rank-{number:05}.json" for number in range(3)]
    assert list(ckpt.diff(f"{tmp_path}/alone", f"{tmp_path}/joined").differences) == []
    changed = {found.name for found in ckpt.diff(f"{tmp_path}/alone", f"{tmp_path}/later").differences}
    assert changed == {f"rank-0000{number}.rng.torch" for number in range(3)}


def test_lines_that_do_not_fit_the_ranks_of_their_name_are_no_documents() -> None:
    from ckpt.formats.native.documents import document_places
    from ckpt.formats.native.manifest import FileRecord

    file = joined_file(range(2, 4), [b"{}", b'{"a": 1}'], 16)
    assert (file.path, file.size, file.block_size) == ("ranks-00002-00003.jsonl", 32, 16)
    record = FileRecord(name=file.path, path=file.path, size=32, blocks=("0", "1"), block_size=16)
    places = document_places([record])
    assert {name: place[1:] for name, place in places.items()} == {
        "rank-00002.json": (0, 16), "rank-00003.json": (16, 32)
    }  # fmt: skip
    assert places["rank-00003.json"].digests == ("1",)
    many = FileRecord(name="ranks-00000-99999999.jsonl", path="x", size=32, blocks=("0", "1"), block_size=16)
    assert document_places([many]) == {}


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


def _as_if_many_with_long_documents() -> None:
    for name in ("ALONE", "LONGEST_JOINED"):
        setattr(transaction, name, 1)


def _save_and_load(rank: int, root: str, many: bool) -> None:
    if many:
        _as_if_many_with_long_documents()
    written = _recorded(root)
    with ckpt.StateManager(root, model=fsdp2(0)) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        manager.save_state("a", wait=True)  # replaces it, under other paths
        manager.load_state("a")
    assert _documents(written) == ({rank} if many else {0, 1} if rank == 0 else set())
    assert ckpt.verify(f"{root}/a") == {"a": []}


@SLOW
@pytest.mark.parametrize("many", [True, False])
def test_each_rank_writes_its_own_document_where_they_are_many_and_too_long_for_lines(root: Place, many: bool) -> None:
    assert run_ranks(2, _save_and_load, str(root), many) == [0, 0]


def _save_and_load_a_pipeline(rank: int, root: str) -> None:
    _as_if_many_with_long_documents()
    written, job = _recorded(root), WAYS["pp2-fsdp"](0)
    with ckpt.StateManager(root, model=job.parts[0], optimizer=job.optimizers[0]) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        before = job.digests()
        job.step(0)
        manager.load_state("a")
    assert job.digests() == before
    assert _documents(written) == {rank}


@SLOW
def test_each_rank_of_a_pipeline_writes_its_own_document_where_they_are_many_and_too_long_for_lines(
    root: Place,
) -> None:
    run_ranks(4, _save_and_load_a_pipeline, str(root))
    assert ckpt.verify(root) == {"a": []}


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.rand(3, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _as_if_many() -> None:
    transaction.ALONE, transaction.IN_A_FILE = 1, 3


def _save_joined(rank: int, root: str) -> None:
    _as_if_many()
    model = fsdp2(0)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        for name in ("a", "b"):
            _train(model, optimizer, 2)
            manager.save_state(name, wait=name == "b")
        drawn = torch.rand(3).tolist()
        manager.load_state("b")
        assert torch.rand(3).tolist() == drawn


def _resume_joined(rank: int, root: str, same: bool) -> None:
    model = fsdp2(1)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(100)
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        restored = manager.resume()
        assert restored is not None
        assert restored.name == "b"
        if same:
            mine = torch.get_rng_state()
            torch.manual_seed(rank)
            for _ in range(4):
                torch.rand(3, 6)
            assert torch.equal(torch.get_rng_state(), mine)


@SLOW
def test_a_job_whose_documents_are_lines_resumes_on_as_many_ranks_and_on_others(root: Place) -> None:
    run_ranks(4, _save_joined, str(root))
    names = {entry.key for entry in open_storage(str(root)).list("b")}
    assert {name for name in names if "rank" in name} == {"b/ranks-00000-00002.jsonl", "b/ranks-00003-00003.jsonl"}
    assert ckpt.verify(str(root)) == {"a": [], "b": []}
    run_ranks(4, _resume_joined, str(root), True)
    run_ranks(2, _resume_joined, str(root), False)


def _kill_at(root: str, prefix: str) -> None:
    """This process dies as it writes the first file whose key begins so."""
    kind = type(open_storage(root))
    write = kind.write

    def deadly(self: object, key: str, pieces: object, **options: object) -> object:
        if key.startswith(prefix):
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, key, pieces, **options)  # type: ignore[arg-type]

    kind.write = deadly  # type: ignore[method-assign, assignment]


def _die_at_the_documents(rank: int, root: str) -> None:
    _as_if_many()
    with ckpt.StateManager(root, model=fsdp2(0), ranks=ckpt.RankOptions(timeout=3.0)) as manager:
        manager.resume()
        manager.save_state("a", wait=True)
        if rank == 3:  # which writes the second file of documents
            _kill_at(root, "b/ranks-")
        if rank == 0:
            with pytest.raises(ckpt.RanksError, match=r"rank 3 did not answer|ranks? .*3"):
                manager.save_state("b", wait=True)
            os._exit(0)
        with pytest.raises(ckpt.RanksError):
            manager.save_state("b", wait=True)
        os._exit(0)


@SLOW
def test_a_rank_that_dies_as_it_writes_the_documents_of_others_is_named_and_nothing_is_committed(
    tmp_path: Path,
) -> None:
    root = str(tmp_path / "run")
    assert run_ranks(4, _die_at_the_documents, root, dies=True) == [0, 0, 0, -9]
    assert [found.name for found in ckpt.list_checkpoints(root)] == ["a"]
    run_ranks(2, _resume_a, root)
    assert ckpt.verify(root) == {"a": []}
    assert {path.name for path in Path(root).iterdir()} >= {"a"}
    assert not (Path(root) / "b").exists()


def _resume_a(rank: int, root: str) -> None:
    with ckpt.StateManager(root, model=fsdp2(1)) as manager:
        restored = manager.resume()
        assert restored is not None
        assert restored.name == "a"


@pytest.mark.on_linux
def test_a_checkpoint_that_is_amended_keeps_the_files_that_ranks_wrote_together_and_have_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "TOGETHER", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    storage = open_storage(tmp_path)
    ranks = job(4, lambda _: storage)
    for rank in ranks:
        rank.layout = "sharded"
        rank.parts = [Replica("model", nn.Sequential(*(linear(float(number), 600) for number in range(4))))]

    def files() -> dict[str, int]:
        found = [file for file in manifest_of(storage).files if file.name.startswith("model")]
        return {file.path: (tmp_path / "a" / file.path).stat().st_ino for file in found}

    assert everywhere(ranks, Rank.save) == [""] * 4
    first = files()
    assert list(first) == ["model/00000.safetensors", "model/00002.safetensors"]
    assert everywhere(ranks, lambda rank: rank.save(amends=True)) == [""] * 4
    assert files() == first
    with torch.no_grad():
        for rank in ranks:
            rank.parts[0].model[0].weight.fill_(9.0)  # type: ignore[attr-defined]
    assert everywhere(ranks, lambda rank: rank.save(amends=True)) == [""] * 4
    close(ranks)
    changed = files()
    assert len(changed) == 2
    assert len(changed.items() & first.items()) == 1
    assert ckpt.verify(tmp_path) == {"a": []}
    for number in range(4):
        means = {name: float(tensor.mean()) for name, tensor in state_of(storage, number, "model").items()}
        assert (means["0.weight"], means["3.weight"]) == (9.0, 3.0)
