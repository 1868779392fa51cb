"""The root or the mirror cannot be reached: nothing is rewound, overtaken or swept away without a word."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from torch import nn

import ckpt
from ckpt.root.catalog import MARKER
from ckpt.root.mirror import Copies
from ckpt.storage import ANY, Buffer, Entry, LocalStorage
from tests.helpers.places import intact
from tests.root.test_mirror import managed, resumed, run, steps, weights

pytestmark = pytest.mark.not_on_s3("about a root and a mirror that a test takes away")


class Away(LocalStorage):
    """A place that may be away for a while."""

    away = False

    def list(self, prefix: str = "") -> Iterator[Entry]:
        self._answer()
        return super().list(prefix)

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        self._answer()
        return super().read(key, start, stop)

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        self._answer()
        super().write(key, pieces, over=over)

    def _answer(self) -> None:
        if self.away:
            raise ckpt.TransientError(f"{self.url} is away.")


class TestTheRootIsAway:
    def test_resume_says_so_and_what_the_mirror_has_and_takes_nothing(self, tmp_path: Path) -> None:
        root, mirror = Away(tmp_path / "root"), tmp_path / "mirror"
        run(tmp_path / "root", mirror, 1, 2)
        run(tmp_path / "root", None, 3)  # which the mirror does not have
        model = weights(7)
        with ckpt.StateManager(root, model=model, mirror=mirror) as manager:
            root.away = True
            with pytest.raises(ckpt.TransientError) as raised:
                manager.resume()
            text = str(raised.value)
            assert f"can't read {root.url}" in text
            assert "has step-00000002, but the root may have a newer one" in text
            assert "Nothing was loaded" in text
            assert model.weight[0, 0].item() == 7.0
            root.away = False
            restored = manager.resume()
        assert restored is not None
        assert restored.step == 3

    def test_both_are_named_when_both_are_away(self, tmp_path: Path) -> None:
        root, mirror = Away(tmp_path / "root"), Away(tmp_path / "mirror")
        run(tmp_path / "root", tmp_path / "mirror", 1)
        with ckpt.StateManager(root, model=weights(0), mirror=mirror) as manager:
            root.away = mirror.away = True
            with pytest.raises(
                ckpt.TransientError, match=r"root is away.*ckpt can't read the mirror either: .*mirror is away"
            ):
                manager.resume()


class TestTheMirrorIsAway:
    def test_a_save_after_a_resume_that_raised_does_not_overtake_what_the_mirror_has(self, tmp_path: Path) -> None:
        mirror = Away(tmp_path / "mirror")
        run(tmp_path / "lost", tmp_path / "mirror", 1, 2, 3)
        mirror.away = True
        with ckpt.StateManager(tmp_path / "new", model=weights(0), mirror=mirror) as manager:
            with pytest.raises(ckpt.TransientError, match="is away"):
                manager.resume()
            with pytest.raises(ckpt.ConfigError, match=r"the last load failed: .* is away.*Call resume\(\)"):
                manager.save_state("step-00000001", wait=True)
            assert steps(tmp_path / "new") == []
            mirror.away = False
            restored = manager.resume()
            assert restored is not None
            assert restored.step == 3
            manager.save_state("step-00000004", wait=True)
        assert [checkpoint.name for checkpoint in ckpt.list_checkpoints(tmp_path / "mirror")][:2] == [
            "step-00000004",
            "step-00000003",
        ]

    def test_where_the_mirror_turns_out_to_be_empty_the_run_may_begin(self, tmp_path: Path) -> None:
        mirror = Away(tmp_path / "mirror")
        mirror.away = True
        with ckpt.StateManager(tmp_path / "new", model=weights(0), mirror=mirror) as manager:
            with pytest.raises(ckpt.TransientError):
                manager.resume()
            mirror.away = False
            assert manager.resume() is None
            manager.save_state("step-00000001", wait=True)
        assert intact(tmp_path / "mirror")

    def test_a_name_that_is_not_there_keeps_nobody_from_saving(self, tmp_path: Path) -> None:
        with ckpt.StateManager(tmp_path / "new", model=weights(0)) as manager:
            with pytest.raises(ckpt.MissingError):
                manager.load_state("initial")
            manager.save_state("step-00000001", wait=True)
        assert intact(tmp_path / "new")


class _InBetween(LocalStorage):
    """Another host looks at the mirror while this one is sending a file there."""

    leader: Copies | None = None

    def write(self, key: str, pieces: Iterable[Buffer], *, over: str | None = ANY) -> None:
        super().write(key, self._looked_at(key, pieces), over=over)

    def _looked_at(self, key: str, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        yield from pieces
        leader, self.leader = (self.leader, None) if key.endswith(".safetensors") else (None, self.leader)
        if leader is not None:
            leader.open_target([])


def test_the_leaders_sweep_of_the_mirror_takes_nothing_from_a_host_that_is_sending(tmp_path: Path) -> None:
    near = tmp_path / "near"
    with ckpt.StateManager(near, model=nn.Linear(4, 4), optimizer=None) as manager:
        manager.save_state("one", wait=True)
    manifest = ckpt.list_checkpoints(near)[0].manifest
    assert manifest is not None
    far = _InBetween(tmp_path / "mirror")
    # two hosts with roots of their own: the leader has lost its disk, so it goes on with nothing
    far.leader = Copies(
        LocalStorage(tmp_path / "empty"), LocalStorage(tmp_path / "mirror"), has_all_files=False, is_leader=True
    )
    sending = Copies(LocalStorage(near), far, has_all_files=False, is_leader=False)
    sending._is_mine = lambda name, file: True  # type: ignore[method-assign]
    sending.open_target([])
    leader = far.leader
    sending.copy(manifest)
    leader.close()
    sending.close()
    assert ckpt.verify(tmp_path / "mirror") == {"one": []}
    assert not (tmp_path / "mirror" / "one" / MARKER).exists()


def test_alone_a_run_still_sweeps_what_an_earlier_one_left_on_the_mirror(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    run(root, mirror, 1)
    (mirror / "cut-off").mkdir()
    (mirror / "cut-off" / MARKER).write_text('{"files": ["x"], "replaces": []}')
    (mirror / "cut-off" / "x").write_text("left")
    with managed(root, mirror, weights(0)):
        pass
    assert not (mirror / "cut-off").exists()
    assert resumed(root, mirror)[1] == 1.0
