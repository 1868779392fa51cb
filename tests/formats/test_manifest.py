from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from typing import Any

import pytest
import xxhash

from ckpt.errors import DamagedError, UnsupportedError, VersionError
from ckpt.formats.native import manifest as manifests
from ckpt.formats.native.manifest import BLOCK_SIZE, BlockHasher, FileRecord, Manifest, digest, digests_of_every

SMALL = Manifest(
    name="step-00000002",
    id="5f",
    sequence=2,
    created="2025-01-01T00:00:00.000+00:00",
    run="r",
    files=(FileRecord(name="m", path="m", size=3, blocks=("ab",), block_size=8),),
    versions={"ckpt": "0.1"},
)


def signed(lines: bytes) -> bytes:
    """A manifest's bytes with a digest that is right, whatever they say."""
    return b'{\n "digest": "xxh3-128:' + xxhash.xxh3_128_hexdigest(lines).encode() + b'",\n' + lines


def altered(manifest: Manifest, **fields: object) -> bytes:
    """The bytes of a manifest with other fields, and a digest that is right."""
    lines = b"{\n" + manifest.to_bytes().split(b"\n", 2)[2]
    return signed(json.dumps({**json.loads(lines), **fields}, indent=1).encode().removeprefix(b"{\n"))


class TestRoundTrip:
    def test_every_field_comes_back(self) -> None:
        manifest = Manifest(
            name="über-1",
            id="0123",
            sequence=7,
            created="2025-01-01T00:00:00.000+00:00",
            run="run",
            files=(
                FileRecord(name="model.safetensors", path="model.5f.safetensors", size=1 << 26, blocks=("a", "b")),
                FileRecord(name="empty.json", path="empty.json", size=0, blocks=(), block_size=16),
            ),
            world_size=8,
            layout="sharded",
            parent="parent",
            progress={"step": 500, "epoch": 2},
            metrics={"loss": 0.1, "tiny": 5e-324, "negative": -0.0},
            versions={"ckpt": "0.1", "torch": "2.8"},
            seconds={"total": 1.5},
            memory={"snapshots": 3, "waited": 0.25},
        )
        again = Manifest.from_bytes(manifest.to_bytes(), "manifest.json")
        assert again == manifest
        assert again.to_bytes() == manifest.to_bytes()
        assert all(isinstance(file, FileRecord) for file in again.files)
        assert (again.step, again.size) == (500, 1 << 26)
        assert math.copysign(1, again.metrics["negative"]) == -1

    def test_what_is_not_given_has_a_default(self) -> None:
        again = Manifest.from_bytes(SMALL.to_bytes(), "manifest.json")
        assert again == SMALL
        assert (again.step, again.parent, again.world_size) == (0, None, 1)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_metrics_that_json_cannot_say_survive(self, value: float) -> None:
        data = dataclasses.replace(SMALL, metrics={"loss": value, "accuracy": 0.5}).to_bytes()
        metrics = Manifest.from_bytes(data, "manifest.json").metrics
        assert repr(metrics["loss"]) == repr(value)
        assert metrics["accuracy"] == 0.5
        json.loads(data, parse_constant=pytest.fail)  # any reader of JSON reads it

    def test_it_is_json_whose_digest_covers_all_that_follows(self) -> None:
        data = SMALL.to_bytes()
        fields = json.loads(data)
        assert (fields["format"], fields["version"]) == ("ckpt", manifests.VERSION)
        head, claim, rest = data.split(b"\n", 2)
        assert head == b"{"
        assert claim == f' "digest": "xxh3-128:{xxhash.xxh3_128_hexdigest(rest)}",'.encode()


