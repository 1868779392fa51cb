"""`save_state` on the main process only: the other ranks are told of it where they next meet, and join the save there.

Whoever saves under `if accelerator.is_main_process` calls it between two batches. So the other ranks are asked before
they read the next batch of a prepared loader, and where they wait for everyone: there, each has the state of the same
step, and has drawn and read nothing since. To know that no save is coming, they wait until the main rank is there too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ckpt.errors import RanksError
from ckpt.ranks.group import MAIN, Ranks

_KEY = "state"
_SHORTEST, _LONGEST = 0.0002, 0.02  # seconds between two polls
_PATIENCE = 1800.0  # seconds for what the main rank does alone, such as validation: as long as torch's collectives wait


class MainProcessSaves:
    """Meetings of all ranks, numbered in the same order on each, and the saves that the main rank calls between them.

    `join` saves on a rank that did not call it, given what the main rank was called with. `place` says where a rank is
    in its training: it must be the same on all ranks.
    """

    def __init__(self, ranks: Ranks, join: Callable[[str | None], object], place: Callable[[], list[Any]]) -> None:
        self._ranks = ranks.channel("main-process-saves")
        self._join = join
        self._place = place
        self._met = 0
        self._saves = 0  # announced, on the main rank; joined, on the others
        self._is_saving = False

    @contextmanager
    def announced(self, output_dir: str | None) -> Iterator[None]:
        """On the main rank: tell the others of a save, and make it."""
        self._saves += 1
        key = _save_key(self._saves)  # of its own: this rank may be at the next save before others have read of this
        self._ranks.publish(key, json.dumps({"at": [self._met + 1, *self._place()], "output_dir": output_dir}))
        self._publish()
        try:
            with self._saving():
                yield
        except BaseException:
            self._ranks.publish(key, json.dumps({}))  # whoever has not joined it must not begin to
            raise

    def meet(self) -> None:
        """Join the saves that the main rank has called since the last meeting."""
        if self._is_saving:  # a hook of the save waits for everyone
            return
        if self._ranks.rank != MAIN:
            while self.join_next():
                pass
        self._met += 1
        if self._ranks.rank == MAIN:
            self._publish()

    def join_next(self) -> bool:
        """Wait for the main rank, and join the save that it calls. False if it has come to the next meeting instead."""
        save = self._next()
        if save is None:
            return False
        self._require_same_place(save["at"])
        self._saves += 1
        with self._saving():
            self._join(save["output_dir"])
        return True

    @contextmanager
    def _saving(self) -> Iterator[None]:
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def _publish(self) -> None:
        self._ranks.publish(_KEY, json.dumps({"met": self._met, "saves": self._saves}))

    def _next(self) -> dict[str, Any] | None:
        """The save to be joined now; None when the main rank has come to this meeting as well."""
        pause, until = _SHORTEST, time.monotonic() + max(_PATIENCE, self._ranks.timeout)
        while time.monotonic() < until:
            said = json.loads(self._ranks.published(_KEY) or '{"met": 0, "saves": 0}')
            if said["saves"] > self._saves:
                save: dict[str, Any] = json.loads(self._ranks.published(_save_key(self._saves + 1)) or "{}")
                if not save:
                    self._refuse_failed()
                if save["at"][0] <= self._met + 1:
                    return save
            if said["met"] > self._met:  # whatever is announced by now belongs to a later meeting
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST)
        raise RanksError(
            f"rank 0 has not read the next batch, or waited for everyone, for {_PATIENCE:g} s. Look at its log: it may "
            "have died. With main_process_saves=True every rank must go through the same prepared loaders."
        )

    def _refuse_failed(self) -> NoReturn:
        raise RanksError(
            "a save that rank 0 has called has failed before this rank could join it: see rank 0's error. With "
            "main_process_saves=True every rank must go through the same prepared loaders."
        )

    def _require_same_place(self, theirs: list[Any]) -> None:
        mine = [self._met + 1, *self._place()]
        if theirs != mine:
            raise RanksError(
                f"rank 0 has called save_state() where this rank no longer is (meeting, epoch, batch, step, step of "
                f"the accelerator: {theirs} there, {mine} here), so its state is that of another moment. Let the save "
                "be the last thing that is done with a batch, or call it on every rank."
            )


def _save_key(number: int) -> str:
    return f"save-{number}"
