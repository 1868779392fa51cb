"""The documentation names files and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt.config import read_config

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("campaign.md", "mutants.md")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name not in GENERATED),
]
FOLDERS = "ckpt|formats|storage|tests|docs|benchmarks|examples"
NAMED = re.compile(rf"(?<![\w./:@-])((?:{FOLDERS})/[\w./*-]*[\w*/])((?:::\w+(?:\.\w+)*)*)")
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)\)")
BARE_TEST = re.compile(r"(?<![\w/])test_\w+\.py\b")
TEST_NAME = re.compile(r"`(test_\w+)`")


def problems(text: str, folder: Path = ROOT) -> list[str]:
    """What a document names and the tree does not have."""
    missing = [path for path, _ in NAMED.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    links = [link for link in LINK.findall(text) if not (folder / link).exists()]
    bare = [f"{name} (say in which folder)" for name in BARE_TEST.findall(text)]
    return [*missing, *links, *bare, *undefined(text)]


def undefined(text: str) -> list[str]:
    """What is named as `file.py::Class.method` and is not in that file, and tests that no file has."""
    found = []
    for path, names in NAMED.findall(text):
        source = (ROOT / path).read_text() if names and (ROOT / path).is_file() else ""
        wrong = [name for name in re.findall(r"\w+", names) if source and not defines(source, name)]
        found += [f"{path}::{name}" for name in wrong]
    names = TEST_NAME.findall(text)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py")) if names else ""
    return [*found, *(name for name in names if not defines(tests, name))]


def defines(source: str, name: str) -> bool:
    return re.search(rf"^ *(?:(?:class|def) {name}\b|{name}(?::|\s=))", source, re.MULTILINE) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_and_every_test_that_a_document_names_exists(document: Path) -> None:
    assert problems(document.read_text(), document.parent) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_in_a_document_is_no_wider_than_the_site_shows(document: Path) -> None:
    lines = [line for block in BLOCK.findall(document.read_text()) for line in block.splitlines()]
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize(
    "text",
    [
        "see `tests/test_nothing.py`",
        "see `ckpt/save/saver.py::Nobody`",
        "see `ckpt/save/saver.py::Saver.nothing`",
        "see `test_imports.py`",
        "see `test_that_nobody_wrote`",
        "see [there](docs/nothing.md)",
        "below `benchmarks/*/nothing`",
    ],
)
def test_what_does_not_exist_is_found(text: str) -> None:
    assert problems(text)


def test_what_exists_is_no_problem() -> None:
    text = (
        "`ckpt/save/saver.py::Saver.save`, `tests/mutants/*.yaml`, `ckpt/state/`, [d](docs/format.md), `runs/ckpt/x.py`"
    )
    assert problems(text) == []
    assert len(DOCUMENTS) > 5


def test_the_yaml_of_the_documentation_has_options_that_exist(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs/options.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "ckpt.yaml").write_text(example)
    assert {"root", "keep", "mirror", "saving", "ranks"} <= read_config(tmp_path / "ckpt.yaml").keys()
