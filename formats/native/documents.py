"""JSON documents: `state.json` with the values of all parts, and a document per rank with that rank's own values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckpt.errors import DamagedError
from ckpt.formats.damage import damage_reported, reason
from ckpt.formats.layout import Members
from ckpt.formats.native import dtypes
from ckpt.formats.native.json_values import Decoder, Encoder, from_base64, of_type, to_base64
from ckpt.formats.native.manifest import STATE as STATE
from ckpt.formats.native.shard_table import ShardedState, build_table
from ckpt.formats.state import PartState, Shard
from ckpt.formats.strides import checked_shape, checked_sizes
from ckpt.formats.tensor_bytes import host_bytes, on_host

INLINE = "state that ckpt writes"
_PART_FIELDS: dict[str, type[Any]] = {"spread": dict, "differs": dict, "about": dict, "plain": list}


def rank_document(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def to_json(data: Any) -> bytes:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def from_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{where} is not JSON: {reason(error)}.") from error


Substitute = Callable[[Any], Any]  # the tensor to store in place of another one


def encode_part(
    kind: str, value: Any, prefix: str, problems: list[str], substitute: Substitute | None = None
) -> PartState:
    """A part's state, split into JSON and tensors. Values that cannot be stored are added to `problems` by path."""
    encoder = Encoder(prefix=prefix, problems=problems, substitute=substitute)
    values = encoder.encode(value)
    return PartState(kind, values, {name: Shard.whole(tensor) for name, tensor in encoder.tensors.items()})


def encode_sharded(
    kind: str,
    value: Any,
    prefix: str,
    problems: list[str],
    world_size: int,
    substitute: Substitute | None = None,
    members: Members = None,
) -> ShardedState:
    """The state of a part whose tensors may be sharded. Every rank has the same values, and its own shards.

    `members`: the ranks' numbers in the job, where they are some of its ranks.
    """
    encoder = Encoder(prefix=prefix, problems=problems, allow_sharded=True, substitute=substitute)
    values = encoder.encode(value)
    table = build_table(encoder.tensors, world_size, members)
    return ShardedState(kind, values, table, encoder.tensors, members=members)


def encode_inline(value: Any, prefix: str, problems: list[str]) -> Any:
    """A value with its tensors as base64 text beside it: for small state that belongs into one document."""
    encoder = Encoder(prefix=prefix, problems=problems)
    values = encoder.encode(value)
    return {"values": values, "tensors": {name: _tensor_to_json(t) for name, t in encoder.tensors.items()}}


def decode_inline(data: Mapping[str, Any], where: str = "the state") -> Any:
    with damage_reported(where, INLINE):
        tensors, values = data["tensors"], data["values"]
    return Decoder(lambda name: _tensor_from_json(tensors[name]), where).decode(values)


def parts_in(document: Any, key: str, where: str) -> dict[str, Any]:
    """The parts below a key of a document, each with all that a reader relies on."""
    with damage_reported(where, "document that ckpt writes"):
        parts = of_type(dict, document[key])
        for name, part in parts.items():
            _check_part(name, of_type(dict, part))
        return parts


def _check_part(name: str, part: dict[str, Any]) -> None:
    """Raise for a part without a state, unless its rank had none, or with fields of other types."""
    if "absent" not in part and ("state" not in part or not isinstance(part.get("class"), str)):
        raise ValueError(f"{name} has no class or no state")
    for field, kind in _PART_FIELDS.items():
        of_type(kind, part.get(field, kind()))
    if not all(isinstance(tensor, str) for tensor in part.get("plain", ())):
        raise ValueError(f"{name} has tensors without a name")
    for ranks in of_type(dict, part.get("differs", {}).get("tensors", {})).values():
        checked_sizes(ranks)


def _tensor_to_json(tensor: torch.Tensor) -> dict[str, Any]:
    plain = on_host(tensor)
    text = to_base64(bytes(host_bytes(plain)))
    return {"dtype": dtypes.name_of(plain.dtype), "shape": list(plain.shape), "bytes": text}


def _tensor_from_json(fields: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape, data = dtypes.by_name(fields["dtype"]), checked_shape(fields["shape"]), from_base64(fields["bytes"])
    if math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no {dtype} of shape {list(shape)}")
    tensor = torch.empty(shape, dtype=dtype)
    host_bytes(tensor)[:] = data
    return tensor
