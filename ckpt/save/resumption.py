"""What the first checkpoint after a load says of it: which one was loaded, and which newer ones were passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.formats.native.manifest import Manifest
from ckpt.shown import shown

MOST = 20  # checkpoints that were passed over; of more, the rest is counted
LONGEST = 400  # characters of a reason
_TIERS = {-1: "memory", 0: "root", 1: "mirror"}


def resumption(loaded: Manifest, tier: int, passed_over: Mapping[str, str]) -> dict[str, Any]:
    """The field `resumed` of a manifest. `passed_over`: the newer ones that could not be used, with the reasons."""
    some = list(passed_over.items())[:MOST]
    more = {"more": len(passed_over) - MOST} if len(passed_over) > MOST else {}
    return {
        "name": shown(loaded.name),
        "id": loaded.id,
        "step": loaded.step,
        "found_in": _TIERS.get(tier, "elsewhere"),
        "passed_over": {shown(name): _short(shown(why)) for name, why in some},
        **more,
    }


def _short(why: str) -> str:
    return why if len(why) <= LONGEST else f"{why[: LONGEST - 3]}..."
