"""Every operation that reads, and every command: each is put before an altered folder.

An operation returns what it has to say; it raises `WrongError` where it succeeded on what it must not accept.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import torch
from click.testing import CliRunner, Result

import ckpt
from ckpt.cli.main import main
from ckpt.errors import CkptError
from ckpt.formats.foreign.torch_save import read_values
from ckpt.root.catalog import list_checkpoints
from ckpt.root.verify import StoredFile
from ckpt.storage import LocalStorage
from tests.fuzz.live import Live
from tests.fuzz.operation import Operation, Place, WrongError, manager_of
from tests.fuzz.seeds import NAMES
from tests.fuzz.signed_targets import SIGNED

NEWEST = NAMES[-1]
_faults: list[Exception] = []  # of the last command


def _loading(load: Callable[[ckpt.StateManager], Any]) -> Operation:
    """A load into marked tensors: if it raises, none of them has changed; if not, all have."""

    def operation(place: Place) -> Any:
        live = Live(tied=place.tied)
        live.train()
        live.marked()
        before = live.snapshot()
        with manager_of(place, live) as manager:
            manager.register(seen=live.seen)
            try:
                done = load(manager)
            except CkptError as error:
                if live.snapshot() != before and not _is_half_loaded(manager):
                    raise WrongError(f"live tensors were changed by a load that raised: {error}") from error
                raise
        if done is not None and not done.skipped and (left := live.left_out()):
            raise WrongError(f"a load that succeeded has left elements as they were: {', '.join(left)}")
        return done

    return operation


def _is_half_loaded(manager: ckpt.StateManager) -> bool:
    """Whether it refuses to go on with what a load has left: a new process reads into live tensors at once."""
    try:
        manager.session.loader.refuse_half_loaded()
    except ckpt.StateError:
        return True
    return False


def _resume_and_save(manager: ckpt.StateManager) -> Any:
    restored = manager.resume()
    manager.save_state("saved-after")
    return restored


def _load_model(path: str) -> Operation:
    def operation(place: Place) -> Any:
        live = Live(tied=place.tied).marked()
        before = live.snapshot()
        try:
            done = ckpt.load_model(place.at(path), live.model)
        except CkptError as error:
            if live.snapshot() != before:
                raise WrongError(f"live tensors were changed by a load that raised: {error}") from error
            raise
        if not done and (left := live.left_out()):
            raise WrongError(f"a load that succeeded has left elements as they were: {', '.join(left)}")
        return done

    return operation


def _verify(place: Place) -> Any:
    return ckpt.verify(place.at("root"))


def _merge(path: str) -> Operation:
    return lambda place: ckpt.merge(place.at(path), f"{place.out}/model.safetensors")


def _convert(path: str, **options: Any) -> Operation:
    return lambda place: ckpt.convert(place.at(path), f"{place.out}/converted", **options)


def _values(name: str) -> Operation:
    def operation(place: Place) -> Any:
        storage = LocalStorage(place.top)
        sizes = {entry.key: entry.size for entry in storage.list()}
        return read_values(StoredFile(storage, name), 0, sizes.get(name, 0), name)

    return operation


def command(*words: str) -> Operation:
    """A command in this process. Its output must not reach a terminal with anything but text."""

    def operation(place: Place) -> Any:
        spelled = [word.replace("ROOT", place.at("root")).replace("OUT", place.out) for word in words]
        spelled = [word.replace("TOP", place.top) for word in spelled]
        done = _invoked(spelled)
        check_text(done.output, "the output")
        if done.exit_code and len(done.stderr.strip().splitlines()) > 12:
            raise WrongError(f"an error of {len(done.stderr.splitlines())} lines:\n{done.stderr[:2000]}")
        return done.exit_code

    return operation


def _invoked(words: list[str]) -> Result:
    """What a command has printed. An error that is none of ckpt's, which it shows as a fault of its own, is raised."""
    _faults.clear()
    done = CliRunner().invoke(main, words)
    if _faults:
        raise _faults[0]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def _note_fault(error: Exception) -> str:
    _faults.append(error)
    return "a fault"


