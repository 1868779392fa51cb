"""A model in parts: its names are those of the parts."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class JoinedModel(nn.Module):
    """The parts of one model. A tensor has the name that it has in its part, after the part's prefix.

    `prefixes`: by the name of a part among the submodules.
    """

    def __init__(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.prefixes: dict[str, str] = {}
        for number, (prefix, part) in enumerate(parts):
            self.prefixes[str(number)] = prefix
            self.add_module(str(number), part)

    @property
    def parts(self) -> list[nn.Module]:
        return [self.get_submodule(number) for number in self.prefixes]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a joined model; any other is its only part."""
    return model.parts if isinstance(model, JoinedModel) else [model]
