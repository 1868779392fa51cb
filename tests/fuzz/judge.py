"""Runs an operation before an input, in limits, and says what was wrong with how it ended."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import FrameType, TracebackType

from ckpt.errors import CkptError
from tests.fuzz import targets
from tests.fuzz.cases import Case
from tests.fuzz.operation import Place, WrongError
from tests.fuzz.targets import BY_NAME
from tests.fuzz.tree import write_tree
from tests.fuzz.watch import Sentinel, Watch
from tests.fuzz.zero_seeds import STAGES

SECONDS = 10.0
MEMORY = 512 << 20  # bytes beyond those of the files
_THREADS = 96 << 20  # the stacks of a few threads
_LINES = 14  # of an error
_UNTIED = ("sharded", "together", "own-state", "dcp", "safetensors-sharded", "accelerate-sharded", *STAGES)
KINDS = ("crash", "hang", "error", "memory", "outside", "wrong")


class HangError(BaseException):
    """Raised in an operation that takes too long."""


@dataclass(frozen=True)
class Finding:
    """What an operation must not do: its kind, where (by which findings are told apart), and the evidence."""

    kind: str
    signature: str
    evidence: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


class Judge:
    """Runs cases one after the other in a folder of its own."""

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        os.makedirs(self.folder, exist_ok=True)
        self.refused = ""
        self._sentinel = Sentinel(f"{self.folder}/beside")
        self._watch = Watch()
        self._place("tmp")
        os.environ.update(TMPDIR=f"{self.folder}/tmp", HOME=f"{self.folder}/tmp")
        os.chdir(self._place("cwd"))
        targets.prepare()
        signal.signal(signal.SIGALRM, _too_long)
        _limit_memory()

    def run(self, case: Case) -> Finding | None:
        """What is wrong with how the operation of a case ended; None if nothing is. `refused` has its error."""
        self.refused = ""
        for name in ("in", "out", "tmp"):
            _clear(self._place(name))
        write_tree(case.files, f"{self.folder}/in", self._sentinel.folder)
        self._sentinel.changes()
        place = Place(f"{self.folder}/in", f"{self.folder}/out", case.seed not in _UNTIED)
        finding = self._operate(case, place)
        seen, beside = self._watch.end(), self._sentinel.changes()
        if finding is None and (seen or beside):
            shown = [line.replace(self.folder, "...") for line in [*dict.fromkeys(seen), *beside]]
            finding = Finding("outside", f"{case.target}: {shown[0]}", "\n".join(shown))
        return finding

    def _place(self, name: str) -> str:
        path = f"{self.folder}/{name}"
        os.makedirs(path, exist_ok=True)
        return path

    def _operate(self, case: Case, place: Place) -> Finding | None:
        self._watch.begin([place.top, place.out, f"{self.folder}/tmp", f"{self.folder}/cwd"])
        try:
            with _quiet(), _in_time():
                BY_NAME[case.target](place)
        except HangError as error:
            return _finding("hang", error)
        except CkptError as error:
            self.refused = f"{type(error).__name__}: {error}"
            return self._judge_error(error)
        except WrongError as error:
            return Finding("wrong", f"{case.target}: {str(error).splitlines()[0].partition(':')[0]}", str(error))
        except BaseException as error:
            return _finding("memory" if _lacks_memory(error) else "error", error)
        return None

    def _judge_error(self, error: CkptError) -> Finding | None:
        if _lacks_memory(error):
            return _finding("memory", error)
        text = str(error)
        if not text.strip() or len(text.splitlines()) > _LINES:
            return _finding("wrong", error, f"an error of {len(text.splitlines())} lines")
        return None


def _finding(kind: str, error: BaseException, note: str = "") -> Finding:
    cause = error if kind != "memory" else _chain(error)[-1]
    evidence = "".join(traceback.format_exception(cause))[-4000:]
    return Finding(kind, f"{note or type(cause).__name__} in {_where(cause.__traceback__)}", evidence)


def _where(trace: TracebackType | None) -> str:
    """The last line of ckpt in a traceback, and the function that was called from there."""
    frames = traceback.extract_tb(trace)
    ours = [
        frame
        for frame in frames
        if "/tests/" not in frame.filename
        and any(f"/{part}/" in frame.filename for part in ("ckpt", "formats", "storage"))
        and "site-packages" not in frame.filename
    ]
    if not ours:
        return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].name}" if frames else "?"
    last = ours[-1]
    parts = last.filename.split("/")
    start = max(at for at, part in enumerate(parts) if part in ("ckpt", "formats", "storage"))
    inner = "" if frames[-1] is last else f" > {frames[-1].name}"
    return f"{'/'.join(parts[start:])}:{last.name}{inner}"


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain


def _lacks_memory(error: BaseException) -> bool:
    """Whether the limit was reached, be it that the error was made one of ckpt."""
    return any(isinstance(one, MemoryError) or "allocate memory" in str(one) for one in _chain(error))


def _too_long(number: int, frame: FrameType | None) -> None:
    raise HangError(f"not done within {SECONDS:g} s")


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing), contextlib.redirect_stdout(nothing):
        yield


def _limit_memory() -> None:
    """Private memory of this process may grow by `MEMORY`: what asks for more fails, and is seen."""
    with open("/proc/self/status") as status:
        held = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    limit = held + MEMORY + _THREADS
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _clear(folder: str) -> None:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


assert sys.platform == "linux", "the limits and the watch are those of Linux"
