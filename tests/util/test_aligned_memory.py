"""Memory that starts at a page, and ranges of addresses that are files for a while."""

from __future__ import annotations

import mmap
import os
import re
import sys
from pathlib import Path

import pytest

from ckpt.util import aligned_memory
from ckpt.util.aligned_memory import (
    HUGE_PAGE,
    MappedRange,
    address_of,
    allocate_aligned,
    allocate_pages,
    can_map_files,
    copy_bytes,
    forget_pages,
    in_pages,
    make_huge,
    make_resident,
    most_mapped,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the calls are those of Linux")
PAGE = mmap.PAGESIZE


def mapping_of(address: int) -> str:
    """What the system says of the memory at an address."""
    for text in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        start, stop = (int(one, 16) for one in text.split()[0].split("-"))
        if start <= address < stop:
            return text
    raise AssertionError


def resident(view: memoryview) -> int:
    """Kilobytes of the mapping that a view lies in that have pages."""
    return int(re.findall(r"(?m)^Rss: +(\d+) kB", mapping_of(address_of(view)))[0])


def test_memory_starts_at_a_huge_page_and_a_forked_child_does_not_see_it() -> None:
    view = allocate_aligned(3 * HUGE_PAGE + 5)
    assert (len(view), address_of(view) % HUGE_PAGE) == (3 * HUGE_PAGE + 5, 0)
    view[-1] = 7
    pages = allocate_pages(5 * PAGE)
    assert len(pages) == 5 * PAGE
    for place in (view, memoryview(pages)):
        flags = re.findall(r"(?m)^VmFlags: (.*)", mapping_of(address_of(place)))[0].split()
        assert "wf" in flags  # wiped on fork
        assert "sh" not in flags  # private
    assert "hg" in flags  # huge pages, where there are any


def test_a_system_that_does_not_know_an_advice_gives_memory_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_memory, "_WIPE_ON_FORK", 9999)
    assert len(allocate_pages(PAGE)) == PAGE


def test_pages_come_when_they_are_asked_for_and_go_when_they_are_forgotten() -> None:
    memory = memoryview(mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    before = resident(memory)
    assert make_resident(memory)
    assert resident(memory) >= before + 64 * PAGE // 1024
    memory[5] = 7
    forget_pages(memory)
    assert memory[5] == 0
    assert not make_resident(memory[1:])  # no page begins there
    assert not make_resident(memory[:0])
    assert not make_huge(memory[1:])
    assert can_map_files()


@pytest.mark.parametrize("size", [0, 1, 70_000])
def test_bytes_are_copied_from_memory_that_may_be_written_and_that_may_not(size: int) -> None:
    data = os.urandom(size)
    for source in (memoryview(data), memoryview(bytearray(data))):
        target = bytearray(size + 2)
        copy_bytes(source, memoryview(target)[1 : size + 1])
        assert target == b"\0" + data + b"\0"


def test_bytes_are_counted_in_whole_pages() -> None:
    sizes = (0, 1, PAGE - 1, PAGE, PAGE + 1, 10 * PAGE)
    assert [in_pages(size) // PAGE for size in sizes] == [0, 1, 1, 1, 2, 10]


class TestMappedRange:
    def file(self, folder: Path, data: bytes) -> Path:
        path = folder / f"file-{len(data)}"
        path.write_bytes(data)
        return path

    def test_a_file_is_the_memory_until_it_is_released_and_keeps_what_was_written(self, tmp_path: Path) -> None:
        size = (16 << 20) + PAGE + 5  # more than is released at a time
        mapped, path = MappedRange(PAGE + size), self.file(tmp_path, b"a" * size)
        assert (mapped.size, len(mapped.memory)) == (in_pages(PAGE + size),) * 2
        assert address_of(mapped.memory) % HUGE_PAGE == 0
        with path.open("r+b") as file:
            mapped.map_file(file.fileno(), PAGE, size)
        before = resident(mapped.memory[PAGE:])
        assert mapped.make_resident(PAGE + 5, size - 5)  # not from a page on
        assert resident(mapped.memory[PAGE:]) >= before + size // 1024
        assert bytes(mapped.memory[PAGE - 1 : PAGE + 2]) == b"\0aa"
        mapped.memory[PAGE] = mapped.memory[PAGE + size - 1] = ord("b")
        assert str(path) in mapping_of(address_of(mapped.memory) + PAGE)
        mapped.release()
        assert path.read_bytes() == b"b" + b"a" * (size - 2) + b"b"
        assert bytes(mapped.memory[PAGE : PAGE + 2]) == b"\0\0"
        assert str(path) not in Path("/proc/self/maps").read_text()
        mapped.memory[PAGE] = 7  # still its own
        mapped.release()  # nothing is left to be released
        assert mapped.memory[PAGE] == 7

    def test_it_has_at_least_a_page_and_takes_files_up_to_its_end_and_no_further(self, tmp_path: Path) -> None:
        assert MappedRange(0).size == PAGE
        mapped = MappedRange(2 * PAGE)
        with self.file(tmp_path, b"a" * 3 * PAGE).open("r+b") as file:
            for start, size in ((PAGE, PAGE + 1), (0, 2 * PAGE + 1), (2 * PAGE, 1), (-PAGE, 1), (1, 1)):
                with pytest.raises(ValueError, match=f"map {size} bytes at offset {start} of {2 * PAGE} bytes"):
                    mapped.map_file(file.fileno(), start, size)
            mapped.map_file(file.fileno(), PAGE, PAGE)
            with pytest.raises(OSError, match="could not map 5 bytes") as raised:
                mapped.map_file(-1, 0, 5)
            assert raised.value.errno == 9
        assert bytes(mapped.memory[PAGE - 1 :]) == b"\0" + b"a" * PAGE
        mapped.release()

    def test_the_most_that_was_mapped_at_a_time_is_known(self, tmp_path: Path) -> None:
        many = most_mapped() // PAGE + 3
        with self.file(tmp_path, b"a" * many * PAGE).open("r+b") as file:
            first, second = MappedRange(many * PAGE), MappedRange(PAGE)
            first.map_file(file.fileno(), 0, many * PAGE)
            second.map_file(file.fileno(), 0, PAGE)
            assert most_mapped() == (many + 1) * PAGE
            first.release()
            second.release()
            second.map_file(file.fileno(), 0, PAGE)
            assert most_mapped() == (many + 1) * PAGE
            second.release()
