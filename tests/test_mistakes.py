"""What people get wrong, and what they are told: one `CkptError` that says what to do, or it just works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import CkptError

Attempted = Callable[[Path], Any]


class Script:
    """Objects as a script has them."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def manager(self, root: Path, **options: Any) -> ckpt.StateManager:
        return ckpt.StateManager(root / "run", model=self.model, optimizer=self.optimizer, follow=False, **options)

    def trained(self, root: Path, steps: int = 1) -> ckpt.StateManager:
        manager = self.manager(root)
        manager.resume()
        for _ in range(steps):
            manager.step()
        manager.save_state(wait=True)
        return manager


def make(*positional: Any, **named: Any) -> Attempted:
    return lambda root: ckpt.StateManager(str(root / "run"), *positional, **named)


def on(call: Callable[[ckpt.StateManager], Any], *, closed: bool = False) -> Attempted:
    """A call on a manager that has saved one step, or is closed after that."""

    def attempt(root: Path) -> Any:
        with Script().trained(root) as manager:
            if not closed:
                return call(manager)
        return call(manager)

    return attempt


def of_other_objects(model: nn.Module, saved: nn.Module) -> Attempted:
    def attempt(root: Path) -> Any:
        with ckpt.StateManager(root / "run", model=saved, follow=False) as manager:
            manager.save_state("a")
        with ckpt.StateManager(root / "run", model=model, follow=False) as manager:
            return manager.load_state()

    return attempt


def rows(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


REFUSED: dict[str, tuple[Attempted, str]] = {
    "a state_dict as the model": (make(model=nn.Linear(2, 2).state_dict()), "model= is a state_dict. Give the object"),
    "a state_dict as the optimizer": (
        make(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict()),
        "optimizer= is a state_dict",
    ),
    "the model without a keyword": (make(nn.Linear(2, 2)), 'StateManager("runs/x", model=model'),
    "the model in place of the root": (lambda root: ckpt.StateManager(nn.Linear(2, 2), str(root)), "Say what each is"),  # type: ignore[arg-type]
    "a class as the model": (make(model=nn.Linear), "model is a type, not a torch.nn.Module"),
    "an optimizer as the model": (make(model=Script().optimizer), "model is a AdamW"),
    "a model as the optimizer": (make(optimizer=nn.Linear(2, 2)), "give it as model="),
    "a number as the optimizer": (make(optimizer=3), "optimizer is a int"),
    "text as the loader": (make(dataloader="train"), "gives no batches"),
    "an option that is misspelled": (make(save_evry=3), "did you mean 'save_every'?"),
    "no steps between saves": (make(save_every=0), "save_every=0 must be"),
    "a number in place of Keep": (make(keep=3), "keep=3 must be a ckpt.Keep"),
    "a root that is a file": (lambda root: ckpt.StateManager(_file(root), model=nn.Linear(2, 2)), "is a file"),
    "a root below a file": (lambda root: ckpt.StateManager(_file(root) / "x"), "cannot be created"),
    "a step that was not saved": (on(lambda manager: manager.load_state(10)), "There are: step-00000001"),
    "a name that leads out": (on(lambda manager: manager.save_state("../x")), "cannot name a checkpoint"),
    "a name with a slash": (on(lambda manager: manager.save_state("a/b")), "cannot name a checkpoint"),
    "no checkpoint at all": (lambda root: Script().manager(root).load_state(), "resume() starts afresh"),
    "metrics that are a number": (on(lambda manager: manager.step(3)), "a dict of names and numbers"),  # type: ignore[arg-type]
    "metrics that are text": (on(lambda manager: manager.save_state(metrics={"loss": "low"})), "one number each"),
    "a step before the resume": (lambda root: Script().manager(root).step(), "call manager.resume() before the loop"),
    "a step after the end": (on(lambda manager: manager.step(), closed=True), "Build a new one"),
    "epochs after the end": (on(lambda manager: next(manager.epochs(3)), closed=True), "is closed"),
    "batches after the end": (on(lambda manager: next(iter(manager.batches([1]))), closed=True), "is closed"),
    "epochs that are a list": (on(lambda manager: next(manager.epochs([1, 2]))), "the number of epochs"),  # type: ignore[arg-type]
    "batches of a number": (on(lambda manager: manager.batches(3)), "batches"),  # type: ignore[arg-type]
    "an object without state": (on(lambda manager: manager.register(x=object())), "no state_dict"),
    "a name that is taken": (on(lambda manager: manager.register(model=nn.Linear(1, 1))), "such a part already"),
    "a value that is an object": (on(lambda manager: manager.values.update(x=object())), "register(name=object)"),
    "every zeroth step": (on(lambda manager: manager.every(0)), "a number of steps"),
    "another shape": (of_other_objects(rows(1, 3), rows(1, 4)), "shape [4, 4] in the checkpoint, [3, 3] here"),
    "a model that is wrapped now": (
        of_other_objects(nn.ModuleDict({"inner": rows(20, 2)}), rows(20, 2)),
        "All 40 names of model begin with 'inner.' here",
    ),
    "a model that was wrapped": (
        of_other_objects(rows(20, 2), nn.ModuleDict({"inner": rows(20, 2)})),
        "begin with 'inner.' in the checkpoint",
    ),
    "a second manager on a root that is held": (
        on(lambda manager: ckpt.StateManager(manager.url, model=nn.Linear(2, 2), follow=False).resume()),
        "a StateManager of this process: close() it first",
    ),
}


def _file(root: Path) -> Path:
    path = root / "file"
    path.write_text("")
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_ten_lines_that_say_what_to_do(what: str, tmp_path: Path) -> None:
    attempt, said = REFUSED[what]
    with pytest.raises(CkptError) as caught:
        attempt(tmp_path)
    text = str(caught.value)
    assert said in text
    assert len(text.splitlines()) <= 10


WORKS: dict[str, Attempted] = {
    "a step by its number": on(lambda manager: manager.load_state(1).step == 1),
    "a checkpoint by its path": on(lambda manager: manager.load_state(f"{manager.url}/step-00000001").step == 1),
    "close twice": on(lambda manager: not [call() for call in (manager.close,) if call()], closed=True),
    "wait after the end": on(lambda manager: not [call() for call in (manager.wait,) if call()], closed=True),
    "save after the end": on(lambda manager: manager.save_state("last", wait=True) == "last", closed=True),
}


@pytest.mark.parametrize("what", WORKS)
def test_it_just_works(what: str, tmp_path: Path) -> None:
    assert WORKS[what](tmp_path)
