from __future__ import annotations

import collections
import enum
import functools
import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ckpt.errors import DamagedError, UnsupportedError
from ckpt.formats.native.documents import Decoder, Encoder, decode_inline, encode_inline, refuse


def back(value: Any) -> Any:
    """Through real JSON bytes and back. The bytes are JSON for any reader: no NaN, no lone surrogates."""
    encoder = Encoder()
    encoded = encoder.encode(value)
    assert encoder.problems == []
    data = json.dumps(encoded, allow_nan=False).encode("ascii")
    json.dumps(json.loads(data), ensure_ascii=False).encode("utf-8")
    return Decoder(encoder.tensors.__getitem__).decode(json.loads(data))


def same(first: Any, other: Any) -> bool:
    """Equal all the way down, in type as well as in value: 1 is not True, -0.0 is not 0.0, NaN is NaN."""
    if type(first) is not type(other):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == other.dtype and torch.equal(first, other)
    if isinstance(first, np.ndarray | np.generic):
        return (first.dtype, first.shape, first.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(first, float):
        return (math.isnan(first) and math.isnan(other)) or (first, math.copysign(1, first)) == (
            other,
            math.copysign(1, other),
        )
    if isinstance(first, complex):
        return same(first.real, other.real) and same(first.imag, other.imag)
    if isinstance(first, slice):
        return same((first.start, first.stop, first.step), (other.start, other.stop, other.step))
    if isinstance(first, dict):
        return same([*first], [*other]) and same([*first.values()], [*other.values()]) and _same_extras(first, other)
    if isinstance(first, set | frozenset):
        return first == other and {type(item) for item in first} == {type(item) for item in other}
    if isinstance(first, list | tuple | deque):
        return len(first) == len(other) and all(map(same, first, other)) and _same_extras(first, other)
    return bool(first == other)


def _same_extras(first: Any, other: Any) -> bool:
    return all(getattr(first, name, None) == getattr(other, name, None) for name in ("maxlen", "default_factory"))


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1 << 62,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    -(1 << 70),
    10**5000,
    -(10**5000),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "text",
    'quotes " and \\ and \n and \0',
    "grüße 🤗",
    "$tuple",
    "\ud800",
    "a\udfffb",
    "\ud83d\ude00",  # two surrogates that JSON would make one character of
    "\ude00\ud83d",
    b"",
    b"\0\xff bytes",
    bytearray(b"\0\xff bytes"),
    1 + 2j,
    complex(-0.0, math.nan),
    complex(math.inf, -0.0),
    [],
    [1, [2, [3, []]]],
    (),
    (1,),
    ((1, (2, ())), [3, (4,)]),
    set(),
    {1, 2, 3},
    {10**5000, -(10**5000), 1},
    {(1, 2), "a", None, b"x", 2.5, frozenset({1})},
    frozenset(),
    frozenset({"a", ("b", 1)}),
    range(0),
    range(5, -5, -3),
    range(1 << 70),
    slice(None),
    slice(1, None, -2),
    slice("a", (1, 2), 0.5),
    deque(),
    deque([1, (2,), {3: 4}], maxlen=3),
    deque(maxlen=0),
    {},
    {"a": {"b": {"c": 1}}},
    {"": 1, ".": 2, "a.b": 3, "[0]": 4},
    {1: "int", "1": "str", 1.5: "float", None: "none", b"1": "bytes"},
    {True: "bool", 2: "int"},
    {(1, "a"): [1], (2, ("b", None)): [2], frozenset({3}): [3], (): 4},
    {math.inf: 1, 1 << 80: 2, -(1 << 80): 3},
    {10**5000: {1: 2}, (10**5000,): [3]},
    {"$tuple": [1, 2]},
    {"$tensor": "weight"},
    {"$": 1},
    {"$a": 1, "b": 2},
    {"\ud83d\ude00": 1, "😀": 2, "\ud800": 3},
    OrderedDict(),
    OrderedDict([("z", 1), ("a", (2,)), (3, {4})]),
    OrderedDict([("$items", [])]),
    Counter(),
    Counter("hello"),
    Counter({1: -5, (2,): 3}),
    defaultdict(None, {"a": 1}),
    defaultdict(int, {"a": 1, 2: 3}),
    defaultdict(dict, {"a": {"b": (1,)}}),
    defaultdict(list, {"$a": [1]}),
    defaultdict(set, {("a",): {1}}),
    defaultdict(float),
    defaultdict(str, {"a": "b"}),
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.device("cpu"),
    torch.device("cuda"),
    torch.device("cuda:3"),
    torch.device("meta"),
    torch.Size([]),
    torch.Size([2, 3]),
    torch.strided,
    torch.sparse_coo,
    torch.channels_last,
    torch.contiguous_format,
    [torch.Size([1]), {torch.float16: torch.device("cpu")}],
    random.Random(0).getstate(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_the_same_value_of_the_same_type(value: Any) -> None:
    assert same(back(value), value)
    assert same(back({"deep": [(value,)]}), {"deep": [(value,)]})


def test_a_comparison_that_holds_all_equal_would_show_nothing() -> None:
    for first, other in [
        (1, True),
        (0.0, -0.0),
        ((1,), [1]),
        ({1: 2}, OrderedDict({1: 2})),
        (deque([1]), deque([1], 3)),
    ]:
        assert not same(first, other)
        assert not same([{"a": first}], [{"a": other}])


def test_the_order_of_a_dict_is_kept() -> None:
    keys = [*"zyxabc", 3, 1, 2, "$"]
    random.Random(0).shuffle(keys)
    items = dict.fromkeys(keys)
    for ordered in (items, OrderedDict(items), defaultdict(None, items)):
        assert [*back(ordered)] == keys


def test_a_set_is_written_in_the_same_order_by_every_process() -> None:
    words = ["delta", "alpha", "charlie", "bravo"]
    assert Encoder().encode({"words": set(words)}) == {"words": {"$set": sorted(words)}}


def test_a_default_factory_works_again() -> None:
    counts = back(defaultdict(int))
    counts["new"] += 1
    groups = back(defaultdict(list))
    groups["new"].append(1)
    assert (dict(counts), dict(groups)) == ({"new": 1}, {"new": [1]})
    with pytest.raises(KeyError):
        back(defaultdict(None))["new"]


def test_a_bounded_deque_stays_bounded() -> None:
    again = back(deque([1, 2], maxlen=2))
    again.append(3)
    assert again == deque([2, 3])


SCALARS: list[Any] = [
    *(np.dtype(kind).type(1) for kind in "?bBhHiIlLefdgFDG"),
    np.float32("nan"),
    np.float64("-inf"),
    np.float16(-0.0),
    np.complex64(1 - 2j),
    np.int64(-(1 << 63)),
    np.uint64((1 << 64) - 1),
    np.datetime64("2025-01-01T12:00:00.123456789", "ns"),
    np.datetime64("NaT"),
    np.timedelta64(5, "D"),
    np.str_("text"),
    np.str_(""),
    np.bytes_(b"\0bytes"),
    np.bytes_(b""),
    np.void(b"\1\2\3"),
    np.array([(1, 2.5)], dtype=[("a", "<i2"), ("b", ">f8")])[0],
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__}-{value!r}")
def test_a_numpy_scalar_comes_back_as_itself(value: Any) -> None:
    assert same(back(value), value)
    assert same(back([value])[0], value)


_ALIGNED = np.dtype([("a", "i1"), ("b", "<f8")], align=True)

ARRAYS: list[np.ndarray[Any, Any]] = [
    np.array(1.5),
    np.array(7, dtype=">u2"),
    np.array(True),
    np.empty(0),
    np.empty((3, 0, 2), dtype=np.int8),
    np.arange(24).reshape(2, 3, 4),
    np.arange(24).reshape(4, 6)[::2, ::-3],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.broadcast_to(np.float32(3), (2, 5)),
    np.arange(5, dtype=">i4"),
    np.array([1 + 2j, math.nan], dtype=np.complex128),
    np.array([math.nan, -0.0, math.inf], dtype=np.float16),
    np.array([1, 2, 3], dtype=np.longdouble),
    np.array(["2025-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([1, 2], dtype="timedelta64[ms]"),
    np.array(["a", "grüße", ""]),
    np.array([b"a", b"bc\0d"]),
    np.array([True, False]),
    np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "<i4"), ("b", ">f8")]),
    np.zeros(2, dtype=[("outer", [("inner", "<f4", (2, 3))]), ("name", "<U5")]),
    np.array((1, 2.5), dtype=_ALIGNED),
    np.zeros(3, dtype=[(("a title", "a"), "<i4")]),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: f"{value.dtype}-{value.shape}".replace(" ", ""))
def test_a_numpy_array_comes_back_as_itself(value: np.ndarray[Any, Any]) -> None:
    again = back({"arrays": [value]})["arrays"][0]
    assert same(again, value)
    assert same(decode_inline(json.loads(json.dumps(encode_inline(value, "", [])))), value)
    again[...] = again  # it can be written to


def test_the_state_of_a_numpy_generator_comes_back() -> None:
    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64):
        generator = np.random.Generator(kind(0))
        generator.random(5)
        again = np.random.Generator(kind(1))
        again.bit_generator.state = back(generator.bit_generator.state)
        assert again.random() == generator.random()


