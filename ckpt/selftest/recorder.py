"""Records a training program from inside its process, without changes to it.

Hooks on the managed models give the inputs, `Tensor.backward` the losses, hooks of all optimizers the gradients before
and the parameters after each step, and `StateManager` the saves and resumes. After the step that the plan names, the
process waits until its saves are committed, and kills itself with SIGKILL.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from ckpt.data.loop import Loop
from ckpt.formats.sharded_tensors import local_tensor
from ckpt.formats.tensors import host_bytes, on_host
from ckpt.load.load_state import Restored
from ckpt.manager import StateManager
from ckpt.options import Every, ManagerOptions
from ckpt.selftest.trace import End, Plan, Resumed, Saved, Step, TraceWriter, read_trace, trace_file
from ckpt.session import Saves, Session
from ckpt.state import rng
from ckpt.state.optimizer import OptimizerPart
from ckpt.state.registry import StateRegistry
from ckpt.state.unwrap import is_fsdp1, parameter_names, unwrap
from ckpt.storage import Storage, open_storage


class Recorder:
    """Records a process: `install` before the user's program starts, `finish` after its end."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._plan, self._rank = plan, rank
        self._folder = Path(plan.folder)
        self._writer = TraceWriter(trace_file(self._folder, plan.process, rank))
        self._number = 0
        self._has_stepped = False
        self._batches: list[str] = []
        self._inputs: list[str] = []
        self._losses: list[str] = []
        self._gradients: dict[str, str] = {}
        self._warnings: list[str] = []
        self._start: dict[str, str] = {}
        self._managers: list[StateManager] = []  # held: what is compared at the end must outlive the program
        self._found = FoundObjects()
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._unmanaged: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        self._watch_managers()
        self._watch_batches()
        self._watch_losses()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        logging.getLogger("ckpt").addHandler(_Collector(self._warnings))

    def finish(self) -> None:
        others, changed = self._found.others()
        self._writer.add(End(self._number, self._tensors(), others, changed, self._found.read_loaders))

    # --- the manager

    def _watch_managers(self) -> None:
        self._watch_construction()
        self._watch_saves()
        self._watch_loads()
        if self._plan.redirect:
            setattr(ManagerOptions, "open_tiers", lambda options, root: self._open_tiers(options, root))  # noqa: B010

    def _watch_construction(self) -> None:
        built = StateManager.__init__

        @functools.wraps(built)
        def __init__(manager: StateManager, *args: Any, **options: Any) -> None:  # noqa: N807
            if self._plan.save_every is not None:
                given = Every.of(options.get("save_every"))
                when = given if isinstance(given, Every) else Every()
                options["save_every"] = replace(when, steps=self._plan.save_every, time=None)
            built(manager, *args, **options)
            self._managers.append(manager)
            self._watch_models()

        setattr(StateManager, "__init__", __init__)  # noqa: B010

    def _watch_saves(self) -> None:
        saved = Saves.to_root

        @functools.wraps(saved)
        def save(saves: Saves, *args: Any, **options: Any) -> str | None:
            self._watch_models()
            tensors, number = self._tensors(), self._number
            self._found.look(self._managers)
            pending = list(self._batches), list(self._inputs), list(self._losses)
            start, forgotten, has_scheduler = self._start_of_step(), self._found.forgotten, self._found.has_scheduler
            progress = saves.state.loop.saved_progress().to_json()
            name = saved(saves, *args, **options)
            if name is not None:
                self._writer.add(Saved(number, name, progress, *pending, tensors, start, forgotten, has_scheduler))
            return name

        setattr(Saves, "to_root", save)  # noqa: B010

    def _watch_loads(self) -> None:
        loaded = Session.load

        @functools.wraps(loaded)
        def load(session: Session, *args: Any, **options: Any) -> Restored | None:
            restored = loaded(session, *args, **options)
            self._watch_models()
            if restored is not None and not self._has_stepped:  # a later load is not a resume, but the program's own
                self._go_back_to(restored.name, restored.progress.to_json())
                self._writer.add(Resumed(self._number, restored.name, self._tensors(), self._named()))
            return restored

        setattr(Session, "load", load)  # noqa: B010

    def _open_tiers(self, options: ManagerOptions, root: str | os.PathLike[str] | Storage) -> tuple[Storage, ...]:
        """A storage of this run for each root that the program names: runs must not find each other's checkpoints."""
        named = [str(getattr(place, "url", place)) for place in (root, options.mirror and options.mirror.url) if place]
        return tuple(open_storage(f"{self._plan.root}/{xxhash.xxh3_64_hexdigest(url.encode())}") for url in named)

    def _go_back_to(self, name: str, progress: Mapping[str, int]) -> None:
        """Continue from the step at which that checkpoint was saved, by this process or an earlier one of the run."""
        for process in range(self._plan.process, -1, -1):
            for save in reversed(read_trace(self._folder, process, self._rank).saves):
                if save.name == name and save.progress == progress:
                    self._number = save.number
                    self._batches, self._inputs, self._losses = save.batches, save.inputs, save.losses
                    return

    # --- batches, models, losses, steps

    def _watch_batches(self) -> None:
        through = Loop._through

        @functools.wraps(through)
        def recorded(loop: Loop, *args: Any, **options: Any) -> Iterator[Any]:
            for number, batch in through(loop, *args, **options):
                self._batches.append(_digest(_tensors_in(batch)))
                yield number, batch

        setattr(Loop, "_through", recorded)  # noqa: B010

    def _models(self) -> Iterator[tuple[str, nn.Module]]:
        for manager in self._managers:
            manager.session.registry.refresh()
            yield from manager.session.registry.models.items()

    def _watch_models(self) -> None:
        for key, model in self._models():
            if model not in self._hooked:
                self._hooked.add(model)
                model.register_forward_pre_hook(functools.partial(self._read, key), with_kwargs=True)

    def _read(self, key: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._start = self._start or self._start_of_step()
            self._inputs.append(f"{key} {_digest(_tensors_in([args, kwargs]))}")

    def _watch_losses(self) -> None:
        backward: Callable[..., None] = torch.Tensor.backward

        @functools.wraps(backward)
        def recorded(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
            if tensor.numel() == 1:
                self._losses.append(f"{tensor.detach().item():.9g}")
            backward(tensor, *args, **options)

        setattr(torch.Tensor, "backward", recorded)  # noqa: B010

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = self._names()
        self._gradients = {
            name: _digest([parameter.grad])
            for name, parameter in _parameters(optimizer, names)
            if parameter.grad is not None
        }

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        names = self._names()
        self._number += 1
        self._has_stepped = True
        key = self._key_of(optimizer)
        label = key or self._unmanaged.setdefault(optimizer, f"{type(optimizer).__name__} {len(self._unmanaged)}")
        self._writer.add(
            Step(
                self._number,
                label,
                key is not None,
                self._batches,
                self._inputs,
                self._losses,
                self._gradients,
                [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
                {name: _digest([parameter]) for name, parameter in _parameters(optimizer, names)},
                {name: _digest([buffer]) for name, buffer in self._buffers()},
                self._named(),
                self._start,
            )
        )
        self._batches, self._inputs, self._losses, self._gradients, self._start = [], [], [], {}, {}
        self._watch_models()
        if self._number == self._plan.kill_at:
            self._die()

    def _key_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """The key of a managed optimizer, also of one that Accelerate wraps; None if no manager has it."""
        for manager in self._managers:
            parts = [part for part in manager.session.registry.parts.values() if isinstance(part, OptimizerPart)]
            for part, inner in zip(parts, manager.session.registry.optimizers, strict=True):
                if inner is optimizer:
                    return part.key
        return None

    def _die(self) -> None:
        for manager in self._managers:
            manager.session.saver.wait()  # every selftest then resumes from the same checkpoint
        os.kill(os.getpid(), signal.SIGKILL)

    def _named(self) -> list[str]:
        """What ckpt says is not exact: the warnings in its log, and the notes of the last load."""
        restored = [manager.restored for manager in self._managers if manager.restored is not None]
        tables = [table for load in restored for table in (load.approximated, load.skipped)]
        warned = "\n".join(self._warnings)
        noted = [f"{what}: {why}" for table in tables for what, why in table.items() if why not in warned]
        return [*self._warnings, *noted]

    # --- state

    def _start_of_step(self) -> dict[str, str]:
        """What a step starts from: if code after `manager.step()` changes one of these, a resume may lose it."""
        models = {f"{key} {index}": model for index, (key, model) in enumerate(self._models()) if not _is_fsdp(model)}
        rates = [group.get("lr") for manager in self._managers for each in manager.session.registry.optimizers
                 for group in each.param_groups]  # fmt: skip
        return {
            "random numbers": _digest(_tensors_in(rng.capture())),
            "models": _digest(tensor for model in models.values() for tensor in _tensors_of(model)),
            "learning rates": str([float(rate or 0.0) for rate in rates]),
        }

    def _names(self) -> dict[int, str]:
        return {
            identity: f"{key}.{name}"
            for key, model in self._models()
            for identity, name in parameter_names(unwrap(model)).items()
        }

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, model in self._models():
            yield from ((f"{key}.{name}", buffer) for name, buffer in unwrap(model).named_buffers())

    def _tensors(self) -> dict[str, str]:
        """Digests of the state that training continues from: parameters, buffers, optimizer state, learning rates."""
        found: dict[str, str] = {}
        for key, model in self._models():
            found |= {f"{key}.{name}": _digest([tensor]) for name, tensor in unwrap(model).named_parameters()}
        found |= {name: _digest([buffer]) for name, buffer in self._buffers()}
        names = self._names()
        for manager in self._managers:
            for index, optimizer in enumerate(manager.session.registry.optimizers):
                for name, parameter in _parameters(optimizer, names):
                    state = optimizer.state.get(parameter, {})
                    found[f"optimizer {index} of {name}"] = _digest(_tensors_in(state))
                rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
                found[f"learning rates of optimizer {index}"] = str([float(rate) for rate in rates])
        return found


class FoundObjects:
    """Objects of the program that no manager has, found among all that are alive when it saves.

    They are held, or those of a function would be gone when the run is compared.
    """

    def __init__(self) -> None:
        self.forgotten: list[str] = []
        self.has_scheduler = False
        self.read_loaders = False
        self._others: dict[int, tuple[nn.Module, str]] = {}  # with the digest of when it was found
        self._watch_loaders()

    def look(self, managers: Iterable[StateManager]) -> None:
        registries = [manager.session.registry for manager in managers]
        kinds = (nn.Module, LRScheduler, GradScaler)
        alive = [found for found in gc.get_objects() if issubclass(type(found), kinds)]
        self._look_for_models([found for found in alive if isinstance(found, nn.Module)], registries)
        schedulers = [found for found in alive if isinstance(found, LRScheduler)]
        scalers = [found for found in alive if isinstance(found, GradScaler) and found.is_enabled()]
        managed = list(_with_inner(value for registry in registries for value in registry.registered()))
        lists = [value for found in schedulers for value in vars(found).values() if isinstance(value, list | tuple)]
        inner = {id(part) for parts in lists for part in parts}  # of a SequentialLR
        known = {id(value) for value in managed} | inner
        optimizers = {id(optimizer) for registry in registries for optimizer in registry.optimizers}
        ours = [found for found in schedulers if id(_innermost(getattr(found, "optimizer", None))) in optimizers]
        self.has_scheduler = any(id(found) in known for found in schedulers)
        self.forgotten = sorted(type(found).__name__ for found in (*ours, *scalers) if id(found) not in known)

    def others(self) -> tuple[dict[str, str], list[str]]:
        """Digests of models that no manager has, by class, and the names of those that have changed."""
        digests: dict[str, list[str]] = {}
        changed = set()
        for model, first in self._others.values():
            now = _digest(_tensors_of(model))
            digests.setdefault(type(model).__name__, []).append(now)
            changed |= {type(model).__name__} if now != first else set()
        return {name: " ".join(sorted(found)) for name, found in digests.items()}, sorted(changed)

    def _look_for_models(self, alive: list[nn.Module], registries: Iterable[StateRegistry]) -> None:
        managed = [model for registry in registries for model in registry.models.values()]
        known = {tensor.data_ptr() for model in managed for tensor in _tensors_of(unwrap(model))}
        inner = {id(child) for model in alive for child in model.modules() if child is not model}
        for model in alive:
            tensors = list(_tensors_of(model))
            is_new = id(model) not in inner and id(model) not in self._others
            if is_new and tensors and not any(tensor.data_ptr() in known for tensor in tensors):
                self._others[id(model)] = model, _digest(tensors)

    def _watch_loaders(self) -> None:
        iterate = DataLoader.__iter__

        @functools.wraps(iterate)
        def recorded(loader: DataLoader[Any]) -> Any:
            self.read_loaders = True
            return iterate(loader)

        setattr(DataLoader, "__iter__", recorded)  # noqa: B010


def _with_inner(values: Iterable[Any]) -> Iterator[Any]:
    """Objects, and those that they are wrapped around, or consist of."""
    for value in values:
        yield value
        yield from getattr(value, "__dict__", {}).values()


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters and buffers, not its state_dict: to ask FSDP for that in a forward takes the weights away from it."""
    yield from model.parameters()
    yield from model.buffers()


def _is_fsdp(model: nn.Module) -> bool:
    """Whether its weights are whole in a forward, and shards otherwise, so that the two cannot be compared."""
    return is_fsdp1(model) or any(hasattr(module, "unshard") for module in model.modules())


def _innermost(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


class _Collector(logging.Handler):
    """Collects the warnings of ckpt."""

    def __init__(self, warnings: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._warnings = warnings

    def emit(self, record: logging.LogRecord) -> None:
        self._warnings.append(record.getMessage())


def _parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(parameters):
        yield names.get(id(parameter), f"parameter {index} of {type(optimizer).__name__}"), parameter


def _tensors_in(value: Any) -> Iterator[Any]:
    """The tensors and numbers in nested containers, in their order."""
    if isinstance(value, torch.Tensor | int | float | str):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors_in(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


def _digest(values: Iterable[Any]) -> str:
    hasher = xxhash.xxh3_64()
    for value in values:
        if isinstance(value, torch.Tensor):
            local = local_tensor(value)
            hasher.update(repr(local.shape).encode() if local.is_meta else host_bytes(on_host(local)))
        else:
            hasher.update(repr(value).encode())
    return hasher.hexdigest()
