"""Private names of PyTorch."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch import nn

from ckpt.compat.private import Private

VERSION = Private(
    "torch.Tensor._version",
    since="2.8",
    use="whether a tensor has changed since: gradients after a step, all state before `Every(exception=True)` saves it",
    without="ckpt cannot tell whether a tensor has changed: Every(exception=True) saves nothing, and gradients that a "
    "step has not used yet are not noticed.",
)


def version_of(tensor: Any) -> int | None:
    """How often a tensor was written to; None where that cannot be known."""
    found: int | None = VERSION.of(tensor)
    return found


FETCHER = Private(
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter._dataset_fetcher",
    since="2.8",
    use="whether a stream has ended with the batch that was just handed out",
    without="After a checkpoint at a stream's last batch, a stream that keeps its own state may be read once more.",
)


def has_ended(iterator: Any) -> bool:
    """Whether the stream that a DataLoader's iterator reads in this process has nothing left."""
    if type(iterator).__name__ != FETCHER.owner.rpartition(".")[2]:
        return False
    return bool(getattr(FETCHER.of(iterator), "ended", False))


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

SHARDED_TENSOR = Private(
    "torch.distributed._shard.sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata",
    since="2.8",
    use="a tensor of FSDP 1 that state of an optimizer is read into",
    without="State of optimizers under FSDP 1 cannot be loaded into an optimizer that has made no step.",
)
FSDP2_GROUP = Private(
    "torch.distributed.fsdp._fully_shard.FSDPState._fsdp_param_group",
    since="2.8",
    use="whether FSDP 2 holds gradients that it has not sharded yet, which no checkpoint has",
    without="ckpt cannot see gradients that FSDP 2 has not sharded yet: save at the end of an accumulation window.",
)


def has_unsharded_gradients(module: nn.Module) -> bool:
    """Whether FSDP 2 holds gradients of this module that it has not sharded yet."""
    from torch.distributed.fsdp import fully_shard

    try:
        group = FSDP2_GROUP.of(fully_shard.state(module))  # type: ignore[attr-defined]
    except AssertionError:  # of a module whose parameters are on several meshes
        FSDP2_GROUP.tell()
        return False
    return any(_unsharded_gradient(parameter) is not None for parameter in getattr(group, "fsdp_params", ()))


def _unsharded_gradient(parameter: Any) -> Any:
    if not hasattr(type(parameter), "unsharded_param"):
        FSDP2_GROUP.tell()
    kept = getattr(parameter, "unsharded_accumulated_grad", None)
    whole = getattr(parameter, "unsharded_param", None)  # exists from the first forward pass on
    return kept if kept is not None else getattr(whole, "grad", None)
