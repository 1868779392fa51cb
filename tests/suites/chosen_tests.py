"""What the plugins in this folder share: which of a library's own tests run, and which of those can't apply to ckpt.

A plugin has two tables. `CHOSEN`: parts of the names of the tests to run, by the name of their file; no part means all.
`CANNOT_APPLY`: the names of tests that must fail, by the reason. A listed test that passes, or that is no longer there,
is an error, so the list stays true.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--background", action="store_true", help="save as ckpt does by itself, while training goes on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite: Any = next(plugin for plugin in config.pluginmanager.get_plugins() if hasattr(plugin, "CANNOT_APPLY"))
    chosen = [item for item in items if any(part in item.name for part in suite.CHOSEN[item.path.name] or ("",))]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
    unknown = {name for names in suite.CANNOT_APPLY.values() for name in names}
    for item in items:
        for reason, names in suite.CANNOT_APPLY.items():
            if named := {item.name, item.name.partition("[")[0]}.intersection(names):
                unknown -= named
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    if unknown:
        raise pytest.UsageError(f"CANNOT_APPLY names tests that are not there: {', '.join(sorted(unknown))}")