class TestTensors:
    def test_tensors_are_found_anywhere(self) -> None:
        state: dict[Any, Any] = {
            "plain": torch.arange(3),
            "list": [torch.ones(2), (torch.zeros(1, 2), {"deeper": torch.tensor(5)})],
            7: deque([torch.full((2,), 0.5)], maxlen=4),
            ("a", 1): OrderedDict(x=torch.tensor([True])),
            "default": defaultdict(list, {"y": [torch.empty(0)]}),
        }
        assert same(back(state), state)

    def test_a_tensor_is_named_by_its_path(self) -> None:
        state = {
            "state": {0: {"exp avg": torch.ones(1)}},
            "groups": [{"lr": torch.ones(1)}],
            "layer.weight": torch.ones(1),
        }
        encoder = Encoder()
        encoder.encode(state)
        assert [*encoder.tensors] == ["state[0]['exp avg']", "groups[0].lr", "layer.weight"]

    def test_a_container_with_a_fact_of_its_own_adds_nothing_to_the_path(self) -> None:
        encoder = Encoder()
        encoder.encode({"queue": deque([torch.ones(1)]), "default": defaultdict(int, {"x": torch.ones(1)})})
        assert [*encoder.tensors] == ["queue[0]", "default.x"]

    def test_a_state_that_is_one_tensor_comes_back(self) -> None:
        assert same(back(torch.arange(3)), torch.arange(3))

    @pytest.mark.parametrize(
        "names",
        [
            ("a.b", ("a", "b")),
            ("a.b", ("a", "b"), "a.b#2"),
            ("a[0]", ("a", 0)),
            ("a.b.c", ("a.b", "c"), ("a", "b.c"), ("a", "b", "c")),
            ("value", ""),
        ],
        ids=str,
    )
    def test_paths_that_would_give_one_name_do_not_mix_up_tensors(
        self, names: tuple[str | tuple[Any, ...], ...]
    ) -> None:
        state: dict[Any, Any] = {}
        for number, name in enumerate(names):
            *path, last = (name,) if isinstance(name, str) else name
            inner = functools.reduce(lambda level, key: level.setdefault(key, {}), path, state)
            inner[last] = torch.tensor(number)
        encoder = Encoder()
        encoder.encode(state)
        assert len(encoder.tensors) == len(names)
        assert same(back(state), state)

    @pytest.mark.parametrize("key", ["__metadata__", "\ud800", "\ud83d\ude00", "", "a b", "quote'", "[0]", "a@storage"])
    def test_any_key_gives_a_name_that_a_safetensors_file_can_have(self, key: str) -> None:
        encoder = Encoder()
        encoder.encode({key: torch.ones(1)})
        (name,) = encoder.tensors
        assert name != "__metadata__"
        name.encode("utf-8")
        assert same(back({key: torch.ones(1)}), {key: torch.ones(1)})

    def test_a_parameter_comes_back_as_the_tensor_it_holds(self) -> None:
        parameter = torch.nn.Parameter(torch.ones(3))
        assert same(back([parameter])[0], torch.ones(3))

    def test_an_inline_document_holds_the_bytes_of_its_tensors(self) -> None:
        state = {
            "bits": torch.tensor([1.5, math.inf], dtype=torch.bfloat16),
            "turned": torch.arange(6).reshape(2, 3).t(),
            "scalar": torch.tensor(5),
            "none": torch.empty(0, 3),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "rng": torch.get_rng_state(),
        }
        problems: list[str] = []
        data = json.loads(json.dumps(encode_inline(state, "rank", problems), allow_nan=False))
        assert problems == []
        assert same(decode_inline(data), state)


