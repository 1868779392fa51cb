"""The registry of managed objects: where a manager finds them, and the part that knows the state of each.

What only some runs have (DeepSpeed, FSDP 1, DDP, an accelerator, ...) is recognised by what the process has imported,
and its module is imported where a part of its kind is built: here.

Accumulation windows are gradients that no step of their optimizer has used yet. Gradients that remain after a step have
been used: the common loop clears them before the next backward pass. Those that a backward pass has added since are
lost by a resume, unless they are saved.
"""

from __future__ import annotations

import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ckpt.compat.torch import has_unsharded_gradients, version_of
from ckpt.errors import ConfigError, UnsupportedError
from ckpt.formats.layout import Members
from ckpt.formats.native.documents import is_packed, pieces
from ckpt.formats.sharded_tensors import local_tensor
from ckpt.formats.tensors import device_obstacle
from ckpt.state import rng
from ckpt.state.model import ModelPart
from ckpt.state.objects import KINDS, GivenObjects, ManagedObjects, ObjectSource, Stateful, is_part_name
from ckpt.state.optimizer import OptimizerPart, is_joined, stepping
from ckpt.state.parts import ENGINE, HOOKS, GradientsPart, ObjectPart, OwnPart, Part, RankObjectPart, has_state
from ckpt.state.unwrap import has_ddp, is_engine, is_fsdp1, is_instance, kinds_in, modules_in
from ckpt.util.checked_json import joined

if TYPE_CHECKING:
    from ckpt.state.ddp import HooksPart
    from ckpt.state.deepspeed import EnginePart


_MARK = "_ckpt_used_as"  # attribute of a gradient: its version when a step used it
_SAMPLE = 64  # evenly spaced parameters examined after each step: a fraction of a millisecond


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method as a callback that does not keep its object alive: loaders and optimizers may outlive it."""
    reference = weakref.WeakMethod(method)

    def call(*given: Any) -> None:
        method = reference()
        if method is not None:
            method(*given)

    return call


class Windows:
    """Detects gradients that were added after a step.

    A step hook marks the gradients that the step has used with their versions. A gradient that was added to since has
    another version, and a new one has no mark.
    """

    def __init__(self) -> None:
        self._samples: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._hooks: list[Any] = []

    def watch(self, optimizers: Iterable[Any]) -> None:
        self._hooks += [optimizer.register_step_post_hook(weakly(self._mark_used)) for optimizer in optimizers]

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def open(self, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        """The optimizers that have unused gradients other than zero."""
        return [optimizer for optimizer in optimizers if self._is_fresh(optimizer) and _is_non_zero(optimizer)]

    def _mark_used(self, optimizer: Any, *_: Any) -> None:
        for parameter in self._sample(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else ():
            gradient = parameter.grad
            if gradient is not None:
                setattr(gradient, _MARK, version_of(local_tensor(gradient)))  # FSDP 2 accumulates into the shard

    def _is_fresh(self, optimizer: torch.optim.Optimizer) -> bool:
        gradients = (parameter.grad for parameter in self._sample(optimizer))
        return any(
            grad is not None and getattr(grad, _MARK, None) != version_of(local_tensor(grad)) for grad in gradients
        )

    def _sample(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        total = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._samples.get(optimizer)
        if known is None or known[0] != total:
            every = [value for group in optimizer.param_groups for value in group["params"] if value.requires_grad]
            step = max(1, -(-len(every) // _SAMPLE))
            known = self._samples[optimizer] = total, every[::step]
        return known[1]


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The existing gradients; of sharded ones this rank's shards."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                yield local_tensor(gradient)


def _is_non_zero(optimizer: torch.optim.Optimizer) -> bool:
    return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in _gradients(optimizer))


def obstacle(models: Mapping[str, nn.Module], waiting: Iterable[torch.optim.Optimizer] = ()) -> str | None:
    """Why the unused gradients of these optimizers cannot be saved; None if they can."""
    if any(is_engine(model) for model in models.values()):
        return "which DeepSpeed keeps to itself"
    if any(is_fsdp1(model) for model in models.values()):
        return "which FSDP 1 keeps to itself"
    gradients = (gradient for optimizer in waiting for gradient in _gradients(optimizer))
    plain = all(type(gradient) is torch.Tensor and gradient.layout is torch.strided for gradient in gradients)
    return None if plain else "some sparse"


def holds_unsharded(models: Mapping[str, nn.Module]) -> bool:
    """Whether FSDP 2 holds gradients that it has not sharded yet: `set_requires_gradient_sync(False)`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a sharded module has imported it
    if fsdp is None:
        return False
    return any(
        isinstance(module, fsdp.FSDPModule) and has_unsharded_gradients(module)
        for model in models.values()
        if any(isinstance(module, fsdp.FSDPModule) for module in kinds_in(model))
        for module in modules_in(model)
    )


