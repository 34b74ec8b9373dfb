"""A pod that lies in its lists, manifests and streams: nothing outside the backup is touched."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from nsa_core.rundir.checkpoint import MANIFEST_NAME, list_checkpoints
from nsa_ops.backup.folder import read_backup_record
from nsa_ops.backup.pull import execute_pull, plan_pull
from nsa_ops.backup.transfer import Pulled
from nsa_ops.backup.verification import verify_backup
from nsa_ops.errors import OpsError, PartialError, StateConflictError, VerificationError
from nsa_ops.remote.local import LocalTransport
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed
from tests.ops.backup.case import ENVIRONMENT, RUN_ID, Case


class LyingPod(LocalTransport):
    """This machine, whose lists and streams are changed on their way."""

    def __init__(
        self,
        *,
        listed: Callable[[bytes], bytes] = bytes,
        manifests: Callable[[bytes], bytes] = bytes,
        streamed: Callable[[list[str], bytes], bytes] | None = None,
    ) -> None:
        super().__init__(ENVIRONMENT)
        self._listed, self._manifests, self._streamed = listed, manifests, streamed
        self.num_calls = 0

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        done = super().run(argv, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes)
        lie = bytes
        if "find ." in " ".join(argv):
            lie = self._listed
        elif MANIFEST_NAME in " ".join(argv):
            lie = self._manifests
        return Completed(done.argv, done.exit_code, lie(done.stdout), done.stderr)

    def run_into(
        self, argv: Sequence[str], sink: Callable[[bytes], object],
        *, stdin: bytes = b"", timeout_s: float, max_bytes: int,
    ) -> Completed:  # fmt: skip
        self.num_calls += 1
        if self._streamed is None or not stdin:
            return super().run_into(
                argv, sink, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
            )
        content = bytearray()
        done = super().run_into(
            argv, content.extend, stdin=stdin, timeout_s=timeout_s, max_bytes=max_bytes
        )
        lied = self._streamed(stdin.decode().splitlines()[0::3], bytes(content))
        for start in range(0, len(lied), 1000):
            sink(lied[start : start + 1000])
        return done


@pytest.fixture
def case(tmp_path: Path) -> Case:
    made = Case(tmp_path / "a" / "b")
    made.build(20)
    return made


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


def pull(case: Case, pod: LocalTransport, which: str = "all") -> Pulled:
    link = case.link(pod)
    return execute_pull(case.operator, link, plan_pull(link, RUN_ID, case.backup, which))


def outside(case: Case) -> dict[str, bytes | None]:
    """Everything around the backup and the operator's own state."""
    top = case.root.parent.parent
    ours = ("a/b/backups", "a/b/state")
    return {name: held for name, held in tree(top).items() if not name.startswith(ours)}


def entry(name: bytes, content: bytes = b"evil", size: int | None = None) -> bytes:
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"%d %s %s\0" % (len(content) if size is None else size, digest, name)


LISTED: dict[str, bytes] = {
    "absolute": entry(b"/tmp/evil"),
    "above": entry(b"../evil"),
    "above later": entry(b"./a/../../evil"),
    "dot": entry(b"./././evil"),
    "backslash": entry(b"..\\evil"),
    "empty": entry(b""),
    "newline": entry(b"./a\nb"),
    "escape": entry(b"./\x1b[2Jevil"),
    "not UTF-8": entry(b"./\xff\xfe"),
    "NUL": entry(b"./a\0b"),
    "300 characters": entry(b"./" + b"x" * 300),
    "very long": entry(b"./" + b"x/" * 5000 + b"x"),
    "deep": entry(b"./" + b"d/" * 40 + b"x"),
    "own record": entry(b"./backup.json"),
    "own record in capitals": entry(b"./BACKUP.json"),
    "a checkpoint": entry(b"./checkpoints/step_000020/model.safetensors"),
    "a checkpoint in capitals": entry(b"./Checkpoints/step_000020/model.safetensors"),
    "put away": entry(b"./.gone/x"),
    "a part": entry(b"./.manifest.json.part"),
    "negative": entry(b"./evil", size=-1),
    "no number": b"\xb2 " + b"0" * 64 + b" ./evil\0",
    "huge": entry(b"./evil", size=10**17),
    "many digits": b"1" * 5000 + b" " + b"0" * 64 + b" ./evil\0",
    "no hash": b"4 " + b"g" * 64 + b" ./evil\0",
    "twin": entry(b"./MANIFEST.json"),
    "twice": entry(b"./manifest.json"),
    "garbage": b"garbage\0",
}


