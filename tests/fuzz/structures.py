"""Structures made by hypothesis: manifests, trees of values, layouts, headers of safetensors and pickles.

Each is put in the place of the real one in a folder of the corpus, and the manifest is made to fit it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from tests.fuzz import pickles
from tests.fuzz.cases import Case
from tests.fuzz.mutate import INTEGERS, WORDS
from tests.fuzz.reseal import reseal, sealed_text
from tests.fuzz.seeds import NAMES
from tests.fuzz.tree import Tree

Trees = Mapping[str, Tree]
Draw = Any

_integers = st.sampled_from(INTEGERS) | st.integers(-5, 5) | st.integers()
_words = st.sampled_from(WORDS) | st.text(max_size=12)
_sizes = st.integers(0, 6) | st.sampled_from(INTEGERS)
_scalars = st.none() | st.booleans() | _integers | st.floats() | _words
_json = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words, inner, max_size=4), max_leaves=12
)
_TAGS = (
    "$tuple", "$set", "$frozenset", "$deque", "$ordered", "$counter", "$defaultdict", "$bytes", "$bytearray",
    "$complex", "$range", "$slice", "$size", "$dtype", "$layout", "$memory_format", "$device", "$float", "$int", "$str",
    "$tensor", "$numpy", "$dict", "$items", "$subclass", "$view",
)  # fmt: skip
_tagged = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_words, inner, max_size=3)
        | st.builds(lambda tag, value: {tag: value}, st.sampled_from(_TAGS), inner)
    ),
    max_leaves=16,
)

_record = st.fixed_dictionaries(
    {
        "name": _words | st.sampled_from(("model.safetensors", "state.json", "rank-00000.json")),
        "path": _words | st.sampled_from(("model.safetensors", "state.json", "../step-00000001/model.safetensors")),
        "size": _integers,
        "blocks": st.lists(_words | st.just("0" * 32), max_size=3) | _scalars,
    },
    optional={
        "block_size": _integers | _scalars,
        "head": st.none() | st.tuples(_integers, _words) | _json,
        "more": _json,
    },
)
_fields: dict[str, st.SearchStrategy[Any]] = {
    "format": st.just("ckpt") | _scalars,
    "version": st.just(1) | _integers | _scalars,
    "name": st.sampled_from(NAMES) | _words,
    "id": st.text("0123456789abcdef", min_size=32, max_size=32) | _scalars,
    "sequence": _integers | _scalars,
    "created": st.just("2026-01-01T00:00:00.000+00:00") | _scalars,
    "run": _words | _scalars,
    "files": st.lists(_record, max_size=4) | _json,
    "world_size": _integers | _scalars,
    "layout": st.sampled_from(("full", "sharded")) | _scalars,
    "parent": st.none() | _words | _json,
    "origin": _words | _json,
    "progress": st.dictionaries(st.sampled_from(("step", "epoch", "batch")) | _words, _integers | _scalars) | _json,
    "metrics": st.dictionaries(_words, st.floats() | _words | _scalars, max_size=3) | _json,
    "versions": st.dictionaries(_words, _words, max_size=3) | _json,
    "hardware": _words | _json,
    "seconds": st.dictionaries(_words, st.floats() | _scalars, max_size=3) | _json,
    "hosts": st.lists(st.fixed_dictionaries({"name": _words, "ranks": st.lists(_integers, max_size=3)}), max_size=2)
    | _json,
    "memory": st.dictionaries(_words, _integers, max_size=2) | _json,
}

_NAMES_OF_TENSORS = (
    "scale",
    "rate",
    "count",
    "embed.weight",
    "body.weight",
    "body.bias",
    "head.weight",
    "__metadata__",
)
_SPELLED = ("F32", "F64", "F16", "BF16", "I64", "I32", "U8", "BOOL", "C64", "F8_E4M3", "F4", "X")


@st.composite
def _manifest(draw: Draw, trees: Trees) -> tuple[str, Tree]:
    """The manifest of the newer checkpoint with some fields drawn."""
    seed = draw(
        st.sampled_from([name for name in ("full", "sharded", "together", "linked", "own-state") if name in trees])
    )
    files = dict(trees[seed])
    path = f"root/{draw(st.sampled_from(NAMES))}/manifest.json"
    fields = json.loads(files[path])  # type: ignore[arg-type]
    del fields["digest"]
    for name in draw(st.lists(st.sampled_from(list(_fields)), max_size=3, unique=True)):
        fields[name] = draw(_fields[name])
    files[path] = sealed_text(fields)
    return seed, files


@st.composite
def _values(draw: Draw, trees: Trees) -> tuple[str, Tree]:
    """A tree of values in place of a part's state, or of the generators of a rank."""
    seed = draw(st.sampled_from([name for name in ("full", "own-state") if name in trees]))
    files = dict(trees[seed])
    path = f"root/{NAMES[-1]}/{draw(st.sampled_from(('state.json', 'rank-00000.json')))}"
    fields = json.loads(files[path])  # type: ignore[arg-type]
    holder, key = fields, draw(st.sampled_from(list(fields)))
    for _ in range(draw(st.integers(0, 5))):
        if isinstance(holder[key], dict) and holder[key]:
            holder = holder[key]
            key = draw(st.sampled_from(list(holder)))
    holder[key] = draw(_tagged)
    files[path] = json.dumps(fields).encode("utf-8", "surrogatepass")
    return seed, reseal(files)


