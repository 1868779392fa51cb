"""Check whether a training program resumes exactly: run it straight, then killed and resumed, and compare.

Every process of the program runs under a recorder (`python -m ckpt.selftest PLAN.json`), which writes a line of JSON
for each optimizer step, save and load. After the step that the plan names, it waits for its saves and kills itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt.data.loop import Loop
from ckpt.errors import ConfigError
from ckpt.formats.native.manifest import FILE_NAME
from ckpt.formats.sharded_tensors import local_tensor
from ckpt.formats.tensors import host_bytes, on_host
from ckpt.load.load_state import Restored
from ckpt.manager import StateManager
from ckpt.options import Every, ManagerOptions
from ckpt.session import Saves, Session
from ckpt.shown import few
from ckpt.state.unwrap import parameter_names, unwrap
from ckpt.storage import Storage, open_storage
from ckpt.tools.diff import diff

PLACEHOLDER = "{root}"
Plan = dict[str, Any]  # what a process of a run is told, as `_Run.start` writes it
Event = dict[str, Any]  # a line of a trace
_TAIL = 15  # lines of a program's output that an error shows
_NAMED = 4  # names in a difference
_REDIRECTED = (
    "\nIts checkpoints are saved into a folder of the test's own. If the script uses that folder itself, pass its "
    "path: {root} in an argument stands for it, as in --output_dir {root}."
)
_HINTS = {
    "nondeterministic": "Even two runs without a kill differ. Seed what is random (torch, NumPy, random), and use "
    "torch.use_deterministic_algorithms(True).",
    "fresh start": "Iterate over manager.epochs() and batches(), or call manager.resume() before the loop.",
    "optimizer": "A count that decides which optimizer steps starts at 0 again: write manager.enumerate(loader), not "
    "enumerate(manager.batches(loader)), or keep the count in the checkpoint.",
    "batches": "Pass the loader (dataloader=loader, or manager.batches(loader)), and don't skip by hand what was "
    "consumed. Register a generator that draws the order: manager.register(generator=g).",
    "losses": "The loss depends on something that is not in the checkpoint: data that ckpt doesn't follow "
    "(dataloader=loader), a generator, a second model, an average, a counter (manager.register(name=...)), or code "
    "after manager.step() in a loop without a loader.",
    "gradients": "The save fell into an accumulation window: give the manager saving=ckpt.SaveOptions(gradients=True). "
    "Or a GradScaler is not managed: scaler=scaler.",
    "learning rates": "Pass the scheduler (scheduler=...), and call manager.step() after scheduler.step().",
    "parameters": "The optimizer's state is not the same: pass the optimizer (optimizer=...), and call manager.step() "
    "after everything that changes weights.",
    "extra steps": "The loop counts epochs or steps from 0 again: use manager.epochs(n), or start at manager.progress.",
    "missing steps": "The loop skips what the manager already skips, or leaves batches out.",
    "final checkpoint": "Code after manager.step() changes these, or a load does not restore them.",
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """The program to test, and the options of the selftest."""

    target: str
    function: str = ""
    arguments: tuple[str, ...] = ()
    processes: int = 1  # ranks, started by torchrun if more than one
    kills: int = 3
    save_every: int | None = None
    seed: int = 0
    timeout: float = 600.0
    say: Callable[[str], None] = lambda text: None
    start: Callable[[Program, Path, Path], tuple[int | None, str]] = lambda *given: in_a_process(*given)

    def __post_init__(self) -> None:
        counts = {"kills": self.kills, "processes": self.processes, "save_every": self.save_every}
        wrong = [] if Path(self.target).is_file() else [f"{self.target} is not a file"]
        wrong += [
            f"{name}={count}: at least 1 is needed" for name, count in counts.items() if count is not None and count < 1
        ]
        if self.timeout <= 0:
            wrong.append(f"timeout={self.timeout:g}: must be positive")
        if wrong:
            raise ConfigError("selftest: " + "; ".join(wrong) + ".")


class ProgramError(Exception):
    """The user's program failed, or did not end in time."""

    def __init__(self, process: int, status: int | None, output: str) -> None:
        how = "did not end in time" if status is None else f"ended with status {status}"
        when = "run straight, without a kill" if process == 0 else f"resumed after kill {process}"
        super().__init__(f"the program, {when}, {how}:\n{output}")


