"""Names, metrics, versions and hosts of a checkpoint that somebody else has written, as they are shown."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli import ls
from ckpt.cli.main import main
from ckpt.export.card import Training, known_fields, render
from ckpt.formats.native.manifest import FILE_NAME, Host, Manifest
from tests.helpers.forgery import write_manifest

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e\n![x](http://evil.example/p.png)|<img src=x>"
ACTS = ("\x1b", "\x07", "\u202e", "\udcff")


class Own:
    """An object whose state has tensors and values under such names."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {EVIL: torch.ones(2), "plain": 1}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two checkpoints, whose manifests were written anew with a hostile string wherever one fits."""
    root = tmp_path / "run\x1b[31m"
    with ckpt.StateManager(root, model=nn.Linear(2, 2)) as manager:
        manager.register(own=Own())
        manager.resume()
        for _ in range(2):
            manager.step()
            manager.save_state()
    for step in (1, 2):
        rewrite(root / f"step-{step:08d}" / FILE_NAME, metrics={EVIL: float(step), "loss": 1.0 / step})
    return root


def rewrite(path: Path, **fields: Any) -> None:
    manifest = Manifest.from_bytes(path.read_bytes(), "it")
    evil = {"run": EVIL, "versions": {EVIL: EVIL}, "hardware": EVIL, "origin": EVIL}
    hosts = (Host(EVIL, tuple(range(manifest.world_size))),)
    write_manifest(path.parent, replace(manifest, **evil, hosts=hosts, **fields).to_bytes())  # type: ignore[arg-type]


COMMANDS: list[tuple[str, ...]] = [
    ("ls", "{root}"), ("ls", "--verify", "{root}"), ("ls", "{root}/step-00000002"), ("show", "--tensors", "{root}"),
    ("show", "--json", "--tensors", "{root}"), ("verify", "{root}"), ("report", "{root}"),
    ("diff", "{root}/step-00000001", "{root}/step-00000002"), ("diff", "--json", "{root}/step-00000001", "{root}"),
    ("prune", "--keep-last", "1", "--dry-run", "{root}"), ("merge", "{root}/nothing", "{root}/out.safetensors"),
    ("merge", "--part", "own", "{root}/step-00000002", "{root}/out.safetensors"), ("pull", "{root}", "{root}-copy"),
    ("convert", "{root}/step-00000002", "{root}-out", "--to", "accelerate"), ("convert", "{root}", "{root}-out"),
    ("prune", "--keep-last", "1", "--yes", "{root}"), ("memory", "clear", "{root}"),
    ("report", "{root}", "-o", "/no/x"),
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("damaged", [False, True], ids=["intact", "damaged"])
def test_no_command_prints_what_a_terminal_would_act_upon(root: Path, command: tuple[str, ...], damaged: bool) -> None:
    (root / "\x1b[2Jnot\ncommitted\udcff").mkdir()
    (root / "\x1b[2Jnot\ncommitted\udcff" / "file").write_text("")
    if damaged:
        (root / "step-00000002" / "own.safetensors").unlink()
    result = CliRunner().invoke(main, [part.format(root=root) for part in command])
    assert isinstance(result.exception, SystemExit | None)
    assert not any(letter in result.output for letter in ACTS)
    assert all(line.isprintable() for line in result.output.split("\n"))
    assert "Traceback" not in result.output


def test_the_table_of_a_terminal_shows_names_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    ls._show_table([[EVIL] * 7])
    _, line = click.unstyle(capsys.readouterr().out).splitlines()
    assert "owned" in line
    assert line.isprintable()


def test_nothing_is_lost_for_a_program_that_reads_the_json(root: Path) -> None:
    result = CliRunner().invoke(main, ["show", "--json", "--tensors", str(root)])
    shown = json.loads(result.stdout)
    assert shown["run"] == EVIL
    assert shown["metrics"][EVIL] == 2.0
    assert any("owned" in name for name in shown["parts"]["own"]["listed"])


@pytest.mark.parametrize("document", ["report", "card"])
def test_a_document_has_no_link_no_image_and_no_tag_of_theirs(root: Path, document: str) -> None:
    from markdown_it import MarkdownIt

    manifests = [found.manifest for found in ckpt.list_checkpoints(root) if found.manifest]
    training = Training.of(manifests[0])
    card = render(None, "model", known_fields({}, training), {}, training).partition("\n# model")[2]
    page = CliRunner().invoke(main, ["report", str(root), "--format", "md"]).stdout if document == "report" else card
    tokens = MarkdownIt("commonmark").enable("table").parse(page)
    found = [inner for token in tokens for inner in (token, *(token.children or ()))]
    wrong = [token for token in found if token.type in ("link_open", "image", "html_inline", "html_block")]
    assert [
        token.content for token in wrong if "of ckpt" not in token.content and "ckpt writes" not in token.content
    ] == []
    assert r"\x1b[2J\x1b]0;owned\x07\u202e\n![x](http://evil.example/p.png)\x7c" in page
    page.encode()


def test_a_load_says_and_logs_names_escaped(
    root: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (root / "step-00000002" / "own.safetensors").unlink()
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.DEBUG, "ckpt"), ckpt.StateManager(root, model=model) as manager:
        manager.register(own=Own())
        restored = manager.resume()
    assert restored is not None
    said = f"{capsys.readouterr().err}\n{restored}\n" + "\n".join(caplog.messages)
    assert r"run\x1b[31m" in said
    assert all(line.isprintable() for line in said.split("\n"))


def test_an_error_about_tensors_names_them_escaped(root: Path) -> None:
    own = Own()
    own.state = {"other\x1b": torch.ones(3)}
    with ckpt.StateManager(root, model=nn.Linear(2, 3)) as manager:
        manager.register(own=own)
        with pytest.raises(ckpt.MismatchError) as caught:
            manager.load_state()
    assert all(line.isprintable() for line in str(caught.value).split("\n"))
    assert all(problem.isprintable() for problem in caught.value.problems)
