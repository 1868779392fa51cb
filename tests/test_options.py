"""The options of a manager: refused at once if they make no sense, all of them in one error."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckpt
from ckpt.options import ManagerOptions, resolve_options
from ckpt.storage import MemoryStorage
from ckpt.util.option_values import parse_size

NONSENSE: dict[str, Any] = {
    "save_every": "10 minuets",
    "keep": 3,
    "mirror": 7,
    "storage_options": "key",
    "saving": {"layout": "full"},
    "ranks": 30.0,
    "memory": 0,
    "signing": "run.key",
}
NONSENSE_OF_EVERY: dict[str, Any] = {"steps": 0, "time": "soon", "epoch_end": 1, "exception": "yes"}
NONSENSE_OF_EVERY["failures_per_node_day"] = 0
NONSENSE_OF_MEMORY: dict[str, Any] = {"every": 0, "replicas": 2}
NONSENSE_OF_SIGNING: dict[str, Any] = {"key": 5, "verify_key": True, "required": "yes", "head": 5}
NONSENSE_OF_SAVES: dict[str, Any] = {
    "layout": "whole",
    "gradients": "yes",
    "background": 1,
    "when_busy": "later",
    "host_memory": "8 elephants",
    "device_memory": "much",
    "read_back": "maybe",
    "sha256": "yes",
    "on_nan": "die",
}
NONSENSE_OF_RANKS: dict[str, Any] = {
    "timeout": float("nan"),
    "shared": "no",
    "broadcast": 0,
    "handle_sigterm": None,
    "handle_sigint": 1,
    "save_on_sigusr1": "yes",
    "grace": 0,
    "alone": 1,
    "process_group": 5,
}


def test_every_argument_that_is_an_option_is_checked() -> None:
    objects = {
        "self",
        "root",
        "unnamed",
        "accelerator",
        "model",
        "optimizer",
        "scheduler",
        "scaler",
        "dataloader",
        "unknown",
    }
    assert inspect.signature(ckpt.StateManager.__init__).parameters.keys() - objects == NONSENSE.keys()


def test_a_manager_names_every_option_that_makes_no_sense_at_once(tmp_path: Path) -> None:
    with pytest.raises(ckpt.ConfigError) as raised:
        ckpt.StateManager(tmp_path / "run", model=nn.Linear(1, 1), **NONSENSE)
    assert [f"{name}=" in str(raised.value) for name in NONSENSE] == [True] * len(NONSENSE)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ckpt.SaveOptions, NONSENSE_OF_SAVES),
        (ckpt.RankOptions, NONSENSE_OF_RANKS),
        (ckpt.Every, NONSENSE_OF_EVERY),
        (ckpt.Memory, NONSENSE_OF_MEMORY),
        (ckpt.Signing, NONSENSE_OF_SIGNING),
    ],
)
def test_an_option_object_names_every_offender_when_it_is_built(kind: type, wrong: dict[str, Any]) -> None:
    assert inspect.signature(kind).parameters.keys() == wrong.keys()
    with pytest.raises(ckpt.ConfigError) as raised:
        kind(**wrong)
    assert str(raised.value).startswith(f"{kind.__name__}: ")
    secret = {"key": "a int", "verify_key": "a bool"}
    shown = [f"{name}={secret.get(name, repr(value))} must be" for name, value in wrong.items()]
    assert [name in str(raised.value) for name in shown] == [True] * len(wrong)


class Mute:
    """Says nothing of itself, and compares with nothing."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __hash__ = None  # type: ignore[assignment]


