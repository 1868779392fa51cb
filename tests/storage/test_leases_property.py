"""Leases under random interleavings of several processes, with latencies, lost answers, freezes and crashes.

A failure names its seed. CKPT_LEASE_SEEDS sets how many seeds are run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

import pytest

from ckpt.errors import LockedError, StorageError
from ckpt.storage.leases import EXPIRY, Leases, shared_folder
from tests.storage.lease_simulation import Actors, Process, Store, Task, World, install

SEEDS = range(int(os.environ.get("CKPT_LEASE_SEEDS", "10")))
QUICK = 5  # of them are run by `make check`
DURATION = 400.0  # seconds of the simulation


@pytest.fixture
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(getattr(request, "param", 0))
    install(world, monkeypatch)
    yield world
    world.close()


every_seed = pytest.mark.parametrize(
    "world", [pytest.param(seed, marks=[pytest.mark.slow] if seed >= QUICK else []) for seed in SEEDS], indirect=True
)


def start(world: World, machine: int | None = None) -> tuple[Process, Leases]:
    """A new process, and its leases."""
    return world.process(machine), Leases(Store(world))


def work(world: World, of: Leases) -> None:
    """What a holder does: time passes, and before each write it confirms that it still holds the lease."""
    for _ in range(world.random.randrange(6)):
        world.sleep(world.random.choice([0.1, 5.0, 40.0]) * world.random.random())
        of.confirm()


def take_and_hold(actors: Actors, of: Leases, *, shared: float) -> None:
    """A process that takes leases again and again."""
    world = actors.world
    while world.now < DURATION:
        world.sleep(world.random.choice([0.1, 3.0, 30.0]) * world.random.random())
        try:
            actors.hold(of, shared=world.random.random() < shared, work=partial(work, world))
        except StorageError as error:
            world.note(f"{type(error).__name__}: {error}")


def disturb(world: World, *, crashes: bool) -> None:
    """Now and then a process is frozen, loses the network for a while, or crashes."""
    while world.now < DURATION:
        world.sleep(40 * world.random.random())
        victim = world.random.choice(world.processes[1:])
        kind = world.random.choice(["freeze", "faults", "faults", "crash" if crashes else "faults"])
        until = world.now + world.random.choice([5.0, 50.0, 200.0]) * world.random.random()
        world.note(f"{kind} process {victim.number} until {until:.2f}")
        if kind == "crash":
            victim.crashed = True
        elif kind == "freeze":
            victim.frozen_until = victim.disturbed = until
        else:
            victim.faulty_until = until


def acquire_at_last(actors: Actors, of: Leases) -> None:
    """Try until the lease is acquired, which must not take longer than the dead holders are waited for.

    Shared holders on other machines are found one after the other: an acquisition ends at the first that may live.
    """
    world, began = actors.world, actors.world.now
    dead = sum(path.startswith(shared_folder(actors.KEY)) for path in world.objects)
    while True:
        try:
            actors.hold(of, shared=False, work=lambda _: None)
        except LockedError:
            if world.now - began > (1 + dead) * (EXPIRY + 15):
                actors.violated("nobody who lives holds it, and it is not free")
            world.sleep(2)
        else:
            return


def run_disturbed(world: World, *, shared: float) -> Actors:
    """Processes on two machines that take leases while they are disturbed."""
    actors = Actors(world)
    tasks: list[Task] = [world.spawn(world.process(), lambda: disturb(world, crashes=True))]
    for number in range(4):
        process, of = start(world, machine=number % 3)
        tasks.append(world.spawn(process, partial(take_and_hold, actors, of, shared=shared)))
    world.run(tasks)
    return actors


@every_seed
@pytest.mark.parametrize("shared", [0.0, 0.5], ids=["exclusive", "also shared"])
def test_no_two_hold_what_excludes_them_and_who_lives_is_not_taken_over(world: World, shared: float) -> None:
    run_disturbed(world, shared=shared)


@every_seed
def test_who_gets_no_answers_to_renewals_does_not_believe_that_they_were_made_later(world: World) -> None:
    actors = Actors(world)
    for number in range(4):
        process, of = start(world)
        process.loses_answers = number < 2
        world.spawn(process, partial(take_and_hold, actors, of, shared=0.0))
    world.run([world.spawn(world.process(), lambda: world.sleep(DURATION))])


@every_seed
def test_what_dead_processes_held_is_free_after_the_expiry(world: World) -> None:
    actors = run_disturbed(world, shared=0.5)
    for process in world.processes:
        process.crashed = True
    process, of = start(world)
    world.run([world.spawn(process, partial(acquire_at_last, actors, of))])
    assert actors.taken > 1


@every_seed
def test_a_released_lease_is_free_at_once(world: World) -> None:
    actors = Actors(world)
    first, second = start(world), start(world)

    def in_turn() -> None:
        for _ in range(4):
            shared = world.random.random() < 0.5
            of = world.random.choice([first, second])[1]
            began = world.now
            actors.hold(of, shared=shared, work=lambda _: world.sleep(50 * world.random.random()))
            assert world.now - began < 60

    world.run([world.spawn(first[0], in_turn)])
    assert actors.taken == 4


@every_seed
@pytest.mark.parametrize("left_by", ["nobody", "a dead process"])
def test_of_many_that_come_at_once_exactly_one_holds_it(world: World, left_by: str) -> None:
    actors = Actors(world)
    if left_by == "a dead process":
        dead, of = start(world)
        world.spawn(dead, partial(actors.hold, of, shared=False, work=lambda _: world.sleep(1e9)))
        world.run([world.spawn(world.process(), lambda: world.sleep(100))])
        dead.crashed = True
    refused = []

    def contend(of: Leases) -> None:
        try:
            actors.hold(of, shared=False, work=lambda _: world.sleep(300))
        except LockedError as error:
            refused.append(error)

    contenders = [start(world) for _ in range(5)]
    before = actors.taken
    world.run([world.spawn(process, partial(contend, of)) for process, of in contenders])
    assert actors.taken - before == 1
    assert len(refused) == 4
