"""Ranks that share a host's memory, and hosts that each have their own: all resume at one step, or from the root."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.memory.host_jobs import Job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return Job(tmp_path_factory.mktemp("straight"), 0, 0, sharded=True).to(12, None)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_all_ranks_resume_from_memory(tmp_path: Path, straight: list[str], hosts: tuple[int, int]) -> None:
    job = Job(tmp_path, *hosts, sharded=True)
    job.to(9, None)
    assert job.to(12, (True, 8)) == straight


def test_a_host_that_was_replaced_makes_all_take_the_roots(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, sharded=True)
    job.to(9, None)
    job.replace_host(1)
    assert job.to(12, (False, 5)) == straight


def test_a_host_that_lacks_the_newest_makes_all_take_the_older(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, sharded=True)
    job.to(9, None)
    for slot in job.memories[1].glob("ckpt-*/slots/step-00000008"):
        shutil.rmtree(slot)
    assert job.to(12, (True, 6)) == straight


def test_a_flipped_bit_on_one_host_makes_all_take_the_older(tmp_path: Path, straight: list[str]) -> None:
    job = Job(tmp_path, 0, 1, sharded=True)
    job.to(9, None)
    (file,) = job.memories[1].glob("ckpt-*/slots/step-00000008/model/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert job.to(12, (True, 6)) == straight


def test_what_all_hosts_went_back_from_is_not_resumed_though_a_kill_leaves_it_on_one(
    tmp_path: Path, straight: list[str]
) -> None:
    job = Job(tmp_path, 0, 1, sharded=True, memory=4)
    job.to(9, None)
    for memory in job.memories:
        shutil.copytree(
            memory, f"{memory}-left", symlinks=True
        )  # as if each host had died before it removed its folder
    job.options["back"] = 5
    job.to(6, (False, 5))
    for memory in job.memories:
        shutil.rmtree(memory)
        shutil.copytree(f"{memory}-left", memory, symlinks=True)
    del job.options["back"]
    assert job.to(12, (False, 5)) == straight


def test_another_number_of_ranks_resumes_from_memory_too(tmp_path: Path) -> None:
    Job(tmp_path, 0, 0, sharded=True).to(9, None)
    Job(tmp_path, 0).to(12, (True, 8))