class TestDamage:
    def test_every_single_flipped_bit_is_noticed(self) -> None:
        data = bytearray(SMALL.to_bytes())
        for index in range(len(data)):
            for bit in range(8):
                data[index] ^= 1 << bit
                with pytest.raises(DamagedError, match=r"step/manifest\.json was altered"):
                    Manifest.from_bytes(bytes(data), "step/manifest.json")
                data[index] ^= 1 << bit
        assert Manifest.from_bytes(bytes(data), "step/manifest.json") == SMALL

    def test_every_truncation_is_noticed(self) -> None:
        data = SMALL.to_bytes()
        for length in range(len(data)):
            with pytest.raises(DamagedError, match="was altered"):
                Manifest.from_bytes(data[:length], "manifest.json")

    @pytest.mark.parametrize("more", [b"\n", b" ", b"\0", b"{}", SMALL.to_bytes()])
    def test_whatever_is_appended_or_prepended_is_noticed(self, more: bytes) -> None:
        for data in (SMALL.to_bytes() + more, more + SMALL.to_bytes()):
            with pytest.raises(DamagedError, match="was altered"):
                Manifest.from_bytes(data, "manifest.json")

    @pytest.mark.parametrize(
        "lines",
        [
            b"",
            b"}",
            b"not JSON",
            b'"format": "another"}',
            b'"version": 1}',
            b'"format": "ckpt"}',
            b'"format": "ckpt", "version": 1}',
            b'"format": "ckpt", "version": "1"}',
            b'"format": "ckpt", "version": 1, "files": 5}',
            b'"format": "ckpt", "version": 1, "files": [{}]}',
            b"\xff\xff",
        ],
    )
    def test_bytes_that_match_their_digest_and_are_no_manifest_are_damaged(self, lines: bytes) -> None:
        with pytest.raises(DamagedError, match=r"step/manifest\.json is not a valid manifest"):
            Manifest.from_bytes(signed(lines), "step/manifest.json")


BAD_FIELDS: list[tuple[str, Any]] = [
    ("name", 5),
    ("name", "\ud800"),
    ("id", "../../x"),
    ("id", ""),
    ("sequence", "a"),
    ("sequence", -1),
    ("sequence", True),
    ("sequence", 2**53),
    ("sequence", 10**400),
    ("created", "yesterday"),
    ("created", "2025-01-01T00:00:00"),
    ("run", ["r"]),
    ("run", "x" * 5000),
    ("files", None),
    ("files", ["model.safetensors"]),
    ("world_size", 0),
    ("layout", None),
    ("parent", 3),
    ("progress", {"step": "7"}),
    ("progress", {"step": -1}),
    ("progress", [1]),
    ("metrics", {"loss": "low"}),
    ("metrics", {"loss": 10**400}),
    ("metrics", {"loss\0": 1.0}),
    ("versions", {"ckpt": 1}),
    ("hardware", {}),
    ("seconds", {"total": "long"}),
    ("seconds", {"total": 10**309}),
    ("hosts", "all"),
    ("hosts", [{"name": "a"}]),
    ("hosts", [{"name": "a", "ranks": [-1]}]),
    ("memory", {"waited": None}),
]
BAD_FILE_FIELDS: list[tuple[str, Any]] = [
    ("path", "../outside"),
    ("path", "/etc/passwd"),
    ("path", "a/./b"),
    ("path", "a\\b"),
    ("path", "a\0b"),
    ("path", ""),
    ("path", 7),
    ("path", "manifest.json"),
    ("path", ".saving"),
    ("name", "../outside"),
    ("size", -1),
    ("size", 1.5),
    ("size", 2**63),
    ("block_size", 0),
    ("block_size", -1),
    ("block_size", 2**40),
    ("block_size", None),
    ("blocks", []),
    ("blocks", ["ab", "ab"]),
    ("blocks", ["not a hash"]),
    ("blocks", [5]),
    ("blocks", {"ab": 1}),
    ("head", [1]),
    ("head", [4, "ab"]),
    ("head", [0, "ab"]),
    ("head", [2, None]),
    ("head", "ab"),
]


