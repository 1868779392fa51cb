"""Ways in which a program changes its parameters and optimizer state on a GPU, for tests of what a save copies.

`build(way)` returns a `Training` of 38 MB whose `change` is that way. It waits for nothing that the way itself does not
wait for, so that the device is still busy with what came before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import ckpt

DEVICE = "cuda"
WIDTH, LAYERS = 1024, 3
SLEEP = 10_000_000  # cycles: five milliseconds
_cuda: Any = torch.cuda  # much of it has no types
State = dict[str, torch.Tensor]
Optimizers = torch.optim.Optimizer | dict[str, torch.optim.Optimizer]


@dataclass
class Training:
    """What a program trains, and how it changes that.

    `wrapped`: the model as the manager is given it. `stream`: current while the program trains and saves.
    `side_streams`: those that work on the state and that the program does not order with its saves.
    `sleeps_in_current`: whether the stream of the save may be busy at the call.
    """

    model: nn.Module
    optimizers: Optimizers
    change: Callable[[], object]
    wrapped: nn.Module | None = None
    average: nn.Module | None = None
    stream: torch.cuda.Stream | None = None
    side_streams: tuple[torch.cuda.Stream, ...] = ()
    sleeps_in_current: bool = True

    def manager(self, root: Path, *, last: int = 2, **saving: Any) -> ckpt.StateManager:
        """A manager of its objects that neither saves gradients nor leaves out saves."""
        options = ckpt.SaveOptions(**{"gradients": False, "when_busy": "wait", **saving})
        model = self.wrapped or self.model
        manager = ckpt.StateManager(
            root, model=model, optimizer=self.optimizers, saving=options, keep=ckpt.Keep(last=last)
        )
        if self.average is not None:
            manager.register(average=self.average)
        return manager

    def current(self) -> AbstractContextManager[object]:
        """Makes its stream the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def sleep(self) -> None:
        """Keep the device busy for some milliseconds, in every stream in which the program works."""
        for device in {parameter.device for parameter in self.model.parameters() if parameter.is_cuda}:
            with torch.cuda.device(device):
                if self.sleeps_in_current:
                    _cuda._sleep(SLEEP)
        for stream in self.side_streams:
            with torch.cuda.stream(stream):
                _cuda._sleep(SLEEP)

    def state(self) -> State:
        """Every tensor, not copied, under its file and its name there."""
        found = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        if self.average is not None:
            found |= {f"average/{name}": tensor for name, tensor in self.average.state_dict().items()}
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        several = self.optimizers if isinstance(self.optimizers, dict) else {"": self.optimizers}
        for key, optimizer in several.items():
            file = f"optimizer.{key}" if key else "optimizer"
            for parameter, state in optimizer.state.items():
                found |= {f"{file}/state.{names[parameter]}.{field}": tensor for field, tensor in state.items()}
        return found

    def clone(self, device: str | None = None) -> State:
        """A copy of the state as the program sees it at this call, in its current stream."""
        if self.side_streams:
            torch.cuda.synchronize()  # the program has not ordered them with the current stream
        copy = {name: tensor.detach().to(device or tensor.device, copy=True) for name, tensor in self.state().items()}
        if self.side_streams:
            torch.cuda.synchronize()
        return copy


def build(way: str) -> Training:
    """A training that changes its state in one of `WAYS`. All of its state exists, and its kernels are compiled."""
    torch.manual_seed(1)
    training = WAYS[way]()
    with training.current():
        for _ in range(2):
            training.change()
    _synchronize()
    return training


def read(folder: Path, device: str) -> State:
    """Every tensor of a checkpoint, from its files."""
    files = {path.stem: load_file(path, device) for path in folder.glob("*.safetensors")}
    return {f"{file}/{name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def differences(found: State, expected: State) -> list[str]:
    """The names of tensors that are not the same in every bit, or are on one side only."""
    unequal = {name for name in found.keys() & expected.keys() if not _same_bits(found[name], expected[name])}
    return sorted(unequal | (found.keys() ^ expected.keys()))


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    alike = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return alike and torch.equal(_bytes(found), _bytes(expected.to(found.device)))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _synchronize() -> None:
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)