_PLAIN = (bool, int, float, str, type(None))
_TOO_DEEP = 50


class PlainValues(UserDict[str, Any]):
    """A dict that is saved with every checkpoint, and is as it was after a resume.

    What is given before a load (`register(best_loss=1e9)`) is the value where the checkpoint has none by that name.
    A tensor or NumPy scalar with one element becomes a number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._is_loaded = False

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"this run has no value {name!r}. It has: {', '.join(map(repr, self)) or 'none'}")

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"the name of a value must be a string, not {name!r}.")
        super().__setitem__(name, _plain(name, value))

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Add values, unless a checkpoint has brought others under their names."""
        for name, value in values.items():
            if not (self._is_loaded and name in self):
                self[name] = value

    def to_save(self) -> dict[str, Any]:
        """All values as they are now, for the state of a rank; nothing if there are none.

        Lists and dicts may have got anything since they were given, so they are checked again.
        """
        return {"values": {name: _plain(name, value) for name, value in self.items()}} if self else {}

    def restore(self, values: Mapping[str, Any]) -> list[str]:
        """Take these. Returns the names of others that are there, and keep what they have."""
        kept = [name for name in self if name not in values]
        self.data |= values
        self._is_loaded = True
        return kept


def is_plain(value: Any) -> bool:
    """Whether it is a single number, text, or None: not an object with state."""
    return isinstance(value, (*_PLAIN, *_of_numpy("generic")))


def are_plain(values: Any) -> bool:
    """Whether these can be the values of a checkpoint."""
    try:
        return (
            isinstance(values, dict) and all(type(name) is str for name in values) and bool(_plain("", values) or True)
        )
    except ConfigError:
        return False


def _plain(name: str, value: Any, depth: int = 0) -> Any:
    arrays: tuple[Any, ...] = (torch.Tensor, *_of_numpy("ndarray", "generic"))
    if isinstance(value, arrays) and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if type(value) in _PLAIN:
        return value
    if depth < _TOO_DEEP and type(value) in (list, tuple):
        return type(value)(_plain(name, item, depth + 1) for item in value)
    if depth < _TOO_DEEP and type(value) is dict and all(type(key) in (str, int) for key in value):
        return {key: _plain(name, item, depth + 1) for key, item in value.items()}
    raise ConfigError(
        f"values[{name!r}] contains a {type(value).__name__}. Values can be numbers, strings, None, and lists, tuples "
        "and dicts of these. For an object with state_dict and load_state_dict, use register(name=object)."
    )


def _of_numpy(*names: str) -> tuple[type, ...]:
    """Classes of NumPy; none where nobody has imported it, and so no value can be of them."""
    numpy = sys.modules.get("numpy")
    return tuple(getattr(numpy, name) for name in names) if numpy is not None else ()


RESERVED = (*KINDS, "custom", "rng", "generators", "loaders", "gradients", HOOKS, ENGINE, "state", "manifest", "values")

_IN_WINDOW = "saved in the middle of an accumulation window"
_WITHOUT = "the next update is made without them"

Watcher = Callable[[Iterable[Any]], None]  # is given the new optimizers, and engines that make steps


