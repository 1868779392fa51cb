"""The command `ckpt`, as a shell runs it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import ckpt
from ckpt.cli.main import COMMANDS, main
from ckpt.root.catalog import MARKER
from ckpt.util.console import format_age

Invoke = Callable[..., Result]

_WITHOUT_TORCH = """
import json, sys
from ckpt.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    assert "torch" not in sys.modules, arguments
print("done")
"""


@pytest.fixture
def invoke() -> Invoke:
    return lambda *arguments: CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints: step-00000001, step-00000002 and last."""
    root = tmp_path / "run"
    model = nn.Linear(300, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    with ckpt.StateManager(root, model=model, optimizer=optimizer) as manager:
        manager.resume()
        for loss in (0.5, 0.25):
            model(torch.ones(300)).sum().backward()
            optimizer.step()
            manager.step(metrics={"loss": loss})
            manager.save_state()
        manager.save_state("last", metrics={"accuracy": 0.875})
    return root


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def leave_uncommitted(root: Path, name: str) -> None:
    (root / name).mkdir()
    (root / name / MARKER).write_text("{}")


def lines_of(text: str) -> dict[str, str]:
    """The lines of a listing by their first word."""
    return {line.split()[0]: line for line in text.splitlines()}


def run_ckpt(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ckpt", *map(str, arguments)], capture_output=True, text=True, timeout=170
    )


def on_a_terminal(*arguments: object) -> str:
    """What the command prints where standard output is a terminal."""
    main_end, child_end = pty.openpty()
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm"}
    command = [sys.executable, "-m", "ckpt", *map(str, arguments)]
    with subprocess.Popen(command, stdout=child_end, env=environment) as process:
        os.close(child_end)
        shown = b""
        try:
            while piece := os.read(main_end, 4096):
                shown += piece
        except OSError:  # the other end was closed
            pass
    os.close(main_end)
    assert process.returncode == 0
    return shown.decode()


@pytest.mark.slow
def test_the_commands_answer_without_importing_torch(root: Path) -> None:
    where = str(root)
    given = [["--help"], ["demo", "--help"], ["ls", where], ["ls", "--verify", where]]
    given += [[name, where] for name in ("verify", "show", "prune", "report")]
    command = [sys.executable, "-c", _WITHOUT_TORCH, json.dumps(given)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=170)
    assert done.stdout.endswith("done\n"), done.stderr


def test_ls_shows_what_is_known_of_each_checkpoint_the_newest_first(root: Path, invoke: Invoke) -> None:
    result = invoke("ls", root)
    header, *rows, footer = result.output.splitlines()
    assert header.split() == ["name", "step", "age", "size", "metrics", "world", "state"]
    assert [row.split()[0] for row in rows] == ["last", "step-00000002", "step-00000001"]
    assert re.fullmatch(r"step-00000001 +1 +\d+ s +\d+\.\d kB +loss=0\.5 +1 +complete", rows[2])
    assert "accuracy=0.875" in rows[0]
    assert footer == "sizes checked; --verify reads every byte"
    assert result.exit_code == 0


def test_a_truncated_file_shows_in_ls(root: Path, invoke: Invoke) -> None:
    truncate(root / "step-00000002" / "optimizer.safetensors")
    result = invoke("ls", root)
    lines = lines_of(result.output)
    assert re.search(r"DAMAGED: optimizer\.safetensors is \d+\.\d kB of \d+\.\d kB", lines["step-00000002"])
    assert lines["step-00000001"].endswith("complete")
    assert result.exit_code == 0


def test_a_missing_file_shows_in_ls(root: Path, invoke: Invoke) -> None:
    (root / "last" / "model.safetensors").unlink()
    assert lines_of(invoke("ls", root).output)["last"].endswith("DAMAGED: model.safetensors is missing")


def test_a_flipped_bit_shows_only_where_every_byte_is_read(root: Path, invoke: Invoke) -> None:
    flip_a_bit(root / "step-00000002" / "model.safetensors")
    assert lines_of(invoke("ls", root).output)["step-00000002"].endswith("complete")
    verified = invoke("ls", root, "--verify").output
    assert "DAMAGED: model.safetensors was altered (bytes 0 to " in lines_of(verified)["step-00000002"]
    assert verified.endswith("every byte checked\n")


def test_a_checkpoint_that_was_never_committed_comes_last_in_ls(root: Path, invoke: Invoke) -> None:
    leave_uncommitted(root, "step-00000003")
    *_, row, _footer = invoke("ls", root).output.splitlines()
    assert re.fullmatch(r"step-00000003 .* uncommitted: was never committed", row)


def test_an_altered_manifest_shows_in_ls(root: Path, invoke: Invoke) -> None:
    flip_a_bit(root / "last" / "manifest.json")
    said = "DAMAGED: manifest.json was altered: its bytes do not match its digest. Its copy manifest.copy.json is used."
    assert said in lines_of(invoke("ls", root).output)["last"]
    flip_a_bit(root / "last" / "manifest.copy.json")
    assert lines_of(invoke("ls", root).output)["last"].endswith("DAMAGED: manifest.json was altered")


def test_ls_of_one_checkpoint_shows_that_one(root: Path, invoke: Invoke) -> None:
    assert list(lines_of(invoke("ls", root / "last").output)) == ["name", "last", "sizes"]


def test_ls_of_an_empty_root_says_so_and_succeeds(tmp_path: Path, invoke: Invoke) -> None:
    result = invoke("ls", tmp_path)
    assert result.output == f"There are no checkpoints in {tmp_path}.\n"
    assert result.exit_code == 0


@pytest.mark.slow
def test_ls_in_a_pipe_is_plain_however_long_its_lines_are(root: Path) -> None:
    for path in (root / "last").glob("*.safetensors"):
        truncate(path)
    shown = run_ckpt("ls", root).stdout
    assert shown.isascii()
    assert shown.replace("\n", "").isprintable()
    assert len(shown.splitlines()) == 5
    assert len(lines_of(shown)["last"]) > 120


@pytest.mark.slow
def test_ls_on_a_terminal_has_colours_and_a_rule(root: Path) -> None:
    truncate(root / "last" / "model.safetensors")
    shown = on_a_terminal("ls", root)
    assert " complete" in shown
    assert "\x1b[32m" not in shown  # green is for bytes that were read
    assert "\x1b[31mDAMAGED: " in shown
    assert "\x1b[32mintact" in on_a_terminal("ls", "--verify", root)


def test_verify_gives_a_line_to_each_checkpoint(root: Path, invoke: Invoke) -> None:
    result = invoke("verify", root)
    assert [re.sub(r"\d+\.\d", "#", line) for line in result.output.splitlines()] == [
        "last           intact  # kB",
        "step-00000002  intact  # kB",
        "step-00000001  intact  # kB",
    ]
    assert result.exit_code == 0


def test_verify_fails_if_one_of_many_is_damaged(root: Path, invoke: Invoke) -> None:
    flip_a_bit(root / "step-00000001" / "model.safetensors")
    truncate(root / "last" / "state.json")
    leave_uncommitted(root, "step-00000003")
    result = invoke("verify", root)
    lines = lines_of(result.output)
    assert lines["step-00000001"].startswith("step-00000001  DAMAGED  model.safetensors was altered (bytes 0 to ")
    assert lines["last"].startswith("last           DAMAGED  state.json is ")
    assert lines["step-00000002"].startswith("step-00000002  intact  ")
    assert lines["step-00000003"].startswith("step-00000003  DAMAGED  was never committed")
    assert result.exit_code == 1


def test_verify_of_one_checkpoint_looks_at_no_other(root: Path, invoke: Invoke) -> None:
    flip_a_bit(root / "last" / "model.safetensors")
    assert invoke("verify", root / "step-00000001").exit_code == 0
    assert invoke("verify", root / "last").exit_code == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "verify"])
