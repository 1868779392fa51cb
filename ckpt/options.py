"""The options of a `StateManager`, in objects that check themselves when they are built."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ckpt.errors import ConfigError
from ckpt.option_checks import MUST_BE, is_place, problems, refuse
from ckpt.root.mirror_wait import AT_END, AT_START, MirrorPatience
from ckpt.root.open import open_tiers
from ckpt.root.retention import Keep
from ckpt.storage import Staging, Storage
from ckpt.util import option_values as check
from ckpt.util.option_values import parse_size


class _Checked(check.KnownFields):
    """An option object that refuses nonsense when it is built, and names every offender at once."""

    def __post_init__(self) -> None:
        values = {option.name: getattr(self, option.name) for option in fields(self)}  # type: ignore[arg-type]
        refuse(type(self).__name__, problems(values))


@dataclass(frozen=True, kw_only=True)
class SaveOptions(_Checked):
    """How checkpoints are captured and written.

    Args:
        layout: "auto" saves what is sharded as shards, each rank its own, and everything else once; "full" gathers
            everything into whole files; "sharded" also divides among the ranks what every rank has.
        gradients: Save gradients too, so that a save in the middle of an accumulation window resumes exactly; None:
            where such a window is open, or an accelerator accumulates.
        background: Training continues while a checkpoint is written, unless a save says otherwise.
        when_busy: A save that comes while another one is being written waits for it ("wait"), is left out ("skip"), or
            waits in memory and is replaced by the next one if its turn has not come by then ("replace").
        host_memory: What the staging buffer may take, as `"8GB"` or in bytes; where that is not enough, training waits
            until a checkpoint is written.
        device_memory: What a snapshot may take on each device until it is fetched, 0 for nothing; None: what training
            has never needed, less a reserve.
        read_back: Read a checkpoint in a local root from the disk after its commit, in the background, which proves it
            and makes a restart on this machine read it from memory; None: from 16 MB of a rank on, when memory is
            plentiful, and not on network filesystems.
        sha256: The manifest has a SHA-256 of every block beside the hashes that find damage, for policies that demand
            it; always so where checkpoints are signed.
        on_nan: Before a save, if parameters are NaN or infinite: "raise" an error, "skip" the save, or "warn" and save;
            None does not look. Each rank looks on the device, and all do the same.
    """

    layout: str = "auto"
    gradients: bool | None = None
    background: bool = True
    when_busy: str = "wait"
    host_memory: int | str | None = None
    device_memory: int | str | None = None
    read_back: bool | None = None
    sha256: bool = False
    on_nan: str | None = None

    @property
    def host_memory_bytes(self) -> int | None:
        return _in_bytes(self.host_memory)

    @property
    def device_memory_bytes(self) -> int | None:
        return _in_bytes(self.device_memory)


def _in_bytes(size: int | str | None) -> int | None:
    return parse_size(size) or 0 if isinstance(size, str) else size


@dataclass(frozen=True, kw_only=True)
class RankOptions(_Checked):
    """How the ranks of a job meet, and stop.

    Args:
        timeout: Seconds to wait for a rank that gives no sign of life.
        shared: All hosts see the same root; None: tried out where the launcher says that there are several hosts. Hosts
            that do not share it keep what their ranks save, each in its own root, and load it from there; what a host
            lacks is read from the mirror.
        broadcast: When loading, read what all ranks of a host need once and pass it on among them; None: where the root
            is remote.
        handle_sigterm: Save and stop when the process is told to terminate.
        handle_sigint: So, too, at Ctrl-C; the second interrupts at once.
        save_on_sigusr1: Save after one of the next steps when any rank gets SIGUSR1, which SLURM sends before the time
            is up, and continue.
        grace: Seconds after SIGTERM or Ctrl-C in which the last save must be done; then the process ends without it.
        alone: This process is a run of its own, in a root of its own, whatever other processes its launcher has
            started, or are in its group.
        process_group: The ranks that have this state, where they are not all of the job: one model of several that are
            trained side by side, say. Only they build the manager, in a root of its own, where they are numbered from
            0.
    """

    timeout: float = 300.0
    shared: bool | None = None
    broadcast: bool | None = None
    handle_sigterm: bool = True
    handle_sigint: bool = False
    save_on_sigusr1: bool = False
    grace: float | None = None
    alone: bool = False
    process_group: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grace is not None and not (self.handle_sigterm or self.handle_sigint):
            refuse("RankOptions", [f"grace={self.grace:g} bounds the save after SIGTERM: it needs handle_sigterm=True"])
        if self.alone and self.process_group is not None:
            refuse("RankOptions", ["alone=True and process_group=... name different ranks: give one of them"])

    @property
    def meeting(self) -> dict[str, Any]:
        """How long a rank waits for others, and for which."""
        return {"timeout": self.timeout, "alone": self.alone, "process_group": self.process_group}


@dataclass(frozen=True)
class Mirror(_Checked):
    """A second storage to which every committed checkpoint is copied in the background.

        StateManager("runs/x", mirror=ckpt.Mirror("s3://bucket/x", keep=ckpt.Keep(last=10), bandwidth="50MB"), ...)

    A start whose root has no intact checkpoint waits for the mirror as long as the storage does: it may have one. After
    SIGTERM the end waits 5 s at most, and not beyond `grace`. What was not copied by then is copied by the next run.

    Args:
        url: A path, a URL or a storage.
        keep: Which checkpoints are kept there; None: as in the root.
        bandwidth: Bytes per second that copying may take, also as `"50MB"`.
        backlog: How many checkpoints may wait to be copied; older ones are left out.
        at_start: Seconds that the start of a run (building the manager, `resume`) waits for a remote mirror that gives
            no sign of life; one that answers is waited for.
        at_end: The same for its end.
        storage_options: Credentials, endpoint and the like for this URL; None: those of the manager.
    """

    url: str | os.PathLike[str] | Storage
    keep: Keep | None = None
    bandwidth: float | str | None = None
    backlog: int = 2
    at_start: float = AT_START
    at_end: float = AT_END
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    @property
    def bytes_per_second(self) -> float | None:
        return parse_size(self.bandwidth) if isinstance(self.bandwidth, str) else self.bandwidth

    def check_storage(self, storage: Storage) -> None:
        """Refuse a storage that publishes by commits: single files cannot be copied there."""
        if isinstance(storage, Staging):
            refuse("Mirror", [f"url={storage.url!r} shows objects by commits, and takes no copies: see push_to_hub"])


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """All options of a manager, checked."""

    save_every: int | str | None = None
    save_at_epoch_end: bool = False
    save_on_exception: bool = False
    keep: Keep | None = None
    mirror: Mirror | None = None
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    saving: SaveOptions = field(default_factory=SaveOptions)
    ranks: RankOptions = field(default_factory=RankOptions)
    memory_every: int | None = None
    memory_rescue: bool = False
    sign: str | os.PathLike[str] | bool | None = field(default=None, repr=False)
    verify_key: str | os.PathLike[str] | None = field(default=None, repr=False)
    require_signed: bool = False
    memory_replicas: int = 0

    @property
    def memory(self) -> dict[str, Any]:
        """The options of the memory tier, as `build_tier` takes them."""
        return {
            "every": self.memory_every,
            "storage_options": self.storage_options,
            "rescue": self.memory_rescue,
            "replicas": self.memory_replicas,
        }

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
    options: Mapping[str, Any], what: str = "StateManager", *, root: Any = None, objects: Collection[str] = ()
) -> ManagerOptions:
    """The options of a manager from keywords. The `root` is checked with them: all nonsense is named at once.

    `objects`: what else may be given by name, for the error that names what may not.
    """
    check.refuse_unknown(what, options, known_options() | {*objects}, _inside())
    given = {name: value for name, value in options.items() if value is not None}
    if is_place(given.get("mirror")):
        given["mirror"] = Mirror(given["mirror"])
    refuse(what, problems({"root": root, **given}))
    return ManagerOptions(**given)


def known_options() -> set[str]:
    """The names of all options."""
    return {option.name for option in fields(ManagerOptions)}


def _inside() -> dict[str, str]:
    """The options of option objects, each with how it is written."""
    classes = {"saving": SaveOptions, "ranks": RankOptions}
    return {
        option.name: f"{into}=ckpt.{kind.__name__}({option.name}=...)"
        for into, kind in classes.items()
        for option in fields(kind)
    }


MUST_BE |= {
    "mirror": (check.optional(check.is_kind(Mirror)), "a path, a URL, a storage or a ckpt.Mirror"),
    "saving": (check.is_kind(SaveOptions), "a ckpt.SaveOptions"),
    "ranks": (check.is_kind(RankOptions), "a ckpt.RankOptions"),
}


def required_root(root: Any) -> Any:
    """The root, which neither the caller nor the accelerator's project may leave out."""
    if root is None:
        raise ConfigError(
            "StateManager needs a root: the folder or URL below which checkpoints are kept. An accelerator brings one "
            "if its ProjectConfiguration has a project_dir."
        )
    return root