class StateRegistry:
    """Parts, whose state is saved once for all ranks, and random generators, which are saved for each rank.

    `find` returns the present objects. Every `refresh` calls it again: objects may be added later, and `watchers` are
    called with new optimizers. `gradients`: whether gradients are saved; None for only within an accumulation window.
    """

    def __init__(
        self,
        find: Callable[[], ManagedObjects],
        watchers: Iterable[Watcher] = (),
        *,
        gradients: bool | None,
        members: Members = None,
    ) -> None:
        self.models: Mapping[str, nn.Module] = {}
        self.parts: dict[str, Part] = {}
        self.generators: dict[str, Any] = {}
        self.values = PlainValues()
        self._find = find
        self._windows = Windows()
        self._watchers = (*watchers, self._windows.watch)
        self._found = ManagedObjects()
        self._registered: dict[str, Part] = {}
        self._per_rank: dict[str, Stateful] = {}
        self._chunked: set[str] = set()
        self._gradients = gradients
        self._members = members  # the ranks that have these objects, where they are some of the job's
        self._engines: dict[str, EnginePart] = {}

    def refresh(self) -> None:
        """Rebuild the parts if the objects have changed, and tell the watchers about new optimizers."""
        found = self._find()
        if found is self._found or found.identities() == self._found.identities():
            return
        _refuse_unmanageable({**found.models, **found.optimizers, **found.others, **found.custom})
        engines, others = self._engine_parts(found)
        engine_parts = {part.key: part for part in engines.values()}
        parts = {**_found_parts(others), **engine_parts, **self._registered}
        known = self._hookable
        self._found, self.models, self._engines = found, found.models, engines
        self.parts = {key: part for key, part in parts.items() if key not in found.left_out}
        new = [stepper for stepper in self._hookable if not any(stepper is other for other in known)]
        for watch in self._watchers:
            watch(new)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The managed optimizers, without wrappers that have no step hooks of their own."""
        return list(self.optimizers_by_key().values())

    def optimizers_by_key(self) -> dict[str, torch.optim.Optimizer]:
        found: dict[str, torch.optim.Optimizer] = {}
        for key, part in self.parts.items():
            if isinstance(part, OptimizerPart) and is_joined(part.optimizer):
                inner: list[torch.optim.Optimizer] = getattr(part.optimizer, "optimizers", [])
                found |= {f"{key}[{number}]": optimizer for number, optimizer in enumerate(inner)}
            elif isinstance(part, OptimizerPart):
                found[key] = stepping(part.managed)
        return found

    def registered(self) -> list[Stateful]:
        """The objects of parts that are neither models nor optimizers."""
        found = [part.value for part in self.parts.values() if isinstance(part, ObjectPart)]
        return [*found, *self._per_rank.values()]

    def steppers(self) -> list[Any]:
        """All objects that step parameters: torch's and other optimizers, and engines."""
        return [*self._found.optimizers.values(), *self._engines.values()]

    @property
    def _hookable(self) -> list[Any]:
        """The objects on which step hooks can be registered."""
        return [*self.optimizers, *(engine for engine in self._engines.values() if engine.stepped is not None)]

    def _engine_parts(self, found: ManagedObjects) -> tuple[dict[str, EnginePart], ManagedObjects]:
        """A part for every engine of DeepSpeed, and the objects without what the engines have of their own."""
        engines = {key: model for key, model in found.models.items() if is_engine(model)}
        if not engines:
            return {}, found
        from ckpt.state import deepspeed

        if self._members is not None:
            deepspeed.refuse_some_ranks(engines, self._members)
        known = {key: part for key, part in self._engines.items() if part.engine is engines.get(key)}
        new = {key: deepspeed.EnginePart(_engine_key(key), engine) for key, engine in engines.items()}
        return new | known, deepspeed.with_engines(found, engines)

    def model_part(self, key: str) -> ModelPart:
        """The part of the model with this key."""
        part = self.parts.get(key) if isinstance(key, str) else None
        if not isinstance(part, ModelPart):
            known = ", ".join(name for name, other in self.parts.items() if isinstance(other, ModelPart)) or "none"
            raise ConfigError(f"this manager has no model named {key!r}. It has: {known}.")
        return part

    def tensors(self) -> Iterator[torch.Tensor]:
        """Parameters, buffers and optimizer state; of sharded tensors this rank's shards. Most of the state."""
        for model in self.models.values():
            yield from map(local_tensor, (*model.parameters(), *model.buffers()))
        yield from self._optimizer_state()

    def _optimizer_state(self) -> Iterator[torch.Tensor]:
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    if type(value) is torch.Tensor:  # most are, and training waits
                        yield value
                    elif isinstance(value, torch.Tensor):
                        yield from map(local_tensor, pieces(value).values() if is_packed(value) else (value,))

    def own(self, rank: int) -> dict[str, OwnPart]:
        """The parts that a rank saves for itself at any time."""
        parts: dict[str, OwnPart] = self._gradients_part(rank) if self._gradients else {}
        for engine in self._engines.values():
            parts |= engine.own_parts(rank)
        for name, value in self._per_rank.items():
            key = f"{name}-{rank:05d}"
            parts[key] = RankObjectPart(key, value, chunked=name in self._chunked)
        return parts

    def _gradients_part(self, rank: int, of: frozenset[int] | None = None) -> dict[str, OwnPart]:
        key = f"gradients-{rank:05d}"
        return {key: GradientsPart(key, self.models, of=of)}

    def own_parts_to_save(self, rank: int) -> tuple[dict[str, OwnPart], dict[str, str]]:
        """The parts that a rank saves for itself now, and what the checkpoint will lack, each with the reason."""
        own: dict[str, OwnPart] = {**self.own(rank), **self.hooks(rank)}
        lacking = {**self._lacking_hooks(), **self._inaccessible_gradients()}
        waiting = [] if self._gradients else self._windows.open(self.optimizers)
        if not waiting:
            return own, lacking
        why = obstacle(self.models, waiting)
        if self._gradients is None and why is None:
            return {**own, **self._gradients_part(rank, _parameter_identities(waiting))}, lacking
        why = why or "with saving=ckpt.SaveOptions(gradients=False)"
        lacking["gradients"] = f"{_IN_WINDOW}, without its gradients, {why}; {_WITHOUT}"
        return own, lacking

    def own_parts_to_load(self, rank: int, saved: Collection[str]) -> dict[str, OwnPart]:
        """The parts that a rank loads for itself from a checkpoint that has these keys of it."""
        optional: dict[str, OwnPart] = {**self.hooks(rank)}
        optional |= self._gradients_part(rank) if self._gradients is None else {}
        return {**self.own(rank), **{key: part for key, part in optional.items() if key in saved}}

    def hooks(self, rank: int) -> dict[str, HooksPart]:
        """The part of DDP's communication hooks, whose state a checkpoint may lack."""
        if not has_ddp(self.models.values()):
            return {}
        from ckpt.state.ddp import saved_hooks

        return saved_hooks(self.models, rank)

    def _lacking_hooks(self) -> dict[str, str]:
        if not has_ddp(self.models.values()):
            return {}
        from ckpt.state.ddp import lacking_state

        return lacking_state(self.models)

    def _inaccessible_gradients(self) -> dict[str, str]:
        """Why gradients of an unfinished accumulation window cannot be saved, if a library holds them."""
        if holds_unsharded(self.models):
            return {"gradients": f"{_IN_WINDOW}, whose gradients FSDP 2 has not divided yet; {_WITHOUT}"}
        if any(engine.in_window for engine in self._engines.values()):
            return {"gradients": f"{_IN_WINDOW}, whose gradients DeepSpeed keeps to itself; {_WITHOUT}"}
        return {}

    def release(self) -> None:
        """Remove the hooks from the optimizers."""
        self._windows.release()

    def leave_windows(self) -> None:
        """Clear the gradients of unfinished windows after a load without gradients: they belong to the old state."""
        if self._gradients is None and obstacle(self.models) is None:
            for optimizer in self._windows.open(self.optimizers):
                optimizer.zero_grad()

    def register(
        self,
        objects: Mapping[str, Any],
        unnamed: Sequence[Any] = (),
        *,
        per_rank: bool = False,
        chunked: bool = False,
    ) -> None:
        """Add all of these objects, or none if one is unsuitable. With `per_rank`, each rank saves its own state; with
        `chunked`, ckpt writes each item of a list in the state to a separate file."""
        if unnamed:
            raise ConfigError("register() needs a name for each object: register(ema=ema).")
        for option, given in (("per_rank", per_rank), ("chunked", chunked)):
            if not isinstance(given, bool):
                raise ConfigError(
                    f"{option}={given!r} must be True or False: it is an option, so no object can have that name."
                )
        wrong = [
            f"{name}: {why}"
            for name, value in objects.items()
            if (why := self._obstacle(name, value, per_rank=per_rank, chunked=chunked))
        ]
        if wrong:
            raise ConfigError(f"cannot register {joined(wrong)}.")
        self._chunked.update(objects if chunked else ())
        for name, value in objects.items():
            if is_plain(value):
                self.values.begin_with({name: value})
            elif rng.is_generator(value):
                self.generators[name] = value
            elif per_rank:
                self._per_rank[name] = value
            else:
                self._registered[name] = self.parts[name] = _registered_part(name, value, chunked=chunked)

    def _obstacle(self, name: str, value: Any, *, per_rank: bool, chunked: bool) -> str | None:
        if any(name in known for known in (self.parts, self.generators, self._per_rank, RESERVED)):
            return "a part of that name already exists"
        if name in self.values and not is_plain(value):
            return "a value of that name already exists"
        if isinstance(value, type):
            return f"{value.__name__} is a class: give an object of it"
        if not is_plain(value) and not all(map(is_part_name, name.split("."))):
            return "this is not a valid part name: use letters, digits, '_' and '-'"
        if chunked and (isinstance(value, nn.Module) or not has_state(value)):
            return f"chunked=True is for an object with lists in its state_dict, which a {type(value).__name__} is not"
        if rng.is_generator(value) or has_state(value) or (is_plain(value) and not per_rank):
            return None
        if _is_hook_state(value):
            return f"a {type(value).__name__} is saved with the DistributedDataParallel model that has the hook"
        if isinstance(value, list | tuple | dict):
            return f"a {type(value).__name__} is kept by manager.values[{name!r}] = ..."
        return f"a {type(value).__name__} has no state_dict and load_state_dict"


