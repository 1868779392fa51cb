"""The kinds of faults, how many trials of each a campaign has, and what must be made before its trials."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign import beside, damage, failing_calls, hub, kills, lost_ranks, power_loss, signals, tiers
from tests.campaign.calls import Call
from tests.campaign.children import Child
from tests.campaign.failing_calls import RESUMES, SAVES, Scenario, Strike
from tests.campaign.training import HOST
from tests.campaign.trials import Trial

LONG = 2000  # trials


@dataclass
class Prepared:
    """What the trials of a campaign begin with. `calls` are those of dry runs."""

    calls: dict[Scenario, list[Call]] = field(default_factory=dict)
    strikes: dict[str, list[Strike]] = field(default_factory=dict)
    killed: list[tuple[Scenario, Call]] = field(default_factory=list)


@dataclass(frozen=True)
class Kind:
    """A kind of fault. Of a thousand trials of a campaign it has `share`."""

    name: str
    words: str
    share: int
    trial: Callable[[Trial, Prepared], None]
    shim: bool = False


def _plain(function: Callable[[Trial], None]) -> Callable[[Trial, Prepared], None]:
    return lambda trial, _: function(trial)


def _strike(trial: Trial, prepared: Prepared) -> None:
    planned = prepared.strikes[trial.kind]
    failing_calls.strike(trial, planned[trial.index % len(planned)])


def _kill_at_call(trial: Trial, prepared: Prepared) -> None:
    scenario, call = prepared.killed[trial.index % len(prepared.killed)]
    kills.at_call(trial, scenario.naming, call, failing_calls.template(scenario))


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "SIGKILL at a random moment, 1 process", 100, _plain(functools.partial(kills.at_random, "one"))),
        Kind("kill-ddp", "SIGKILL at a random moment, DDP", 40, _plain(functools.partial(kills.at_random, "ddp"))),
        Kind("kill-fsdp", "SIGKILL at a random moment, FSDP 2", 40, _plain(functools.partial(kills.at_random, "fsdp"))),
        Kind(
            "kill-host", "SIGKILL at a random moment, ranks of a host write together", 30,
            _plain(functools.partial(kills.at_random, HOST)),
        ),
        Kind("kill-call", "SIGKILL at a system call of a save", 90, _kill_at_call, shim=True),
        Kind("save-call", "a system call of a save fails", 250, _strike, shim=True),
        Kind("resume-call", "a system call of a resume fails", 150, _strike, shim=True),
        Kind("rank-call", "a system call of one rank fails", 20, _plain(lost_ranks.rank_call), shim=True),
        Kind("power", "power failure, what was not synced is dropped", 120, _plain(power_loss.power_loss), shim=True),
        Kind("damage", "flipped, cut, swapped, stale, missing files", 80, _plain(damage.damage)),
        Kind("damage-all", "every file of a kind, in every checkpoint at once", 60, _plain(damage.everything)),
        Kind("memory", "SIGKILL with snapshots in memory, then damage", 50, _plain(tiers.memory)),
        Kind("keeper", "the keeper is frozen or killed", 30, _plain(tiers.keeper)),
        Kind("mirror", "SIGKILL with a mirror, then damage of every file", 50, _plain(tiers.mirror)),
        Kind("hub", "SIGKILL with a root on the Hub, then altered or cut answers", 30, _plain(hub.hub)),
        Kind(
            "rank-killed", "a rank is killed", 20, _plain(functools.partial(lost_ranks.rank_lost, signal.SIGKILL))
        ),
        Kind(
            "rank-stopped", "a rank is stopped", 12, _plain(functools.partial(lost_ranks.rank_lost, signal.SIGSTOP))
        ),
        Kind("sigterm", "SIGTERM", 20, _plain(signals.terminated)),
        Kind("sigint", "SIGINT", 20, _plain(signals.interrupted)),
        Kind("fork", "fork in the middle of a save", 16, _plain(signals.forked)),
        Kind("prune", "ckpt prune beside a saving run", 8, _plain(functools.partial(beside.beside, "prune"))),
        Kind("verify", "ckpt verify beside a saving run", 8, _plain(functools.partial(beside.beside, "verify"))),
        Kind("pull", "ckpt pull beside a saving run", 6, _plain(functools.partial(beside.beside, "pull"))),
    )
}  # fmt: skip


def counts(trials: int, kinds: Iterable[Kind], prepared: Prepared) -> dict[str, int]:
    """How many trials each kind has, at least one each; in the long form every call is struck at least once."""
    chosen = list(kinds)
    total = sum(kind.share for kind in chosen)
    least = {name: len({(one.scenario, one.call) for one in found}) for name, found in prepared.strikes.items()}
    shares = {kind.name: max(1, round(trials * kind.share / total)) for kind in chosen}
    return {name: max(number, least.get(name, 0) if trials >= LONG else 0) for name, number in shares.items()}


def prepare(names: set[str], seed: int, folder: Path, trial: Trial) -> Prepared:
    """Make what the trials of these kinds begin with."""
    prepared = Prepared()

    def run(function: Callable[..., object], *args: object, **options: object) -> Child:
        return trial.start(functools.partial(function, **options), *args)

    scenarios = {"save-call": SAVES, "resume-call": RESUMES, "kill-call": SAVES[:4]}
    for kind, needed in scenarios.items():
        for scenario in needed if kind in names else ():
            if scenario not in prepared.calls:
                prepared.calls[scenario] = failing_calls.prepare(scenario, folder, run)
        if kind in names:
            of_kind = {one: prepared.calls[one] for one in needed}
            prepared.strikes[kind] = failing_calls.strikes(of_kind, seed)
            if kind == "kill-call":
                prepared.killed = [(one, call) for one, calls in of_kind.items() for call in calls]
                random.Random(f"{seed}/killed").shuffle(prepared.killed)
    if names & {"damage", "damage-all"}:
        damage.prepare(folder, run, trial)
    return prepared
