"""What all ranks do at a step that is due: the main rank decides from what each of them sees."""

from __future__ import annotations

from typing import TypedDict

from ckpt.memory import room
from ckpt.memory.place import memory_directory
from ckpt.ranks.hosts import Hosts

SAVE, SKIP, GIVE_WAY = "save", "skip", "give way"


class View(TypedDict):
    """What a rank knows before a snapshot. `size`: bytes that it would write. `room`: of its host, by its owner.

    `peak`: bytes that its training needs within a step, beside what it holds now.
    """

    busy: bool
    error: str
    full: bool  # the error says that there is no more memory
    size: int
    peak: int
    room: room.Room | None


class Verdict(TypedDict):
    """What all ranks do: take the snapshot, leave it out, or give way to the training for a while, and why.

    `free`: whether the memory of earlier snapshots is given back too. `memfd`: the owners of folders that are to be
    made where the tmpfs is too small.
    """

    do: str
    why: str
    free: bool
    memfd: list[int]


def verdict_of(views: list[View], hosts: Hosts, copies: bool = False) -> Verdict:
    """On the main rank: from the views of all ranks. `copies`: each host keeps those of the host before it too."""
    if any(view["busy"] for view in views):  # before errors: to give way, each rank waits for what it has under way
        return {"do": SKIP, "why": "", "free": False, "memfd": []}
    errors = dict.fromkeys(view["error"] for view in views if view["error"])
    if errors:
        return {"do": GIVE_WAY, "why": "; ".join(errors), "free": any(view["full"] for view in views), "memfd": []}
    measured = {owner: view["room"] for owner, view in enumerate(views) if view["room"] is not None}
    sizes = {owner: [view["size"] for view in _on_host(owner, views, hosts)] for owner in measured}
    peaks = {owner: sum(view["peak"] for view in _on_host(owner, views, hosts)) for owner in measured}
    if copies and hosts.separate_roots:
        ring = sorted(sizes)
        sizes = {owner: sizes[owner] + sizes[ring[at - 1]] for at, owner in enumerate(ring)}
    where = str(memory_directory())
    lacking = (room.problem(found, sizes[owner], where, peaks[owner]) for owner, found in measured.items())
    small = [owner for owner, found in measured.items() if room.exceeds_tmpfs(found, sizes[owner])]
    return save_unless("; ".join(filter(None, lacking)), small)


def save_unless(why_not: str, memfd: list[int] | None = None) -> Verdict:
    return {"do": GIVE_WAY if why_not else SAVE, "why": why_not, "free": bool(why_not), "memfd": memfd or []}


def _on_host(owner: int, views: list[View], hosts: Hosts) -> list[View]:
    """Those of the ranks on the host of this one."""
    first = hosts.first if hosts.separate_roots else (owner,) * len(views)
    return [view for rank, view in enumerate(views) if first[rank] == owner]
