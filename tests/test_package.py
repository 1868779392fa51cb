"""The wheel, and what it does to a project that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckpt
from tests.helpers.wheel import install_wheel

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, installed alone into an empty folder."""
    return install_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_adds_ckpt_alone_to_the_import_names(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} - {"bin"}
    assert names == {"ckpt"}
    inside = {path.name for path in (installed / "ckpt").iterdir()}
    assert {"formats", "storage", "integrations", "py.typed"} <= inside


def test_every_package_of_the_tree_is_in_the_wheel(installed: Path) -> None:
    there = {path.parent.relative_to(installed).as_posix() for path in installed.glob("ckpt/**/__init__.py")}
    tops = {"ckpt": REPOSITORY / "ckpt", "ckpt/formats": REPOSITORY / "formats", "ckpt/storage": REPOSITORY / "storage"}
    wanted = {
        f"{name}/{path.parent.relative_to(top).as_posix()}".removesuffix("/.")
        for name, top in tops.items()
        for path in top.rglob("__init__.py")
    }
    assert there == wanted
    assert len(there) > 20


def test_a_project_with_its_own_storage_and_formats_imports_it_without_harm(installed: Path, tmp_path: Path) -> None:
    for name in ("storage", "formats"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("whose = 'mine'\n")
    script = (
        "import ckpt, ckpt.storage, ckpt.formats.native.tensor_file, storage, formats\n"
        "assert storage.whose == formats.whose == 'mine'\n"
        f"assert ckpt.__file__.startswith({str(installed)!r}), ckpt.__file__\n"
        f"assert ckpt.formats.__file__.startswith({str(installed)!r})\n"
        "import torch\n"
        "manager = ckpt.StateManager('run', model=torch.nn.Linear(1, 1))\n"
        "manager.save_state('x')\n"
        "assert manager.load_state().name == 'x'\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{installed}"}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with ckpt.StateManager(
        tmp_path, model=model, optimizer=optimizer, saving=ckpt.SaveOptions(gradients=True)
    ) as manager:
        manager.register(dice=torch.Generator())
        manager.save_state("x")
    files = sorted((tmp_path / "x").iterdir())
    assert len(files) == 7  # with the copy of the manifest
    for file in files:
        found = subprocess.run([sys.executable, "-m", "pickletools", str(file)], capture_output=True, text=True)
        assert found.returncode != 0, f"{file.name} is a pickle"
        assert "Error" in found.stderr