def _found_parts(found: ManagedObjects) -> dict[str, Part]:
    # optimizers name the parameters of a single model as it does, those of several with the model's name before them
    models = {"" if len(found.models) == 1 else key.partition(".")[2]: model for key, model in found.models.items()}
    parts: dict[str, Part] = {key: model_part(key, model) for key, model in found.models.items()}
    parts |= {key: optimizer_part(key, optimizer, models) for key, optimizer in found.optimizers.items()}
    parts |= {key: ObjectPart(key, value, same_class=True) for key, value in found.others.items()}
    return parts | {key: _registered_part(key, value) for key, value in found.custom.items()}


def model_part(key: str, model: nn.Module) -> ModelPart:
    """The part of a model, by what wraps it."""
    if "deepspeed" in sys.modules:
        from ckpt.state.deepspeed import EngineModelPart, refuse_bare

        if is_engine(model):
            return EngineModelPart(key, model)
        refuse_bare(key, model)
    if is_fsdp1(model):
        from ckpt.state.fsdp1 import Fsdp1ModelPart

        return Fsdp1ModelPart(key, model)
    return ModelPart(key, model)


def optimizer_part(key: str, optimizer: Any, models: Mapping[str, nn.Module]) -> Part:
    """The part of an optimizer, by its class and by what wraps its models."""
    if is_instance(optimizer, "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer"):
        from ckpt.state.zero_redundancy import ZeroRedundancyPart

        return ZeroRedundancyPart.of(key, optimizer, models)
    if not isinstance(optimizer, torch.optim.Optimizer) and not is_joined(optimizer):
        return ObjectPart(key, optimizer)
    if any(map(is_fsdp1, models.values())):
        from ckpt.state.fsdp1 import Fsdp1OptimizerPart

        return Fsdp1OptimizerPart(key, optimizer, models)
    return OptimizerPart(key, optimizer, models)


