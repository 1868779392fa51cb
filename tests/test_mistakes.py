"""What people get wrong, and what they are told: one `CkptError` that says what to do, or it just works."""

from __future__ import annotations

import copy
import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckpt
from ckpt.errors import CkptError
from ckpt.storage.local.files import translated

Attempted = Callable[[Path], Any]


class Script:
    """Objects as a script has them."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def manager(self, root: Path, **options: Any) -> ckpt.StateManager:
        return ckpt.StateManager(root / "run", model=self.model, optimizer=self.optimizer, **options)

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
        with ckpt.StateManager(root / "run", model=saved) as manager:
            manager.save_state("a")
        with ckpt.StateManager(root / "run", model=model) as manager:
            return manager.load_state()

    return attempt


def rows(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def make_at(root: Any) -> Attempted:
    return lambda _: ckpt.StateManager(root, model=nn.Linear(2, 2))


def make_and_save(**named: Any) -> Attempted:
    return lambda root: make(**named)(root).save_state("a", wait=True)


def scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(Script().optimizer, 1)


def of_another_optimizer(root: Path) -> Any:
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with ckpt.StateManager(root / "run", model=model, optimizer=sgd) as manager:
        manager.save_state("a", wait=True)
    with Script().manager(root) as manager:
        return manager.load_state()


def config(text: str | None) -> Attempted:
    def attempt(root: Path) -> Any:
        if text is not None:
            (root / "ckpt.yaml").write_text(text)
        return ckpt.StateManager.from_config(root / "ckpt.yaml", model=nn.Linear(2, 2))

    return attempt


class Talkative:
    """Takes no state back, and says so in several lines, as PyTorch's modules do."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise RuntimeError("first line\n\tsecond line\n")


def _of_many_lines(manager: ckpt.StateManager) -> Any:
    manager.register(talkative=Talkative())
    manager.save_state("a", wait=True)
    return manager.load_state("a")