TOO_LARGE = "9" * 400 + "GB"
ODD: list[Any] = [
    float("nan"), float("inf"), -1, -1.5, "", "\0", "\ud800", TOO_LARGE, 10**400, b"x", [], {1: 2}, object(), Mute(),
    torch.ones(2), np.ones(2), 1e300,
]  # fmt: skip
OPTIONS = [
    *((ckpt.SaveOptions, name) for name in NONSENSE_OF_SAVES),
    *((ckpt.RankOptions, name) for name in NONSENSE_OF_RANKS),
    *((ckpt.Every, name) for name in NONSENSE_OF_EVERY),
    *((ckpt.Memory, name) for name in NONSENSE_OF_MEMORY),
    *((ckpt.Signing, name) for name in NONSENSE_OF_SIGNING),
    *((ckpt.Keep, name) for name in inspect.signature(ckpt.Keep).parameters),
    *((ckpt.Mirror, name) for name in inspect.signature(ckpt.Mirror).parameters),
    *((ckpt.StateManager, name) for name in ("root", *NONSENSE)),
]
MEANT = {
    "metric": "",
    **dict.fromkeys(("root", "mirror", "url", "key", "verify_key", "head"), TOO_LARGE),
}  # no nonsense


@pytest.mark.parametrize(("kind", "name"), OPTIONS)
def test_whatever_makes_no_sense_is_refused_by_name(
    kind: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    needed: dict[type, dict[str, Any]] = {
        ckpt.Mirror: {"url": "x"},
        ckpt.StateManager: {"root": "run", "model": nn.Linear(1, 1)},
    }
    for value in ODD:
        if value is MEANT.get(name):
            continue
        with pytest.raises(ckpt.ConfigError, match=rf"{name}=") as raised:
            kind(**{**needed.get(kind, {}), name: value})
        assert len(str(raised.value)) < 400
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (resolve_options, "save_every"),
        (resolve_options, "memory"),
        (ckpt.Every, "steps"),
        (ckpt.Memory, "replicas"),
        (ckpt.SaveOptions, "host_memory"),
        (ckpt.SaveOptions, "device_memory"),
        (ckpt.RankOptions, "timeout"),
    ],
)
def test_true_is_no_number(kind: Callable[..., Any], name: str) -> None:
    with pytest.raises(ckpt.ConfigError, match=f"{name}=True"):
        kind({name: True}) if kind is resolve_options else kind(**{name: True})


def test_a_plain_value_stands_for_an_option_object() -> None:
    options = resolve_options({"save_every": 500, "memory": 10, "mirror": "there"})
    assert options.save_every == ckpt.Every(steps=500)
    assert options.memory == ckpt.Memory(every=10)
    assert options.mirror == ckpt.Mirror("there")
    assert resolve_options({"save_every": "10min"}).save_every == ckpt.Every(time="10min")
    assert resolve_options({}) == ManagerOptions()


def test_what_may_be_a_secret_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ckpt.ConfigError, match="storage_options=a str must be a dict") as raised:
        ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), storage_options="hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(raised.value)


def test_the_root_and_the_mirror_are_named_with_the_other_offenders() -> None:
    with pytest.raises(ckpt.ConfigError) as raised:
        ckpt.StateManager("a\0b", mirror="c\0d", save_every=-1)
    assert [f"{name}=" in str(raised.value) for name in ("root", "mirror", "save_every")] == [True] * 3


@pytest.mark.parametrize("below", ["file/run", "file/a/b", "x" * 300, "loop/run"])
def test_a_root_that_cannot_be_created_is_refused_at_once(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ckpt.ConfigError, match=r"cannot be created: .*Choose another root"):
        ckpt.StateManager(tmp_path / below, model=nn.Linear(1, 1))


def test_a_root_in_a_folder_that_is_not_writable_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # permissions do not bind root
    with pytest.raises(ckpt.ConfigError, match=rf"cannot be created: {tmp_path} is not writable for this user"):
        ckpt.StateManager(tmp_path / "a" / "b", model=nn.Linear(1, 1))
    ckpt.StateManager(tmp_path, model=nn.Linear(1, 1)).close()  # it is there: it may be read


