"""Which states PyTorch's optimizers, schedulers and scalers would not accept: found before live tensors are changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import optim
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, MultiplicativeLR, SequentialLR

_SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_WITH_STEPS = (  # these look for it in the first state that they are given
    optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop,
    optim.Rprop,
)  # fmt: skip
_LISTS = {
    LambdaLR: "lr_lambdas",
    MultiplicativeLR: "lr_lambdas",
    SequentialLR: "_schedulers",
    ChainedScheduler: "_schedulers",
}


def problem_with(live: Any, saved: Any) -> str:
    """Why a scheduler or scaler cannot have this state; empty if it can, or is none of PyTorch's own."""
    if type(live).__name__ == "AcceleratedScheduler":
        live = live.scheduler  # which it passes its state on to
    if not isinstance(live, LRScheduler | ChainedScheduler | GradScaler) or not _loads_as_torch_does(live):
        return ""
    if not isinstance(saved, Mapping) or not all(isinstance(key, str) for key in saved):
        return f"no state of a {type(live).__name__}"
    if isinstance(live, GradScaler):
        odd = [key for key in _SCALER if not isinstance(saved.get(key), int | float)] if saved else []
    else:
        lists = [key for kind, key in _LISTS.items() if isinstance(live, kind)]
        odd = [key for key in lists if not isinstance(saved.get(key), list | tuple)]
    return f"no state of a {type(live).__name__}: {', '.join(odd)} missing or of another kind" if odd else ""


def unusable_states(live: Any, saved: Mapping[str, Any]) -> dict[str, str]:
    """Which states of parameters an optimizer cannot have, and why; none if it is not of PyTorch's own kinds."""
    if not isinstance(live, optim.Optimizer) or not str(type(live).__module__).startswith("torch.optim"):
        return {}
    unfit = {}
    for name, state in saved.items():
        if not isinstance(state, Mapping):
            unfit[f"state.{name}"] = f"no state of {type(live).__name__}"
        elif isinstance(live, _WITH_STEPS) and "step" not in state:
            unfit[f"state.{name}"] = f"no state of {type(live).__name__}: step is missing"
    return unfit


def _loads_as_torch_does(live: Any) -> bool:
    """Whether its class has not a `load_state_dict` of its own, which may accept anything."""
    return str(type(live).load_state_dict.__module__).startswith("torch.")
