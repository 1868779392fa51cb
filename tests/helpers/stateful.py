"""An object that a manager can register."""

from __future__ import annotations

from typing import Any


class Stateful:
    """An object whose state is its own, live, dict."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
