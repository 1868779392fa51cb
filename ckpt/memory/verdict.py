"""What all ranks do at a step that is due: the main rank decides from what each of them sees."""

from __future__ import annotations

from typing import TypedDict

from ckpt.memory import room
from ckpt.memory.place import memory_directory
from ckpt.ranks.hosts import Hosts

SAVE, SKIP, GIVE_WAY = "save", "skip", "give way"


class View(TypedDict):
    """What a rank knows before a snapshot. `size`: bytes that it would write. `room`: of its host, by its owner."""

    busy: bool
    error: str
    full: bool  # the error says that there is no more memory
    size: int
    room: room.Room | None


class Verdict(TypedDict):
    """What all ranks do: take the snapshot, leave it out, or give way to the training for a while, and why.

    `free`: whether the memory of earlier snapshots is given back too.
    """

    do: str
    why: str
    free: bool


def verdict_of(views: list[View], hosts: Hosts) -> Verdict:
    """On the main rank: from the views of all ranks."""
    errors = dict.fromkeys(view["error"] for view in views if view["error"])
    if errors:
        return {"do": GIVE_WAY, "why": "; ".join(errors), "free": any(view["full"] for view in views)}
    if any(view["busy"] for view in views):
        return {"do": SKIP, "why": "", "free": False}
    lacking = (_lacking(owner, view, views, hosts) for owner, view in enumerate(views))
    return save_unless("; ".join(filter(None, lacking)))


def save_unless(why_not: str) -> Verdict:
    return {"do": GIVE_WAY if why_not else SAVE, "why": why_not, "free": bool(why_not)}


def _lacking(owner: int, view: View, views: list[View], hosts: Hosts) -> str:
    """What the host of this rank has too little of, if the rank has measured it for all ranks of the host."""
    if view["room"] is None:
        return ""
    first = hosts.first if hosts.separate_roots else (owner,) * len(views)
    sizes = [other["size"] for rank, other in enumerate(views) if first[rank] == owner]
    return room.problem(view["room"], sizes, str(memory_directory()))