@dataclass(frozen=True)
class Difference:
    """Describes the first value that differs, with its rank, process and step."""

    process: int
    step: int
    rank: int
    what: str  # a key of _HINTS
    detail: str
    resumed_from: int | None = None
    said: tuple[str, ...] = ()  # what ckpt itself has warned of


@dataclass(frozen=True)
class Report:
    """The result of a selftest; `str()` of it is the text for people."""

    steps: int
    saves: int
    resumed: tuple[tuple[int, int], ...] = ()  # by kill: the step after which, and the step resumed from
    difference: Difference | None = None
    failure: str = ""

    @property
    def exact(self) -> bool:
        return self.difference is None and not self.failure

    def __str__(self) -> str:
        lines = [f"straight run: {self.steps} optimizer steps, {self.saves} saves"]
        lines += [f"killed after step {killed}, resumed from step {resumed}" for killed, resumed in self.resumed]
        found = self.difference
        if found is None:
            exact = (
                "exact: every batch, loss, gradient, learning rate and parameter is the same, and the final checkpoint"
            )
            return "\n".join([*lines, self.failure or exact])
        after = "" if found.resumed_from is None else f", {found.step - found.resumed_from} after the resume"
        lines += [f"NOT exact: first differs at step {found.step}{after}, on rank {found.rank}: {found.what}"]
        lines += [*_wrapped("what:   ", found.detail), *_wrapped("likely: ", _HINTS[found.what])]
        return "\n".join([*lines, *(line for text in found.said[:4] for line in _wrapped("ckpt says: ", text))])


def _wrapped(label: str, text: str) -> list[str]:
    return fill(text, 110, initial_indent=f"  {label}", subsequent_indent=" " * (len(label) + 2)).splitlines()


@dataclass
class _Run:
    """A run of the program: its processes in order, each with a trace per rank."""

    program: Program
    folder: Path
    traces: list[list[list[Event]]] = field(default_factory=list)  # [process][rank]

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def start(self, kill_at: int | None) -> None:
        """Run one process, killed after a step or to the end of the program."""
        process, program = len(self.traces), self.program
        self.folder.mkdir(exist_ok=True)
        plan = {
            "target": str(Path(program.target).resolve()),
            "function": program.function,
            "save_every": program.save_every,
            "seed": program.seed,
            "arguments": [argument.replace(PLACEHOLDER, str(self.root)) for argument in program.arguments],
            "folder": str(self.folder),  # of traces
            "process": process,  # all but the first resume
            "root": str(self.root),
            "redirect": not program.function and not any(PLACEHOLDER in argument for argument in program.arguments),
            "kill_at": kill_at,
            "path": [folder for folder in sys.path if folder],
        }
        path = self.folder / f"plan-{process}.json"
        path.write_text(json.dumps(plan))
        status, output = program.start(program, path, self.folder / f"log-{process}")
        traces = [_read_trace(self.folder, process, rank) for rank in range(program.processes)]
        self.traces.append(traces)
        ended = status == 0 and all(_of("end", trace) for trace in traces)
        killed = kill_at is not None and all(_last_step(trace) == kill_at for trace in traces)
        if not ended and not killed:
            raise ProgramError(process, status, output + (_REDIRECTED if plan["redirect"] and process == 0 else ""))


def check(program: Program) -> Report:
    """Run the program straight, then killed and resumed, and compare every step and the final checkpoint."""
    with tempfile.TemporaryDirectory(prefix="ckpt-selftest-", ignore_cleanup_errors=True) as folder:
        straight, killed = (_Run(program, Path(folder, name)) for name in ("straight", "killed"))
        program.say("running it straight ...")
        straight.start(None)
        (reference,) = straight.traces
        kills = kill_steps(reference[0], program)
        counts = len(_of("step", reference[0])), len(_of("saved", reference[0]))
        program.say(f"{counts[0]} optimizer steps, {counts[1]} saves; killing it after step {str(kills)[1:-1]} ...")
        failure = ""
        try:
            for step in (*kills, None):
                killed.start(step)
        except ProgramError as error:
            failure = f"NOT exact: {error}"
        loads = [_of("loaded", process[0]) for process in killed.traces[1:]]
        resumed = tuple((kill, load[0]["number"]) for kill, load in zip(kills, loads, strict=False) if load)
        if failure:
            return Report(*counts, resumed, failure=failure)
        ranks = ([process[rank] for process in killed.traces] for rank in range(program.processes))
        found = [one for rank, traces in enumerate(ranks) for one in _difference(rank, reference[rank], traces)]
        first = min(found, key=lambda one: (one.process, one.step, one.rank), default=None)
        return Report(*counts, resumed, first or _final_difference(straight, killed))


