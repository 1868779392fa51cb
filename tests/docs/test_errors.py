"""The page of errors has an entry for every class, and quotes messages that the code has."""

from __future__ import annotations

import ast
import inspect
import re

from ckpt import errors
from tests.docs.pages import DOCS
from tests.weight import sources

PAGE = (DOCS / "errors.md").read_text()
ENTRY = re.compile(r"^### (\w+)\n\n\*\*Cause\.\*\* .+?\*\*What to do\.\*\* \S", re.MULTILINE | re.DOTALL)
CLASSES = [name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == "ckpt.errors"]


def test_every_class_of_error_has_an_entry_with_a_cause_and_what_to_do() -> None:
    headings = re.findall(r"^### (\w+)", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(CLASSES)
    sections = re.split(r"^(?=### )", PAGE, flags=re.MULTILINE)[1:]
    assert [section.split("\n")[0] for section in sections if not ENTRY.match(section)] == []


def test_the_page_shows_the_tree_that_the_module_shows() -> None:
    shown = re.findall(r"^[│├└─ ]*(\w+)", PAGE[PAGE.index("```text") : PAGE.index("Preempted (")], re.MULTILINE)
    assert shown == [name for name in CLASSES if name != "Preempted"]


def messages() -> list[str]:
    """All texts in the code, with `…` for what is filled in."""
    found = []
    for node in (node for nodes in sources().values() for node in nodes):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value.replace("%s", "…").replace("%d", "…"))
    return found


def test_every_message_on_the_page_is_one_of_the_code() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \| ", PAGE[PAGE.index("## Messages") :], re.MULTILINE)
    assert len(quoted) > 15
    texts = messages()
    assert [text for text in quoted if not any(has(known, text) for known in texts)] == []


def has(text: str, quoted: str) -> bool:
    """Whether all that is between the gaps of a quotation is in a text, one after the other."""
    for part in quoted.split("…"):
        _, found, text = text.partition(part) if part else ("", "…", text)
        if not found:
            return False
    return True