def _parameter_identities(optimizers: Iterable[torch.optim.Optimizer]) -> frozenset[int]:
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return frozenset(id(parameter) for group in groups for parameter in group["params"])


def _engine_key(model: str) -> str:
    return model.replace("model", ENGINE, 1)


def _registered_part(key: str, value: Stateful, *, chunked: bool = False) -> Part:
    return model_part(key, value) if isinstance(value, nn.Module) else ObjectPart(key, value, chunked=chunked)


def _refuse_unmanageable(objects: Mapping[str, Any]) -> None:
    wrong = []
    for key, value in objects.items():
        kind = key.partition(".")[0]
        if kind == "model" and not isinstance(value, nn.Module):
            wrong.append(f"{key} is a {type(value).__name__}, not a torch.nn.Module")
        elif kind != "model" and kind in KINDS and isinstance(value, nn.Module):
            wrong.append(
                f"{key} is a {type(value).__name__}, a torch.nn.Module: give it as model={{...}}, or register it"
            )
        elif (kind == "optimizer" and isinstance(value, LRScheduler)) or (
            kind == "scheduler" and isinstance(value, torch.optim.Optimizer)
        ):
            wrong.append(f"{key} is a {type(value).__name__}, which is not a valid {kind}")
        elif not has_state(value):
            wrong.append(f"{key} is a {type(value).__name__}, which has no state_dict and load_state_dict")
    if wrong:
        raise ConfigError(f"StateManager: {joined(wrong)}.")
    models = {key: value for key, value in objects.items() if isinstance(value, nn.Module)}
    refuse_devices({key: {one.device for one in model.parameters()} for key, model in models.items()})