class TestSchema:
    """A digest that is right proves nothing: whoever alters a manifest makes its digest anew."""

    @pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
    def test_a_field_that_makes_no_sense_is_named(self, field: str, value: Any) -> None:
        with pytest.raises(DamagedError, match=rf"step/manifest\.json is not a valid manifest: .*{field.rstrip('s')}"):
            Manifest.from_bytes(altered(SMALL, **{field: value}), "step/manifest.json")

    @pytest.mark.parametrize(("field", "value"), BAD_FILE_FIELDS)
    def test_a_field_of_a_file_that_makes_no_sense_is_named(self, field: str, value: Any) -> None:
        file = {**dataclasses.asdict(SMALL.files[0]), field: value}
        with pytest.raises(DamagedError, match=r"is not a valid manifest: file .*(block|hash|head|size|path|name)"):
            Manifest.from_bytes(altered(SMALL, files=[file]), "step/manifest.json")

    @pytest.mark.parametrize("field", ["name", "id", "sequence", "created", "run", "files"])
    def test_a_missing_field_is_named(self, field: str) -> None:
        lines = b"{" + SMALL.to_bytes().split(b"\n", 2)[2]
        left = {name: value for name, value in json.loads(lines).items() if name != field}
        with pytest.raises(DamagedError, match=f"{field} is missing"):
            Manifest.from_bytes(signed(json.dumps(left).encode().removeprefix(b"{")), "manifest.json")

    @pytest.mark.parametrize("field", ["name", "path"])
    def test_two_files_of_one_name_or_path_are_refused(self, field: str) -> None:
        first = dataclasses.asdict(SMALL.files[0])
        second = {**first, "name": "other", "path": "other", field: first[field]}
        with pytest.raises(DamagedError, match=f"'m' is the {field} of 2 files"):
            Manifest.from_bytes(altered(SMALL, files=[first, second]), "manifest.json")

    def test_every_offender_is_named_at_once_and_of_many_the_first(self) -> None:
        with pytest.raises(DamagedError) as raised:
            Manifest.from_bytes(altered(SMALL, sequence="a", run=1, progress=2), "manifest.json")
        assert all(f"{field} is " in str(raised.value) for field in ("sequence", "run", "progress"))
        files = [{"path": f"{number}"} for number in range(1000)]
        with pytest.raises(DamagedError, match="and 2992 more") as raised:
            Manifest.from_bytes(altered(SMALL, files=files), "manifest.json")
        assert len(str(raised.value)) < 2000

    def test_what_was_altered_is_shown_escaped_and_short(self) -> None:
        with pytest.raises(DamagedError) as raised:
            Manifest.from_bytes(altered(SMALL, created="\x1b[2J\n" + "x" * 10_000), "manifest.json")
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) < 300

    @pytest.mark.parametrize(
        "value", [b"[" * 200_000, b'{"a":' * 200_000, b"NaN", b"-Infinity", b"1" * 5000, b'"\xff"', b"1e", b"{"]
    )
    def test_json_that_is_too_deep_or_none_is_damaged(self, value: bytes) -> None:
        with pytest.raises(DamagedError, match="is not a valid manifest"):
            Manifest.from_bytes(signed(b'"format": "ckpt", "version": 1, "x": ' + value + b"}"), "manifest.json")

    @pytest.mark.parametrize("version", [0, -1, True, 1.0, None, "2", 10**7])
    def test_a_version_that_is_none_is_damage_and_no_newer_format(self, version: object) -> None:
        with pytest.raises(DamagedError, match="its version is"):
            Manifest.from_bytes(altered(SMALL, version=version), "manifest.json")

    def test_the_writer_of_a_newer_format_is_shown_only_if_it_is_a_version(self) -> None:
        for versions in ({"ckpt": "9\x1b[2J"}, {"ckpt": ["9"]}, ["ckpt"], None):
            with pytest.raises(VersionError, match=r"written by ckpt \?,"):
                Manifest.from_bytes(altered(SMALL, version=99, versions=versions), "manifest.json")

    def test_what_no_reader_would_accept_is_not_written(self) -> None:
        with pytest.raises(UnsupportedError, match="step-00000002 cannot be saved: metrics is a dict and must be"):
            dataclasses.replace(SMALL, metrics={"\ud800": 1.0}).to_bytes()


