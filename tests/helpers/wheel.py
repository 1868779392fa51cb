"""The wheel of this checkout, built and installed without the network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def install_wheel(folder: Path) -> Path:
    """Build the wheel from the files that git knows, and return the folder in which it is installed alone."""
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPOSITORY, capture_output=True, check=True
    )
    for name in tracked.stdout.decode().splitlines():
        if (REPOSITORY / name).is_file() and not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPOSITORY / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (folder / "dist").iterdir()
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return folder / "site"
