"""A hook of mkdocs: what lies beside docs/ (examples, results of benchmarks, the changelog) has pages in the site too.

Links in the documents are those of the repository, so that they work there. Those that lead out of docs/ are rewritten
to the pages made here; one that leads to a file without a page is a warning, and with --strict an error.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changes.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples/index.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(?=[)#])")
FENCE = re.compile(r"^(?: *```.*?^ *```$)", re.MULTILINE | re.DOTALL)

_log = logging.getLogger("mkdocs.hooks.site")


def on_config(config: Any) -> Any:
    """Every decision has its place in the navigation."""
    for section in config.nav:
        for entry in next(iter(section.values())):
            if entry == {"Decisions": "decisions/"}:
                entry["Decisions"] = [
                    f"decisions/{path.name}" for path in sorted((ROOT / "docs/decisions").glob("*.md"))
                ]
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, uri in _beside().items():
        if path == "README.md":
            continue
        text = (ROOT / path).read_bytes()
        content = _listing(path, text.decode()) if path.endswith(".py") else text
        inclusion = InclusionLevel.INCLUDED if uri in PAGES.values() else InclusionLevel.NOT_IN_NAV  # reached by links
        files.append(File.generated(config, uri, content=content, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = _repository_path(page.file.src_uri)
    known = _beside()

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[1]))
        uri = known.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if uri is None:
            _log.warning("%s links to %s, which has no page in the site", here, match[1])
            return match[1]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    parts = re.split(f"({FENCE.pattern})", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(rewritten, part) for number, part in enumerate(parts))


def _beside() -> dict[str, str]:
    """The files beside docs/ that have a place in the site, by their path in the repository."""
    examples = {f"examples/{path.name}": f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")}
    results = [path for path in (ROOT / "benchmarks/results").iterdir() if path.suffix in (".md", ".svg", ".json")]
    return PAGES | examples | {(uri := f"benchmarks/results/{path.name}"): uri for path in results}


def _repository_path(uri: str) -> str:
    return {page: path for path, page in _beside().items() if path != "README.md"}.get(uri, f"docs/{uri}")


def _listing(path: str, code: str) -> str:
    return f'# {os.path.basename(path)}\n\n```python title="{path}"\n{code}```\n'