@pytest.mark.parametrize("where", ["nothing/here", "gopher://nowhere/run"])
def test_an_error_is_one_line_and_no_traceback(tmp_path: Path, command: str, where: str) -> None:
    done = run_ckpt(command, where if "://" in where else tmp_path / where)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"ckpt: .+\n", done.stderr)
    assert where.partition(":")[0] in done.stderr


@pytest.mark.parametrize("arguments", [["ls"], ["verify"], ["ls", ".", "--nonsense"], ["nonsense"]])
def test_bad_usage_exits_with_2(arguments: list[str], invoke: Invoke) -> None:
    assert invoke(*arguments).exit_code == 2


def test_the_installed_command_knows_its_version(invoke: Invoke) -> None:
    assert invoke("--version").output == f"ckpt, version {ckpt.__version__}\n"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0 s"), (59, "59 s"), (200, "3 min"), (7300, "2 h"), (100_000, "27 h"), (200_000, "2 d"), (4e6, "46 d")],
)
def test_ages_are_for_people(seconds: float, shown: str) -> None:
    created = datetime.now(timezone.utc) - timedelta(seconds=seconds)
    assert format_age(created.isoformat(timespec="milliseconds")) == shown


@pytest.mark.slow
def test_python_m_ckpt_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "ckpt", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ckpt, version")


