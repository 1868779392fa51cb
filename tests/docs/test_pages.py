"""Every block of code in the documentation is run, in the order of its page, or the page says why not."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

import ckpt
from tests.docs.given import given_to
from tests.docs.pages import Block, Runner, all_pages, blocks_of, is_part, never_run, page, says
from tests.helpers.wheel import install_wheel

IMPORTS = r"(from|import) (accelerate|lightning|transformers)\b"  # which takes seconds
PAGES = {name: page(name) for name in all_pages()}
RUN = [name for name, blocks in PAGES.items() if any(block.is_run or block.language == "python" for block in blocks)]
WITH_COMMANDS = [name for name in RUN if any(block.is_run and block.language == "bash" for block in PAGES[name])]
HEAVY = [name for name in RUN if any(re.search(IMPORTS, block.code) for block in PAGES[name])]
LONG = ["moving/deepspeed.md", "guides/pipelines.md"]  # it compiles for a minute; four interpreters under torchrun
ON_SERVERS = ["guides/hub.md", "guides/s3.md", "options.md"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "memory").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    monkeypatch.setenv("CKPT_MEMORY_DIR", str(tmp_path / "memory"))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Pages show how to set it, and later tests look at what is logged."""
    loggers = (logging.getLogger(), logging.getLogger("ckpt"))
    before = [(one.level, one.propagate, one.disabled, list(one.handlers)) for one in loggers]
    yield
    for one, (level, propagate, disabled, handlers) in zip(loggers, before, strict=True):
        for added in set(one.handlers) - set(handlers):
            added.close()
        one.setLevel(level)
        one.propagate, one.disabled, one.handlers = propagate, disabled, handlers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else [])
        for name in RUN
        if name not in (*WITH_COMMANDS, *ON_SERVERS)
    ],
)
def test_every_block_of_a_page_runs(name: str) -> None:
    run(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in LONG else [])
        for name in WITH_COMMANDS
        if name not in (*ON_SERVERS, "start.md")
    ],
)
def test_every_command_of_a_page_runs(name: str) -> None:
    run(name)


@pytest.mark.slow
def test_a_newcomers_path_leads_to_the_end_with_what_pip_installs(tmp_path: Path) -> None:
    site = install_wheel(tmp_path / "wheel")
    where = [*blocks_of('```bash\npython -c "import ckpt; print(ckpt.__file__)"\n```', "where"), *PAGES["start.md"]]
    where.insert(1, Block("text", f"{site}/ckpt/__init__.py\n", "where"))
    space = run("start.md", where, PYTHONPATH=str(site))
    assert [found.step for found in ckpt.list_checkpoints("runs/killed")] == [320, 300, 250]
    assert Path("model.safetensors").stat().st_size < 6000
    assert not space["model"].training


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_SERVERS)
def test_every_block_of_a_page_runs_on_servers(name: str, s3: str, hub: object) -> None:
    s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)
    run(name)


def run(name: str, blocks: list[Block] | None = None, **environment: str) -> dict[str, Any]:
    runner = Runner(given_to(name), environment)
    try:
        runner.run(blocks or PAGES[name])
    finally:
        for value in runner.space.values():
            if isinstance(value, ckpt.StateManager):
                value.close()
        gc.collect()  # managers that a page only builds
    return runner.space


def test_every_file_in_a_page_is_run_by_a_later_block() -> None:
    assert [where for blocks in PAGES.values() for where in never_run(blocks)] == []


def test_what_a_page_shows_of_a_file_stands_there() -> None:
    shown = [block for blocks in PAGES.values() for block in blocks if block.file]
    assert shown
    assert [block.where for block in shown if not is_part(block)] == []


def test_nothing_is_left_out_without_a_reason_that_says_something() -> None:
    reasons = [block.reason for blocks in PAGES.values() for block in blocks if block.reason is not None]
    assert [reason for reason in reasons if len(reason.split()) < 4] == []


BROKEN = """
```python title="lost.py"
print("nobody starts this")
```

<!-- not run: needs a cluster with GPUs -->
```python
fleet.launch()
```

  ```python
  print("saved 3 files of 1.5 MB")
  ```

  ```text
  saved 4 files of 12 bytes
  ```
"""


@pytest.mark.slow
def test_blocks_are_found_with_their_titles_and_reasons() -> None:
    lost, left_out, run, shown = blocks_of(BROKEN, "page.md")
    assert (lost.title, lost.where, lost.is_run) == ("lost.py", "page.md:2", False)
    assert (left_out.reason, left_out.is_run) == ("needs a cluster with GPUs", False)
    assert (run.code, run.is_run, shown.language) == ('print("saved 3 files of 1.5 MB")\n', True, "text")
    assert never_run([lost, left_out, run]) == ["page.md:2"]
    Runner({}).run([run, shown])


@pytest.mark.slow
def test_a_block_that_fails_or_prints_something_else_is_noticed() -> None:
    (wrong,) = blocks_of("```python\nx = 1 / 0\n```", "page.md")
    with pytest.raises(ZeroDivisionError):
        Runner({}).run([wrong])
    printed, shown = blocks_of("```python\nprint('saved')\n```\n\n```text\nresumed\n```", "page.md")
    with pytest.raises(AssertionError, match=r"page.md:5: it says\nsaved"):
        Runner({}).run([printed, shown])
    assert says("step 3 of run a", "step 14 of ...")
    assert not says("step 3 of run a", "step 3 of 1 run")
