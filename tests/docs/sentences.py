"""Draws sentences that people read: `python -m tests.docs.sentences --seed 1 --count 60`.

A third comes from pages (README, docs, CONTRIBUTING), a third from docstrings of public names and the help of commands,
a third from messages (errors, log records). It prints each with its file: read it on its own, and mend it there.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT, all_pages

GENERATED = {"mutants.md", "fuzzing.md", "campaign.md", "scripts.md"}
LOGGED = {"debug", "info", "warning", "error", "exception", "warn", "once"}
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*\"(\[]|ckpt\b)")
NO_WORDS = re.compile(r"`[^`]*`|\[[^]]*\]\([^)]*\)")  # code and links: a cell that is only a link is no sentence
CODE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|^:::.*?$", re.MULTILINE | re.DOTALL)
Sentence = tuple[str, str]  # where, text


def pages() -> Iterator[Sentence]:
    names = [f"docs/{name}" for name in all_pages() if name not in GENERATED]
    for name in ["README.md", "CONTRIBUTING.md", *names]:
        text = re.sub(
            r"^ *```.*?^ *```$|<!--.*?-->|^:::.*$", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL
        )
        for paragraph in re.split(r"\n\s*\n|^ *(?:- |\d+\. )|^#+ .*$|(?<=\|)\n|\n(?=\|)", text, flags=re.MULTILINE):
            cells = paragraph.strip(" |\n").split(" | ") if paragraph.lstrip().startswith("|") else [paragraph]
            yield from ((name, sentence) for cell in cells for sentence in sentences_of(cell))


def docstrings() -> Iterator[Sentence]:
    reference = "".join(path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md")))
    listed = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", reference, re.MULTILINE)}
    for path in sorted((ROOT / "ckpt").rglob("*.py")):
        where = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            public = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name in listed
            command = where.startswith("ckpt/cli") and isinstance(node, ast.FunctionDef) and node.decorator_list
            shown = public or command or (where == "ckpt/errors.py" and isinstance(node, ast.ClassDef))
            text = ast.get_docstring(node) if shown and isinstance(node, (ast.ClassDef, ast.FunctionDef)) else ""
            if isinstance(node, ast.keyword) and node.arg == "help":
                text = text_of(node.value)
            yield from ((where, sentence) for sentence in sentences_of(text or ""))


def messages() -> Iterator[Sentence]:
    for path in sorted(path for folder in ("ckpt", "formats", "storage") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and (call is not node or last_name(call.func) in LOGGED):
                text = " ".join(text_of(argument) for argument in call.args)
                yield from ((str(path.relative_to(ROOT)), sentence) for sentence in sentences_of(text))


def last_name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def text_of(node: ast.expr) -> str:
    """The text of a literal; whatever is put into it is `…`."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return re.sub(r"%[sdr]", "…", node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def sentences_of(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n|\n(?=\s+\**\w+: )", text):
        for sentence in [] if paragraph.startswith(("\b", "    ")) else END.split(" ".join(paragraph.split())):
            if len(re.findall(r"[A-Za-z]{2,}", NO_WORDS.sub("", sentence))) >= 4:
                yield sentence


def draw(seed: int, count: int) -> list[Sentence]:
    """As many sentences from each of the three, by a seed; a sentence that is in several places counts once."""
    chosen = random.Random(seed)
    found = [sorted({text: where for where, text in kind()}.items()) for kind in (pages, docstrings, messages)]
    drawn = [chosen.sample(kind, -(-count // len(found))) for kind in found]
    return [(where, text) for texts in zip(*drawn, strict=True) for text, where in texts][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws sentences that people read.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    options = parser.parse_args()
    for number, (where, text) in enumerate(draw(options.seed, options.count), start=1):
        print(f"{number:3}. [{where}] {text}")


if __name__ == "__main__":
    main()
