"""Hosts that share no filesystem: each keeps what its ranks saved, and a mirror makes up for what one of them lacks."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.ranks import hosts as host_names
from tests.helpers.namespaces import Node, run_on_nodes
from tests.helpers.processes import run_ranks
from tests.helpers.sharded import MODELS, state, step
from tests.helpers.variations import cells

pytestmark = pytest.mark.slow

SAME, SWAPPED = "aabb", "bbaa"  # for each of four ranks its host
KINDS = ("ddp", "fsdp2", "hsdp")


@contextmanager
def managed(
    rank: int, folder: str, kind: str, hosts: str, mirror: str
) -> Iterator[tuple[ckpt.StateManager, nn.Module]]:
    """A manager as on a host of its own: with a root that only the ranks of that host see."""
    host = hosts[rank]
    host_names.host_name = lambda: f"host-{host}"
    Path(folder, host).mkdir(exist_ok=True)
    os.chdir(Path(folder, host))
    model = MODELS[kind](1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with ckpt.StateManager(
        kind,
        model=model,
        optimizer=optimizer,
        ranks=ckpt.RankOptions(shared=False, timeout=60),
        mirror=f"{mirror}/{kind}" if mirror else None,
    ) as manager:
        yield manager, model


def _save(rank: int, folder: str, hosts: str, mirror: str) -> None:
    """Save with four ranks on two hosts, twice; and then all of them die."""
    for kind in KINDS:
        with managed(rank, folder, kind, hosts, mirror) as (manager, model):
            manager.resume()
            optimizer = manager.session.registry.optimizers[0]
            for number in range(2):
                step(model, optimizer, number)
                manager.progress.step = number + 1
                manager.save_state(wait=True)
            saved = state(model, optimizer)
            if rank == 0:
                Path(folder, f"{kind}.txt").write_text(saved)
    _meet(rank, folder)
    os.kill(os.getpid(), signal.SIGKILL)


def _meet(rank: int, folder: str) -> None:
    """Until all ranks are here. In a barrier, one that is slow to leave it would learn of the others' deaths."""
    Path(folder, f"here-{rank}").touch()
    while not all(Path(folder, f"here-{rank}").exists() for rank in range(4)):
        time.sleep(0.01)


def _resume(rank: int, folder: str, hosts: str, mirror: str, kinds: tuple[str, ...] = KINDS) -> None:
    for kind in kinds:
        with managed(rank, folder, kind, hosts, mirror) as (manager, model):
            restored = manager.resume()
            assert restored is not None
            assert restored.step == 2
            assert not restored.passed_over
            optimizer = manager.session.registry.optimizers[0]
            assert state(model, optimizer) == Path(folder, f"{kind}.txt").read_text(), kind
            step(model, optimizer, 2)
            manager.progress.step = 3
            manager.save_state(wait=True)


def _refused(rank: int, folder: str, hosts: str, mirror: str, kind: str = "fsdp2") -> None:
    with managed(rank, folder, kind, hosts, mirror) as (manager, _), pytest.raises(ckpt.DamagedError) as refusal:
        manager.load_state("step-00000002")
    Path(folder, f"refusal-{rank}.txt").write_text(str(refusal.value))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert run_ranks(4, _save, str(folder), SAME, str(folder / "mirror"), dies=True) == [-9] * 4
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_every_host_has_the_manifest_and_what_its_own_ranks_need(saved: Path) -> None:
    here, there = (files(saved / host / "fsdp2" / "step-00000002") for host in "ab")
    common = {"manifest.json", "state.json", *(f"rank-{rank:05d}.json" for rank in range(4))}
    assert common <= here & there
    assert {path for path in here if path.startswith("model/")} == {
        "model/00000.safetensors",
        "model/00001.safetensors",
    }
    assert {path for path in there if path.startswith("model/")} == {
        "model/00002.safetensors",
        "model/00003.safetensors",
    }
    assert "model.safetensors" in files(saved / "b" / "ddp" / "step-00000002")
    manifests = [(saved / host / "fsdp2" / "step-00000002" / "manifest.json").read_bytes() for host in "ab"]
    assert manifests[0] == manifests[1]


def test_what_all_hosts_have_sent_is_whole_on_the_mirror(saved: Path) -> None:
    for kind in KINDS:
        assert ckpt.verify(saved / "mirror" / kind) == {"step-00000001": [], "step-00000002": []}
    ckpt.merge(saved / "mirror" / "hsdp" / "step-00000002", saved / "merged" / "model.safetensors")