@st.composite
def _layouts(draw: Draw, trees: Trees) -> tuple[str, Tree]:
    """The table of a sharded part: other meshes, ranks, placements, shapes, dtypes, owners, how many write together."""
    seed = draw(st.sampled_from([name for name in ("sharded", "together") if name in trees]))
    files = dict(trees[seed])
    path = f"root/{NAMES[-1]}/state.json"
    fields = json.loads(files[path])  # type: ignore[arg-type]
    table = fields["parts"][draw(st.sampled_from(("model", "optimizer")))]["spread"]
    ranks = st.lists(st.integers(0, 3) | st.sampled_from(INTEGERS), max_size=4)
    mesh = st.lists(st.integers(0, 4) | st.sampled_from(INTEGERS), max_size=3)
    places = st.lists(
        st.sampled_from(("S0", "S1", "R", "P", "S0/2", "S0/999999999", "S9", "S-1", "", "S")) | _words, max_size=3
    )
    for layout in table["layouts"]:
        for name, strategy in (("mesh", mesh), ("ranks", ranks), ("placements", places)):
            if draw(st.booleans()):
                layout[name] = draw(strategy)
    if draw(st.booleans()):
        tensor = draw(st.sampled_from(list(table["tensors"])))
        table["tensors"][tensor] = [
            draw(st.sampled_from(("float32", "int32", "float64", "quint4x2", "bool")) | _words),
            draw(st.lists(_sizes, max_size=4)),
            draw(_integers),
            draw(_integers),
        ]
    if draw(st.integers(0, 9)) == 0:
        table["aliases"] = draw(st.dictionaries(st.sampled_from(_NAMES_OF_TENSORS), _words, max_size=2))
    if draw(st.integers(0, 3)) == 0:
        table["together"] = draw(st.integers(0, 4) | st.sampled_from(INTEGERS) | _words)
    if draw(st.integers(0, 3)) == 0:
        table["aside"] = draw(st.lists(st.sampled_from(list(table["tensors"])) | _words, max_size=3) | _words)
    files[path] = json.dumps(fields).encode("utf-8", "surrogatepass")
    return seed, reseal(files)


