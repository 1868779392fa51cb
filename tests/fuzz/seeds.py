"""The corpus: folders of every kind that ckpt reads, made by the libraries that write them.

`python -m tests.fuzz.seeds FOLDER [NAME...]` makes them in a process of its own: these libraries leave
threads and settings.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ckpt
from ckpt.save import capture, transaction
from tests.fuzz.live import Live, Net, Untied
from tests.fuzz.zero_seeds import STAGES, zero
from tests.helpers.processes import run_ranks

NAMES = ("step-00000001", "step-00000002")


def full(folder: Path) -> None:
    """A root with two checkpoints, metrics, and everything that one process has."""
    live = Live()
    with ckpt.StateManager(str(folder / "root"), **live.parts(), saving=ckpt.SaveOptions(background=False)) as manager:
        manager.register(seen=live.seen)
        for name in NAMES:
            live.train()
            manager.save_state(name, metrics={"loss": 0.5, "worst": float("nan")})


def signed(folder: Path) -> None:
    """The same, signed. What is loaded with the key must be one of its two states."""
    live = Live()
    with ckpt.StateManager(
        str(folder / "root"), **live.parts(), saving=ckpt.SaveOptions(background=False),
        signing=ckpt.Signing(key=signing_key()),
    ) as manager:  # fmt: skip
        manager.register(seen=live.seen)
        for name in NAMES:
            live.train()
            manager.save_state(name)


def signing_key() -> str:
    """A private key that everybody knows."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.from_private_bytes(b"ckpt" * 8)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def linked(folder: Path) -> None:
    """Two checkpoints of a model that did not change: its file is linked, and its `path` differs from its name."""
    live = Live()
    live.train()
    with ckpt.StateManager(str(folder / "root"), **live.parts(), saving=ckpt.SaveOptions(background=False)) as manager:
        manager.register(seen=live.seen)
        for name in (*NAMES, NAMES[-1]):
            live.seen.state["again"] = name
            manager.save_state(name)


def sharded(folder: Path) -> None:
    run_ranks(2, _save_sharded, str(folder / "root"))


def together(folder: Path) -> None:
    run_ranks(2, _save_together, str(folder / "root"))


def own_state(folder: Path) -> None:
    run_ranks(2, _save_own_state, str(folder / "root"))


def _save_sharded(rank: int, root: str, *, frozen: bool = False) -> None:
    from torch.distributed.fsdp import fully_shard

    live = Live(tied=False)
    next(live.model.parameters()).requires_grad_(not frozen)
    fully_shard(live.model)
    live.optimizer = torch.optim.AdamW(live.model.parameters(), lr=0.01)
    live.scheduler = torch.optim.lr_scheduler.StepLR(live.optimizer, 2)
    _save_on_ranks(live, root)


def _save_together(rank: int, root: str) -> None:
    """As of many ranks: what those of a host train is in one file, and the documents of all in another."""
    transaction.TOGETHER = transaction.ALONE = capture._WORTH_A_FILE = 1
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    _save_sharded(rank, root, frozen=True)


def _save_own_state(rank: int, root: str) -> None:
    _save_on_ranks(Live(tied=False, seed=rank), root)


def _save_on_ranks(live: Live, root: str) -> None:
    with ckpt.StateManager(root, **live.parts(), saving=ckpt.SaveOptions(background=False)) as manager:
        manager.register(seen=live.seen)
        for name in NAMES:
            live.train()
            manager.save_state(name)


def accelerate(folder: Path) -> None:
    _save_with_accelerate(folder / "root" / "checkpoint_0", safe=True)


def accelerate_pickles(folder: Path) -> None:
    _save_with_accelerate(folder / "root" / "checkpoint_0", safe=False)


def _save_with_accelerate(folder: Path, *, safe: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    live = Live()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*live.parts().values())
    accelerator.register_for_checkpointing(live.seen)
    live.train()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    accelerator.save_state(str(folder), safe_serialization=safe)


def dcp(folder: Path) -> None:
    run_ranks(2, _save_dcp, str(folder / "dcp"))


def accelerate_sharded(folder: Path) -> None:
    """What Accelerate saves under FSDP with SHARDED_STATE_DICT: its folders of DCP beside its pickles."""
    accelerate(folder)
    top = folder / "root" / "checkpoint_0"
    for name in ("model.safetensors", "optimizer.bin"):
        (top / name).unlink()
    run_ranks(2, _save_dcp, str(top / "pytorch_model_fsdp_0"))


def _save_dcp(rank: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = Untied()
    fully_shard(model)
    save({"model": get_model_state_dict(model), "steps": 3}, checkpoint_id=folder)


def safetensors_whole(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: value.clone() for name, value in Live().model.state_dict().items()}
    (folder / "model").mkdir(parents=True)
    save_file(tensors, folder / "model" / "model.safetensors", {"format": "pt"})
    (folder / "model" / "config.json").write_text('{"architectures": ["Net"]}')


def safetensors_sharded(folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    (folder / "model").mkdir(parents=True)
    tensors = {name: value.clone() for name, value in Live(tied=False).model.state_dict().items()}
    save_torch_state_dict(tensors, folder / "model", max_shard_size=80)


def torch_save(folder: Path) -> None:
    live = Live()
    live.train()
    folder.mkdir(parents=True)
    state = {"model": live.model.state_dict(), "optimizer": live.optimizer.state_dict(), "seen": live.seen.state}
    torch.save(state, folder / "state.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)


def lightning(folder: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(Net, LightningModule):  # type: ignore[misc]
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self(batch).pow(2).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(max_steps=1, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder, **quiet)
    samples: Any = list(torch.arange(4))
    trainer.fit(Module(), torch.utils.data.DataLoader(samples, batch_size=2))
    folder.mkdir(parents=True, exist_ok=True)
    trainer.save_checkpoint(folder / "state.pt")


def memory(folder: Path) -> None:
    """The folder of a killed run in a host's memory, with two snapshots."""
    from tests.memory.deserted import create_place, snapshot

    held = folder / "memory"
    held.mkdir(parents=True)
    os.environ["CKPT_MEMORY_DIR"] = str(held)
    place = create_place(folder / "root")
    for number in (1, 2):
        snapshot(place, f"step-{number}", sequence=number)
    place.release()
    (place.path / "keeper.log").write_text("the last words of a keeper\n")
    del os.environ["CKPT_MEMORY_DIR"]


MAKERS: dict[str, Callable[[Path], None]] = {
    "full": full,
    "signed": signed,
    "linked": linked,
    "sharded": sharded,
    "together": together,
    "own-state": own_state,
    "accelerate": accelerate,
    "accelerate-pickles": accelerate_pickles,
    "accelerate-sharded": accelerate_sharded,
    "dcp": dcp,
    "safetensors": safetensors_whole,
    "safetensors-sharded": safetensors_sharded,
    "torch-save": torch_save,
    "lightning": lightning,
    **{name: partial(zero, stage) for name, stage in STAGES.items()},
    "memory": memory,
}


SLOW = ("lightning", *STAGES)  # minutes to import and build, where the machine is busy


def make(folder: Path, names: Iterable[str]) -> None:
    """Seeds in folders of their names. A library that is not installed has none, which is said."""
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                MAKERS[name](folder / name)
            except ImportError as error:
                print(f"no corpus of {name}: {error}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("CKPT_MEMORY_KEEPER", "off")
    make(Path(sys.argv[1]), sys.argv[2:] or MAKERS)
    sys.stdout.flush()
    os._exit(0)  # the threads of some libraries would keep it