def _layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _model() -> nn.Sequential:
    return _layers().to(DEVICE)


def _with_gradients(model: nn.Module) -> nn.Module:
    """The model with gradients that are the same in every step: AdamW changes every number with them."""
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def _adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """With the state of one step."""
    optimizer = torch.optim.AdamW(_with_gradients(model).parameters(), lr=1e-3, **options)
    optimizer.step()
    return optimizer


def _loss(model: nn.Module) -> Callable[[], Any]:
    """The loss of a batch, the same in every step."""
    inputs, targets = torch.randn(2, 64, WIDTH, device=DEVICE)
    return lambda: nn.functional.mse_loss(model(inputs), targets)


def _optimizer_steps(**options: Any) -> Training:
    model = _model()
    optimizer = _adamw(model, **options)
    return Training(model, optimizer, optimizer.step)


def _fused_optimizer_steps() -> Training:
    return _optimizer_steps(fused=True)


def _loss_is_read() -> Training:
    model = _model()
    optimizer, loss_of_batch = _adamw(model), _loss(model)

    def change() -> None:
        optimizer.zero_grad()
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
        loss.item()

    return Training(model, optimizer, change)


def _graph_replays() -> Training:
    model = _model()
    optimizer, loss_of_batch = _adamw(model, capturable=True), _loss(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of_batch().backward()
        optimizer.step()

    warming_up = _cuda.Stream()
    warming_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warming_up):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warming_up)
    optimizer.zero_grad(set_to_none=True)  # the gradients are then allocated in the graph's own memory
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return Training(model, optimizer, graph.replay)


def _compiled_step() -> Training:
    _require_compiler()
    model = _model()
    optimizer = _adamw(model, capturable=True)
    return Training(model, optimizer, torch.compile(optimizer.step))


def _compiled_model() -> Training:
    _require_compiler()
    model = _model()
    optimizer = _adamw(model)
    wrapped: Any = torch.compile(model, mode="reduce-overhead")
    compiler: Any = torch.compiler
    loss_of_batch = _loss(wrapped)

    def change() -> None:
        compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        loss_of_batch().backward()
        optimizer.step()

    for _ in range(3):
        change()  # the third one replays what the second one has captured
    return Training(model, optimizer, change, wrapped=wrapped)


def _parameters_change(change: Callable[[list[torch.Tensor]], object]) -> Training:
    """A training in which this is called with all parameters, without autograd."""
    model = _model()
    return Training(model, _adamw(model), torch.no_grad()(functools.partial(change, list(model.parameters()))))


def _data_multiplied() -> Training:
    def change(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.data.mul_(0.999)

    return _parameters_change(change)


def _multiplied() -> Training:
    def change(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            parameter.mul_(0.999)

    return _parameters_change(change)


def _multiplied_together() -> Training:
    return _parameters_change(lambda parameters: torch._foreach_mul_(parameters, 0.999))


def _clipped() -> Training:
    bound = 1 / WIDTH**0.5  # of the initial weights; smaller in every step, or only the first would change anything

    def change(parameters: list[torch.Tensor]) -> None:
        nonlocal bound
        bound *= 0.995
        for parameter in parameters:
            parameter.data.clamp_(-bound, bound)

    return _parameters_change(change)


def _averaged() -> Training:
    model = _model()
    optimizer = _adamw(model)
    swa: Any = torch.optim.swa_utils
    average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))

    def change() -> None:
        average.update_parameters(model)
        optimizer.step()

    return Training(model, optimizer, change, average=average)