def kill_steps(straight: Sequence[Event], program: Program) -> list[int]:
    """The steps after which to kill, in order: each follows another save, so that each kill resumes from another."""
    last = _last_step(straight)
    if not last:
        raise ConfigError(
            f"{program.target} never called optimizer.step(), so there is nothing to compare. The selftest follows "
            "torch.optim optimizers in the process that it starts."
        )
    saves = sorted({save["number"] for save in _of("saved", straight) if 0 < save["number"] < last})
    if not saves:
        raise ConfigError(
            f"{program.target} made no save between the first and the last of its {last} optimizer steps, so there is "
            "nothing to resume from. Set save_every= (or run ckpt selftest --save-every N), or train for more steps."
        )
    chance = random.Random(program.seed)  # noqa: S311
    chosen = sorted(chance.sample(saves, min(program.kills, len(saves))))
    following = dict(zip(saves, [*saves[1:], last], strict=True))
    return [chance.randint(save + 1, following[save]) for save in chosen]


def in_a_process(program: Program, plan: Path, log: Path) -> tuple[int | None, str]:
    """Run a plan in a new interpreter, or under torchrun; return its exit status (None: not in time) and last lines.

    Its whole process group is killed before this returns.
    """
    ranks = ["--standalone", "--nproc_per_node", str(program.processes)]
    launcher = ["-m", "torch.distributed.run", *ranks] if program.processes > 1 else []
    command = [sys.executable, *launcher, "-m", "ckpt.selftest", str(plan)]
    with log.open("wb") as out:  # a file and not a pipe: a process that outlives its launcher would keep that open
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)  # noqa: S603
    status: int | None = None
    try:
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(program.timeout)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, last_lines(log)


def last_lines(log: Path) -> str:
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-_TAIL:])


# --- traces, and how they are compared


def _trace_file(folder: str | Path, process: int, rank: int) -> Path:
    return Path(folder, f"process-{process}-rank-{rank}.jsonl")


def _read_trace(folder: str | Path, process: int, rank: int) -> list[Event]:
    """The events of a process, in order; none if it was killed before the first."""
    path = _trace_file(folder, process, rank)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _of(kind: str, trace: Iterable[Event]) -> list[Event]:
    return [event for event in trace if event["kind"] == kind]


def _last_step(trace: Sequence[Event]) -> int:
    return max((step["number"] for step in _of("step", trace)), default=0)


def _difference(rank: int, straight: Sequence[Event], killed: Sequence[Sequence[Event]]) -> Iterator[Difference]:
    """The first difference on a rank, if there is one: later ones follow from it."""
    expected = {step["number"]: step["values"] for step in _of("step", straight)}
    for process, trace in enumerate(killed):
        steps, loads = _of("step", trace), _of("loaded", trace)
        found = None
        if process and not loads:
            found = 0, "fresh start", "it loaded no checkpoint and started from scratch"
        for number, values in () if found else ((step["number"], step["values"]) for step in steps):
            if number not in expected:
                found = number, "extra steps", "the straight run has no such step"
            elif unequal := _compare(expected[number], values):
                found = number, *unequal
            if found:
                break
        if not found and process == len(killed) - 1 and _last_step(trace) < max(expected):
            made = _last_step(trace) or (loads[0]["number"] if loads else 0)
            if made < max(expected):
                found = made + 1, "missing steps", f"it ended after step {made}; the straight run made {max(expected)}"
        if found:
            step, what, detail = found
            said = tuple(dict.fromkeys(event["text"] for event in _of("said", trace)))
            resumed_from = loads[0]["number"] if loads else None
            yield Difference(process, step, rank, what if process else "nondeterministic", detail, resumed_from, said)
            return


