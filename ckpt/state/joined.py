"""Several objects that are one: the parts of a model that a rank has, and an optimizer for each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ckpt.errors import ConfigError, UnsupportedError
from ckpt.state.joined_optimizer import JoinedOptimizer
from ckpt.state.unwrap import JoinedModel


class JoinedState:
    """Objects with the same state, such as the schedulers of the optimizers of all parts: saved once, loaded by all."""

    def __init__(self, objects: list[Any]) -> None:
        self.objects = objects

    def state_dict(self) -> Any:
        first, *others = [item.state_dict() for item in self.objects]
        if any(other != first for other in others):
            raise UnsupportedError(
                f"{len(self.objects)} objects of class {type(self.objects[0]).__name__} are joined, and their states "
                "differ. Give them as a list instead of ckpt.Joined."
            )
        return first

    def load_state_dict(self, state: Any) -> None:
        for item in self.objects:
            item.load_state_dict(state)


class Joined:
    """Several objects that a checkpoint holds as one, so that ranks with another number of them can load it.

        StateManager(root, model=Joined(parts), optimizer=Joined(optimizers), scheduler=Joined(schedulers))

    Models: the parts of a model that this rank has, for example its stages of a pipeline, as modules or as
    `PipelineStage`s of torch.distributed.pipelining. Names are those in the parts, which must be names of the whole
    model. Optimizers: one for each part or for each parameter, all of one class. Schedulers and scalers: all have the
    same state.

    Args:
        objects: All of this rank. Of models, a dict gives each part a prefix, for parts whose names begin anew
            (`{"stages.3": part}`); of optimizers, the keys are of no importance (a dict by names of parameters, which
            have dots, is joined without being told so).

    Raises:
        ConfigError: There is nothing to join.
    """

    def __init__(self, objects: Iterable[Any] | Mapping[str, Any]) -> None:
        self.objects = dict(objects) if isinstance(objects, Mapping) else list(objects)
        if not self.objects:
            raise ConfigError("ckpt.Joined has nothing to join. Give it all objects of this rank.")

    def as_one(self, kind: str) -> Any:
        """The object that a manager manages."""
        values = list(self.objects.values()) if isinstance(self.objects, dict) else self.objects
        ways: dict[str, Callable[[list[Any]], Any]] = {
            "model": self._model,
            "optimizer": JoinedOptimizer,
            "scheduler": JoinedState,
            "scaler": JoinedState,
        }
        if kind not in ways:
            raise ConfigError(f"{kind}=ckpt.Joined(...): models, optimizers, schedulers and scalers can be joined.")
        return ways[kind](values)

    def _model(self, values: list[Any]) -> JoinedModel:
        prefixes = list(self.objects) if isinstance(self.objects, dict) else [""] * len(values)
        parts = [getattr(value, "submod", value) for value in values]
        wrong = [type(part).__name__ for part in parts if not isinstance(part, nn.Module)]
        if wrong:
            raise ConfigError(f"model=ckpt.Joined(...) takes modules, and has {', '.join(wrong)}.")
        return JoinedModel(zip(prefixes, parts, strict=True))
