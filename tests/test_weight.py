"""The library does not gain weight: what `tests/weight.py` measures, where it is a property of the tree."""

from __future__ import annotations

import pytest

from tests import weight

PRIVATE_NAMES = 40
ARGUMENTS = 15
MODULES = 214  # one more than before: what ranks of a host write together
CROSSED = {"save": 45, "resume": 50, "steps": 12}


def test_private_names_of_others_are_in_one_package_alone() -> None:
    assert weight.foreign_private_names(weight.sources()) == []
    assert len(weight.declared_names()) <= PRIVATE_NAMES


def test_no_class_of_others_is_patched_but_in_the_processes_of_selftest() -> None:
    patched = weight.patched_classes(weight.sources())
    assert [one for one in patched if not one.startswith(weight.SELFTEST)] == []
    assert patched  # those of selftest are found


def test_the_library_has_no_more_modules() -> None:
    assert len(weight.sources()) <= MODULES


def test_the_manager_takes_no_more_arguments() -> None:
    assert len(weight.arguments()) <= ARGUMENTS


@pytest.mark.slow
def test_a_save_a_resume_and_a_step_cross_no_more_modules() -> None:
    found = weight.crossed()
    assert found.keys() == CROSSED.keys()
    grown = {name: sorted(modules) for name, modules in found.items() if len(modules) > CROSSED[name]}
    assert grown == {}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("tensor._version", ["_version"]),
        ("getattr(loader, '_iterator', None)", ["_iterator"]),
        ("NAMES = ('_tr_loss', 'state')", ["_tr_loss"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("from torch._subclasses import FakeTensor", ["torch._subclasses.FakeTensor"]),
        ("def f():\n    from torch.distributed.tensor import _utils", ["torch.distributed.tensor._utils"]),
        ("self._begin()", []),
        ("super().__init__()", []),
        ("from ckpt.x import _y", []),
        ("os._exit(1)", []),
        ("def _mine(): pass\nother._mine", []),
    ],
)
def test_private_names_of_others_are_seen(code: str, names: list[str]) -> None:
    uses = weight.foreign_private_names({"ckpt/x.py": weight.nodes(code)})
    assert [use.name for use in uses] == names


def test_lines_are_counted_without_blanks_comments_and_docstrings() -> None:
    text = (
        '"""One.\n\nTwo."""\n\n# three\nx = """a\nb"""  # four\n\n\ndef f() -> None:\n    """Five."""\n    return x\n'
    )
    assert weight.code_lines(text) == 4
