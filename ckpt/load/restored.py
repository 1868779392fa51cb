"""What a load restored, and the report that is printed of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt.data.progress import Progress
from ckpt.shown import Lines
from ckpt.util.console import html_table

if TYPE_CHECKING:
    from ckpt.load.restore import Restoration
    from ckpt.load.select import Choice

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was restored, what could only be approximated, what was left out, and from where.

    Attributes:
        name: Of the checkpoint.
        url: Where it is.
        run: The run's identity, the same over all its resumes.
        progress: Epoch, batch, step and samples.
        metrics: Those of the checkpoint.
        restored: The parts.
        resharded: Parts that were sharded over ranks in another way when they were saved.
        approximated: What is not exactly as it was, with the reason.
        skipped: What was left out, with the reason.
        passed_over: Newer checkpoints that could not be used, with the reason.
        from_memory: It was a snapshot in memory, between the checkpoints of the root.
        root_step: Then, the step of the root's newest; None if it has none.
        begins_at: Where the next `for` over each loader begins.
    """

    name: str
    url: str
    run: str
    progress: Progress
    metrics: Mapping[str, float] = field(default_factory=dict)
    restored: tuple[str, ...] = ()
    resharded: Mapping[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    passed_over: Mapping[str, str] = field(default_factory=dict)
    from_memory: bool = False
    root_step: int | None = None
    begins_at: str = ""  # where the next `for` over each loader begins
    on_read: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)  # of `epoch`, or of `step`

    @property
    def step(self) -> int:
        self.on_read()
        return self.progress.step

    @property
    def epoch(self) -> int:
        self.on_read()
        return self.progress.epoch

    def __str__(self) -> str:
        return Lines.of([*self._restored_lines(), *self._inexact_lines()])

    def report(self) -> None:
        """Log it: what was restored as progress, what is not as it was as a warning."""
        _log.info("%s", Lines.of(self._restored_lines()))
        inexact = self._inexact_lines()
        if inexact:
            _log.warning("%s", Lines.of([f"not everything is as it was when {self.name} was saved:", *inexact]))

    def _restored_lines(self) -> list[str]:
        at = self.progress
        position = f"epoch {at.epoch}, batch {at.batch}, {at.samples} samples"
        lines = [f"resumed from {self.url}: step {at.step}, {position}"]
        if self.from_memory:
            has = "no checkpoint" if self.root_step is None else f"step {self.root_step:,}"
            lines = [f"resumed from memory: step {at.step:,} (root has {has})", f"  position      {position}"]
        lines.append(f"  restored      {', '.join(self.restored) or 'nothing'}")
        if self.begins_at:
            lines.append(f"  continues     the next `for` begins at {self.begins_at} (manager.enumerate counts on)")
        return lines + _table("resharded", self.resharded)

    def _inexact_lines(self) -> list[str]:
        tables = {"approximated": self.approximated, "skipped": self.skipped, "passed over": self.passed_over}
        return [line for title, table in tables.items() for line in _table(title, table)]

    def _repr_html_(self) -> str:
        """For notebooks: the lines that are printed, as a table."""
        first, *others = str(self).splitlines()
        return html_table(first, [(line[2:16].strip(), line[16:]) for line in others])


def _table(title: str, reasons: Mapping[str, str]) -> list[str]:
    return [f"  {title:<13} {why if why.startswith(what) else f'{what}: {why}'}" for what, why in reasons.items()]


def restored_from(
    choice: Choice[Restoration],
    restored: tuple[str, ...],
    *,
    begins_at: str = "",
    on_read: Callable[[], None] = lambda: None,
) -> Restored:
    """The report of a load whose restoration is finished."""
    manifest, notes = choice.manifest, choice.ready.notes
    return Restored(
        name=manifest.name,
        url=choice.url,
        run=manifest.run,
        progress=Progress.from_json(manifest.progress),
        metrics=manifest.metrics,
        restored=restored,
        resharded=notes.resharded,
        approximated=notes.approximated,
        skipped=notes.skipped,
        passed_over=choice.passed_over,
        from_memory=choice.in_memory,
        root_step=choice.root_step,
        begins_at=begins_at,
        on_read=on_read,
    )
