"""The checks of `make release`: `python -m tests.release build/dist`.

What was built has every module, the metadata that an index shows, and an entry in the changelog. In a new environment
it installs, and runs its demo.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from ckpt.version import __version__

REPOSITORY = Path(__file__).resolve().parent.parent
_WANTED = ("Name", "Version", "Summary", "License-Expression", "Requires-Python", "Classifier")


def problems(folder: Path) -> list[str]:
    """What must be mended before these files are published."""
    wheels, archives = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if (len(wheels), len(archives)) != (1, 1):
        return [f"{folder} has {len(wheels)} wheels and {len(archives)} source archives, not one of each"]
    return [*_of_metadata(_metadata(wheels[0])), *_of_changelog(), *_of_files(wheels[0], archives[0])]


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def _of_metadata(found: Message) -> list[str]:
    missing = [f"the metadata has no {key}" for key in _WANTED if not found.get_all(key)]
    if found["Version"] != __version__:
        missing.append(f"it was built as {found['Version']}, and the tree has {__version__}")
    if len(str(found.get_payload())) < 2000:
        missing.append("its README is missing or short")
    return missing


def _of_changelog() -> list[str]:
    headings = re.findall(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    return [] if headings[:1] == [__version__] else [f"CHANGELOG.md begins with {headings[:1]}, not {__version__}"]


def _of_files(wheel: Path, archive: Path) -> list[str]:
    """Modules of the tree that one of the files lacks."""
    tops = {"ckpt": "ckpt", "formats": "ckpt/formats", "storage": "ckpt/storage"}
    modules = [(top, path.relative_to(REPOSITORY / top)) for top in tops for path in (REPOSITORY / top).rglob("*.py")]
    with zipfile.ZipFile(wheel) as opened:
        there = set(opened.namelist())
    with tarfile.open(archive) as opened_archive:
        kept = {name.partition("/")[2] for name in opened_archive.getnames()}
    lacking = [f"{wheel.name} lacks {tops[top]}/{path}" for top, path in modules if f"{tops[top]}/{path}" not in there]
    lacking += [f"{archive.name} lacks {top}/{path}" for top, path in modules if f"{top}/{path}" not in kept]
    return lacking


def try_demo(wheel: Path) -> None:
    """Install the wheel into a new environment, and run `ckpt demo` there."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        constraints = str(REPOSITORY / "constraints.txt")
        pip = [f"{folder}/bin/pip", "install", "--quiet", "--disable-pip-version-check", "-c", constraints, str(wheel)]
        subprocess.run(pip, check=True)
        subprocess.run([f"{folder}/bin/ckpt", "demo"], check=True, cwd=folder)


if __name__ == "__main__":
    dist = Path(sys.argv[1])
    if wrong := problems(dist):
        sys.exit("\n".join(wrong))
    try_demo(next(dist.glob("*.whl")))
