"""What a session is built from: the ranks that it is of, the mirror of its root, and its objects."""

from __future__ import annotations

import weakref

from ckpt.data.loop import Loop
from ckpt.errors import ConfigError
from ckpt.options import ManagerOptions, RankOptions
from ckpt.ranks.find import find_ranks
from ckpt.ranks.group import MAIN, Ranks
from ckpt.ranks.hosts import Hosts, find_hosts, may_have_separate_roots
from ckpt.ranks.preemption import Preemption
from ckpt.root.mirror import Copies, MirrorPatience, MirrorWorker
from ckpt.root.open import refuse_checkpoint, try_out_tiers
from ckpt.root.retention import Keep
from ckpt.state.objects import GivenObjects, ObjectSource
from ckpt.state.registry import StateRegistry
from ckpt.state.unmanaged import weakly
from ckpt.storage import MemoryStorage, Storage, place_of


def meet_ranks(options: RankOptions, tiers: tuple[Storage, ...], patience: MirrorPatience) -> tuple[Ranks, Hosts]:
    """The ranks of a job and their hosts. Refuses a root or a mirror that they cannot use."""
    storage = tiers[0]
    place, own_root = place_of(storage), may_have_separate_roots(storage, shared=options.shared)
    ranks = find_ranks(place, own_root=own_root, **options.meeting)
    if ranks.world_size > 1 and any(isinstance(storage, MemoryStorage) for storage in tiers):
        raise ConfigError("memory:// is in one process, and this job has several. Give it a root that all can see.")
    try_out_tiers(*tiers, patience=patience)
    refuse_checkpoint(storage)
    return ranks, find_hosts(ranks, storage, shared=options.shared)


def build_mirror(
    options: ManagerOptions,
    tiers: tuple[Storage, ...],
    keep: Keep | None,
    ranks: Ranks,
    hosts: Hosts,
    patience: MirrorPatience,
) -> MirrorWorker | None:
    """The worker that copies to the mirror, if there is one."""
    if (mirror := options.mirror) is None:
        return None
    copies = Copies(
        tiers[0],
        tiers[1],
        keep=keep if mirror.keep is None else mirror.keep,
        bandwidth=mirror.bytes_per_second,
        has_all_files=not hosts.separate_roots,
        is_leader=ranks.rank == MAIN,
    )
    return MirrorWorker(copies, mirror.backlog, patience)


def build_preemption(options: RankOptions, ranks: Ranks, patience: MirrorPatience) -> Preemption:
    """What answers SIGTERM, after which the end does not wait long for a mirror that is away."""
    return Preemption(ranks, sigint=options.handle_sigint, grace=options.grace, on_told=patience.hurry)


def build_registry(source: ObjectSource, gradients: bool | None, loop: Loop, ranks: Ranks) -> StateRegistry:
    """The registry of the source's objects, whose optimizers the loop watches."""
    gradients = (source.gradients or None) if gradients is None else gradients
    return StateRegistry(source.find, (loop.watch,), gradients=gradients, members=ranks.members)


def connect_loop(loop: Loop, registry: StateRegistry, source: ObjectSource) -> None:
    """Let the loop follow the loaders that it was given. They may outlive the manager, so nothing of it is held by
    them."""
    reference = weakref.ref(registry)
    loop.has_data = lambda: bool((found := reference()) is not None and found.generators)
    loop.before_pass = weakly(registry.refresh)
    loop.sets_iteration = isinstance(source, GivenObjects)
    loop.follow_named()
    source.on_loader(weakly(loop.follow_named))