def _compare(straight: Mapping[str, Any], killed: Mapping[str, Any]) -> tuple[str, str] | None:
    """Compare the values of a step in the order in which it computes them: the first that differs causes the rest."""
    for what, expected in straight.items():
        found = killed[what]
        if what == "batches" and expected:
            found = found[-len(expected) :]  # a script may skip by hand what it was handed out before
        if found == expected:
            continue
        if isinstance(expected, dict):
            names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
            return what, few(names, _NAMED)
        if what == "batches":
            return what, "the loop got different data than in the straight run"
        return what, f"{found}, {expected} straight"
    return None


def _final_difference(straight: _Run, killed: _Run) -> Difference | None:
    """Compare the newest checkpoint that both runs have."""
    written = sorted(straight.root.rglob(FILE_NAME), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    names = (path.parent.relative_to(straight.root) for path in written)
    for name in (name for name in names if (killed.root / name / FILE_NAME).exists()):
        unequal = [one.name for one in diff(straight.root / name, killed.root / name).differences]
        unequal = [one for one in unequal if ".loop." not in one]  # notes about the loader: its batches were compared
        if not unequal:
            return None
        detail = f"{few(unequal, _NAMED)} differ in {name.name}"
        last = killed.traces[-1][0]
        said = tuple(dict.fromkeys(event["text"] for event in _of("said", last)))
        return Difference(len(killed.traces) - 1, _last_step(last), 0, "final checkpoint", detail, None, said)
    return None


# --- in the processes of the program


class Recorder:
    """Records a process without changes to the program: `install` before it starts, `write("end")` after its end."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        path = _trace_file(plan["folder"], plan["process"], rank)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number = 0
        self._has_stepped = False
        self._pending: dict[str, list[str]] = {"batches": [], "losses": []}  # since the last step
        self._gradients: dict[str, str] = {}
        self._managers: list[StateManager] = []

    def install(self) -> None:
        _wrap(StateManager, "__init__", self._build)
        _wrap(Saves, "to_root", self._save)
        _wrap(Session, "_load", self._load)  # of load and resume
        _wrap(Loop, "_through", self._hand_out)
        if self._plan["redirect"]:
            _wrap(ManagerOptions, "open_tiers", self._open_tiers)
        setattr(torch.Tensor, "backward", _through(torch.Tensor.backward, self._backward))  # noqa: B010
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.write("said", text=record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("ckpt").addHandler(handler)

    def write(self, kind: str, **fields: Any) -> None:
        """Append a line with one system call, so that a kill right after it leaves it complete."""
        os.write(self._file, (json.dumps({"kind": kind, "number": self._number, **fields}) + "\n").encode())

    def _build(self, build: Callable[..., None], manager: StateManager, *args: Any, **options: Any) -> None:
        if self._plan["save_every"] is not None:
            given = Every.of(options.get("save_every"))
            when = given if isinstance(given, Every) else Every()
            options["save_every"] = replace(when, steps=self._plan["save_every"], time=None, failures_per_node_day=None)
        build(manager, *args, **options)
        self._managers.append(manager)

    def _open_tiers(self, _: object, options: ManagerOptions, root: str | os.PathLike[str] | Storage) -> Any:
        """A storage of this run for each root that the program names: runs must not find each other's checkpoints."""
        named = [str(getattr(place, "url", place)) for place in (root, options.mirror and options.mirror.url) if place]
        return tuple(open_storage(f"{self._plan['root']}/{xxhash.xxh3_64_hexdigest(url.encode())}") for url in named)

    def _save(self, save: Callable[..., str | None], saves: Saves, *args: Any, **options: Any) -> str | None:
        at = {"number": self._number, "pending": {what: list(values) for what, values in self._pending.items()}}
        progress = saves.state.loop.saved_progress().to_json()
        name = save(saves, *args, **options)
        if name is not None:
            self.write("saved", name=name, progress=progress, **at)
        return name

    def _load(self, load: Callable[..., Restored | None], session: Session, *args: Any, **options: Any) -> Any:
        restored = load(session, *args, **options)
        if restored is not None and not self._has_stepped:  # a later load is not a resume, but the program's own
            self._go_back_to(restored.name, restored.progress.to_json())
            self.write("loaded")
            for what, why in (restored.approximated | restored.skipped).items():
                self.write("said", text=f"{what}: {why}")
        return restored

    def _go_back_to(self, name: str, progress: Mapping[str, int]) -> None:
        """Continue from the step at which that checkpoint was saved, by this process or an earlier one of the run."""
        for process in range(self._plan["process"], -1, -1):
            for save in reversed(_of("saved", _read_trace(self._plan["folder"], process, self._rank))):
                if save["name"] == name and save["progress"] == progress:
                    self._number, self._pending = save["number"], save["pending"]
                    return

    def _hand_out(self, through: Callable[..., Iterator[Any]], *args: Any) -> Iterator[Any]:
        for number, batch in through(*args):
            self._pending["batches"].append(_digest(batch))
            yield number, batch

    def _backward(self, backward: Callable[..., None], tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        if tensor.numel() == 1:
            self._pending["losses"].append(f"{tensor.detach().item():.9g}")
        backward(tensor, *args, **options)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._gradients = {name: _digest(one.grad) for name, one in self._parameters(optimizer) if one.grad is not None}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._number += 1
        self._has_stepped = True
        values = {
            "optimizer": f"{type(optimizer).__name__} of {next(self._parameters(optimizer))[0]}",
            **self._pending,
            "gradients": self._gradients,
            "learning rates": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            "parameters": {name: _digest(parameter) for name, parameter in self._parameters(optimizer)},
        }
        self.write("step", values=values)
        self._pending, self._gradients = {"batches": [], "losses": []}, {}
        if self._number == self._plan["kill_at"]:
            for manager in self._managers:
                manager.session.saver.wait()  # every selftest then resumes from the same checkpoint
            os.kill(os.getpid(), signal.SIGKILL)

    def _parameters(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[int, str] = {}
        for manager in self._managers:
            for key, model in manager.session.registry.models.items():
                names |= {identity: f"{key}.{name}" for identity, name in parameter_names(unwrap(model)).items()}
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        for index, parameter in enumerate(parameters):
            yield names.get(id(parameter), f"parameter {index} of {type(optimizer).__name__}"), parameter


def _wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    setattr(owner, name, _through(getattr(owner, name), around))


def _through(method: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    """Have calls of a method go through `around`, which gets the method first."""
    return functools.wraps(method)(lambda *args, **options: around(method, *args, **options))


def _digest(value: Any) -> str:
    hasher = xxhash.xxh3_64()
    for one in _leaves(value):
        if isinstance(one, torch.Tensor):
            local = local_tensor(one)
            hasher.update(repr(local.shape).encode() if local.is_meta else host_bytes(on_host(local)))
        else:
            hasher.update(repr(one).encode())
    return hasher.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors and numbers in nested containers, in their order."""
    if isinstance(value, torch.Tensor | int | float | str):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)


def main(path: str) -> None:
    """Run the user's program with a recorder installed."""
    plan: Plan = json.loads(Path(path).read_text())
    rank = int(os.environ.get("RANK", "0"))
    # resumed processes are seeded otherwise: a program that relies on the seed of its process then differs
    seed = plan["seed"] + 1000 * rank + 100_000 * plan["process"]
    random.seed(seed)
    torch.manual_seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(seed % (1 << 32))
    sys.path[:0] = [folder for folder in plan["path"] if folder not in sys.path]
    recorder = Recorder(plan, rank)
    recorder.install()
    try:
        _run(plan)
    except SystemExit as done:
        if done.code not in (0, None):
            raise
    recorder.write("end")


def _run(plan: Plan) -> None:
    sys.path.insert(0, str(Path(plan["target"]).parent))
    if plan["function"]:
        getattr(importlib.import_module(Path(plan["target"]).stem), plan["function"])(plan["root"])
        return
    sys.argv = [plan["target"], *plan["arguments"]]
    runpy.run_path(plan["target"], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