REFUSED: dict[str, tuple[Attempted, str]] = {
    "a state_dict as the model": (
        make(model=nn.Linear(2, 2).state_dict()),
        "StateManager got a state_dict as model=. Pass the object",
    ),
    "a state_dict as the optimizer": (
        make(optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters()).state_dict()),
        "got a state_dict as optimizer=",
    ),
    "the model without a keyword": (make(nn.Linear(2, 2)), 'StateManager("runs/x", model=model'),
    "the model in place of the root": (lambda root: ckpt.StateManager(nn.Linear(2, 2), str(root)), "Name each object"),  # type: ignore[arg-type]
    "a class as the model": (make(model=nn.Linear), "model is a type, not a torch.nn.Module"),
    "an optimizer as the model": (make(model=Script().optimizer), "model is a AdamW"),
    "a model as the optimizer": (make(optimizer=nn.Linear(2, 2)), "give it as model="),
    "a number as the optimizer": (make(optimizer=3), "optimizer is a int"),
    "text as the loader": (make(dataloader="train"), "can't iterate over dataloader"),
    "an option that is misspelled": (make(save_evry=3), "did you mean 'save_every'?"),
    "an option of saves that is misspelled": (lambda _: ckpt.SaveOptions(backgroud=True), "mean 'background'?"),  # type: ignore[call-arg]
    "an option of Keep that is misspelled": (lambda _: ckpt.Keep(lst=3), "did you mean 'last'?"),  # type: ignore[call-arg]
    "an object under another name": (make(optim=Script().optimizer), "did you mean 'optimizer'?"),
    "an option of an option object": (make(timeout=9), "'timeout' (write ranks=ckpt.RankOptions(timeout=...))"),
    "no steps between saves": (make(save_every=0), "save_every=0 must be"),
    "a number in place of Keep": (make(keep=3), "keep=3 must be a ckpt.Keep"),
    "a root that is a file": (lambda root: ckpt.StateManager(_file(root), model=nn.Linear(2, 2)), "is a file"),
    "a root that is a link to nothing": (
        lambda root: ckpt.StateManager(_link(root)),
        "nowhere, which does not exist (create that folder, or remove the link)",
    ),
    "a root below a link to nothing": (lambda root: ckpt.StateManager(_link(root) / "x"), "create that folder"),
    "a root in /proc": (make_at("/proc/run"), "/proc is on proc, which shows the kernel and keeps no files"),
    "an object whose error has several lines": (on(_of_many_lines), "first line second line"),
    "a root below a file": (lambda root: ckpt.StateManager(_file(root) / "x"), "cannot be created"),
    "a step that was not saved": (on(lambda manager: manager.load_state(10)), "There are: step-00000001"),
    "a name that leads out": (on(lambda manager: manager.save_state("../x")), "is not a valid checkpoint name"),
    "a name with a slash": (on(lambda manager: manager.save_state("a/b")), "is not a valid checkpoint name"),
    "no checkpoint at all": (lambda root: Script().manager(root).load_state(), "resume() would start from scratch"),
    "metrics that are a number": (on(lambda manager: manager.step(3)), "a dict that maps names to numbers"),  # type: ignore[arg-type]
    "metrics that are text": (
        on(lambda manager: manager.save_state(metrics={"loss": "low"})),
        "one number for each name",
    ),
    "a step before the resume": (lambda root: Script().manager(root).step(), "call manager.resume() before the loop"),
    "a step after the end": (on(lambda manager: manager.step(), closed=True), "Build a new manager"),
    "epochs after the end": (on(lambda manager: next(manager.epochs(3)), closed=True), "on a closed StateManager"),
    "batches after the end": (
        on(lambda manager: next(iter(manager.batches([1]))), closed=True),
        "on a closed StateManager",
    ),
    "epochs that are a list": (on(lambda manager: next(manager.epochs([1, 2]))), "the total number of epochs"),  # type: ignore[arg-type]
    "batches of a number": (on(lambda manager: manager.batches(3)), "batches"),  # type: ignore[arg-type]
    "an object without state": (on(lambda manager: manager.register(x=object())), "no state_dict"),
    "a name that is taken": (
        on(lambda manager: manager.register(model=nn.Linear(1, 1))),
        "a part of that name already exists",
    ),
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
        on(lambda manager: ckpt.StateManager(manager.url, model=nn.Linear(2, 2)).resume()),
        "a StateManager of this process: close() it first",
    ),
    "a root that is nothing": (make_at(None), "needs a root"),
    "a root that is empty": (make_at(""), "must be a path, a URL or a storage"),
    "a root that is a number": (make_at(3), "must be a path, a URL or a storage"),
    "a URL in a Path": (make_at(Path("s3://bucket/run")), "Pass the URL as a string: 's3://bucket/run'"),
    "a URL that lost a slash": (make_at("hub:/me/run"), "Pass the URL as a string: 'hub://me/run'"),
    "a model saved to a URL": (on(lambda manager: manager.save_model("s3://b/m")), "only to a disk"),
    "a model saved to a URL in a Path": (on(lambda manager: manager.save_model(Path("s3://b/m"))), "lost a slash"),
    "a chained URL": (make_at("simplecache::s3://bucket/run"), "Name only the store"),
    "a chained URL in a Path": (make_at(Path("simplecache::s3://bucket/run")), "Name only the store"),
    "a URL with a space before it": (make_at(" s3://bucket/run"), "is not a URL that ckpt can open"),
    "a scheme that nobody serves": (make_at("foo://bucket/run"), "ckpt has no storage for foo://"),
    "options for a local folder": (make(storage_options={"key": "x"}), "accepts no storage_options, but you gave key"),
    "nothing to save": (lambda root: make()(root).save_state("a", wait=True), "there is nothing to save"),
    "a list of no models": (lambda root: make(model=[])(root).save_state("a"), "there is nothing to save"),
    "a scheduler as the optimizer": (
        make(optimizer=scheduler()),
        "optimizer is a StepLR, which is not a valid optimizer",
    ),
    "an optimizer as the scheduler": (
        make(scheduler=Script().optimizer),
        "scheduler is a AdamW, which is not a valid scheduler",
    ),
    "a scaler that is switched on": (make(scaler=True), "scaler is a bool"),
    "a model under a name with a slash": (make(model={"a/b": nn.Linear(2, 2)}), "is not a valid part name"),
    "a dict in place of Keep": (make(keep={"last": 3}), "must be a ckpt.Keep"),
    "a number in place of SaveOptions": (make(saving=3), "must be a ckpt.SaveOptions"),
    "a number in place of RankOptions": (make(ranks=4), "must be a ckpt.RankOptions"),
    "a number in place of a mirror": (make(mirror=3), "must be a path, a URL, a storage, or a ckpt.Mirror"),
    "a mirror that is the root": (lambda root: make(mirror=root / "run")(root), "is the same place as the root"),
    "a time that is none": (make(save_every="10 parsecs"), "such as '10min', '90s' or '2h'"),
    "half a step": (make(save_every=1.5), "a number of steps"),
    "a switch in place of steps": (make(save_every=True), "a number of steps"),
    "no steps between snapshots": (make(memory=0), "memory=0 must be"),
    "to keep nothing": (lambda root: ckpt.Keep(last=0), "the newest checkpoint is never removed"),
    "the best of nothing": (lambda root: ckpt.Keep(best=1), 'needs metric="..."'),
    "the best in no order": (lambda root: ckpt.Keep(best=1, metric="x", mode="maximum"), "one of min, max"),
    "a layout that is none": (lambda root: ckpt.SaveOptions(layout="half"), "one of auto, full, sharded"),
    "a name that is empty": (on(lambda manager: manager.save_state("")), "is not a valid checkpoint name"),
    "a name that is hidden": (on(lambda manager: manager.save_state(".x")), "is not a valid checkpoint name"),
    "a step before the first": (on(lambda manager: manager.load_state(-1)), "is not a valid checkpoint name"),
    "the latest by a name": (
        on(lambda manager: manager.load_state("latest")),
        "To load the newest one, leave out the name",
    ),
    "a class to register": (
        on(lambda manager: manager.register(x=nn.Linear)),
        "Linear is a class: give an",
    ),
    "an object without a name": (on(lambda manager: manager.register(nn.Linear(1, 1))), "register(ema=ema)"),
    "a name and an object": (on(lambda manager: manager.register("ema", nn.Linear(1, 1))), "register(ema=ema)"),
    "a tensor to register": (on(lambda manager: manager.register(t=torch.ones(2))), "has no state_dict"),
    "a name to register with a slash": (
        on(lambda manager: manager.register(**{"a/b": nn.Linear(1, 1)})),
        "a/b: this is not a valid part name",
    ),
    "a value that is a tensor": (on(lambda manager: manager.values.update(x=torch.ones(2))), "contains a Tensor"),
    "a value without a name": (
        on(lambda manager: manager.values.update({1: 2})),  # type: ignore[dict-item]
        "the name of a value must be a string",
    ),
    "less than no epochs": (on(lambda manager: next(manager.epochs(-1))), "the total number of epochs, not -1"),
    "every few steps as text": (on(lambda manager: manager.every("10")), "a number of steps"),  # type: ignore[arg-type]
    "a metric of many numbers": (on(lambda manager: manager.step({"loss": torch.ones(2)})), "'loss' is not"),
    "a metric that is not there": (on(lambda manager: manager.step({"loss": None})), "'loss' is not"),
    "a metric that is text": (on(lambda manager: manager.step({"loss": "3"})), "'loss' is not"),
    "a metric without a name": (on(lambda manager: manager.step({3: 1.0})), "3 is not"),  # type: ignore[dict-item]
    "a callback that is none": (on(lambda manager: manager.on_save(3)), "on_save needs a function"),  # type: ignore[arg-type]
    "a copy of the manager": (on(copy.deepcopy), "you can't copy or pickle"),
    "a pickled manager": (on(pickle.dumps), "you can't copy or pickle"),
    "a model without data": (make_and_save(model=nn.Linear(2, 2, device="meta")), "on the meta device"),
    "another optimizer": (of_another_optimizer, "a SGD in the checkpoint, a AdamW here"),
    "another dtype": (of_other_objects(rows(1, 3).half(), rows(1, 3)), "dtype float32 in the checkpoint, float16 here"),
    "a model and its source in the wrong order": (
        on(lambda manager: ckpt.load_model(nn.Linear(2, 2), manager.url)),  # type: ignore[arg-type]
        "needs a path or a URL as its source",
    ),
    "a model from nowhere": (lambda root: ckpt.load_model(root / "no", nn.Linear(2, 2)), "there is nothing at"),
    "a merge into a folder": (on(lambda manager: ckpt.merge(manager.url, manager.url)), "Name a file in that folder"),
    "a merge from nowhere": (lambda root: ckpt.merge(root / "no", "x.safetensors"), "there is nothing at"),
    "a conversion to what is none": (on(lambda manager: ckpt.convert(manager.url, "x", to="onnx")), "is not a format"),
    "to verify nothing": (lambda root: ckpt.verify(root), "neither a root nor a checkpoint"),
    "to prune by a number": (on(lambda manager: ckpt.prune(manager.url, keep=3)), "must be a ckpt.Keep"),  # type: ignore[arg-type]
    "a repository that is none": (on(lambda manager: manager.push_to_hub("not a name!")), "Write user/name"),
    "a configuration that is not there": (config(None), "cannot be read"),
    "a configuration with a slip": (config("root: x\nsave_evry: 3\n"), "did you mean 'save_every'?"),
    "a configuration that is no YAML": (config("root: [x\n"), "is not YAML"),
    "a configuration without a root": (config("save_every: 3\n"), "with at least 'root: ...'"),
}


