"""Private names of PyTorch, of its DataLoader, and of torchdata's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ckpt.compat.private import Private

# -- modules and tensors ----------------------------------------------------------------------------------------------

VERSION = Private(
    "torch.Tensor._version",
    since="2.8",
    use="whether a tensor has changed since: gradients after a step, all state before `Every(exception=True)` saves it",
    without="ckpt cannot tell whether a tensor has changed: Every(exception=True) saves nothing, and gradients that a "
    "step has not used yet are not noticed.",
)
CHILDREN = Private(
    "torch.nn.Module._modules",
    since="2.8",
    use="walks a model three times as fast as `named_children`, while training waits",
    without="ckpt walks models by their public methods, which takes longer.",
)
PARAMETERS = Private(
    "torch.nn.Module._parameters",
    since="2.8",
    use="the same for `named_parameters(recurse=False)`",
    without="ckpt walks models by their public methods, which takes longer.",
)


def version_of(tensor: Any) -> int | None:
    """How often a tensor was written to; None where that cannot be known."""
    found: int | None = VERSION.of(tensor)
    return found


def children(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The submodules of a module by name."""
    found: Mapping[str, nn.Module | None] | None = CHILDREN.of(module)
    return dict(module.named_children()) if found is None else found


def own_parameters(module: nn.Module) -> Mapping[str, nn.Parameter | None]:
    """The parameters of a module by name, without those of its submodules."""
    found: Mapping[str, nn.Parameter | None] | None = PARAMETERS.of(module)
    return dict(module.named_parameters(recurse=False, remove_duplicate=False)) if found is None else found


# -- loaders ----------------------------------------------------------------------------------------------------------

ITERATOR = Private(
    "torch.utils.data.DataLoader._iterator",
    since="2.8",
    use="whether persistent workers have been at work before ckpt followed the loader",
    without="ckpt cannot see whether persistent workers have begun before: begin their loader under the manager.",
)
FETCHER = Private(
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter._dataset_fetcher",
    since="2.8",
    use="whether a stream has ended with the batch that was just handed out",
    without="A checkpoint right after a stream's last batch reads the end of the stream once more on resume.",
)
EARLY_ITERATOR = Private(
    "torchdata.stateful_dataloader.StatefulDataLoader._initial_iter_for_state_dict",
    since="0.11",
    use="whether Accelerate has asked for a loader's state before its first pass, which begins an epoch too early",
    without="A StatefulDataLoader whose state was asked for before its first pass may begin with the next epoch.",
)


def has_workers(loader: Any) -> bool:
    """Whether a loader has workers that outlive a pass, and that have begun."""
    return bool(getattr(loader, "persistent_workers", False)) and ITERATOR.of(loader) is not None


def has_ended(iterator: Any) -> bool:
    """Whether the stream that a DataLoader's iterator reads in this process has nothing left."""
    if type(iterator).__name__ != FETCHER.owner.rpartition(".")[2]:
        return False
    return bool(getattr(FETCHER.of(iterator), "ended", False))


def began_too_early(loader: Any) -> bool:
    """Whether torchdata's loader holds an iterator that was made to ask for its state."""
    if type(loader).__name__ != "StatefulDataLoader":
        return False
    return bool(EARLY_ITERATOR.of(loader, False))


# -- ranks and meshes -------------------------------------------------------------------------------------------------

DEFAULT_STORE = Private(
    "torch.distributed.distributed_c10d._get_default_store",
    since="2.8",
    use="ranks agree through the job's own store, also while training uses the process group",
    without="ckpt connects to the job's store at MASTER_ADDR and MASTER_PORT; ranks that met in another way cannot.",
)
ROOT_MESH = Private(
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    since="2.8",
    use="which ranks a mesh was cut from: a tensor on a part of them is replicated over the others",
    without="A mesh counts as one over all ranks of the job.",
)
SHARD_BOX = Private(
    "torch.distributed.tensor._utils._compute_local_shape_and_global_offset",
    since="2.8",
    use="which part of a tensor a rank holds that two dimensions of a mesh divide in strides",
    without="Tensors with strided shards (FSDP over tensor parallelism) cannot be saved or loaded.",
)
STRIDED = Private(
    "torch.distributed.tensor.placement_types._StridedShard",
    since="2.8",
    use="the same",
    without="Tensors with strided shards (FSDP over tensor parallelism) cannot be saved or loaded.",
)


