"""What ckpt says goes through its logger, once: heard by default, switched off, routed or reformatted as any logger."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt.formats.checkpoint_name import name_of_step
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
STARTS = r"No checkpoint in runs(/\w+)? yet; starting from scratch\."
MORE = r"CKPT_LOG=debug shows more, CKPT_LOG=warning less\."
TIMES = r"\d+\.\d [kM]B, training waited \d+\.\d\d s, durable after \d+\.\d\d s"
SAVED = rf"saved step-\d{{8}}: {TIMES}"
FORGOTTEN = ".*that optimizer starts over after a resume.*"
RESUMED = r"resumed from runs/step-00000002: step 2, epoch 0, batch 2"
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
    more = [] if formatted else [MORE]  # a script that has set up logging knows
    assert matches(said(before), f"{info}{STARTS}", *more, forgotten, saved, saved)
    if setup in ("nothing", "basicConfig"):
        inexact = (f"{warning}{INEXACT[0]}", INEXACT[1])
        assert matches(said(before, until=4), f"{info}{RESUMED}", *inexact, *more, saved, saved)


def test_at_the_level_of_warnings_a_resume_says_what_is_not_exact_and_nothing_else(said: Said) -> None:
    assert matches(said(CKPT_LOG="WARNING"), f"ckpt warning: {FORGOTTEN}")
    assert matches(said(until=3, CKPT_LOG="warning"), f"ckpt warning: {INEXACT[0]}", INEXACT[1])


EXAMPLES = Path(__file__).parent.parent / "examples"
RUNS: dict[str, tuple[int, int, str]] = {  # ranks, steps of an epoch, what is saved at the end of each epoch
    "train.py": (1, 64, ""),
    "train.py, two ranks": (2, 32, ""),
    "accelerate_loop.py": (1, 32, "epoch_{}"),
    "accelerate_loop.py, two ranks": (2, 16, "epoch_{}"),
}


def planned_saves(steps: int, after_epoch: str) -> list[str]:
    """The checkpoints of three epochs with a save every ten steps, in their order."""
    names = [name_of_step(step) for step in range(10, 3 * steps + 1, 10)]
    if not after_epoch:
        return names if names[-1] == name_of_step(3 * steps) else [*names, name_of_step(3 * steps)]
    ends = {(epoch + 1) * steps: after_epoch.format(epoch) for epoch in range(3)}
    at = {10 * number: name for number, name in enumerate(names, 1)}
    return [name for step in sorted({*at, *ends}) for name in (at.get(step), ends.get(step)) if name]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_says_where_it_begins_and_a_line_for_each_save(tmp_path: Path, name: str) -> None:
    """Killed and started again, too. These are all lines of all ranks, and they fit a terminal of 80 columns."""
    ranks, steps, after_epoch = RUNS[name]
    saves, script = planned_saves(steps, after_epoch), EXAMPLES / name.partition(",")[0]
    log, errors = tmp_path / "stdout", tmp_path / "stderr"
    command = (script, "--root", "runs/x", "--epochs", "3", "--save-every", "10")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}

    def start() -> Script:
        return Script(*command, log=log, errors=errors, ranks=ranks, environment=environment, folder=tmp_path)

    def saved(names: list[str]) -> list[str]:
        return [f"saved {name}: {TIMES}" for name in names]

    with start() as job:
        while f"saved {saves[2]}" not in errors.read_text():
            assert job.poll() is None, errors.read_text()
            time.sleep(0.002)
    killed = errors.read_text().splitlines()
    assert matches(killed, STARTS, MORE, *saved(saves[: len(killed) - 2]))

    start().run()
    lines = [line for line in errors.read_text().splitlines() if "never committed" not in line]  # cut off by the kill
    last = re.match(r"resumed from runs/x/(\w+-?\d+): step \d+, epoch \d, batch \d+$", lines[0])
    assert last is not None, lines
    assert matches(lines[1:], MORE, *saved(saves[saves.index(last.group(1)) + 1 :]))
    assert len({*lines}) == len(lines)
    assert max(map(len, [*killed, *lines])) <= 80


ON_A_TERMINAL = """
import torch, ckpt
from tqdm import tqdm
from ckpt.util import console

console._BAR_AFTER = 0.0
model = torch.nn.Linear(2000, 2000)
with ckpt.StateManager("runs", model=model) as manager:
    manager.resume()
    for step in tqdm(manager.batches(range(4)), mininterval=0):
        manager.step()
        if step == 1:
            manager.save_state(wait=True)
    manager.save_state()  # waited for by the end