def _file(root: Path) -> Path:
    path = root / "file"
    path.write_text("")
    return path


def _link(root: Path) -> Path:
    path = root / "link"
    path.symlink_to(root / "nowhere")
    return path


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_ten_lines_that_say_what_to_do(what: str, tmp_path: Path) -> None:
    attempt, said = REFUSED[what]
    with pytest.raises(CkptError) as caught:
        attempt(tmp_path)
    text = str(caught.value)
    assert said in text
    assert len(text.splitlines()) <= 10
    assert "\\n" not in text


WORKS: dict[str, Attempted] = {
    "a step by its number": on(lambda manager: manager.load_state(1).step == 1),
    "a checkpoint by its path": on(lambda manager: manager.load_state(f"{manager.url}/step-00000001").step == 1),
    "close twice": on(lambda manager: not [call() for call in (manager.close,) if call()], closed=True),
    "wait after the end": on(lambda manager: not [call() for call in (manager.wait,) if call()], closed=True),
    "resume after the end": on(lambda manager: manager.resume().step == 1, closed=True),  # type: ignore[union-attr]
    "a folder whose name begins like a URL": lambda root: ckpt.StateManager(f"{root}/s3:/run", model=nn.Linear(2, 2)),
    "no epochs": on(lambda manager: list(manager.epochs(0)) == []),
    "a metric on a device, with a graph": on(
        lambda manager: [call({"loss": torch.ones(1, requires_grad=True) * 2}) for call in (manager.step,)] == [None]
    ),
    "a mirror beside the root": lambda root: make(mirror=root / "run-copy")(root),
    "save after the end": on(lambda manager: manager.save_state("last", wait=True) == "last", closed=True),
}