def check_text(text: str, what: str) -> None:
    """No control characters, and none that reverse the direction of writing."""
    odd = {char for char in text if (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160}
    odd |= set(text) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029\u200e\u200f")
    if odd:
        line = next(line for line in text.split("\n") if odd & set(line))
        raise WrongError(f"{what} has {sorted(map(ascii, odd))}: {ascii(line)[:300]}")


def _report(place: Place) -> Any:
    status = command("report", "ROOT", "--output", "OUT/report.md")(place)
    if os.path.exists(f"{place.out}/report.md"):
        with open(f"{place.out}/report.md", encoding="utf-8") as file:
            text = file.read()
        check_text(text, "the report")
        text = re.sub("`[^`\n]*`", "", text)  # shown as they are
        if "](http://evil.example" in text or "<script>" in text:
            raise WrongError("the report has a link or a script of a checkpoint's own")
    return status


def _report_page(place: Place) -> Any:
    status = command("report", "ROOT", "--output", "OUT/report.html")(place)
    if os.path.exists(f"{place.out}/report.html"):
        with open(f"{place.out}/report.html", encoding="utf-8") as file:
            text = file.read()
        check_text(text, "the page")
        _Page().feed(text)
    return status


class _Page(HTMLParser):
    """Refuses whatever could load, link or run something."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        acts = {name for name, _ in attrs if name in ("src", "href") or name.startswith("on")}
        if acts or tag in ("script", "img", "a", "link", "iframe"):
            raise WrongError(f"the page has <{tag}> of a checkpoint's own, with {sorted(acts)}")


def _memory(*words: str) -> Operation:
    def operation(place: Place) -> Any:
        os.environ["CKPT_MEMORY_DIR"] = place.at("memory")
        try:
            return command("memory", *words)(place)
        finally:
            os.environ.pop("CKPT_MEMORY_DIR", None)

    return operation


def _memory_json(place: Place) -> Any:
    os.environ["CKPT_MEMORY_DIR"] = place.at("memory")
    try:
        done = _invoked(["memory", "ls", "--json"])
    finally:
        os.environ.pop("CKPT_MEMORY_DIR", None)
    return json.loads(done.stdout) if done.exit_code == 0 else done.exit_code


def _resume_from_memory(place: Place) -> Any:
    os.environ["CKPT_MEMORY_DIR"] = place.at("memory")
    try:
        return _loading(lambda manager: manager.resume())(place)
    finally:
        os.environ.pop("CKPT_MEMORY_DIR", None)


_A, _B = (f"root/{name}" for name in NAMES)
ROOT: dict[str, Operation] = {
    "resume": _loading(lambda manager: manager.resume()),
    "load_state": _loading(lambda manager: manager.load_state(NEWEST)),
    "load_state, not strict": _loading(lambda manager: manager.load_state(NEWEST, strict=False)),
    "resume and save": _loading(_resume_and_save),
    "load_model of a root": _load_model("root"),
    "load_model": _load_model(_B),
    "verify": _verify,
    "list_checkpoints": lambda place: list_checkpoints(place.at("root")),
    "merge": _merge(_B),
    "merge the optimizer": lambda place: ckpt.merge(
        place.at(_B), f"{place.out}/optimizer.safetensors", part="optimizer"
    ),
    "convert to accelerate": _convert(_B, to="accelerate"),
    "convert to DCP": _convert(_B, to="dcp"),
    "convert to torch": _convert(_B, to="torch"),
    "convert to Lightning": _convert(_B, to="lightning"),
    "convert to safetensors": _convert(_B, to="hf"),
    "convert to ckpt": _convert(_B),
    "diff": lambda place: str(ckpt.diff(place.at(_A), place.at(_B))),
    "pull": lambda place: ckpt.pull(place.at("root"), f"{place.out}/pulled"),
    "pull one": lambda place: ckpt.pull(place.at(_B), f"{place.out}/pulled"),
    "prune": lambda place: ckpt.prune(place.at("root"), keep=ckpt.Keep(last=1), grace=0),
    "ckpt ls": command("ls", "ROOT"),
    "ckpt ls of one": command("ls", f"ROOT/{NEWEST}"),
    "ckpt ls --verify": command("ls", "ROOT", "--verify"),
    "ckpt show": command("show", f"ROOT/{NEWEST}"),
    "ckpt show --tensors": command("show", f"ROOT/{NEWEST}", "--tensors"),
    "ckpt verify": command("verify", "ROOT"),
    "ckpt diff": command("diff", f"ROOT/{NAMES[0]}", f"ROOT/{NEWEST}"),
    "ckpt merge": command("merge", f"ROOT/{NEWEST}", "OUT/model.safetensors"),
    "ckpt convert": command("convert", "--to", "accelerate", f"ROOT/{NEWEST}", "OUT/converted"),
    "ckpt pull": command("pull", "ROOT", "OUT/pulled"),
    "ckpt prune --dry-run": command("prune", "ROOT", "--keep-last", "1", "--dry-run"),
    "ckpt prune": command("prune", "ROOT", "--keep-last", "1", "--grace", "0s", "--yes"),
    "ckpt prune by metric": command(
        "prune", "ROOT", "--keep-best", "1", "--metric", "loss", "--keep-last", "1", "--yes"
    ),
    "ckpt report": _report,
    "ckpt report as a page": _report_page,
}
_ACCELERATED = "root/checkpoint_0"
ACCELERATE: dict[str, Operation] = {
    "resume what Accelerate saved": _loading(lambda manager: manager.resume()),
    "load_state of Accelerate": _loading(lambda manager: manager.load_state("checkpoint_0")),
    "load_state of Accelerate, not strict": _loading(lambda manager: manager.load_state("checkpoint_0", strict=False)),
    "load_model of Accelerate": _load_model(_ACCELERATED),
    "merge of Accelerate": _merge(_ACCELERATED),
    "convert from accelerate": _convert(_ACCELERATED),
    "ckpt convert from accelerate": command("convert", "TOP/root/checkpoint_0", "OUT/converted"),
    "ckpt show of Accelerate": command("show", "TOP/root/checkpoint_0"),
    "ckpt ls of Accelerate": command("ls", "ROOT"),
    "ckpt pull of Accelerate": command("pull", "ROOT", "OUT/pulled"),
    "ckpt diff of Accelerate": command("diff", "TOP/root/checkpoint_0", "TOP/root/checkpoint_0"),
}


def _of_a_model(path: str, whose: str) -> dict[str, Operation]:
    """What is done with a model that somebody else wrote."""
    return {
        f"merge of {whose}": _merge(path),
        f"load_model of {whose}": _load_model(path),
        f"ckpt merge of {whose}": command("merge", f"TOP/{path}", "OUT/model.safetensors"),
        f"ckpt diff of {whose}": command("diff", f"TOP/{path}", f"TOP/{path}"),
        f"ckpt show of {whose}": command("show", f"TOP/{path}"),
    }


DCP = {
    **_of_a_model("dcp", "DCP"),
    "convert from DCP": _convert("dcp"),
    "convert from DCP to torch": _convert("dcp", to="torch"),
}
MODEL = {
    **_of_a_model("model", "safetensors"),
    "convert from safetensors": _convert("model"),
    "convert from safetensors to DCP": _convert("model", to="dcp"),
    "pull of safetensors": lambda place: ckpt.pull(place.at("model"), f"{place.out}/pulled"),
}
ZERO = {
    **_of_a_model("zero", "DeepSpeed"),
    "convert from DeepSpeed": _convert("zero"),
    "values of a pickle of DeepSpeed": _values("state.pt"),
}
PICKLE: dict[str, Operation] = {
    "values of a pickle": _values("state.pt"),
    "convert from a file": _convert("state.pt"),
    "convert from a file to DCP": _convert("state.pt", to="dcp"),
    "convert from a file to torch": _convert("state.pt", to="torch"),
    "convert from a file to Lightning": _convert("state.pt", to="lightning"),
    "merge of a file": _merge("state.pt"),
    "load_model of a file": _load_model("state.pt"),
    "ckpt convert from a file": command("convert", "TOP/state.pt", "OUT/converted"),
    "ckpt show of a file": command("show", "TOP/state.pt", "--tensors"),
    "ckpt diff of a file": command("diff", "TOP/state.pt", "TOP/state.pt"),
    "ckpt pull of a file": command("pull", "TOP/state.pt", "OUT/pulled"),
}
MEMORY: dict[str, Operation] = {
    "ckpt memory ls": _memory("ls"),
    "ckpt memory ls --json": _memory_json,
    "ckpt memory clear": _memory("clear", "--all"),
    "ckpt memory clear of a root": _memory("clear", "ROOT"),
    "resume beside memory": _resume_from_memory,
}
TARGETS: dict[str, dict[str, Operation]] = {
    "root": ROOT,
    "signed": SIGNED,
    "accelerate": ACCELERATE,
    "dcp": DCP,
    "model": MODEL,
    "zero": ZERO,
    "pickle": PICKLE,
    "memory": MEMORY,
}
BY_NAME: dict[str, Operation] = {name: one for group in TARGETS.values() for name, one in group.items()}


def import_everything() -> None:
    """All modules of ckpt but the integrations, and what `prepare` needs: processes that are forked later need not
    import them."""
    importlib.import_module("torch._inductor")  # for `use_deterministic_algorithms`
    for module in pkgutil.walk_packages(ckpt.__path__, "ckpt."):
        if not module.name.startswith(("ckpt.integrations", "ckpt.selftest", "ckpt.state.deepspeed")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def prepare() -> None:
    """Settings of the process in which operations run."""
    torch.set_num_threads(1)
    os.environ["CKPT_MEMORY_KEEPER"] = "off"
    cli: Any = sys.modules["ckpt.cli.main"]
    cli._fault = _note_fault
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory that was never written with NaN