@pytest.mark.parametrize(
    ("lie", "is_first"),
    [(lie, number % 2 == 0) for number, lie in enumerate(LISTED.values())],
    ids=LISTED,
)
def test_a_name_that_is_refused_costs_only_itself(case: Case, lie: bytes, is_first: bool) -> None:
    before = outside(case)
    pod = LyingPod(listed=lambda honest: lie + honest if is_first else honest + lie)
    if lie == LISTED["twice"] and is_first:
        pod = LyingPod(listed=lambda honest: honest + lie)
    with pytest.raises(PartialError, match="Refused: ") as caught:
        pull(case, pod)
    assert caught.value.exit_code == 10
    assert outside(case) == before
    here = tree(case.backup.root)
    there = tree(case.run.root)
    assert {name: here.get(name) for name in there} == there
    assert set(here) - set(there) == {"backup.json"}
    assert verify_backup(case.backup.root, load=True).differences == []
    again = LyingPod(listed=lambda honest: honest + lie)
    with pytest.raises((VerificationError, PartialError), match="Refused: "):
        pull(case, again)
    assert tree(case.backup.root).keys() == here.keys()


def test_a_plan_names_what_is_refused_and_a_crowd_is_counted(case: Case) -> None:
    crowd = b"".join(entry(b"/%d" % number) for number in range(5000))
    pod = LyingPod(listed=lambda honest: honest + crowd)
    planned = plan_pull(case.link(pod), RUN_ID, case.backup, "all")
    assert sum("refused" in note for note in planned.plan.notes) < 50
    assert "refused: `/0` is absolute" in planned.plan.notes
    with pytest.raises(PartialError):
        execute_pull(case.operator, case.link(pod), planned)
    assert len(case.told) < 200


def test_an_empty_list_puts_files_away_and_never_over_what_was_put_away_before(case: Case) -> None:
    note = case.run.root / "note.txt"
    note.write_bytes(b"good")
    pull(case, LyingPod())
    for content in (b"one", b"two"):
        pull(case, LyingPod(listed=lambda _honest: b""))
        lie = entry(b"./note.txt", content)
        pod = LyingPod(
            listed=lambda _honest, lie=lie: lie, streamed=lambda _names, _bytes, c=content: c
        )
        note.write_bytes(content)
        pull(case, pod)
    pull(case, LyingPod(listed=lambda _honest: b""))
    kept = {path.read_bytes() for path in case.backup.gone.glob("note.txt*")}
    assert kept == {b"good", b"one", b"two"}


def test_a_file_that_becomes_a_folder_is_reported_and_then_brought(case: Case) -> None:
    (case.run.root / "thing").write_text("a file")
    pull(case, LyingPod())
    (case.run.root / "thing").unlink()
    (case.run.root / "thing").mkdir()
    (case.run.root / "thing" / "inner").write_text("in a folder")
    with pytest.raises(OpsError, match="no folder") as caught:
        pull(case, LyingPod())
    assert caught.value.exit_code in {9, 10}
    pull(case, LyingPod())
    assert (case.backup.root / "thing" / "inner").read_text() == "in a folder"
    assert verify_backup(case.backup.root).differences == []