class TestVersions:
    def test_a_newer_version_is_refused_with_the_way_to_upgrade(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as newer:
            newer.setattr(manifests, "VERSION", manifests.VERSION + 1)
            data = dataclasses.replace(SMALL, versions={"ckpt": "9.0"}).to_bytes()
        with pytest.raises(VersionError) as raised:
            Manifest.from_bytes(data, "step-00000002/manifest.json")
        message = str(raised.value)
        assert f"step-00000002/manifest.json has format version {manifests.VERSION + 1}" in message
        assert "written by ckpt 9.0" in message
        assert "pip install -U torch-ckpt" in message

    def test_a_newer_version_is_refused_though_nothing_else_is_known_of_it(self) -> None:
        with pytest.raises(VersionError, match="format version 99"):
            Manifest.from_bytes(signed(b'"format": "ckpt", "version": 99}'), "manifest.json")

    def test_fields_it_does_not_know_are_ignored(self) -> None:
        file = {**dataclasses.asdict(SMALL.files[0]), "colour": "red"}
        data = altered(SMALL, files=[file], weather={"sky": [1, None]})
        assert b"weather" in data
        assert b"colour" in data
        assert Manifest.from_bytes(data, "manifest.json") == SMALL


class TestBlockHasher:
    @pytest.mark.parametrize("seed", range(20))
    def test_it_equals_hashing_block_by_block(self, seed: int) -> None:
        chance = random.Random(seed)
        block = chance.choice([1, 7, 64, 1000])
        data = chance.randbytes(chance.choice([0, block - 1, block, block + 1, 5 * block, chance.randrange(9 * block)]))
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(20)))
        pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        hasher = BlockHasher(block, sha256=True)
        assert b"".join(hasher.through(pieces)) == data
        assert hasher.size == len(data)
        blocks = [data[start : start + block] for start in range(0, len(data), block)]
        assert hasher.digests == tuple(map(xxhash.xxh3_128_hexdigest, blocks))
        assert hasher.sha256_digests == tuple(hashlib.sha256(found).hexdigest() for found in blocks)
        for threads in (1, 2, 3):  # each hashes its own blocks
            views = [memoryview(piece) for piece in pieces]
            shares = [digests_of_every(views, number, threads, hashlib.sha256, block) for number in range(threads)]
            found = {index: value for share in shares for index, value in share.items()}
            assert tuple(found[index] for index in sorted(found)) == hasher.sha256_digests

    def test_it_counts_bytes_whatever_the_items_of_a_piece_are(self) -> None:
        data = bytes(range(64))
        hasher = BlockHasher(24)
        assert b"".join(hasher.through([memoryview(data).cast("Q"), bytearray(b"end")])) == data + b"end"
        assert hasher.size == 67
        assert hasher.digests == (digest(data[:24]), digest(data[24:48]), digest(data[48:] + b"end"))

    def test_digests_can_be_asked_for_in_between(self) -> None:
        hasher = BlockHasher(4)
        seen = [[*hasher.digests]]
        for piece in (b"abc", b"de"):
            hasher.update(memoryview(piece))
            seen.append([*hasher.digests])
        assert seen == [[], [digest(b"abc")], [digest(b"abcd"), digest(b"e")]]

    def test_blocks_are_tens_of_megabytes_unless_told_otherwise(self) -> None:
        hasher = BlockHasher()
        list(hasher.through([bytes(BLOCK_SIZE), b"x"]))
        assert 10 << 20 <= BLOCK_SIZE < 100 << 20
        assert hasher.digests == (digest(bytes(BLOCK_SIZE)), digest(b"x"))
