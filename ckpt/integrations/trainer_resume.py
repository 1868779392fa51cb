"""What a Trainer resumes from: a checkpoint in the callback's root, or a folder that a Trainer itself wrote."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import get_last_checkpoint

from ckpt.errors import ConfigError, DamagedError, MismatchError
from ckpt.formats.native.manifest import Manifest
from ckpt.integrations.trainer_state import PART, STATE_FILE
from ckpt.load.reader import CheckpointReader
from ckpt.load.select import Choice, MemoryTier, Selection, choose, list_memory
from ckpt.memory.session_tier import build_tier, find_snapshots
from ckpt.options import ManagerOptions
from ckpt.ranks.consensus import Ranks, Result, decide_together, run_on_all_ranks
from ckpt.ranks.find import find_ranks
from ckpt.root import catalog
from ckpt.root.folder import open_url
from ckpt.root.signing import open_keys
from ckpt.root.verify import problems
from ckpt.save.root_writer import RootWriter
from ckpt.save.saver import Saver
from ckpt.storage import Storage, place_of
from ckpt.util.checked_json import is_mapping, is_relative


class ResumeSource:
    """Chooses what a Trainer resumes from, and holds the lock on a checkpoint in the root until it has been loaded.

    `name`: the checkpoint in the root that was chosen; None for a folder of the Trainer's, or a fresh start.
    `in_memory`: whether it is a snapshot in memory, newer than all in the root.
    """

    def __init__(self, options: ManagerOptions, tiers: tuple[Storage, ...]) -> None:
        self.name: str | None = None
        self.in_memory = False
        self._options = options
        self._trust = open_keys(options.signing, sha256=False)[1]
        self._tiers = tiers
        self._storage = tiers[0]
        self._held = ExitStack()

    def choose(self, resume: str | bool | None, output_dir: str, stack: ExitStack) -> str | bool | None:
        """What the Trainer is to resume from. For a checkpoint in the root that is a temporary folder, removed with
        `stack`, which has the Trainer's state, and what an override of its `_save_checkpoint` wrote."""
        name = self._name_of(resume) if isinstance(resume, str) else None
        choice = self._find(name) if resume is True or name else None
        self.name, self.in_memory = (choice.manifest.name, choice.in_memory) if choice else (None, False)
        if choice is None:
            _refuse_to_overtake(self._storage, self._ranks())
            if resume is not True:
                self._refuse_to_leave_snapshots()
            found = _last_of_trainer(output_dir) if resume is True else resume
            self._refuse_untrusted(found)
            return found
        folder = stack.enter_context(TemporaryDirectory(prefix="ckpt-"))
        _write_files(Path(folder), choice.ready.get("files", {}), choice.manifest.name)
        TrainerState(**choice.ready["state"]).save_to_json(str(Path(folder, STATE_FILE)))
        return folder

    def release(self) -> None:
        """Release the lock on the chosen checkpoint."""
        self._held.close()

    def _name_of(self, resume: str) -> str | None:
        """The checkpoint in the root that a path or a name means; None for a folder that a Trainer itself wrote."""
        if Path(resume, STATE_FILE).is_file():
            return None
        root, _, name = resume.rstrip("/").rpartition("/")
        options = self._options.storage_options
        if root and place_of(open_url(root, options)) != place_of(self._storage):
            raise ConfigError(
                f"{resume} is neither a checkpoint in {self._storage.url} nor a folder that a Trainer wrote."
            )
        return name

    def _find(self, name: str | None) -> Choice[dict[str, Any]] | None:
        """The checkpoint of that name, or the newest intact one. Its lock is held until `release`."""
        ranks = self._ranks()
        memory = self._snapshots(ranks) if name is None else None
        with ranks.working():
            return choose(
                Selection(
                    tiers=self._tiers,
                    ranks=ranks,
                    prepare=lambda candidate: _verified_state(candidate.storage, ranks, candidate.manifest),
                    name=name,
                    memory=memory,
                    patience=self._options.patience,
                    trust=self._trust if name is None else self._trust.of_named(),
                ),
                self._held,
            )

    def _snapshots(self, ranks: Ranks) -> MemoryTier | None:
        """What a run before this one has left in memory. The manager that loads it is not there yet."""
        tier = build_tier(Saver(RootWriter(self._storage, ranks)), **self._options.tier)
        if tier is None:
            return None
        self._held.callback(lambda: tier.close(keep=True))
        return find_snapshots(tier)

    def _refuse_to_leave_snapshots(self) -> None:
        """Refuse a fresh start beside what a killed run has left in memory: its manager would resume from there."""
        ranks = self._ranks()
        memory = self._snapshots(ranks)
        mine = Result([found["name"] for found in list_memory(memory.storage)] if memory is not None else [])
        there = decide_together(ranks, "train() (memory)", mine, lambda each: sorted({*chain(*each)}))
        if there:
            raise ConfigError(
                f"an earlier run of {self._storage.url} has left a snapshot in memory ({there[-1]}), but this run "
                "starts from scratch. Call train(resume_from_checkpoint=True), or remove the snapshots: ckpt memory "
                f"clear {self._storage.url}"
            )

    def _refuse_untrusted(self, found: str | bool | None) -> None:
        """Refuse a fresh start in place of a run that is known, and a Trainer's own folder, which nobody has signed."""

        def refuse() -> None:
            if self._trust.head is not None:
                self._trust.head.refuse_other("", self._storage.url)
            if isinstance(found, str):
                self._trust.refuse_unsigned(found)

        run_on_all_ranks(self._ranks(), "train()", refuse)

    def _ranks(self) -> Ranks:
        return find_ranks(self._storage.url, **self._options.ranks.meeting)