def _triton_kernel() -> Training:
    pytest.importorskip("triton")
    from tests.helpers.triton_kernel import scale

    try:
        scale(torch.ones(8, device=DEVICE), 2.0)
    except Exception as error:
        pytest.skip(f"Triton compiles nothing here: {error!r:.200}")

    def change(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            scale(parameter, 0.999)

    return _parameters_change(change)


_SOURCE = """
extern "C" __global__ void scale(float* values, int count) {
    int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) values[place] *= 0.999f;
}
"""


def _cuda_kernel() -> Training:
    compile_kernel: Any = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        pytest.skip("this PyTorch compiles no CUDA kernels")
    try:
        scale = compile_kernel(_SOURCE, "scale")
    except Exception as error:
        pytest.skip(f"NVRTC compiles nothing here: {error!r:.200}")

    def change(parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            count = parameter.numel()
            scale(grid=((count + 255) // 256, 1, 1), block=(256, 1, 1), args=[parameter.detach(), count])

    return _parameters_change(change)


def _two_streams(*, ordered: bool = False, sleeps_in_current: bool = True) -> Training:
    """Two optimizers, each in a stream of its own; `ordered`: with the current stream, before and after."""
    model = _model()
    first, *others = model
    optimizers: dict[str, torch.optim.Optimizer] = {"first": _adamw(first), "others": _adamw(nn.Sequential(*others))}
    streams = (_cuda.Stream(), _cuda.Stream())

    def change() -> None:
        for stream, optimizer in zip(streams, optimizers.values(), strict=True):
            if ordered:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.step()
        for stream in streams if ordered else ():
            torch.cuda.current_stream().wait_stream(stream)

    torch.cuda.synchronize()
    side_streams = () if ordered else streams
    return Training(model, optimizers, change, side_streams=side_streams, sleeps_in_current=sleeps_in_current)


def _steps_in_backward() -> Training:
    model = _model()
    loss_of_batch = _loss(model)
    by_parameter: dict[Any, torch.optim.Optimizer] = {
        parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        optimizer = by_parameter[parameter]
        optimizer.step()
        optimizer.zero_grad()

    for parameter in by_parameter:
        parameter.register_post_accumulate_grad_hook(step)
    optimizers = {f"of-{number}": optimizer for number, optimizer in enumerate(by_parameter.values())}
    return Training(model, optimizers, lambda: loss_of_batch().backward())


def _other_stream() -> Training:
    training = _optimizer_steps()
    training.stream = _cuda.Stream()
    torch.cuda.synchronize()
    return training


def _several_devices() -> Training:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    model = _layers()
    for number, layer in enumerate(model):
        layer.to(f"cuda:{number % torch.cuda.device_count()}")
    optimizer = _adamw(model)
    return Training(model, optimizer, optimizer.step)


def _partly_on_the_host() -> Training:
    model = _layers()
    model[1:].to(DEVICE)
    optimizer = _adamw(model)
    return Training(model, optimizer, optimizer.step)


@functools.cache
def _why_not_compiled() -> str | None:
    try:
        torch.compile(lambda values: values * 2 + 1)(torch.ones(8, device=DEVICE))
    except Exception as error:
        return f"torch.compile compiles nothing here: {error!r:.200}"
    return None


def _require_compiler() -> None:
    if reason := _why_not_compiled():
        pytest.skip(reason)


WAYS: dict[str, Callable[[], Training]] = {
    "the optimizer steps": _optimizer_steps,
    "a fused optimizer steps": _fused_optimizer_steps,
    "a CUDA graph replays the whole step": _graph_replays,
    "the optimizer's step is compiled": _compiled_step,
    "parameters are multiplied through .data": _data_multiplied,
    "parameters are multiplied under no_grad": _multiplied,
    "parameters are multiplied by _foreach_mul_": _multiplied_together,
    "an average of the weights is updated in place": _averaged,
    "weights are clipped through .data": _clipped,
    "a Triton kernel writes parameters": _triton_kernel,
    "a CUDA kernel writes parameters": _cuda_kernel,
    "two optimizers step in streams of their own": functools.partial(_two_streams, sleeps_in_current=False),
    "two optimizers step in streams of their own and the stream of the save is busy": _two_streams,
    "two optimizers step in streams that the program orders": functools.partial(_two_streams, ordered=True),
    "gradient hooks step in backward": _steps_in_backward,
    "the model is compiled into CUDA graphs": _compiled_model,
    "the program trains and saves in another stream than the default one": _other_stream,
    "the loss is read in every step": _loss_is_read,
    "the state is on several devices": _several_devices,
    "the state is partly on the host": _partly_on_the_host,
}