def default_store() -> Any:
    """The store through which the ranks of the job have met. None if that cannot be found."""
    found = DEFAULT_STORE.imported()
    if found is not None:
        return found()
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return None
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # documented, and not in the stubs
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    return store


def root_ranks(mesh: Any) -> tuple[int, ...]:
    """The ranks of the mesh that this one was cut from."""
    find = ROOT_MESH.of(mesh)
    return tuple(range(dist.get_world_size())) if find is None else tuple(find().mesh.flatten().tolist())


# -- FSDP 1 and 2 -----------------------------------------------------------------------------------------------------

HANDLE = Private(
    "torch.distributed.fsdp.FullyShardedDataParallel._handle",
    since="2.8",
    use="which parameters of FSDP 1 are tied",
    without="Tied parameters of FSDP 1 are saved as PyTorch gives them: on some ranks without values.",
)
TIES = Private(
    "torch.distributed.fsdp.FlatParameter._shared_param_infos",
    since="2.8",
    use="the same",
    without="Tied parameters of FSDP 1 are saved as PyTorch gives them: on some ranks without values.",
)
PROCESS_GROUP = Private(
    "torch.distributed._shard.sharded_tensor.ShardedTensor._process_group",
    since="2.8",
    use="which ranks hold a tensor of FSDP 1",
    without="A tensor of FSDP 1 counts as one over all ranks of the job.",
)
SHARDED_TENSOR = Private(
    "torch.distributed._shard.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata",
    since="2.8",
    use="a tensor of FSDP 1 that state of an optimizer is read into",
    without="State of optimizers under FSDP 1 cannot be loaded into an optimizer that has made no step.",
)
FSDP2_STATE = Private(
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    since="2.8",
    use="whether FSDP 2 holds gradients that it has not sharded yet, which no checkpoint has",
    without="ckpt cannot see gradients that FSDP 2 has not sharded yet: save at the end of an accumulation window.",
)
FSDP2_GROUP = Private(
    "torch.distributed.fsdp._fully_shard.FSDPState._fsdp_param_group",
    since="2.8",
    use="the same",
    without="ckpt cannot see gradients that FSDP 2 has not sharded yet: save at the end of an accumulation window.",
)
FSDP2_PARAMETER = Private(
    "torch.distributed.fsdp._fully_shard.FSDPParam._unsharded_param",
    since="2.8",
    use="the same",
    without="ckpt cannot see gradients that FSDP 2 has not sharded yet: save at the end of an accumulation window.",
)


def process_group_of(tensor: Any) -> Any:
    """The process group over which a tensor of FSDP 1 is sharded."""
    found = PROCESS_GROUP.of(tensor)
    return dist.group.WORLD if found is None else found


def has_unsharded_gradients(module: nn.Module) -> bool:
    """Whether FSDP 2 holds gradients of this module that it has not sharded yet."""
    find = FSDP2_STATE.of(module)
    state = find() if find is not None else None
    group = FSDP2_GROUP.of(state) if state is not None else None  # None where the module has no parameters of its own
    return any(_unsharded_gradient(parameter) is not None for parameter in getattr(group, "fsdp_params", ()))


def _unsharded_gradient(parameter: Any) -> Any:
    kept = getattr(parameter, "unsharded_accumulated_grad", None)
    whole = getattr(parameter, FSDP2_PARAMETER.name, None)  # exists from the first forward pass on
    return kept if kept is not None else getattr(whole, "grad", None)


def tied_in(wrapper: Any) -> list[Any]:
    """What a wrapper of FSDP 1 knows about parameters that are tied."""
    handle = HANDLE.of(wrapper)  # None where it has no parameters
    return [] if handle is None else list(TIES.of(handle.flat_param, ()))


# -- files ------------------------------------------------------------------------------------------------------------

FAKE_TENSORS = Private(
    "torch._subclasses.fake_tensor.FakeTensorMode",
    since="2.8",
    use="`torch.save` writes a file in which every tensor's bytes are filled in later",
    without="Files of torch.save are written from memory: a conversion needs as much as all its tensors.",
)