def test_on_one_host_what_is_there_is_verified_and_who_has_the_rest_is_said(folder: Path) -> None:
    root = folder / "a" / "fsdp2"
    assert ckpt.verify(root) == {"step-00000001": [], "step-00000002": []}
    listed, verified, shown = (CliRunner().invoke(main, [command, str(root)]) for command in ("ls", "verify", "show"))
    assert listed.output.count("complete, but for the files of host-b") == 2
    assert verified.output.count("; the rest is on host-b") == 2
    assert re.search(r"(?m)^  host +host-a: ranks 0, 1$", shown.output)
    assert re.search(r"(?m)^  host +host-b: ranks 2, 3, has its files itself$", shown.output)
    assert re.search(r"(?m)^model +\S+ +\d+ +[\d,]+ +float32 ", shown.output)
    assert [command.exit_code for command in (listed, verified, shown)] == [0, 0, 0]
    with pytest.raises(ckpt.DamagedError, match=r"model/00002\.safetensors is missing \(host-b saved it\)"):
        ckpt.merge(root / "step-00000002", folder / "model.safetensors")


def test_on_one_host_what_it_has_lost_itself_is_missing(folder: Path) -> None:
    root = folder / "a" / "fsdp2"
    (root / "step-00000002" / "model" / "00001.safetensors").unlink()
    assert ckpt.verify(root)["step-00000002"] == ["model/00001.safetensors is missing (host-a saved it)"]
    shutil.rmtree(root / "step-00000001" / "model")
    shutil.rmtree(root / "step-00000001" / "optimizer")
    assert len(ckpt.verify(root)["step-00000001"]) == 8


def test_the_same_hosts_load_what_they_have(folder: Path) -> None:
    shutil.rmtree(folder / "mirror")
    assert run_ranks(4, _resume, str(folder), SAME, "") == [0] * 4
    for host in "ab":
        assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(folder / host / "fsdp2")] == [3, 2, 1]


def test_swapped_hosts_load_what_they_lack_from_the_mirror(folder: Path) -> None:
    assert run_ranks(4, _resume, str(folder), SWAPPED, str(folder / "mirror")) == [0] * 4
    for kind in KINDS:
        assert ckpt.verify(folder / "mirror" / kind)["step-00000003"] == []


@pytest.mark.parametrize("lost", cells(["a", "b"], often=["a"]))
def test_a_host_that_has_lost_its_disk_loads_from_the_mirror(folder: Path, lost: str) -> None:
    shutil.rmtree(folder / lost)
    assert run_ranks(4, _resume, str(folder), SAME, str(folder / "mirror")) == [0] * 4
    assert [checkpoint.step for checkpoint in ckpt.list_checkpoints(folder / lost / "fsdp2")] == [3]


def test_without_a_mirror_swapped_hosts_are_told_what_is_missing_where(folder: Path) -> None:
    assert run_ranks(4, _refused, str(folder), SWAPPED, "") == [0] * 4
    told = {(folder / f"refusal-{rank}.txt").read_text() for rank in range(4)}
    assert len(told) == 1
    text = told.pop()
    for part in ("model", "optimizer"):
        assert f"{part}/00000.safetensors, {part}/00001.safetensors" in text
    assert "host-b lacks model/00000.safetensors" in text
    assert "host-a lacks model/00002.safetensors" in text
    assert files(folder / "a" / "fsdp2" / "step-00000002")  # and nothing is removed


@pytest.mark.parametrize("hosts", cells([SWAPPED, "abab"], often=["abab"]))
def test_hosts_that_changed_places_load_the_replica_that_each_disk_holds(folder: Path, hosts: str) -> None:
    """With HSDP and DDP every host has written all pieces, be it under the names of other ranks."""
    shutil.rmtree(folder / "mirror")
    assert run_ranks(4, _resume, str(folder), hosts, "", ("hsdp", "ddp")) == [0] * 4


def test_a_replica_of_which_a_piece_is_gone_is_not_taken_for_complete(folder: Path) -> None:
    (folder / "b" / "hsdp" / "step-00000002" / "model" / "00003.safetensors").unlink()
    assert run_ranks(4, _refused, str(folder), SWAPPED, "", "hsdp") == [0] * 4
    assert "host-b lacks model/00001.safetensors." in (folder / "refusal-0.txt").read_text()


