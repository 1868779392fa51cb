from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ckpt.formats.memory import ask_for_large_pages

_GRANTED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _flags_at(address: int) -> list[str]:
    """What the kernel keeps in mind about the memory at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(
    not _GRANTED.exists() or "[never]" in _GRANTED.read_text(), reason="this system has no large pages to give"
)
def test_new_memory_is_wished_for_in_large_pages_and_holds_what_is_put_there() -> None:
    small = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(16)]
    large = torch.empty(48 << 20, dtype=torch.uint8)
    ask_for_large_pages([large, *small, torch.empty(0)])
    assert "hg" in _flags_at(large.data_ptr() + large.nbytes // 2)
    for number, one in enumerate([*small, large]):
        one.fill_(number)
    assert all(bool((one == number).all()) for number, one in enumerate([*small, large]))