@pytest.mark.parametrize("part", ["training.csv", "attempts", ".training.csv.part"])
def test_a_link_in_the_backup_is_never_written_through(case: Case, part: str) -> None:
    pull(case, LyingPod())
    victim = case.root.parent / "victim"
    victim.mkdir()
    (victim / "file").write_text("good")
    (case.run.root / "attempts").mkdir()
    (case.run.root / "attempts" / "file").write_text("evil")
    case.run.training_csv.write_text("evil\n" * 3)
    target = case.backup.root / part
    target.unlink(missing_ok=True)
    target.symlink_to(victim if part == "attempts" else victim / "file")
    try:
        pull(case, LyingPod())
    except OpsError as error:
        assert error.exit_code in {9, 10}
    assert tree(victim) == {"file": b"good"}


def manifest_of(case: Case, **changes: Any) -> bytes:
    document = json.loads((case.run.checkpoint(20) / MANIFEST_NAME).read_bytes())
    return json.dumps(document | {"step": 40} | changes).encode()


def file_of(name: str, size: int = 4, sha256: str = "0" * 64) -> dict[str, Any]:
    return {"name": name, "size": size, "sha256": sha256}


BAD_FILES: dict[str, list[dict[str, Any]]] = {
    "absolute": [file_of("/etc/passwd")],
    "above": [file_of("../../../../escape")],
    "a folder": [file_of("a/b")],
    "itself": [file_of(MANIFEST_NAME)],
    "nothing": [],
    "negative": [file_of("a", -5)],
    "huge": [file_of("a", 10**30)],
    "no hash": [file_of("a", 4, "x")],
    "twice": [file_of("a"), file_of("a", 5)],
    "twin": [file_of("a"), file_of("A")],
    "NUL": [file_of("a\0b")],
    "surrogate": [file_of("\ud800")],
    "long": [file_of("x" * 300)],
    "part": [file_of(".a.part")],
}


def manifests_of(name: bytes, content: bytes) -> Callable[[bytes], bytes]:
    return lambda honest: name + b"\0" + content + b"\0" + honest


def refused_alone(case: Case, manifests: Callable[[bytes], bytes]) -> str:
    """Pull from a pod with one bad manifest; the good one arrives, and what was said."""
    before = outside(case)
    with pytest.raises(PartialError) as caught:
        pull(case, LyingPod(manifests=manifests))
    assert outside(case) == before
    assert [one.step for one in list_checkpoints(case.backup.run)] == [20]
    assert [one.step for one in case.operator.store.receipts(RUN_ID)] == [20]
    assert verify_backup(case.backup.root, load=True).steps == [20]
    return caught.value.message


@pytest.mark.parametrize("files", BAD_FILES.values(), ids=BAD_FILES)
def test_a_manifest_with_bad_files_blocks_no_other_checkpoint(
    case: Case, files: list[dict[str, Any]]
) -> None:
    content = manifest_of(case, files=files)
    assert "step_000040" in refused_alone(case, manifests_of(b"step_000040", content))


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b" " * 5_000_000,
        b"1" * 10_000, b"null",
    ],
)  # fmt: skip
def test_a_manifest_that_is_none_blocks_no_other_checkpoint(case: Case, content: bytes) -> None:
    assert "can be read" in refused_alone(case, manifests_of(b"step_000040", content))


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (b"step_000060", {}, "of step 40"),
        (b"step_0000040", {}, "of step 40"),
        ("step_٠٠٠٠٤٠".encode(), {}, "no name"),
        (b"step_" + b"9" * 5000, {}, "no name"),
        (b"../step_000040", {}, "no name"),
        (b"\xff", {}, "no name"),
        (b"step_000040", {"step": -40}, "of step -40"),
        (b"step_000040", {"step": 10**50}, "of step"),
        (b"step_000040", {"run_id": "another-run"}, "another-run"),
        (b"step_000040", {"run_id": "\x1b[2J"}, r"\x1b[2J"),
    ],
)
def test_a_manifest_of_another_step_or_run_is_refused(
    case: Case, name: bytes, changes: dict[str, Any], said: str
) -> None:
    content = manifest_of(case, **changes)
    assert said in refused_alone(case, manifests_of(name, content))


