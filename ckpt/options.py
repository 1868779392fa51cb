"""The options of a manager, checked before anything is done with them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ckpt.errors import ConfigError
from ckpt.root.retention import Keep
from ckpt.save.capture import LAYOUTS
from ckpt.storage import Staging, Storage


def check_options(*, save_every: Any, keep: Any, layout: Any, timeout: Any, when_busy: Any) -> None:
    """Raise one error that names every option that makes no sense."""
    wrong = []
    if save_every is not None and (not isinstance(save_every, int) or save_every < 1):
        wrong.append(f"save_every={save_every!r} must be a number of steps, 1 or more")
    if keep is not None and not isinstance(keep, Keep):
        wrong.append(f"keep={keep!r} must be a ckpt.Keep, for example Keep(last=3)")
    if when_busy not in ("wait", "skip"):
        wrong.append(f"when_busy={when_busy!r} must be 'wait' or 'skip'")
    if layout not in LAYOUTS:
        wrong.append(f"layout={layout!r} must be one of {', '.join(LAYOUTS)}")
    if not (isinstance(timeout, int | float) and 0 < timeout < math.inf):
        wrong.append(f"timeout={timeout!r} must be a number of seconds")
    if wrong:
        raise ConfigError("StateManager: " + "; ".join(wrong) + ".")


def check_mirror(mirrors: Iterable[Storage], *, keep: Any, bandwidth: Any, backlog: Any) -> None:
    """The same for what is said about a mirror."""
    wrong = []
    for one in mirrors:
        if isinstance(one, Staging):
            wrong.append(f"mirror={one.url!r} shows objects by commits, and takes no copies: see push_to_hub")
    if keep is not None and not isinstance(keep, Keep):
        wrong.append(f"mirror_keep={keep!r} must be a ckpt.Keep, for example Keep(last=3)")
    if bandwidth is not None and not (isinstance(bandwidth, int | float) and bandwidth > 0):
        wrong.append(f"mirror_bandwidth={bandwidth!r} must be a number of bytes in a second")
    if not isinstance(backlog, int) or backlog < 1:
        wrong.append(f"mirror_backlog={backlog!r} must be a number of checkpoints, 1 or more")
    if wrong:
        raise ConfigError("StateManager: " + "; ".join(wrong) + ".")


def required_root(root: Any) -> Any:
    """The root, which neither the caller nor the accelerator's project may leave out."""
    if root is None:
        raise ConfigError(
            "StateManager needs a root: the folder or URL below which checkpoints are kept. An accelerator brings one "
            "if its ProjectConfiguration has a project_dir."
        )
    return root