def test_a_manifest_that_one_host_could_not_write_is_made_up_for(folder: Path) -> None:
    """As after SIGKILL in the moment after the main rank's commit."""
    here = folder / "b" / "fsdp2" / "step-00000002"
    manifest = here / "manifest.json"
    (here / ".saving").write_text('{"files": ["model/00002.safetensors"], "replaces": []}')
    manifest.unlink()
    replaced = folder / "b" / "ddp"  # where the one of an older checkpoint of that name is left
    for name in ("manifest.json", "manifest.copy.json"):
        shutil.copy(replaced / "step-00000001" / name, replaced / "step-00000002" / name)
    assert run_ranks(4, _resume, str(folder), SAME, "") == [0] * 4
    assert manifest.exists()
    assert (here / "model" / "00002.safetensors").exists()


def _differ(rank: int, folder: str) -> None:
    with managed(rank, folder, "ddp", "aabb", "") as (manager, _):
        ema = nn.Linear(2, 2)
        nn.init.constant_(ema.weight, rank)
        manager.register(ema=ema)
        with pytest.raises(ckpt.RanksError, match=r"ema\.weight: differs between rank 2 and rank 0"):
            manager.save_state(wait=True)


def test_copies_that_differ_from_the_main_ranks_are_refused(tmp_path: Path) -> None:
    assert run_ranks(4, _differ, str(tmp_path)) == [0] * 4
    assert not list(tmp_path.rglob("manifest.json"))


def _found_out(rank: int, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.chdir(folder)
    manager = ckpt.StateManager("root", model=nn.Linear(1, 1), ranks=ckpt.RankOptions(timeout=60))
    assert not manager.session.saver.root.hosts.separate_roots


def test_a_root_that_all_hosts_see_is_found_to_be_shared(tmp_path: Path) -> None:
    assert run_ranks(2, _found_out, str(tmp_path)) == [0] * 2
    assert not list((tmp_path / "root").iterdir())


SCRIPT = """
import copy, os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ckpt

mirror, expected, die = sys.argv[1] or None, int(sys.argv[2]), sys.argv[3] == "die"
dist.init_process_group("gloo")
def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
straight = copy.deepcopy(model.module)
for _ in range(expected):
    train(straight, torch.optim.SGD(straight.parameters(), lr=0.1))
options = {"saving": ckpt.SaveOptions(layout="sharded"), "mirror": mirror, "ranks": ckpt.RankOptions(timeout=60)}
with ckpt.StateManager("run", model=model, optimizer=optimizer, **options) as manager:
    try:
        restored = manager.resume()
    except ckpt.DamagedError as error:
        print(error, file=sys.stderr)
        sys.exit(7)
    assert (restored.step if restored else 0) == expected, restored
    assert manager.session.saver.root.hosts.separate_roots
    assert torch.equal(model.module.weight, straight.weight)
    train(model, optimizer)
    manager.progress.step = expected + 1
    manager.save_state(wait=True)
if die:  # together, but not after a barrier: one that is slow to leave it would learn of the other's death
    open(f"../here-{dist.get_rank()}", "w").close()
    while not (os.path.exists("../here-0") and os.path.exists("../here-1")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def _launch(nodes: list[Node], folders: list[Path], *arguments: str) -> list[tuple[int, str]]:
    script = folders[0].parent / "script.py"
    script.write_text(SCRIPT)
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return run_on_nodes(nodes, script, *arguments, folders=folders)


@pytest.mark.parametrize("mirrored", cells([True, False], often=[False]))
def test_two_nodes_in_namespaces_of_their_own_are_killed_and_resume(
    nodes: list[Node], tmp_path: Path, mirrored: bool
) -> None:
    mirror = str(tmp_path / "mirror") if mirrored else ""
    folders = [tmp_path / "a", tmp_path / "b"]
    killed = _launch(nodes, folders, mirror, "0", "die")
    assert [code for code, _ in killed] == [-signal.SIGKILL] * 2, killed
    swapped = _launch(nodes, folders[::-1], mirror, "1", "live")
    assert [code for code, _ in swapped] == [0, 0], swapped
    again = _launch(nodes, folders, mirror, "2", "live")
    assert [code for code, _ in again] == [0, 0], again