@st.composite
def _headers(draw: Draw, trees: Trees) -> tuple[str, Tree]:
    """A file of tensors with a header that was drawn: entries in any order, with gaps, overlaps and other ends."""
    places = {"full": f"root/{NAMES[-1]}/model.safetensors", "safetensors": "model/model.safetensors"}
    seed = draw(st.sampled_from([name for name in places if name in trees]))
    entries: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.sampled_from(_NAMES_OF_TENSORS) | _words, max_size=7, unique=True)):
        shape = draw(st.lists(_sizes, max_size=3))
        spelled = draw(st.sampled_from(_SPELLED))
        size = draw(st.integers(0, 64) | st.just(_bytes_of(spelled, shape)))
        start = at + draw(st.sampled_from((0, 0, 0, 0, -4, 4, 1)))
        entries[name] = {"dtype": spelled, "shape": shape, "data_offsets": [start, start + size]}
        at = start + size
    if draw(st.booleans()):
        entries["__metadata__"] = {"ckpt": json.dumps(draw(_ours)), "DCP_SHARDING_INFO": json.dumps(draw(_json))}
    text = json.dumps(entries).encode("utf-8", "surrogatepass")
    data = bytes(min(max(0, at + draw(st.sampled_from((0, 0, 0, -1, 1, -64, 64)))), 1 << 16))
    length = draw(st.just(len(text)) | st.sampled_from((0, len(text) - 1, len(text) + 1, 2**63, 2**31)))
    files = dict(trees[seed])
    files[places[seed]] = struct.pack("<Q", max(0, length)) + text + data
    return seed, reseal(files)


_ours = st.fixed_dictionaries(
    {},
    optional={
        "dtypes": st.dictionaries(st.sampled_from(_NAMES_OF_TENSORS), _words, max_size=2),
        "views": st.dictionaries(
            st.sampled_from(_NAMES_OF_TENSORS),
            st.fixed_dictionaries(
                {
                    "of": st.sampled_from(_NAMES_OF_TENSORS),
                    "dtype": st.sampled_from(("float32", "int64", "uint8", "quint4x2")) | _words,
                    "shape": st.lists(_sizes, max_size=3),
                    "stride": st.lists(_sizes, max_size=3),
                    "start": _sizes,
                }
            ),
            max_size=2,
        ),
        "shapes": st.dictionaries(st.sampled_from(_NAMES_OF_TENSORS), st.lists(_sizes, max_size=3), max_size=2),
    },
)


def _bytes_of(spelled: str, shape: list[int]) -> int:
    count = {"F64": 8, "I64": 8, "C64": 8, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1}.get(spelled, 4)
    for length in shape:
        count *= length
    return count if 0 <= count < 1 << 62 else 4


@st.composite
def _pickles(draw: Draw, trees: Trees) -> tuple[str, Tree]:
    """A program of opcodes as the metadata of DCP, or in an archive of `torch.save`."""
    places = {
        "dcp": "dcp/.metadata",
        "accelerate": "root/checkpoint_0/custom_checkpoint_0.pkl",
        "accelerate-pickles": "root/checkpoint_0/pytorch_model.bin",
        "torch-save": "state.pt",
        "zero-3": next((path for path in trees.get("zero-3", {}) if path.endswith("_optim_states.pt")), ""),
    }
    seed = draw(st.sampled_from([name for name in places if name in trees]))
    code = pickles.program(draw(st.lists(st.sampled_from(pickles.PIECES), max_size=40)))
    files = dict(trees[seed])
    entries = [("archive/data.pkl", code), ("archive/byteorder", b"little"), ("archive/data/0", bytes(64))]
    files[places[seed]] = code if seed == "dcp" else pickles.archived(entries)
    return seed, files


def cases(trees: Trees, targets: Mapping[str, tuple[str, ...]], kinds: Mapping[str, str]) -> st.SearchStrategy[Case]:
    """Inputs of all structures whose seeds are there."""
    found = [_manifest(trees), _values(trees), _headers(trees), _pickles(trees)]
    if "sharded" in trees:
        found.append(_layouts(trees))

    @st.composite
    def drawn(draw: Draw) -> Case:
        seed, files = draw(st.one_of(found))
        return Case(seed, draw(st.sampled_from(targets[kinds[seed]])), files, ["a structure of hypothesis"])

    return drawn()
