"""Every format that ckpt knows: which files show it, whose files it contains, and whether `convert` writes it.

Whoever asks what a folder is asks `identify`. It puts the names of the files before all formats, so that no order
decides: a folder that two of them claim is refused, with both names. `ckpt/export/source.py` opens the tensors of each,
`ckpt/tools/convert.py` reads and writes its whole state. Imports no torch: the command `ckpt` starts without it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from ckpt.errors import ConfigError
from ckpt.formats.checkpoint_name import is_name_of_step
from ckpt.formats.native.header import SUFFIX
from ckpt.formats.native.manifest import COPY_NAME, FILE_NAME, MARKER, STATE
from ckpt.util.checked_json import is_key
from ckpt.util.option_values import said

INDEX_SUFFIX = ".index.json"
OLD_WEIGHTS = "pytorch_model.bin"
ADAPTER = "adapter_model"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar", ".pkl")
FILE_SUFFIXES = (SUFFIX, f"{SUFFIX}{INDEX_SUFFIX}", *TORCH_SUFFIXES)  # how the names of single files end
_READERS = "ckpt convert, ckpt merge, ckpt diff and ckpt.load_model read it"

Sign = Callable[[Collection[str]], str | None]


@dataclass(frozen=True)
class Format:
    """A format. `name` is what `format=` and `to=` take, `looks` what a save looks like, for errors.

    `sign` returns a file that shows the format, or None. `covers`: formats whose files belong to a save of this one,
    so that they have no claim of their own on its folder.
    """

    name: str
    tool: str
    looks: str
    sign: Sign = lambda files: None
    covers: tuple[str, ...] = ()
    is_written: bool = False


def _named(pattern: str) -> Sign:
    """Shown by any file with such a name."""
    compiled = re.compile(pattern)
    return lambda files: next(filter(compiled.fullmatch, files), None)


_own_document = _named(
    rf"(?:{re.escape(STATE.removesuffix('.json'))}|rank-\d{{5}}|ranks-\d{{5,}}-\d{{5,}})(?:\.[0-9a-f]{{8}})?\.jsonl?"
)
_engine_states = _named(
    r"(?:zero_pp_rank_\d{1,9}_)?mp_rank_\d\d(?:_\d{3})?_model_states\.pt|layer_\d.*-?model_states\.pt|expp_rank_.*\.pt"
)
_accelerate_state = _named(r"random_states_\d+\.pkl|pytorch_model_fsdp_\d+/.*")
_accelerate_optimizer = _named(r"optimizer(?:_\d+)?\.bin|optimizer_\d+/.*|scheduler(?:_\d+)?\.bin")
# the Trainer saves with Accelerate's functions too, beside files of its own
_trainer_files = _named(r"trainer_state\.json|training_args\.bin|scheduler\.pt|rng_state.*\.pth")


def _checkpoint(files: Collection[str]) -> str | None:
    return next((path for path in (FILE_NAME, COPY_NAME, MARKER) if path in files), None) or _own_document(files)


def is_checkpoint(name: str, files: Collection[str]) -> bool:
    """Whether a folder with these files is, or was, a checkpoint of ckpt, committed or not.

    Weights alone are one where the folder is named like a step: a model that was exported into a root is none.
    """
    if _checkpoint(files):
        return is_key(name)
    return is_name_of_step(name) and any(path.endswith(SUFFIX) for path in files)


def _root(files: Collection[str]) -> str | None:
    return next((f"{name}/" for name, inside in _by_folder(files).items() if is_checkpoint(name, inside)), None)


def is_engine_save(files: Collection[str]) -> bool:
    """Whether DeepSpeed wrote these files of one folder."""
    return _engine_states(files) is not None


def _deepspeed(files: Collection[str]) -> str | None:
    below = (f"{name}/" for name, inside in _by_folder(files).items() if is_engine_save(inside))
    has_pointer = "latest" in files or "latest_universal" in files
    return _engine_states(files) or (next(below, None) if has_pointer else None)


def _megatron(files: Collection[str]) -> str | None:
    if "common.pt" in files and (".metadata" in files or "metadata.json" in files):
        return "common.pt"
    tracker = "latest_checkpointed_iteration.txt"  # Megatron-DeepSpeed writes one, too
    is_cores = tracker in files and (not _deepspeed(files) or any(path.endswith("/common.pt") for path in files))
    return tracker if is_cores else None


def _accelerate(files: Collection[str]) -> str | None:
    """Whether `save_state` wrote these files, or began to: the random states come last."""
    return _accelerate_state(files) or (None if _trainer_files(files) else _accelerate_optimizer(files))


def _by_folder(files: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in files:
        name, slash, rest = path.partition("/")
        if slash:
            found[name].append(rest)
    return found


CKPT = Format(
    "ckpt",
    "ckpt",
    "a ckpt checkpoint (with manifest.json)",
    _checkpoint,
    # a manifest lists all files of its checkpoint: whatever else lies there is no part of it
    ("root", "dcp", "accelerate", "trainer", "deepspeed", "megatron", "hf", "peft"),
    is_written=True,
)
ROOT = Format("root", "ckpt", "a root with ckpt checkpoints", _root)
DCP = Format(
    "dcp",
    "torch.distributed.checkpoint",
    "a torch.distributed.checkpoint folder (with .metadata, *.distcp)",
    _named(r"\.metadata|[^/]+\.distcp"),
    is_written=True,
)
ACCELERATE = Format(
    "accelerate",
    "Accelerate",
    "what Accelerate's save_state wrote (with random_states_0.pkl, or pytorch_model_fsdp_0/)",
    _accelerate,
    ("hf", "deepspeed"),
    is_written=True,
)
TRAINER = Format(
    "trainer",
    "the Trainer of Transformers",
    "a Trainer checkpoint (with trainer_state.json)",
    _named(r"trainer_state\.json"),
    ("accelerate", "deepspeed", "hf", "peft"),
)
DEEPSPEED = Format(
    "deepspeed",
    "DeepSpeed",
    "what DeepSpeed's save_checkpoint wrote (with latest, or mp_rank_00_model_states.pt), universal ones too",
    _deepspeed,
)
MEGATRON = Format(
    "megatron",
    "Megatron-Core",
    "a torch_dist folder of Megatron-Core (with common.pt, metadata.json)",
    _megatron,
    ("dcp",),
    is_written=True,
)
HF = Format(
    "hf",
    "Transformers, or another tool that writes safetensors",
    "a folder or file of safetensors, whole or in shards, or a folder with pytorch_model.bin",
    _named(rf"(?!{ADAPTER})[^/]+{re.escape(SUFFIX)}|{re.escape(OLD_WEIGHTS)}"),
    is_written=True,
)
PEFT = Format(
    "peft", "PEFT", "a PEFT adapter (with adapter_model.safetensors)", _named(rf"{ADAPTER}[^/]*{re.escape(SUFFIX)}")
)
TORCH = Format("torch", "torch.save", "a torch.save file", is_written=True)
LIGHTNING = Format("lightning", "Lightning", "a Lightning file (.ckpt)", is_written=True)
FORMATS = (CKPT, ROOT, HF, PEFT, DCP, ACCELERATE, TRAINER, DEEPSPEED, MEGATRON, TORCH, LIGHTNING)
WRITTEN = tuple(each.name for each in FORMATS if each.is_written)
KNOWN = ", ".join(each.looks for each in FORMATS)


def claims(files: Collection[str]) -> dict[str, str]:
    """The formats that claim a folder with these files, each with a file that shows it."""
    signs = {each: sign for each in FORMATS if (sign := each.sign(files))}
    covered = {name for each in signs for name in each.covers}
    return {each.name: sign for each, sign in signs.items() if each.name not in covered}


def identify(files: Collection[str], where: str, format: str | None = None, *, must: bool = True) -> Format | None:
    """The format of a folder with these files; None if no format claims it.

    `format` chooses where several do. Without `must`, a folder that one other format claims is taken as that.
    """
    found = claims(files)
    if format is not None and len(found) > (0 if must else 1):
        chosen = named(format)
        if not chosen.sign(files):
            raise ConfigError(f"{where} is not in the format {format}, but in {' and '.join(found)}.")
        return chosen
    if len(found) > 1:
        listed = " and ".join(f"{name} ({sign})" for name, sign in found.items())
        ways = " or ".join(f"format={name!r}" for name in found)
        raise ConfigError(
            f"{where} holds saves in {len(found)} formats: {listed}. Choose a format: {ways} (--format on the command "
            "line), or move the other saves away."
        )
    return named(*found) if found else None


def named(name: str) -> Format:
    known = {each.name: each for each in FORMATS}
    if not isinstance(name, str) or name not in known:
        raise ConfigError(f"format={said(name)} is not a format that ckpt knows. Choose one of {', '.join(known)}.")
    return known[name]


def foreign_hint(files: Collection[str]) -> str:
    """A sentence, behind a space, about a place without checkpoints: who wrote what is there, and what reads it."""
    for inside in (files, *_by_folder(files).values()):
        for found in (named(name) for name in claims(inside) if name not in (CKPT.name, ROOT.name)):
            also = ", and so does StateManager.load_state" if found is ACCELERATE else ""
            return f" It was written by {found.tool}: {_READERS}{also}."
    return ""