def _last_of_trainer(output_dir: str) -> str | None:
    """The last checkpoint that a Trainer without the callback has left, if there is one."""
    found: str | None = get_last_checkpoint(output_dir) if Path(output_dir).is_dir() else None
    return found


def _refuse_to_overtake(storage: Storage, ranks: Ranks) -> None:
    """Refuse a fresh start in a root that has checkpoints, before training begins: its saves would become newest."""
    there = decide_together(
        ranks, "train()", Result(), lambda _: [found.name for found in catalog.scan(storage) if found.committed]
    )
    if there:
        raise ConfigError(
            f"{storage.url} has checkpoints ({there[0]} is the newest), but this run starts from scratch, and its "
            "saves would count as newer. Call train(resume_from_checkpoint=True), or give CkptCallback another root."
        )


def _verified_state(storage: Storage, ranks: Ranks, manifest: Manifest) -> dict[str, Any]:
    """The part with the Trainer's state in a checkpoint of which every byte has been verified.

    The Trainer reads its state, and finds its place in the data, before there is an optimizer to load into: if damage
    were found only then, no other checkpoint could be chosen any more.
    """
    call = f"train({manifest.name!r})"
    wrong = decide_together(ranks, call, Result(), lambda _: problems(storage, manifest, show=True))
    if wrong:
        raise DamagedError(f"{manifest.name} is damaged: {'; '.join(wrong)}.")
    reader: CheckpointReader = run_on_all_ranks(ranks, call, lambda: CheckpointReader(storage, manifest, ranks.rank))
    if not reader.has(PART):
        raise MismatchError(
            f"{manifest.name} has no {PART}, so no Trainer saved it. Load the checkpoint with StateManager, or give "
            "CkptCallback another root."
        )
    part: dict[str, Any] = reader.tree(PART)
    return part


def _write_files(folder: Path, files: Any, name: str) -> None:
    if not is_mapping(lambda data: isinstance(data, bytes))(files) or not all(map(is_relative, files)):
        raise DamagedError(f"{name} is damaged: its list of the Trainer's files is invalid.")
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