def refuse_devices(devices: Mapping[str, Iterable[torch.device]]) -> None:
    """Raise if the parameters of some models, by key, are on a device whose tensors cannot be saved."""
    obstacles = {key: why for key, found in devices.items() for device in found if (why := device_obstacle(device))}
    for key, why in obstacles.items():
        raise UnsupportedError(
            f"{key} has parameters {why}: a save could copy values that XLA has not computed yet. Copy the state to a "
            "model on the CPU or a GPU before each save, and give that model to the manager. Alternatively, use "
            "torch_xla's own checkpoints."
        )


def _is_hook_state(value: Any) -> bool:
    from ckpt.state.ddp import is_hook_state

    return is_hook_state(value)


# -- where a manager finds its objects: in an accelerator, or in the arguments of its constructor ---------------------


class UnnamedObjectError(ConfigError, TypeError):
    """An object without the keyword that says what it is: a TypeError too, as for any argument too many."""


def refuse_unnamed(root: Any, others: Sequence[Any]) -> None:
    """Refuse whatever is given without a keyword, the root aside: what it is would have to be guessed."""
    misplaced = [root] if isinstance(root, nn.Module | torch.optim.Optimizer) else []
    given = [*misplaced, *others]
    if given:
        kinds = ", ".join(type(value).__name__ for value in given)
        raise UnnamedObjectError(
            f"StateManager takes only the root as a positional argument, but you also passed {kinds} by position. Name "
            'each object: StateManager("runs/x", model=model, optimizer=optimizer).'
        )


def find_source(accelerator: Any, **objects: Any) -> ObjectSource:
    """The accelerator's prepared objects, or the given ones. Both at once are refused."""
    if accelerator is None:
        return GivenObjects(**objects)
    given = [kind for kind, value in objects.items() if value is not None]
    if given:
        raise ConfigError(
            f"StateManager takes either accelerator= or {', '.join(given)}: ckpt saves everything that the accelerator "
            "has prepared. Pass your objects to accelerator.prepare(...), or add others with register(name=...)."
        )
    from ckpt.state.accelerator import AcceleratorObjects

    return AcceleratorObjects(accelerator)