def test_two_manifests_of_one_step_are_refused_but_the_first(case: Case) -> None:
    other = manifest_of(case, step=20, files=[file_of("a")])
    lie = b"step_000020\0" + other + b"\0"
    assert "twice" in refused_alone(case, lambda honest: honest + lie)


def test_a_linked_manifest_on_the_pod_is_refused(case: Case) -> None:
    folder = case.run.checkpoint(40)
    folder.mkdir()
    (folder / MANIFEST_NAME).symlink_to(case.run.checkpoint(20) / MANIFEST_NAME)
    case.run.checkpoint(60).symlink_to(case.run.checkpoint(20))
    assert "can be read" in refused_alone(case, bytes)


def test_a_manifest_with_a_nul_does_not_shift_the_others(case: Case) -> None:
    folder = case.run.checkpoint(10)
    folder.mkdir()
    (folder / MANIFEST_NAME).write_bytes(b"{\0step_000020\0{}")
    assert "step_000010" in refused_alone(case, bytes)


def test_a_lost_list_is_refused_and_the_checkpoints_arrive(case: Case) -> None:
    pull(case, LyingPod(), "none")
    here = tree(case.backup.root)

    class Endless(LyingPod):
        def run(self, argv: Sequence[str], **more: Any) -> Completed:
            if "find ." in " ".join(argv):
                argv = ("cat", "/dev/zero")
            return super().run(argv, **more)

    with pytest.raises(PartialError, match="list of files cannot be used"):
        pull(case, Endless())
    now = tree(case.backup.root)
    assert {name: now[name] for name in here if name != "backup.json"} == {
        name: content for name, content in here.items() if name != "backup.json"
    }
    assert [one.step for one in list_checkpoints(case.backup.run)] == [20]


def small_files(case: Case, count: int = 60) -> list[str]:
    """Files beside the run's own, each with its own content."""
    folder = case.run.root / "many"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:03d}").write_bytes(f"{number:05d}".encode() * (number % 7) * 40)
    return [f"many/{number:03d}" for number in range(count)]


def lie_at(case: Case, victim: str, lie: Callable[[bytes], bytes]) -> Callable[..., bytes]:
    """Change what arrives for one file wherever it stands in a stream."""

    def changed(names: list[str], content: bytes) -> bytes:
        pieces, at = [], 0
        for name in names:
            path = case.run.root / name
            size = path.stat().st_size if path.exists() else 0
            piece = content[at : at + size]
            at += size
            pieces.append(lie(piece) if name == victim else piece)
        return b"".join(pieces)

    return changed


@pytest.mark.parametrize(
    ("lie", "number"),
    [
        (lambda piece: piece[:-1], 1), (lambda piece: piece[1:], 32),
        (lambda piece: piece + b"extra", 59), (lambda piece: b"extra" + piece, 1),
        (lambda piece: b"", 32), (lambda piece: piece * 50, 59),
        (lambda piece: piece[:-1] + b"?", 32),
    ],
    ids=["short", "late", "long", "early", "none", "many times", "other"],
)  # fmt: skip
def test_a_lie_in_the_stream_of_small_files_damages_only_what_it_is_about(
    case: Case, lie: Callable[[bytes], bytes], number: int
) -> None:
    names = small_files(case)
    victim = names[number]
    pod = LyingPod(streamed=lie_at(case, victim, lie))
    with pytest.raises(OpsError) as caught:
        pull(case, pod)
    assert caught.value.exit_code in {9, 10}
    for name in names:
        here, there = case.backup.root / name, case.run.root / name
        if name != victim:
            assert here.read_bytes() == there.read_bytes()
        else:
            assert not here.exists() or here.read_bytes() == there.read_bytes()
    assert verify_backup(case.backup.root, load=True).differences == []
    assert pod.num_calls < 30
    pull(case, LyingPod())
    assert (case.backup.root / victim).read_bytes() == (case.run.root / victim).read_bytes()


