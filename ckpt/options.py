"""The options of a `StateManager`, in objects that check their values when you build them."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch.distributed as dist

from ckpt.errors import ConfigError
from ckpt.root.mirror import AT_END, AT_START, MirrorPatience
from ckpt.root.open import open_tiers
from ckpt.root.retention import Keep
from ckpt.root.signing import is_head
from ckpt.save.capture import LAYOUTS
from ckpt.save.finite_guard import ON_NAN
from ckpt.storage import Staging, Storage
from ckpt.storage.urls import is_storage
from ckpt.util.option_values import (
    AUTO,
    Flag,
    Maybe,
    Must,
    Options,
    Period,
    Seconds,
    Settings,
    Size,
    Steps,
    is_count,
    is_kind,
    is_number,
    is_one_of,
    is_path,
    is_period,
    is_rate,
    names_of,
    objects_in,
    one_of,
    parse_size,
    refuse,
    refuse_unknown,
)


def _is_place(value: Any) -> bool:
    return is_path(value) or is_storage(value)


def _is_group(value: Any) -> bool:
    if value is None or not dist.is_available():
        return value is None
    return isinstance(value, dist.ProcessGroup) or value is dist.GroupMember.NON_GROUP_MEMBER


def _is_required(value: Any) -> bool:
    return isinstance(value, bool) or is_head(value)


def _is_key(value: Any) -> bool:
    return isinstance(value, bool) or is_path(value)


def _is_often(value: Any) -> bool:
    return is_count(value) or is_period(value)


_OFTEN = "a number of steps, 1 or more, a time such as '10min', '90s' or '2h', 'auto'"
Place = Annotated[str | os.PathLike[str] | Storage, Must(_is_place, "a path, a URL or a storage")]


@dataclass(frozen=True, kw_only=True)
class Every(Options):
    """Set when ckpt saves. `save_every=500` is short for `Every(steps=500)`, and `save_every="10min"` or `"auto"` for
    `Every(time=...)`.

        StateManager("runs/x", save_every=ckpt.Every(steps=500, epoch_end=True, exception=True), ...)

    Args:
        steps: Save every this many steps.
        time: Save when this much time has passed since the last save or load, by rank 0's clock: `"10min"`, `"90s"` or
            `"1h30min"`. All ranks save after the same step. With `"auto"`, rank 0 chooses the interval that loses the
            least time, from what saves cost this run and how often the run fails.
        epoch_end: Save at the end of every epoch of `epochs`.
        exception: When an exception leaves the `with` block, save the last complete step, if nothing has changed since
            on any rank; otherwise ckpt logs why not. This option costs the time to capture the state, after every step.
        failures_per_node_day: For `time="auto"`: the number of failures per node per day, until the run has seen enough
            failures of its own. None: `CKPT_FAILURES_PER_NODE_DAY` if set, otherwise 0.0065, a published rate.
    """

    steps: Steps | None = None
    time: Period | None = None
    epoch_end: Flag = False
    exception: Flag = False
    failures_per_node_day: Annotated[float, Must(is_number, "a number above 0")] | None = None

    @classmethod
    def of(cls, value: Any) -> Any:
        if is_count(value):
            return cls(steps=value)
        return cls(time=value) if is_period(value) else value

    def contradictions(self, wrong: Collection[str]) -> list[str]:
        is_vain = self.failures_per_node_day is not None and self.time != AUTO and not wrong
        return ["failures_per_node_day= changes nothing without time='auto'"] if is_vain else []

    @property
    def period(self) -> int | str | None:
        """The steps or the time between saves; None if neither is set."""
        return self.steps or self.time


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Options):
    """Set how ckpt captures and writes checkpoints.

    Args:
        layout: "auto" saves sharded state as shards, each rank its own, and everything else once; "full" gathers
            everything into full files; "sharded" also divides replicated state among the ranks.
        gradients: Save gradients too, so that a save in the middle of an accumulation window resumes exactly; None:
            save them if such a window is open, or if an accelerator accumulates.
        background: Write checkpoints while training continues, unless `save_state(wait=...)` says otherwise.
        when_busy: If another save is still being written: "wait" for it, "skip" the new one, or "replace": the new save
            waits in memory, and the next save replaces it if ckpt has not begun to write it by then.
        host_memory: The limit for the staging buffer, as `"8GB"` or in bytes; if the limit is too small, training waits
            until a checkpoint is written.
        device_memory: The limit for the snapshot that each device holds until ckpt has fetched it, 0 for no snapshot;
            None: the memory that training has never needed, less a reserve.
        read_back: After the commit in a local root, read the checkpoint back from the disk in the background. This
            proves that the checkpoint is intact, and a restart on this machine then reads it from memory. None: read it
            back if a rank has 16 MB or more and memory is plentiful, but not on network filesystems.
        sha256: Record a SHA-256 of every block in addition to the hashes that find damage, for policies that require
            it; signed checkpoints always have it.
        on_nan: If parameters are NaN or infinite before a save: "raise" an error, "skip" the save, or "warn" and save;
            None does not check. Each rank checks on its device, and all ranks then do the same.
    """

    layout: Annotated[str, one_of(*LAYOUTS)] = "auto"
    gradients: Maybe = None
    background: Flag = True
    when_busy: Annotated[str, one_of("wait", "skip", "replace")] = "wait"
    host_memory: Size | None = None
    device_memory: Size | None = None
    read_back: Maybe = None
    sha256: Flag = False
    on_nan: Annotated[str, one_of(*ON_NAN)] | None = None

    example = "background: false"

    @property
    def host_memory_bytes(self) -> int | None:
        return _in_bytes(self.host_memory)

    @property
    def device_memory_bytes(self) -> int | None:
        return _in_bytes(self.device_memory)


def _in_bytes(size: int | str | None) -> int | None:
    return parse_size(size) or 0 if isinstance(size, str) else size


@dataclass(frozen=True, kw_only=True)
class RankOptions(Options):
    """Set how the ranks of a job find each other, and how they stop.

    Args:
        timeout: Seconds to wait for a rank that gives no sign of life.
        shared: All hosts see the same root; None: if the launcher started several hosts, ckpt finds out whether they
            share it. If hosts do not share the root, each host keeps what its ranks save in its own root and loads it
            from there; it reads whatever it lacks from the mirror.
        broadcast: When loading, one rank per host reads the files and passes the bytes on to the others. "job": what
            all ranks need is read by one rank of the job instead, and passed on to all hosts. False: every rank reads
            for itself. None: one rank per host, but only if the root is remote.
        handle_sigterm: Save and stop on SIGTERM.
        handle_sigint: Save and stop on Ctrl-C; a second Ctrl-C interrupts at once.
        save_on_sigusr1: Save and continue when any rank gets SIGUSR1, which SLURM sends before the time is up; ckpt
            saves after one of the next steps.
        grace: The seconds that the last save may take after SIGTERM or Ctrl-C; after that, the process ends without the
            save.
        alone: This process is a separate run with its own root, regardless of other processes that its launcher started
            or that are in its group.
        process_group: The ranks that share this state, if not all ranks of the job do: for example, one of several
            models that train side by side. Only these ranks build the manager, with its own root, and ckpt numbers them
            from 0.
    """

    timeout: Seconds = 300.0
    shared: Maybe = None
    broadcast: Annotated[bool | str, Must(is_one_of(True, False, "job"), "True, False, None or 'job'")] | None = None
    handle_sigterm: Flag = True
    handle_sigint: Flag = False
    save_on_sigusr1: Flag = False
    grace: Seconds | None = None
    alone: Flag = False
    process_group: Annotated[Any, Must(_is_group, "a process group, as torch.distributed.new_group returns it")] = None

    example = "timeout: 60"

    def contradictions(self, wrong: Collection[str]) -> list[str]:
        if wrong:
            return []
        if self.grace is not None and not (self.handle_sigterm or self.handle_sigint):
            return [f"grace={self.grace:g} bounds the save after SIGTERM: it needs handle_sigterm=True"]
        if self.alone and self.process_group is not None:
            return ["alone=True and process_group=... name different ranks: give one of them"]
        return []

    @property
    def meeting(self) -> dict[str, Any]:
        """How long a rank waits for others, and for which."""
        return {"timeout": self.timeout, "alone": self.alone, "process_group": self.process_group}


def _a(kind: type[Options], plain: str = "") -> Must:
    """An option object, or the plain values that may stand for it."""
    return Must(is_kind(kind), f"{plain}, or a ckpt.{kind.__name__}" if plain else f"a ckpt.{kind.__name__}", kind=kind)


_Keep = Annotated[Keep, Must(is_kind(Keep), "a ckpt.Keep, for example Keep(last=3)", kind=Keep)]


@dataclass(frozen=True)
class Mirror(Options):
    """Set a second storage, to which ckpt copies every committed checkpoint in the background.

        StateManager("runs/x", mirror=ckpt.Mirror("s3://bucket/x", keep=ckpt.Keep(last=10), bandwidth="50MB"), ...)

    If the root has no intact checkpoint at the start, ckpt looks for one in the mirror, and waits for the mirror as
    long as its storage retries. After SIGTERM, `close` waits at most 5 s for copies, and never longer than `grace`.
    The next run copies the checkpoints that the mirror still lacks.

    Args:
        url: A path, a URL or a storage.
        keep: Rules for which checkpoints to keep in the mirror; None: the same as in the root.
        bandwidth: The limit in bytes per second, as a number or as `"50MB"`.
        backlog: How many checkpoints may wait to be copied; ckpt skips older ones.
        at_start: Seconds to wait for a silent remote mirror at the start (building the manager, `resume`); ckpt always
            waits for a mirror that answers.
        at_end: Seconds to wait for a silent remote mirror at the end.
        storage_options: Credentials, endpoint and the like for this URL; None: the manager's.
    """

    url: Place
    keep: _Keep | None = None
    bandwidth: Annotated[float | str, Must(is_rate, "bytes per second, such as '50MB'")] | None = None
    backlog: Annotated[int, Must(is_count, "a number of checkpoints, 1 or more")] = 2
    at_start: Seconds = AT_START
    at_end: Seconds = AT_END
    storage_options: Settings | None = field(default=None, repr=False)

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(value) if _is_place(value) else value

    @property
    def bytes_per_second(self) -> float | None:
        return parse_size(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth

    def check_storage(self, storage: Storage) -> None:
        """Refuse a storage that publishes by commits: single files cannot be copied there."""
        if isinstance(storage, Staging):
            refuse("Mirror", [f"url={storage.url!r} saves by commits, so it can't be a mirror: see push_to_hub"])


@dataclass(frozen=True, kw_only=True)
class Memory(Options):
    """Keep snapshots in the hosts' memory, so that a restart on the same machines can resume from them.

    `memory=10` is short for `Memory(every=10)`, and `memory="30s"` or `"auto"` for `Memory(every="30s")`.

    Args:
        every: Steps between snapshots, or a time such as `"30s"`, by rank 0's clock. With `"auto"`, rank 0 chooses the
            interval that loses the least time, as `Every(time="auto")` does for saves, with the same failure rate.
        replicas: With 1, the next host keeps a copy of the snapshots, so that you can lose a machine. Hosts send it
            over the job's network, in the clear, and authenticate it with a secret from the job's store.
    """

    every: Annotated[int | str, Must(_is_often, _OFTEN)] = 10
    replicas: Annotated[int, Must(is_one_of(0, 1), "0 or 1: how many other hosts keep a copy")] = 0

    @classmethod
    def of(cls, value: Any) -> Any:
        return cls(every=value) if _is_often(value) else value


_File = str | os.PathLike[str]
_PrivateKey = Annotated[_File | bool, Must(_is_key, "a path of a PEM file, its text, or False", secret=True)]
_PublicKeys = Annotated[_File, Must(is_path, "a path of a PEM file, or its text", secret=True)]


@dataclass(frozen=True, kw_only=True)
class Signing(Options):
    """Set the key that signs a run's checkpoints, and the keys that the run trusts.

    Without `Signing`, ckpt takes the keys from the environment variables `CKPT_SIGN_KEY` and `CKPT_VERIFY_KEY`.

    Args:
        key: An Ed25519 private key (path or text of a PEM file) that signs every checkpoint. None: the key in
            `CKPT_SIGN_KEY`, if set. True: the same, but it must be set. False: don't sign.
        verify_key: Public keys to trust besides the run's own; None: the keys in `CKPT_VERIFY_KEY`.
        required: Refuse checkpoints that none of these keys has signed; `resume` skips them like damaged ones. If you
            name a run, as `RUN` or `RUN:NUMBER`, ckpt also refuses other runs, and checkpoints below that number.
        head: A file in which the manager records its run and its newest checkpoint. `resume` then loads nothing older,
            and never starts from scratch. Keep the file where nobody else can write. Implies `required`.
    """

    key: _PrivateKey | None = field(default=None, repr=False)
    verify_key: _PublicKeys | None = field(default=None, repr=False)
    required: Annotated[bool | str, Must(_is_required, "True, False, or a run as RUN or RUN:NUMBER")] = False
    head: Annotated[_File, Must(is_path, "the path of a file")] | None = None

    example = "key: run.key"

    def contradictions(self, wrong: Collection[str]) -> list[str]:
        both = self.head is not None and isinstance(self.required, str)
        return ["head= remembers which run is required: leave the run out of required="] if both else []


@dataclass(frozen=True, kw_only=True)
class ManagerOptions(Options):
    """All options of a manager."""

    called = "StateManager"

    root: Place | None = None
    save_every: Annotated[Every, _a(Every, _OFTEN)] = Every()
    keep: _Keep | None = None
    mirror: Annotated[Mirror, _a(Mirror, "a path, a URL, a storage")] | None = None
    storage_options: Settings | None = field(default=None, repr=False)
    saving: Annotated[SaveOptions, _a(SaveOptions)] = SaveOptions()
    ranks: Annotated[RankOptions, _a(RankOptions)] = RankOptions()
    memory: Annotated[Memory, _a(Memory, _OFTEN)] | None = None
    signing: Annotated[Signing, _a(Signing)] = Signing()

    @property
    def tier(self) -> dict[str, Any]:
        """The options of the memory tier, as `build_tier` takes them."""
        if self.memory is None:
            return {"every": None, "replicas": 0}
        return asdict(self.memory) | {"rate": self.save_every.failures_per_node_day}

    @property
    def patience(self) -> MirrorPatience:
        """How long the run waits for a mirror that is away; a new one each time."""
        return MirrorPatience(self.mirror.at_start, self.mirror.at_end) if self.mirror else MirrorPatience()

    def open_tiers(self, root: str | os.PathLike[str] | Storage) -> tuple[Storage, ...]:
        """The storages of a run: the root, and the mirror if there is one."""
        if self.mirror is None:
            return open_tiers(root, self.storage_options)
        own = self.mirror.storage_options
        tiers = open_tiers(root, self.storage_options, self.mirror.url, self.storage_options if own is None else own)
        self.mirror.check_storage(tiers[1])
        return tiers


def resolve_options(
    options: Mapping[str, Any], kind: type[ManagerOptions] = ManagerOptions, *, objects: Collection[str] = ()
) -> ManagerOptions:
    """The options of a manager from keywords. All nonsense is named at once.

    `objects`: what else may be given by name, for the error that names what may not.
    """
    refuse_unknown(kind.called, options, {*names_of(kind), *objects}, inside())
    return kind(**{name: value for name, value in options.items() if value is not None})


def inside() -> dict[str, str]:
    """The options of option objects, with how each is written, for whoever writes `replicas` or `memory_replicas`."""
    found: dict[str, str] = {}
    for into, kind in objects_in(ManagerOptions).items():
        for name in names_of(kind):
            written = f"{into}=ckpt.{kind.__name__}({name}=...)"
            found.setdefault(name, written)
            found[f"{into}_{name}"] = written
    return found


def required_root(root: Any) -> Any:
    """The root, which neither the caller nor the accelerator's project may leave out."""
    if root is None:
        raise ConfigError(
            "StateManager needs a root: the folder or URL for the checkpoints. You can leave out the root if "
            "the accelerator's ProjectConfiguration has a project_dir."
        )
    return root
