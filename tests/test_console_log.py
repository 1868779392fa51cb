"""What ckpt says goes through its logger, once: heard by default, switched off, routed or reformatted as any logger."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.processes import Script

pytestmark = pytest.mark.slow
Said = Callable[..., list[str]]
TRAINING = """
import torch, ckpt

model = torch.nn.Linear(2, 2)
forgotten = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = torch.utils.data.DataLoader(torch.randn(64, 2), batch_size=2)
with ckpt.StateManager("runs", model=model, dataloader=loader, save_every=1) as manager:
    manager.resume()
    for batch in manager.batches(loader):
        model(batch).sum().backward()
        forgotten.step()
        manager.step()
        if manager.progress.step == {until}:
            break
"""
STARTS = "No checkpoint in .*runs.*"
SAVED = r"saved .*runs/step-0000000\d: \d.* kB, training waited \d\.\d\d s, durable after \d\.\d\d s"
FORGOTTEN = ".*that optimizer starts over after a resume.*"
RESUMED = (r"resumed from runs/step-00000002: step 2, .*", " +restored +model, rng, progress", " +continues +.*")
INEXACT = ("not everything is as it was when step-00000002 was saved:", f" +approximated +{FORGOTTEN}")


# the server that it is forked from has imported ckpt, which is heard from then on
AS_BEFORE_THE_IMPORT = """
import logging, sys

del sys.modules["ckpt"]
logger = logging.getLogger("ckpt")
logger.handlers.clear(), logger.filters.clear(), logger.setLevel(logging.NOTSET)
"""


@pytest.fixture
def said(tmp_path: Path) -> Said:
    """The lines on standard error of a training in a new process."""

    def run(before: str = "", until: int = 2, **environment: str) -> list[str]:
        code = AS_BEFORE_THE_IMPORT + script(before, until=until)
        log, errors = tmp_path / "stdout", tmp_path / "stderr"
        Script("-c", code, log=log, errors=errors, environment=environment, folder=tmp_path).run()
        return errors.read_text().splitlines()

    return run


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def script(before: str = "", after: str = "", until: int = 2) -> str:
    return f"import logging, sys\n{before}\n{TRAINING.replace('{until}', str(until))}\n{after}"


def matches(lines: list[str], *patterns: str) -> bool:
    assert len(lines) == len(patterns), lines
    assert all(map(re.fullmatch, patterns, lines)), lines
    return True


FORMAT = "format='%(levelname)s %(message)s'"
TEE = """
class Tee:
    def write(self, text): sys.stderr.write(text)
    def flush(self): pass
"""
SETUPS = {  # and whether records come in its format
    "nothing": ("", False),
    "basicConfig": (f"logging.basicConfig(level='INFO', {FORMAT})", True),
    "basicConfig after the import": (f"import ckpt; logging.basicConfig({FORMAT}, stream=sys.stderr)", True),
    "a wrapped standard error": (
        f"import io; logging.basicConfig({FORMAT}, stream=io.TextIOWrapper(sys.stderr.buffer, line_buffering=True))",
        True,
    ),
    "a tee": (f"{TEE}\nlogging.basicConfig({FORMAT}, stream=Tee())", True),
    "transformers": (
        "import transformers; transformers.logging.set_verbosity_info(); transformers.logging.enable_propagation()",
        False,
    ),
    "lightning": ("import lightning.pytorch", False),
    "a log in memory": ("import io; logging.basicConfig(stream=io.StringIO())", False),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_each_thing_is_said_once(said: Said, setup: str) -> None:
    before, formatted = SETUPS[setup]
    info, warning = ("INFO ", "WARNING ") if formatted else ("", "ckpt warning: ")
    saved, forgotten = f"{info}{SAVED}", f"{warning}{FORGOTTEN}"
    assert matches(said(before), f"{info}{STARTS}", forgotten, saved, saved)
    if setup in ("nothing", "basicConfig"):
        resumed = (f"{info}{RESUMED[0]}", *RESUMED[1:])
        inexact = (f"{warning}{INEXACT[0]}", INEXACT[1])
        assert matches(said(before, until=4), *resumed, *inexact, saved, saved)


def test_at_the_level_of_warnings_a_resume_says_what_is_not_exact_and_nothing_else(said: Said) -> None:
    assert matches(said(CKPT_LOG="WARNING"), f"ckpt warning: {FORGOTTEN}")
    assert matches(said(until=3, CKPT_LOG="warning"), f"ckpt warning: {INEXACT[0]}", INEXACT[1])


def test_quiet_says_nothing(said: Said) -> None:
    assert said(CKPT_LOG="quiet") == []


def test_debug_says_nothing_twice(said: Said) -> None:
    lines = said(CKPT_LOG="debug")
    assert len(lines) == len(set(lines))
    assert [sum(bool(re.fullmatch(known, line)) for line in lines) for known in (STARTS, SAVED)] == [1, 2]


def test_under_pytest_the_report_of_a_failure_has_each_once(tmp_path: Path) -> None:
    """A forked child's own log is in no report: it prints."""
    fork = """import os
if os.fork() == 0:
    logging.getLogger("ckpt").warning("of a child")
    os._exit(0)
os.wait()
assert False"""
    indented = "\n".join(f"    {line}" for line in script(after=fork).splitlines())
    (tmp_path / "test_it.py").write_text(f"def test_it():\n{indented}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "."]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": _path(), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for text in ("starts over after a resume", "saved runs/step-00000002", "ckpt warning: of a child"):
        assert done.stdout.count(text) == 1, done.stdout


def test_a_level_switches_them_off_and_leaves_warnings(said: Said) -> None:
    quiet = 'logging.getLogger("ckpt").setLevel("WARNING")'
    assert matches(said(quiet), f"ckpt warning: {FORGOTTEN}")


def test_an_unknown_word_in_the_environment_is_named(said: Said) -> None:
    first, *rest = said(CKPT_LOG="loud")
    assert first == "ckpt warning: CKPT_LOG=loud is not known. Choose one of: debug, info, warning, error, quiet."
    assert len(rest) == 4


def test_a_log_file_gets_them_beside_the_console(tmp_path: Path, said: Said) -> None:
    lines = said('logging.basicConfig(filename="log", format="%(message)s")')
    assert matches(lines, STARTS, f"ckpt warning: {FORGOTTEN}", SAVED, SAVED)
    assert (tmp_path / "log").read_text().replace("an AdamW", "") == "\n".join(lines).replace(
        "ckpt warning: ", ""
    ) + "\n"


def test_a_handler_of_rich_is_a_console(tmp_path: Path, said: Said) -> None:
    lines = said("from rich.logging import RichHandler\nlogging.basicConfig(handlers=[RichHandler()])\n"
                           "logging.root.handlers[0].console.file = open('rich', 'w')")  # fmt: skip
    assert lines == []
    assert "No checkpoint in" in " ".join((tmp_path / "rich").read_text().split())


def test_a_logger_that_passes_nothing_on_is_heard_all_the_same(said: Said) -> None:
    lines = said('logging.basicConfig()\nlogging.getLogger("ckpt").propagate = False')
    assert matches(lines, STARTS, f"ckpt warning: {FORGOTTEN}", SAVED, SAVED)


def test_a_closed_standard_error_is_no_error_of_the_training(tmp_path: Path, said: Said) -> None:
    assert said("sys.stderr.close(); sys.stderr = None") == []
    assert (tmp_path / "runs" / "step-00000001" / "manifest.json").exists()
