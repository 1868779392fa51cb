"""The table of supported versions is that of pyproject.toml and constraints.txt."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS, ROOT

ROWS = dict(
    re.findall(
        r"^\| (\w[\w, -]*?) \| ([\d.]+ and newer \| [\d.]+) \|", (DOCS / "versions.md").read_text(), re.MULTILINE
    )
)
PROJECT = (ROOT / "pyproject.toml").read_text()
PINNED = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def test_the_table_says_what_pyproject_allows_and_what_ci_pins() -> None:
    assert {"torch", "transformers", "accelerate", "huggingface_hub", "Python"} <= ROWS.keys()
    for names, found in ROWS.items():
        for name in names.split(", "):
            assert [found.partition(" ")[0]] == least_of(name), name
            tested = found.rpartition(" ")[2]
            assert name == "Python" or f"{PINNED[name]}.".startswith(f"{tested}."), name


def least_of(name: str) -> list[str]:
    """The oldest version of a package that is allowed, the same wherever it is asked for."""
    asked = r'requires-python = ">=([\d.]+)"' if name == "Python" else rf'"{name}>=([\d.]+)"'
    return sorted(set(re.findall(asked, PROJECT)))