"""


def screen(written: str) -> list[str]:
    """What a terminal shows of it, as far as bars need one."""
    rows, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if piece == "\n":
            row += 1
            rows += [""] * (row - len(rows) + 1)
        elif piece in ("\r", "\x1b[2K"):
            column, rows[row] = 0, "" if piece == "\x1b[2K" else rows[row]
        elif piece == "\x1b[1A":
            row -= 1
        elif not piece.startswith("\x1b"):
            rows[row] = rows[row][:column].ljust(column) + piece + rows[row][column + len(piece) :]
            column += len(piece)
    return [one.rstrip() for one in rows if one.strip()]


def test_on_a_terminal_bars_come_and_go_and_every_line_stays_whole(tmp_path: Path) -> None:
    main_end, child_end = pty.openpty()
    fcntl.ioctl(child_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code, written = AS_BEFORE_THE_IMPORT + ON_A_TERMINAL, b""
    environment = {"TERM": "xterm"}
    terminal = Path(os.ttyname(child_end))
    with Script(
        "-c", code, log=tmp_path / "stdout", errors=terminal, environment=environment, folder=tmp_path
    ) as job, open(main_end, "rb", buffering=0) as reader:  # fmt: skip
        os.set_blocking(main_end, False)
        while job.poll() is None:
            written += reader.read(1 << 16) or b""
            time.sleep(0.002)
        written += reader.read(1 << 16) or b""
    os.close(child_end)
    text = written.decode()
    assert job.poll() == 0, text
    for bar in ("copying step-00000004 ", "saving step-00000002 ", "16.0/16.0 MB"):
        assert bar in text
    assert matches(screen(text), STARTS, MORE, SAVED, r"100%.* 4/4 .*", SAVED)


def test_quiet_says_nothing(said: Said) -> None:
    assert said(CKPT_LOG="quiet") == []


def test_debug_says_what_a_save_has_done_when_and_what_a_load_chose(said: Said) -> None:
    def steps(name: str, *last: str) -> list[str]:
        done = (
            "copied; training continues", r"agreed on \d files", r"wrote \d files \(\d+\.\d kB\)",
            "all files are written; committing", SAVED, *last,
        )  # fmt: skip
        return [one if one == SAVED else rf"{name} \+\d+\.\d\d\d s: {one}" for one in done]

    def without_read_back(lines: list[str]) -> list[str]:  # beside the next save
        return [line for line in lines if "read back" not in line]

    lines = without_read_back(said(CKPT_LOG="debug"))
    one, two = (steps(f"step-0000000{step}", f"kept {step} checkpoints") for step in (1, 2))
    assert matches(lines, r"load_state\(\): found nothing in runs", STARTS, f".*{FORGOTTEN}", *one, *two)
    lines = without_read_back(said(until=3, CKPT_LOG="debug"))
    found = r"load_state\(\): found runs/step-00000002, runs/step-00000001"
    loaded = r"verified and loaded runs/step-00000002 in \d\.\d\d s"
    what = (" +restored +model, rng, progress", " +continues +the next `for` begins at batch 2 .*")
    inexact = (f"ckpt warning: {INEXACT[0]}", INEXACT[1])
    assert matches(lines, found, loaded, RESUMED, *what, *inexact, *steps("step-00000003", "kept 3 checkpoints"))


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
    for text in ("starts over after a resume", "saved step-00000002", "ckpt warning: of a child"):
        assert done.stdout.count(text) == 1, done.stdout


def test_a_level_switches_them_off_and_leaves_warnings(said: Said) -> None:
    quiet = 'logging.getLogger("ckpt").setLevel("WARNING")'
    assert matches(said(quiet), f"ckpt warning: {FORGOTTEN}")


def test_an_unknown_word_in_the_environment_is_named(said: Said) -> None:
    first, *rest = said(CKPT_LOG="loud")
    assert first == "ckpt warning: CKPT_LOG=loud is not known. Choose one of: debug, info, warning, error, quiet."
    assert len(rest) == 5


def test_a_log_file_gets_them_beside_the_console(tmp_path: Path, said: Said) -> None:
    lines = said('logging.basicConfig(filename="log", format="%(message)s")')
    assert matches(lines, STARTS, MORE, f"ckpt warning: {FORGOTTEN}", SAVED, SAVED)
    of_console = {"ckpt warning: ": "", f"{lines[1]}\n": ""}
    told = "".join(f"{line}\n" for line in lines)
    for text, without in of_console.items():
        told = told.replace(text, without)
    assert (tmp_path / "log").read_text() == told


def test_a_handler_of_rich_is_a_console(tmp_path: Path, said: Said) -> None:
    lines = said("from rich.logging import RichHandler\nlogging.basicConfig(handlers=[RichHandler()])\n"
                           "logging.root.handlers[0].console.file = open('rich', 'w')")  # fmt: skip
    assert lines == []
    assert "No checkpoint in" in " ".join((tmp_path / "rich").read_text().split())


def test_a_logger_that_passes_nothing_on_is_heard_all_the_same(said: Said) -> None:
    lines = said('logging.basicConfig()\nlogging.getLogger("ckpt").propagate = False')
    assert matches(lines, STARTS, MORE, f"ckpt warning: {FORGOTTEN}", SAVED, SAVED)


def test_a_closed_standard_error_is_no_error_of_the_training(tmp_path: Path, said: Said) -> None:
    assert said("sys.stderr.close(); sys.stderr = None") == []
    assert (tmp_path / "runs" / "step-00000001" / "manifest.json").exists()
