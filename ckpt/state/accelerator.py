"""The objects that a Hugging Face accelerator has prepared, as a manager's objects."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ckpt.compat.accelerate import CUSTOM, LOADERS, MODELS, OPTIMIZERS, SCHEDULERS, load_hooks, save_hooks, unseen
from ckpt.errors import StateError, UnsupportedError
from ckpt.root.retention import Keep
from ckpt.state import rng, samplers
from ckpt.state.objects import ManagedObjects
from ckpt.state.unwrap import is_fsdp1

_log = logging.getLogger("ckpt")
_PREPARE = "prepare_data_loader"


class _Prepares:
    """`prepare_data_loader` of one accelerator, after which `told` is called. Pickled, it is Accelerate's own."""

    def __init__(self, accelerator: Any, told: Callable[[], None]) -> None:
        self._accelerator = accelerator
        self._told = told

    def __call__(self, *args: Any, **options: Any) -> Any:
        prepared = type(self._accelerator).prepare_data_loader(self._accelerator, *args, **options)
        self._told()
        return prepared

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._accelerator, _PREPARE)  # of a copy that has no attributes yet


class AcceleratorObjects:
    """Everything that an accelerator has prepared so far, without Accelerate's wrappers.

    Hooks registered on the accelerator are called with the arguments that Accelerate gives them. A model that a hook
    removes from its list belongs to the hook: it is neither saved nor loaded.
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        self._seen: dict[int, tuple[str, Any]] = {}  # holds the objects, so that identities are not reused
        self._left_out: set[int] = set()
        self._prepares: _Prepares | None = None
        _refuse_megatron(accelerator)
        _refuse_unseen(accelerator)

    @property
    def root(self) -> str | None:
        project = self._project.project_dir
        if project is None:
            return None
        return os.path.join(project, "checkpoints") if self._project.automatic_checkpoint_naming else str(project)

    @property
    def keep(self) -> Keep | None:
        """The project's `total_limit`, under Accelerate's own condition that it names the checkpoints.

        Checkpoints that a script names ("best") are never removed by that limit.
        """
        limit = self._project.total_limit
        if limit is None:
            return None
        if self._project.automatic_checkpoint_naming:
            return Keep(last=limit)
        if self.accelerator.is_main_process:
            _log.warning(
                "total_limit=%d has no effect without automatic_checkpoint_naming=True, here or in Accelerate "
                "itself. To remove old checkpoints of any name, pass keep=ckpt.Keep(last=%d).",
                limit, limit,
            )  # fmt: skip
        return None

    @property
    def gradients(self) -> bool:
        """Whether gradients are accumulated and can be saved: DeepSpeed and FSDP 1 do not expose theirs."""
        accumulates = self.accelerator.gradient_accumulation_steps > 1
        exposed = not (self._is_deepspeed or any(is_fsdp1(model) for model in self._models))
        return accumulates and exposed

    def find(self) -> ManagedObjects:
        models = _numbered("model", self._models)
        optimizers = _numbered(
            "optimizer", [_bare(wrapped, "optimizer") for wrapped in OPTIMIZERS.of(self.accelerator)]
        )
        schedulers = _numbered(
            "scheduler", [_bare(wrapped, "scheduler") for wrapped in SCHEDULERS.of(self.accelerator)]
        )
        scaler = {} if self.accelerator.scaler is None else {"scaler": self.accelerator.scaler}
        custom = {f"custom.{index}": value for index, value in enumerate(CUSTOM.of(self.accelerator))}
        self._refuse_gone({**models, **optimizers, **schedulers, **custom})
        left_out = frozenset(key for key, model in models.items() if id(model) in self._left_out)
        return ManagedObjects(models, optimizers, {**schedulers, **scaler}, custom, left_out)

    def loaders(self) -> dict[str, Any]:
        return {f"dataloader.{index}": loader for index, loader in enumerate(LOADERS.of(self.accelerator))}

    def on_loader(self, told: Callable[[], None]) -> None:
        vars(self.accelerator)[_PREPARE] = self._prepares = _Prepares(self.accelerator, told)

    def release(self) -> None:
        if vars(self.accelerator).get(_PREPARE) is self._prepares:  # unless another manager has come since
            vars(self.accelerator).pop(_PREPARE)

    def name(self) -> str | None:
        project = self._project
        return f"checkpoint_{project.iteration}" if project.automatic_checkpoint_naming else None

    def before_save(self, folder: str) -> None:
        self._require_something("save")
        self._left_out.clear()
        hooks = save_hooks(self.accelerator)
        if not hooks:
            return
        models = [] if self._is_sharded else list(self._models)
        weights = [self.accelerator.get_state_dict(model, unwrap=False) for model in models]
        before = list(zip(models, weights, strict=True))
        if "://" not in folder:
            os.makedirs(folder, exist_ok=True)  # hooks write their own files into it
        for hook in hooks:
            hook(self._models, weights, folder)
        self._leave_out(model for model, state in before if not any(state is kept for kept in weights))

    def after_save(self) -> None:
        self._project.iteration += 1
        self._left_out.clear()

    def before_load(self, folder: str) -> None:
        self._require_something("load into")
        models = [] if self._is_sharded else list(self._models)
        before = list(models)
        for hook in load_hooks(self.accelerator):
            hook(models, folder)
        self._leave_out(model for model in before if not any(model is kept for kept in models))

    def state(self) -> dict[str, Any]:
        """Counters of the accelerator, and of its loaders, which count epochs themselves."""
        return {
            "step": self.accelerator.step,
            "sync_gradients": self.accelerator.sync_gradients,
            "saves": self._project.iteration + 1,  # the current save is not counted yet
            "loaders": {key: _loader_state(loader) for key, loader in self.loaders().items()},
        }

    def go_back(self, state: dict[str, Any]) -> None:
        self._left_out.clear()
        if not state:  # saved without an accelerator
            return
        self.accelerator.step = state["step"]
        self.accelerator.sync_gradients = state["sync_gradients"]
        self._project.iteration = state["saves"]
        for key, loader in self.loaders().items():
            if key in state["loaders"]:
                _set_loader_state(loader, state["loaders"][key])

    @property
    def _models(self) -> list[Any]:
        found: list[Any] = MODELS.of(self.accelerator)
        return found

    @property
    def _project(self) -> Any:
        return self.accelerator.project_configuration

    @property
    def _is_sharded(self) -> bool:
        return self._is_deepspeed or bool(self.accelerator.distributed_type.value == "FSDP")

    @property
    def _is_deepspeed(self) -> bool:
        return bool(self.accelerator.distributed_type.value == "DEEPSPEED")

    def _leave_out(self, models: Iterable[Any]) -> None:
        self._left_out = {id(model) for model in models}

    def _require_something(self, what: str) -> None:
        found = self.find()
        if not (found.models or found.optimizers or found.others or found.custom or self.loaders()):
            raise StateError(
                f"this accelerator has prepared nothing that ckpt could {what}. First call accelerator.prepare(model, "
                "optimizer, ...) on the accelerator that you gave to ckpt."
            )

    def _refuse_gone(self, found: Mapping[str, Any]) -> None:
        """Refuse to save without an object that was managed before: the checkpoint could not resume this run."""
        now = {id(value) for value in found.values()}
        gone = [f"{key} (a {type(value).__name__})" for id_, (key, value) in self._seen.items() if id_ not in now]
        if gone:
            raise StateError(
                f"the accelerator has dropped {', '.join(gone)} since you attached ckpt, because your script called "
                "accelerator.free_memory() or clear(). Prepare the objects for the next training run, then attach "
                "again or build a new StateManager."
            )
        self._seen = {id(value): (key, value) for key, value in found.items()}


def _refuse_unseen(accelerator: Any) -> None:
    missing = unseen(accelerator)
    if missing:
        raise UnsupportedError(
            f"this release of Accelerate has no Accelerator.{', '.join(missing)}, so ckpt can't see everything that "
            "the accelerator has prepared, and checkpoints would be incomplete. Pass the objects themselves instead "
            "of accelerator=: StateManager(root, model=model, optimizer=optimizer, ...)."
        )


def _refuse_megatron(accelerator: Any) -> None:
    if accelerator.distributed_type.value == "MEGATRON_LM":
        raise UnsupportedError(
            "ckpt can't save under Megatron-LM, which writes the state of the model and the optimizer itself, as "
            "pickles. Use the FSDP plugin (sharded), DeepSpeed or DDP with ckpt, or save with "
            "accelerator.save_state() without attaching ckpt."
        )


def _numbered(kind: str, objects: list[Any]) -> dict[str, Any]:
    """Objects by key. A single one has its kind as key, so that other tools find the file: `model.safetensors`."""
    if len(objects) == 1:
        return {kind: objects[0]}
    return {f"{kind}.{index}": value for index, value in enumerate(objects)}


def _bare(wrapped: Any, name: str) -> Any:
    """The object inside Accelerate's wrapper, or the object itself."""
    is_wrapper = type(wrapped).__module__.startswith("accelerate.")
    return getattr(wrapped, name) if is_wrapper else wrapped


def _loader_state(loader: Any) -> dict[str, Any]:
    return {
        "iteration": loader.iteration,
        "seeds": [sampler.initial_seed for sampler in _seeded(loader)],
        "generators": [rng.capture_one(generator) for generator in samplers.generators(loader)],
    }


def _set_loader_state(loader: Any, state: dict[str, Any]) -> None:
    loader.iteration = state["iteration"]
    for sampler, seed in zip(_seeded(loader), state["seeds"], strict=False):
        sampler.initial_seed = seed
    for generator, saved in zip(samplers.generators(loader), state["generators"], strict=False):
        rng.restore_one(generator, saved)


def _seeded(loader: Any) -> list[Any]:
    return [sampler for sampler in samplers.samplers(loader) if hasattr(sampler, "initial_seed")]