class TestForOtherPrograms:
    def test_ls_and_verify_say_the_same_in_json(self, invoke: Invoke, tmp_path: Path) -> None:
        for seed in (1, 2):
            with ckpt.StateManager(tmp_path / "runs" / f"seed-{seed}", model=nn.Linear(3, 3)) as manager:
                for name in ("a", "b"):
                    manager.save_state(name, metrics={"loss": 0.5}, wait=True)
        root = tmp_path / "runs" / "seed-1"
        flip_a_bit(root / "a" / "model.safetensors")
        truncate(root / "b" / "model.safetensors")
        listed = json.loads(invoke("ls", root, "--json").stdout)
        assert [(found["name"], found["state"]) for found in listed] == [("b", "damaged"), ("a", "complete")]
        assert listed[1]["metrics"] == {"loss": 0.5}
        assert listed[1]["bytes"] > 0
        done = invoke("verify", root, "--json")
        assert done.exit_code == 1
        found = {one["name"]: one for one in json.loads(done.stdout)}
        assert {name: one["state"] for name, one in found.items()} == {"a": "damaged", "b": "damaged"}
        assert "was altered" in found["a"]["problems"][0]
        assert json.loads(invoke("ls", root, "--json", "--verify").stdout)[1]["state"] == "damaged"

    def test_of_a_folder_above_roots_ls_shows_the_roots(self, invoke: Invoke, tmp_path: Path) -> None:
        for where in ("one", "group/two"):
            with ckpt.StateManager(tmp_path / where, model=nn.Linear(3, 3)) as manager:
                manager.save_state("a", wait=True)
        done = invoke("ls", tmp_path)
        assert done.exit_code == 0
        rows = [line.split() for line in done.output.splitlines() if " a " in line]
        assert [(row[0], row[1], row[2]) for row in rows] == [("group/two", "1", "a"), ("one", "1", "a")]


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"demo"}))
def test_the_help_of_a_command_has_examples(name: str, invoke: Invoke) -> None:
    assert re.search(rf"^ +ckpt {name} \S", invoke(name, "--help").output, re.MULTILINE)


def test_every_command_is_listed_with_its_own_words() -> None:
    context = click.Context(main)
    assert main.list_commands(context) == sorted(COMMANDS)
    for name, words in COMMANDS.items():
        command = main.get_command(context, name)
        assert command is not None
        assert command.get_short_help_str(100) == words
    assert main.get_command(context, "nonsense") is None
