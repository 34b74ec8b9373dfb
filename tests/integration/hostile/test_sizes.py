"""A pod announces sizes and hashes that are not true, or sends more than it announced."""

import pytest

from tests.integration.hostile import tree_guard
from tests.integration.hostile.ended_run import (
    CONTENT,
    MARKER,
    SHA256,
    TOKEN,
    change_manifest,
    read_manifest,
    sha256_of,
)
from tests.integration.hostile.judged import lacks, pull
from tests.integration.hostile.lying_pod import SLACK_BYTES, World

pytestmark = pytest.mark.integration

#: Sizes in the pod's list of files, each in the place of the true 7919.
LISTED = {
    "negative": "-1",
    "2^64": str(2**64),
    "a-petabyte": str(10**15),
    "5000-digits": "9" * 5000,
    "hexadecimal": "0x1eef",
    "fraction": "7919.5",
    "not-a-number": "NaN",
    "other-digits": "\u0667\u0669\u0661\u0669".encode().decode("latin-1"),
    "empty": "",
    "shorter": "100",
    "longer": "8919",
}


@pytest.mark.parametrize("size", LISTED)
def test_a_size_in_the_listing_that_is_not_true_is_refused_alone(world: World, size: str) -> None:
    side = world.sides["far"]
    # With its hash: four digits alone stand in the hash of another file now and then.
    swap = [f"{len(CONTENT)} {SHA256}", f"{LISTED[size]} {SHA256}"]
    side.lie({"answer": MARKER, "swap": [swap]})
    heard, problems = pull(world, side, (9, 10))
    assert side.num_lies, heard.said
    assert problems + lacks(side, 20, 30) == [], heard.said
    assert not (side.backup / MARKER).exists()


HASHES = {
    "of-nothing": sha256_of(b""),
    "of-another-file": sha256_of(b"30\n"),
    "upper-case": SHA256.upper(),
    "long": SHA256 + "00",
    "no-hex": "z" * 64,
    "a-path": "../" * 21 + "x",
}


@pytest.mark.parametrize("sha256", HASHES)
def test_a_hash_in_the_listing_that_is_not_true_is_refused_alone(world: World, sha256: str) -> None:
    side = world.sides["far"]
    side.lie({"answer": SHA256, "swap": [[SHA256, HASHES[sha256]]]})
    heard, problems = pull(world, side, (9, 10))
    assert side.num_lies, heard.said
    assert problems + lacks(side, 20, 30) == [], heard.said
    assert not (side.backup / MARKER).exists()


#: What a checkpoint's manifest may say of a file of three bytes.
STATED = {
    "size-negative": {"size": -1},
    "size-2^70": {"size": 2**70},
    "size-petabyte": {"size": 10**15},
    "size-zero": {"size": 0},
    "size-null": {"size": None},
    "size-list": {"size": [3]},
    "size-shorter": {"size": 2},
    "size-longer": {"size": 4},
    "hash-other": {"sha256": sha256_of(b"30\n")},
    "hash-short": {"sha256": sha256_of(b"20\n")[:32]},
    "hash-escape": {"sha256": "\x1b[2J" * 16},
    "hash-long": {"sha256": "0" * 100_000},
}


@pytest.mark.parametrize("stated", STATED)
def test_a_size_or_hash_in_a_checkpoint_that_is_not_true_is_refused_alone(
    world: World, stated: str
) -> None:
    side = world.sides["near"]
    manifest = read_manifest(side.checkpoint(20))
    state = next(one for one in manifest["files"] if one["name"] == "state.txt")
    state.update(STATED[stated])
    change_manifest(side.checkpoint(20), manifest)
    heard, problems = pull(world, side, (9, 10, 11))
    assert problems + lacks(side, 30) == [], heard.said
    assert not side.held(20).exists()


@pytest.mark.parametrize("stream", ["out", "err"])
@pytest.mark.parametrize("token", [TOKEN.decode(), "20\n"], ids=["a-plain-file", "a-checkpoint"])
def test_more_bytes_than_were_announced_are_cut_at_once(
    world: World, token: str, stream: str
) -> None:
    side = world.sides["far"]
    again = {"again": "\0" * 2**16, "repeat": -1, "stream": stream}
    side.lie({"answer": token, "asked": "." if token == "20\n" else "", **again})
    before = tree_guard.disk_bytes(world.laptop)
    heard, problems = pull(world, side, (5, 8, 9, 10))
    assert side.num_lies, heard.said
    assert problems == [], heard.said
    assert side.flooded_bytes < SLACK_BYTES, f"{side.flooded_bytes} bytes were taken"
    assert tree_guard.disk_bytes(world.laptop) - before < 8 * 2**20


def test_a_file_of_a_terabyte_of_holes_fills_no_disk(world: World) -> None:
    side = world.sides["near"]
    manifest = read_manifest(side.checkpoint(20))
    weights = next(one for one in manifest["files"] if one["name"] == "model.safetensors")
    with (side.checkpoint(20) / "model.safetensors").open("r+b") as file:
        file.truncate(2**42)
    weights["size"] = 2**42
    change_manifest(side.checkpoint(20), manifest)
    before = tree_guard.disk_bytes(world.laptop)
    heard, problems = pull(world, side, (9, 10, 11))
    assert problems == [], heard.said
    assert tree_guard.disk_bytes(world.laptop) - before < SLACK_BYTES


def test_a_file_that_grows_while_it_is_read_is_brought_as_it_was_listed(world: World) -> None:
    side = world.sides["far"]
    more = f"dd if=/dev/zero bs=1M count=8 >> {side.run_dir / MARKER} 2>/dev/null"
    side.lie({"answer": MARKER, "script": more})
    heard, problems = pull(world, side, (0, 10))
    assert problems + lacks(side, 20, 30) == [], heard.said
    here = side.backup / MARKER
    assert not here.exists() or here.read_bytes().rstrip(b"\0") == CONTENT