class TestHome:
    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("home", "here"):
            (tmp_path / name).mkdir()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.chdir(tmp_path / "here")
        return tmp_path / "home"

    def test_it_is_where_a_tilde_leads_for_every_call(self, home: Path) -> None:
        with ckpt.StateManager("~/run", model=nn.Linear(1, 1)) as manager:
            manager.save_state("a")
            manager.save_model("~/model")
        assert ckpt.verify("~/run") == {"a": []}
        ckpt.merge("~/run/a", "~/merged/model.safetensors")
        ckpt.convert("~/run/a", "~/accelerate", to="accelerate")
        ckpt.pull("~/run", "~/copy")
        assert {path.name for path in home.iterdir()} == {"run", "model", "merged", "accelerate", "copy"}
        assert not list(Path().iterdir())

    def test_of_nobody_it_is_refused(self) -> None:
        with pytest.raises(ckpt.ConfigError, match="no user 'nobody-here' with a home folder"):
            ckpt.StateManager("~nobody-here/run", model=nn.Linear(1, 1))


CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (ckpt.verify, {"url": "run"}),
    (ckpt.list_checkpoints, {"root": "run"}),
    (ckpt.prune, {"root": "run"}),
    (ckpt.pull, {"source": "run", "destination": "out"}),
    (ckpt.merge, {"source": "run/a", "destination": "out/model.safetensors"}),
    (ckpt.convert, {"source": "run/a", "destination": "out"}),
    (ckpt.diff, {"first": "run/a", "second": "run/a"}),
]
ARGUMENTS = [
    (call, needed, name)
    for call, needed in CALLS
    for name in (*needed, "storage_options", "keep", "grace")
    if name in inspect.signature(call).parameters
]