def function() -> None: ...


class Thing:
    def method(self) -> None: ...


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


class Point(NamedTuple):
    x: int


class Text(str):
    __slots__ = ()


class Subclass(torch.Tensor):
    pass


_HERE = __name__

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: function, "a function"),
    (lambda: lambda: 0, "a function"),
    (lambda: len, "a function"),
    (lambda: Thing().method, "a function"),
    (lambda: Thing, f"the class {_HERE}.Thing"),
    (lambda: int, "the class builtins.int"),
    (lambda: Thing(), f"a {_HERE}.Thing"),
    (lambda: object(), "a object"),
    (lambda: iter([]), "a list_iterator"),
    (lambda: functools.partial(function), "a functools.partial"),
    (lambda: Colour.RED, f"a {_HERE}.Colour"),
    (lambda: Number.ONE, f"a {_HERE}.Number"),
    (lambda: Point(1), f"a {_HERE}.Point"),
    (lambda: Text("text"), f"a {_HERE}.Text"),
    (lambda: collections.ChainMap(), "a collections.ChainMap"),
    (lambda: defaultdict(lambda: 0), "a defaultdict whose factory is a function"),
    (lambda: defaultdict(Thing), f"a defaultdict whose factory is the class {_HERE}.Thing"),
    (lambda: torch.Generator(), "a torch._C.Generator"),
    (lambda: torch.nn.Linear(1, 1), "a torch.nn.modules.linear.Linear"),
    (lambda: np.array([None]), "a NumPy value of dtype object, which holds Python objects"),
    (lambda: np.zeros(1, dtype=[("a", "O")]), "a NumPy value of dtype [('a', 'O')], which holds Python objects"),
    (lambda: np.matrix([[1]]), "a numpy.matrix"),
    (lambda: np.ma.masked_array([1], mask=[True]), f"a {np.ma.MaskedArray.__module__}.MaskedArray"),
    (lambda: np.zeros(1, np.dtype({"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]})), "overlapping"),
    (lambda: torch.eye(2).to_sparse(), "a tensor of layout torch.sparse_coo and dtype torch.float32; only dense ones"),
    (lambda: torch.eye(2).to_sparse_csr(), "a tensor of layout torch.sparse_csr"),
    (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "dtype torch.qint8; only dense ones"),
    (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "only dense ones"),
    (lambda: torch.empty(2, device="meta"), "a tensor on the meta device, which has no data"),
    (lambda: torch.ones(2).as_subclass(Subclass), f"a {_HERE}.Subclass"),
    (lambda: torch.nn.parameter.UninitializedParameter(), "a torch.nn.parameter.UninitializedParameter"),
]


def refused(value: Any, prefix: str = "") -> list[str]:
    encoder = Encoder(prefix=prefix)
    encoder.encode(value)
    return encoder.problems


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PendingDeprecationWarning")
class TestRefused:
    @pytest.mark.parametrize(("make", "what"), REFUSED, ids=[what for _, what in REFUSED])
    def test_what_cannot_be_held_is_named_by_its_path(self, make: Callable[[], Any], what: str) -> None:
        (problem,) = refused({"fine": 1, "groups": [{"also fine": torch.ones(1)}, {"lr": make()}]})
        path, _, said = problem.partition(": ")
        assert path == "groups[1].lr"
        assert what in said

    def test_the_lambdas_of_a_scheduler_are_named(self) -> None:
        assert refused({"lr_lambdas": [lambda step: 1.0]}) == ["lr_lambdas[0]: a function"]
        assert refused({"lr_lambdas": [None, function]}, "scheduler") == ["scheduler.lr_lambdas[1]: a function"]

    def test_the_path_says_where_in_any_container(self) -> None:
        assert refused((1, function)) == ["[1]: a function"]
        assert refused({"a": {0: {"b c": function}}}) == ["a[0]['b c']: a function"]
        assert refused({"queue": deque([1, function], maxlen=5)}) == ["queue[1]: a function"]
        assert refused({"default": defaultdict(dict, {"x": function})}) == ["default.x: a function"]
        assert refused({"set": {function}}) == ["set[0]: a function"]
        assert refused({function: 1}) == ["(key): a function"]
        assert refused({"a": {Thing: 1}}, "p") == [f"p.a(key): the class {_HERE}.Thing"]

    def test_a_state_that_is_refused_itself_is_named_by_its_part(self) -> None:
        assert refused(function, "scheduler") == ["scheduler: a function"]
        assert refused([function], "scheduler") == ["scheduler[0]: a function"]
        assert refused({function: 1}, "scheduler") == ["scheduler(key): a function"]

    def test_all_of_them_stand_in_one_error(self) -> None:
        problems: list[str] = []
        Encoder(prefix="scheduler", problems=problems).encode({"lr_lambdas": [function, None, function]})
        Encoder(prefix="custom", problems=problems).encode({"thing": Thing(), "fine": 1, "colour": Colour.RED})
        expected = (
            "scheduler.lr_lambdas[0]: a function",
            "scheduler.lr_lambdas[2]: a function",
            f"custom.thing: a {_HERE}.Thing",
            f"custom.colour: a {_HERE}.Colour",
        )
        with pytest.raises(UnsupportedError) as raised:
            refuse(problems)
        assert raised.value.problems == expected
        assert all(problem in str(raised.value) for problem in expected)
        assert "nothing was saved" in str(raised.value)
        assert "Leave them out of state_dict()" in str(raised.value)

    def test_no_problem_is_no_error(self) -> None:
        refuse([])

    def test_a_container_inside_itself_is_refused_at_once(self) -> None:
        loop: list[Any] = [1]
        loop += [loop, loop]  # followed twice at every level, it would never end
        assert refused({"state": loop}) == ["state[1]: a list inside itself", "state[2]: a list inside itself"]
        table: dict[str, Any] = {}
        table["a"] = {"b": (table,)}
        assert refused(table) == ["a.b[0]: a dict inside itself"]
        default: defaultdict[str, Any] = defaultdict(dict)
        default["a"] = deque([default])
        assert refused({"x": default}) == ["x.a[0]: a collections.defaultdict inside itself"]

    def test_one_container_in_two_places_is_fine(self) -> None:
        shared = [1, 2]
        assert same(back([shared, {"again": shared}, (shared, shared)]), [shared, {"again": shared}, (shared, shared)])

    @pytest.mark.parametrize(
        ("around", "levels"),
        [
            (lambda value: [value], 1),
            (lambda value: {"k": value}, 1),
            (lambda value: {("k",): value}, 1),
            (lambda value: deque([value]), 1),
            (lambda value: defaultdict(dict, {0: value}), 1),
            (lambda value: OrderedDict({"$": (value,)}), 2),
        ],
        ids=["list", "dict", "items", "deque", "defaultdict", "ordered"],
    )
    def test_what_is_nested_too_deeply_is_refused_and_what_is_not_comes_back(
        self, around: Callable[[Any], Any], levels: int
    ) -> None:
        value, count = 1, -1
        while not refused(value):
            fits, value, count = value, around(value), count + 1
        assert count * levels in (100, 101)  # numbers in the innermost list are not looked at one by one
        for problem in refused(value):
            assert "nested more than 100 levels deep" in problem
            assert len(problem) < 200
        assert back(fits) == fits


def test_a_kind_of_value_that_is_not_known_is_damage() -> None:
    with pytest.raises(DamagedError, match=r"unknown kind '\$future'.*newer version of ckpt"):
        Decoder(lambda name: None).decode({"a": [{"$future": 1}]})


@pytest.mark.parametrize(
    "data", [{"$dtype": "save"}, {"$dtype": "Tensor"}, {"$layout": "load"}, {"$memory_format": "float32"}]
)
def test_a_name_from_a_file_leads_to_nothing_but_its_kind(data: Any) -> None:
    with pytest.raises(DamagedError, match=r"the installed torch .* has no"):
        Decoder(lambda name: None).decode(data)