def test_a_pod_that_sends_nothing_of_any_file_ends(case: Case) -> None:
    names = small_files(case, 20)
    with pytest.raises(PartialError):
        pull(case, LyingPod(streamed=lambda _names, _content: b""))
    written = [name for name in names if (case.backup.root / name).exists()]
    assert {(case.run.root / name).stat().st_size for name in written} <= {0}


def test_a_rewritten_file_never_hides_the_ones_beside_it(case: Case) -> None:
    names = small_files(case)
    pull(case, LyingPod())
    for name in names[10:13]:
        (case.run.root / name).write_bytes(b"rewritten " * 30)
    (case.run.root / names[20]).unlink()
    pull(case, LyingPod())
    here = tree(case.backup.root / "many")
    assert here == tree(case.run.root / "many")


def test_a_large_file_that_sends_more_is_cut_and_both_sizes_are_named(case: Case) -> None:
    big = case.run.root / "big.bin"
    big.write_bytes(os.urandom(5 * 2**20))

    class Overflowing(LyingPod):
        def stream(self, path: str, offset: int, sink: Any, **more: Any) -> None:
            def more_than_asked(piece: bytes) -> None:
                for _ in range(100):
                    sink(piece)

            super().stream(path, offset, more_than_asked, **more)

    with pytest.raises(PartialError, match=r"big\.bin.*sent \d+ bytes or more.*5242880"):
        pull(case, Overflowing())
    size = sum(path.stat().st_size for path in case.backup.root.rglob("*big*"))
    assert size <= 5 * 2**20


def test_nine_hundred_small_files_take_no_more_round_trips_than_one(case: Case) -> None:
    def calls_of(act: Callable[[], Iterable[str]]) -> int:
        act()
        pod = Counting()
        pull(case, pod, "none")
        return pod.calls

    class Counting(LyingPod):
        calls = 0

        def run(self, *words: Any, **more: Any) -> Completed:
            Counting.calls += 1
            return super().run(*words, **more)

        def stream(self, *words: Any, **more: Any) -> None:
            Counting.calls += 1
            super().stream(*words, **more)

    pull(case, LyingPod(), "none")
    one = calls_of(lambda: [(case.run.root / "one").write_text("1")])
    Counting.calls = 0
    many = calls_of(lambda: small_files(case, 900))
    assert many <= one + 3
    assert tree(case.backup.root / "many") == tree(case.run.root / "many")


def test_a_receipt_is_not_renewed_for_a_checkpoint_that_changed_meanwhile(case: Case) -> None:
    pull(case, LyingPod())
    (before,) = case.operator.store.receipts(RUN_ID)
    link = case.link()
    planned = plan_pull(link, RUN_ID, case.backup, "all")
    model = case.backup.run.checkpoint(20) / "model.safetensors"
    facts = model.stat()
    model.write_bytes(bytes(facts.st_size))
    os.utime(model, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    with pytest.raises(VerificationError, match="has changed"):
        execute_pull(case.operator, link, planned)
    assert case.operator.store.receipts(RUN_ID) == [before]


def test_a_lie_about_a_held_checkpoint_leaves_it_and_its_receipt(case: Case) -> None:
    pull(case, LyingPod())
    good = tree(case.backup.run.checkpoint(20))
    receipts = case.operator.store.receipts(RUN_ID)
    lie = manifest_of(case, step=20, files=[file_of("model.safetensors", 4)])
    pod = LyingPod(manifests=lambda _honest: b"step_000020\0" + lie + b"\0")
    with pytest.raises(OpsError) as caught:
        pull(case, pod)
    assert caught.value.exit_code in {6, 7, 9, 10}
    assert not isinstance(caught.value, StateConflictError)
    assert tree(case.backup.run.checkpoint(20)) == good
    assert case.operator.store.receipts(RUN_ID) == receipts
    assert read_backup_record(case.backup) is not None
