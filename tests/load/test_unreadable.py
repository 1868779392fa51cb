"""What cannot be read is not damaged: it is neither skipped nor removed."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli.main import main
from ckpt.storage import open_storage
from tests.helpers.places import intact

pytestmark = pytest.mark.not_on_s3("about the errors of a local filesystem")

NEWEST = "step-00000002"
_CAP_VERSION = 0x20080522
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def _permissions_hold_for_root() -> Iterator[None]:
    """Permissions are checked for root, too: this thread, and those that it starts, may not override them."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_CAP_VERSION, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective = before & ~(1 << _CAP_DAC_OVERRIDE | 1 << _CAP_DAC_READ_SEARCH)
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0


@contextmanager
def _without_permission(file: Path) -> Iterator[None]:
    before = file.stat().st_mode
    file.chmod(0)
    try:
        with _permissions_hold_for_root():
            yield
    finally:
        file.chmod(before)


@contextmanager
def _without_descriptors(_: Path) -> Iterator[None]:
    """As many files are open as this process may have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _failing(code: int) -> Callable[[Path], AbstractContextManager[None]]:
    """The disk, or the server behind a mount, fails to read a file."""

    @contextmanager
    def failing(file: Path) -> Iterator[None]:
        preadv = os.preadv

        def read(descriptor: int, *rest: object) -> int:
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                raise OSError(code, os.strerror(code))
            return preadv(descriptor, *rest)  # type: ignore[arg-type]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", read)
            yield

    return failing


FAULTS = {
    "EACCES": (_without_permission, ckpt.DeniedError),
    "EMFILE": (_without_descriptors, ckpt.TransientError),
    "EIO": (_failing(errno.EIO), ckpt.TransientError),
    "ESTALE": (_failing(errno.ESTALE), ckpt.TransientError),
    "ETIMEDOUT": (_failing(errno.ETIMEDOUT), ckpt.TransientError),
}
Fault = tuple[Callable[[Path], AbstractContextManager[None]], type[ckpt.StorageError]]


@pytest.fixture(params=list(FAULTS))
def fault(request: pytest.FixtureRequest) -> Fault:
    return FAULTS[request.param]


def _model(step: float) -> nn.Linear:
    model = nn.Linear(40, 40)
    nn.init.constant_(model.weight, step)
    return model


def _run(root: Path, *steps: int, mirror: Path | None = None) -> None:
    model = _model(0)
    with ckpt.StateManager(root, model=model, mirror=mirror) as manager:
        manager.resume()
        for step in steps:
            nn.init.constant_(model.weight, step)
            manager.progress.step = step
            manager.save_state(wait=True)


def _names(root: Path) -> set[str]:
    return {checkpoint.name for checkpoint in ckpt.list_checkpoints(root)}


def test_when_the_newest_cannot_be_read_resume_raises_and_keep_does_not_delete_it(tmp_path: Path, fault: Fault) -> None:
    fails, kind = fault
    _run(tmp_path, 1, 2)
    model = _model(7)
    with ckpt.StateManager(tmp_path, model=model, keep=ckpt.Keep(last=1)) as manager:
        with fails(tmp_path / NEWEST / "model.safetensors"), pytest.raises(kind):
            manager.resume()
        with pytest.raises(ckpt.CkptError):
            manager.save_state("step-00000003", wait=True)
        assert _names(tmp_path) == {"step-00000001", NEWEST}
        restored = manager.resume()
        assert restored is not None
        assert (restored.name, restored.passed_over) == (NEWEST, {})
    assert torch.equal(model.weight, _model(2).weight)


def test_the_error_names_the_checkpoint_and_what_to_do(tmp_path: Path) -> None:
    _run(tmp_path, 1, 2)
    with (
        ckpt.StateManager(tmp_path, model=_model(0)) as manager,
        _failing(errno.EIO)(tmp_path / NEWEST / "model.safetensors"),
        pytest.raises(ckpt.TransientError) as raised,
    ):
        manager.resume()
    text = str(raised.value)
    assert f"can't read {NEWEST} now" in text
    assert "Input/output error" in text
    assert "may be intact" in text
    assert "load_state(name)" in text


def test_after_going_back_on_purpose_the_unreadable_one_still_counts_as_a_checkpoint(tmp_path: Path) -> None:
    _run(tmp_path, 1, 2)
    with ckpt.StateManager(tmp_path, model=_model(0), keep=ckpt.Keep(last=2)) as manager:
        with _failing(errno.EIO)(tmp_path / NEWEST / "model.safetensors"):
            assert manager.load_state("step-00000001").name == "step-00000001"
        manager.save_state("next", wait=True)
        assert _names(tmp_path) == {NEWEST, "next"}
    assert intact(tmp_path)


def test_what_the_root_cannot_read_is_taken_from_the_mirror_if_that_has_the_same_one(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    _run(root, 1, 2, mirror=mirror)
    model = _model(0)
    with ckpt.StateManager(root, model=model, mirror=mirror, keep=ckpt.Keep(last=2)) as manager:
        with _failing(errno.EIO)(root / NEWEST / "model.safetensors"):
            restored = manager.load_state()
        assert restored.url == f"{mirror}/{NEWEST}"
        manager.save_state("next", wait=True)
    assert torch.equal(model.weight, _model(2).weight)
    assert _names(root) == {NEWEST, "next"}  # nothing has shown that the root's copy is damaged


def test_prune_removes_nothing_when_the_newest_cannot_be_read(tmp_path: Path, fault: Fault) -> None:
    fails, kind = fault
    _run(tmp_path, 1, 2)
    with fails(tmp_path / NEWEST / "model.safetensors"), pytest.raises(kind):
        ckpt.prune(tmp_path, keep=ckpt.Keep(last=1))
    assert _names(tmp_path) == {"step-00000001", NEWEST}
    assert list(ckpt.prune(tmp_path, keep=ckpt.Keep(last=1)).removed) == ["step-00000001"]


def test_verify_does_not_call_damaged_what_it_cannot_read(tmp_path: Path) -> None:
    _run(tmp_path, 1, 2)
    with _without_permission(tmp_path / NEWEST / "model.safetensors"):
        result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    lines = {line.split()[0]: line.split()[1] for line in result.output.splitlines()}
    assert lines == {NEWEST: "UNREADABLE", "step-00000001": "intact"}
    assert result.exit_code == 1
    assert "Permission denied" in result.output


def test_one_that_is_being_cleaned_by_another_process_is_waited_for_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path, 1, 2)
    taken, release = threading.Event(), threading.Event()

    def clean() -> None:
        with open_storage(str(tmp_path)).lock(NEWEST):
            taken.set()
            release.wait()

    other = threading.Thread(target=clean)
    other.start()
    taken.wait()

    def pause(_: float) -> None:  # resume has met the lock: only now is it released
        release.set()
        other.join()

    monkeypatch.setattr("ckpt.load.select.time.sleep", pause)
    try:
        with ckpt.StateManager(tmp_path, model=_model(0)) as manager:
            assert manager.load_state().name == NEWEST
    finally:
        release.set()
        other.join()