@pytest.mark.parametrize("what", WORKS)
def test_it_just_works(what: str, tmp_path: Path) -> None:
    assert WORKS[what](tmp_path)


def _trained(root: Path, epochs: int, lr: float = 0.1, *, decayed: bool = False, scheduled: bool = False) -> float:
    """Train as many epochs of two steps, or what is left of them; returns the learning rate at the end."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1) if scheduled else None
    with ckpt.StateManager(root, model=model, optimizer=optimizer, scheduler=scheduler, save_every=2) as manager:
        for _ in manager.epochs(epochs):
            for batch in manager.batches([torch.ones(1, 2)] * 2):
                model(batch).sum().backward()
                optimizer.step()
                if decayed:
                    optimizer.param_groups[0]["lr"] *= 0.5
                if scheduler is not None:
                    scheduler.step()
                manager.step()
    return float(optimizer.param_groups[0]["lr"])


def test_a_run_that_is_complete_says_so_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _trained(tmp_path / "run", 2)
    assert "is complete" not in capsys.readouterr().err
    _trained(tmp_path / "run", 2)
    said = capsys.readouterr().err
    assert "step-00000004 has all 2 epochs, at step 4. Nothing is left to train." in said
    assert "To train on, ask for more: manager.epochs(3). For a new run, choose another root." in said
    _trained(tmp_path / "run", 3)
    assert "is complete" not in capsys.readouterr().err


@pytest.mark.parametrize("how", [{}, {"decayed": True}, {"scheduled": True}], ids=["plain", "by hand", "scheduled"])
def test_a_learning_rate_that_the_checkpoint_overrides_is_named_with_both_values_and_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: dict[str, bool]
) -> None:
    _trained(tmp_path, 1, 0.1, **how)
    _trained(tmp_path, 2, 0.1, **how)
    assert "learning rate" not in caplog.text  # the script's is the run's, whatever has become of it since
    at_end = _trained(tmp_path, 3, 0.05, **how)
    assert "the run began with 0.1, and you give 0.05" in caplog.text
    assert "set it after the resume: group['lr'] = 0.05" in caplog.text
    assert at_end == pytest.approx(0.1 if not how else 0.1 * 0.5**6 if "decayed" in how else 0.1**7)
    caplog.clear()
    _trained(tmp_path, 4, 0.05, **how)
    assert "the run began with 0.1" in caplog.text  # still so: it was not set


def test_callbacks_of_on_save_have_been_called_when_a_save_that_was_waited_for_returns(tmp_path: Path) -> None:
    reported: list[str] = []
    with Script().manager(tmp_path) as manager:
        manager.on_save(lambda report: reported.append(report.name))
        manager.save_state("waited", wait=True)
        assert reported == ["waited"]
        manager.save_state("later")
        manager.wait()
        assert reported == ["waited", "later"]


def test_a_disk_without_inodes_is_not_told_to_free_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = os.statvfs(tmp_path)
    values = list(there)
    values[5:8] = [1000, 0, 0]  # inodes: in all, free, free for this user
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    error = translated(OSError(errno.ENOSPC, "No space left on device"), "write", "x", tmp_path, "run")
    assert "No inodes are left there: it has room for bytes, but not for another file. Delete files" in str(error)
    assert "GB" not in str(error)
