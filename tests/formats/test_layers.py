"""Layers of formats: shared modules import neither `native` nor `foreign`, and `native` does not import `foreign`.

The registry, which knows all of them by the names of their files, imports those of the native format.
"""

from __future__ import annotations

import pytest

from tests.test_imports import below, imported, modules, package_of, parsed

NATIVE, FOREIGN = "ckpt.formats.native", "ckpt.formats.foreign"


def imports_of(module: str) -> list[str]:
    path = modules()[module]
    return list(imported(parsed(path), package_of(module, path)))


REGISTRY = "ckpt.formats.registry"
SHARED = sorted(
    name for name in modules() if below(name, "ckpt.formats") and not below(name, NATIVE, FOREIGN, REGISTRY)
)


@pytest.mark.parametrize("module", SHARED)
def test_what_formats_share_imports_no_format(module: str) -> None:
    assert [name for name in imports_of(module) if below(name, NATIVE, FOREIGN)] == []


@pytest.mark.parametrize("module", sorted(name for name in modules() if below(name, NATIVE)))
def test_the_native_format_imports_no_foreign_one(module: str) -> None:
    assert [name for name in imports_of(module) if below(name, FOREIGN)] == []


def test_the_registry_imports_no_foreign_format() -> None:
    assert [name for name in imports_of(REGISTRY) if below(name, FOREIGN)] == []


def test_the_shared_modules_are_found() -> None:
    assert {"ckpt.formats.pieces", "ckpt.formats.tensors", "ckpt.formats.layout"} <= set(SHARED)