@pytest.mark.parametrize(("call", "needed", "name"), ARGUMENTS)
def test_a_call_with_nonsense_raises_an_error_of_ckpt(
    call: Callable[..., Any], needed: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in (5, float("nan"), b"x", ["run"], object(), "\0", Mute()):
        with pytest.raises(ckpt.CkptError):
            call(**{**needed, name: value})


@pytest.mark.parametrize("folder", ["", ".", "..", "\0", 5])
def test_a_model_does_not_replace_the_folder_that_the_program_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with ckpt.StateManager(tmp_path / "run", model=nn.Linear(1, 1)) as manager, pytest.raises(ckpt.ConfigError):
        manager.save_model(folder)
    assert os.getcwd() == str(tmp_path / "here")


def test_sizes_are_said_as_people_say_them() -> None:
    assert ckpt.SaveOptions(host_memory="8GB").host_memory_bytes == 8 * 10**9
    assert ckpt.SaveOptions(host_memory=0).host_memory_bytes == 0
    assert ckpt.Mirror("x", bandwidth="50MiB").bytes_per_second == 50 * 2**20
    assert [parse_size(size) for size in ("5GB", "1.5 kb", "12", 7)] == [5 * 10**9, 1500, 12, 7]
    assert [parse_size(size) for size in ("", "GB", "-1", "5 GBs", 0, True)] == [None] * 6


def test_an_option_that_does_not_exist_is_refused_with_the_nearest_that_does(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"no option 'save_evry' \(did you mean 'save_every'\?\)") as raised:
        ckpt.StateManager(tmp_path, model=nn.Linear(1, 1), save_evry=5)
    assert isinstance(raised.value, ckpt.ConfigError)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("read_back", "saving=ckpt.SaveOptions(read_back=...)"),
        ("memory_replicas", "memory=ckpt.Memory(replicas=...)"),
        ("memory_every", "memory=ckpt.Memory(every=...)"),
        ("save_at_epoch_end", "save_every=ckpt.Every(epoch_end=...)"),
        ("save_on_exception", "save_every=ckpt.Every(exception=...)"),
        ("verify_key", "signing=ckpt.Signing(verify_key=...)"),
        ("require_signed", "signing=ckpt.Signing(required=...)"),
    ],
)
def test_an_option_of_an_option_object_is_refused_with_how_it_is_written(name: str, written: str) -> None:
    with pytest.raises(TypeError, match=re.escape(f"no option {name!r} (write {written})")):
        resolve_options({name: True})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is opened, and with which options."""
    found: list[tuple[str, Any]] = []

    def open_url(url: str, options: Any) -> MemoryStorage:
        found.append((url, options))
        return MemoryStorage(url.replace("://", "-"))

    monkeypatch.setattr("ckpt.root.open.open_url", open_url)
    return found


class TestMirror:
    def test_it_has_an_account_of_its_own(self, opened: list[tuple[str, Any]]) -> None:
        there = ckpt.Mirror("s3://second/run", storage_options={"key": "mine"})
        resolve_options({"mirror": there, "storage_options": {"key": "ours"}}).open_tiers("s3://first/run")
        assert opened == [("s3://first/run", {"key": "ours"}), ("s3://second/run", {"key": "mine"})]

    def test_without_one_it_has_the_options_of_the_root(self, opened: list[tuple[str, Any]]) -> None:
        resolve_options({"mirror": "s3://b/run", "storage_options": {"key": "ours"}}).open_tiers("s3://a/run")
        assert [options for _, options in opened] == [{"key": "ours"}, {"key": "ours"}]


class TestYaml:
    def read(self, tmp_path: Path, text: str) -> ckpt.StateManager:
        (tmp_path / "ckpt.yaml").write_text(text)
        return ckpt.StateManager.from_config(tmp_path / "ckpt.yaml", model=nn.Linear(1, 1))

    @pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
    def test_another_encoding_is_named(self, tmp_path: Path, encoding: str) -> None:
        (tmp_path / "ckpt.yaml").write_bytes("root: caf\xe9".encode(encoding))
        with pytest.raises(ckpt.ConfigError, match="is not UTF-8"):
            ckpt.StateManager.from_config(tmp_path / "ckpt.yaml")

    def test_mappings_become_option_objects(self, tmp_path: Path) -> None:
        text = (
            f"root: {tmp_path}/run\nkeep: {{last: 2}}\nsaving: {{host_memory: 8GB, when_busy: skip}}\n"
            f"ranks: {{timeout: 7}}\nmirror: {{url: {tmp_path}/mirror, keep: {{last: 9}}, backlog: 4}}\n"
            "save_every: {steps: 5, epoch_end: true}\nmemory: 10\nsigning: {key: false}\n"
        )
        with self.read(tmp_path, text) as manager:
            options = manager.session.options
        assert options.saving == ckpt.SaveOptions(host_memory="8GB", when_busy="skip")
        assert options.ranks == ckpt.RankOptions(timeout=7)
        assert options.mirror == ckpt.Mirror(f"{tmp_path}/mirror", keep=ckpt.Keep(last=9), backlog=4)
        assert options.keep == ckpt.Keep(last=2)
        assert options.save_every == ckpt.Every(steps=5, epoch_end=True)
        assert options.memory == ckpt.Memory(every=10)
        assert options.signing == ckpt.Signing(key=False)

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ("saving: {layuot: full}", r"saving has no option 'layuot' \(did you mean 'layout'\?\)"),
            ("ranks: 30", "'ranks' must be a mapping, for example 'ranks: {timeout: 60}'"),
            ("mirror: {keep: {last: 3}}", "'mirror' needs a 'url'"),
            ("mirror: {url: x, keep: 3}", "'keep' must be a mapping"),
            ("save_every: {step: 5}", r"save_every has no option 'step' \(did you mean 'steps'\?\)"),
            ("memory: 0", "memory=0 must be a number of steps, 1 or more, a time such as .*, or a ckpt.Memory"),
            ("signing: run.key", "'signing' must be a mapping, for example 'signing: {key: run.key}'"),
            ("save_evry: 5", "did you mean 'save_every'"),
            ("1: 5", "the name of an option must be a word, not 1"),
            ("keep: {1: 2, ~: 3}", "keep: the name of an option must be a word, not 1, None"),
            ("keep: " + "[" * 1500 + "]" * 1500, "nested too deeply"),
        ],
    )
    def test_what_makes_no_sense_is_named(self, tmp_path: Path, line: str, said: str) -> None:
        with pytest.raises(ckpt.ConfigError, match=said):
            self.read(tmp_path, f"root: {tmp_path}/run\n{line}\n")
