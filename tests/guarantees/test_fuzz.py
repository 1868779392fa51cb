"""A slice of `make fuzz`, everything that it ever found, and that it finds what it is there to find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt.root.verify import verify
from ckpt.storage import LocalStorage
from tests.fuzz.cases import Case, Maker
from tests.fuzz.fuzzer import CORPUS
from tests.fuzz.reseal import reseal
from tests.fuzz.targets import BY_NAME, TARGETS
from tests.fuzz.tree import Special, Tree, from_json, read_tree, to_json, write_tree
from tests.helpers.byte_checkpoints import save

_ROOT = Path(__file__).parents[2]
_INPUTS = "60"

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="limits and audits are those of Linux")


def _fuzz(scratch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", "--scratch", str(scratch), *options]
    return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=800)


@pytest.mark.slow
@needs_linux
@pytest.mark.timeout(900)
def test_a_slice_of_the_fuzzer_finds_nothing(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    done = _fuzz(
        tmp_path, "--inputs", _INPUTS, "--seed", os.environ.get("CKPT_FUZZ_SEED", "18"), "--report", str(report)
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "- findings: 0" in report.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.slow
@needs_linux
def test_nothing_that_the_fuzzer_ever_found_is_there_again(tmp_path: Path) -> None:
    done = _fuzz(tmp_path, "--replay", str(CORPUS))
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


@pytest.mark.slow
@needs_linux
@pytest.mark.timeout(900)
def test_a_slice_of_the_conversations_with_servers_that_lie_finds_nothing(tmp_path: Path) -> None:
    """No crash, no hang, no file elsewhere, no planted secret in what is raised, logged, written or sent on."""
    seed = os.environ.get("CKPT_FUZZ_SEED", "18")
    command = [sys.executable, "-m", "tests.fuzz.servers", "--conversations", "30", "--seed", seed, "--jobs", "1"]
    done = subprocess.run(
        [*command, "--scratch", str(tmp_path)], cwd=_ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.startswith("30 conversations with servers that lie")
    assert list(tmp_path.iterdir()) == []


_PLANTED = """
import json, os, sys
from tests.fuzz import targets
def planted(place):
    exec(open(place.top + "/root/x").read())
targets.BY_NAME["ckpt ls"] = planted
from tests.fuzz.__main__ import main
sys.exit(main())
"""
_FORBIDDEN = [
    ("raise KeyError('x')", "error"),
    ("import ctypes; ctypes.string_at(8)", "crash"),
    ("bytearray(1 << 30)", "memory"),
    ("open(place.top + '/../beside/secret.json').read()", "outside"),
    ("os.unlink(place.top + '/../beside/secret.json')", "outside"),
    ("os.system('true')", "outside"),
    ("from tests.fuzz import canary; canary.fire()", "outside"),
    ("raise targets.WrongError('it is wrong')", "wrong"),
]


@pytest.mark.slow
@needs_linux
def test_what_an_operation_must_not_do_is_found(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for number, (code, _) in enumerate(_FORBIDDEN):
        case = Case("full", "ckpt ls", {"root/x": code.encode()})
        (kept / f"{number}.json").write_text(json.dumps(case.to_json()))
    command = [sys.executable, "-c", _PLANTED, "--scratch", str(tmp_path), "--replay", str(kept)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr[-2000:]
    kinds = re.findall(r"^(\w+): .*\(ckpt ls\)$", done.stdout, re.MULTILINE)
    assert sorted(kinds) == sorted(kind for _, kind in _FORBIDDEN), done.stdout


def test_every_input_that_is_kept_names_an_operation_and_its_finding() -> None:
    for path in CORPUS.glob("*.json"):
        fields = json.loads(path.read_text())
        assert Case.from_json(fields).target in BY_NAME, path.name
        assert fields["finding"].keys() == {"kind", "signature", "evidence"}, path.name


def test_the_number_of_an_input_and_the_seed_decide_all_of_it() -> None:
    trees: dict[str, Tree] = {"full": {"root/step-00000001/state.json": b'{"a": 1}', "root/.lock": b""}}
    names = {kind: tuple(group) for kind, group in TARGETS.items()}
    for number in range(50):
        first, second = (Maker(trees, names, 7).make(number) for _ in range(2))
        assert first == second


def test_a_tree_with_links_and_pipes_survives_json_and_reaches_the_disk(tmp_path: Path) -> None:
    tree: Tree = {
        "root/text": b"plain",
        "root/raw": bytes(range(256)),
        "root/link": Special("link", "{beside}/x"),
        "root/pipe": Special("fifo"),
        "root/socket": Special("socket"),
    }
    assert from_json(json.loads(json.dumps(to_json(tree)))) == tree
    write_tree(tree, str(tmp_path / "in"), "/nowhere")
    assert os.readlink(tmp_path / "in/root/link") == "/nowhere/x"
    assert (tmp_path / "in/root/pipe").is_fifo()
    assert (tmp_path / "in/root/socket").is_socket()


def test_a_resealed_checkpoint_passes_its_own_verification(tmp_path: Path) -> None:
    save(LocalStorage(tmp_path / "root"), "x")
    tree = read_tree(tmp_path)
    tree["root/x/state.json"] = b'{"other": 1}'
    write_tree(reseal(tree), str(tmp_path / "resealed"), "")
    assert verify(tmp_path / "resealed/root") == {"x": []}
    write_tree(tree, str(tmp_path / "altered"), "")
    assert verify(tmp_path / "altered/root") != {"x": []}
