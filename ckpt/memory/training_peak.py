"""What a step of training needs beside what the process holds between steps: snapshots must leave it free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ckpt.util.mapped_range import most_mapped

_STATUS = Path("/proc/self/status")


@dataclass
class TrainingPeak:
    """The most memory that this process has had since training began, from what the kernel counts anyway.

    A peak of before, of loading a model perhaps, does not come again: until training exceeds it, nothing is known.
    """

    status: Path = _STATUS
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = self._counted()[0]

    def more(self) -> int:
        """Bytes that a step may need for a while beside those that the process holds now; 0 if that is not known.

        Snapshots that were being fetched into mapped files may have been part of the peak: they are none of training's.
        """
        peak, held = self._counted()
        return max(0, peak - held - most_mapped()) if peak > self._before else 0

    def _counted(self) -> tuple[int, int]:
        """The most, and what there is now. Zeros where the system does not count."""
        try:
            lines = (line.split() for line in self.status.read_text().splitlines())
            kilobytes = {line[0]: int(line[1]) for line in lines if line and line[0] in ("VmHWM:", "VmRSS:")}
        except (OSError, ValueError, IndexError):
            return 0, 0
        return kilobytes.get("VmHWM:", 0) * 1024, kilobytes.get("VmRSS:", 0) * 1024
