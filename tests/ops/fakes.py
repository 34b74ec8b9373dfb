"""Fakes for the operator's side: a transport with scripted answers and a clock that only obeys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from nsa_ops.errors import NotFoundError
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Ceiling, Completed

Answer = Completed | Exception | Callable[[tuple[str, ...], bytes], Completed]


def completed(stdout: str = "", *, exit_code: int = 0, stderr: str = "") -> Completed:
    return Completed((), exit_code, stdout.encode(), stderr.encode())


@dataclass
class FakeTransport:
    """Answers commands by a word in them, and remembers what was asked."""

    answers: dict[str, Answer] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)
    where: str = "a fake pod"

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        words = tuple(argv)
        self.asked.append(words)
        self.inputs.append(stdin)
        for word, answer in self.answers.items():
            if word in " ".join(words):
                if isinstance(answer, Exception):
                    raise answer
                return answer if isinstance(answer, Completed) else answer(words, stdin)
        message = f"`{words[0]}` does not exist on {self.where}"
        raise NotFoundError(message)

    def run_into(
        self, argv: Sequence[str], sink: Callable[[bytes], object],
        *, stdin: bytes = b"", timeout_s: float, max_bytes: int,
    ) -> Completed:  # fmt: skip
        done = self.run(argv, stdin=stdin, timeout_s=timeout_s)
        Ceiling(sink, max_bytes, f"`{argv[0]}`")(done.stdout)
        return replace(done, stdout=b"")

    def put(self, source: Path, target: str, *, timeout_s: float) -> None:
        self.files[target] = source.read_bytes()

    def get(self, source: str, target: Path, *, timeout_s: float) -> None:
        target.write_bytes(self.files[source])

    def stream(
        self, path: str, offset: int, sink: Callable[[bytes], object],
        *, max_bytes: int, timeout_s: float,
    ) -> None:  # fmt: skip
        sink(self.tail(path, offset, max_bytes=max_bytes, timeout_s=timeout_s))

    def tail(self, path: str, offset: int, *, max_bytes: int, timeout_s: float) -> bytes:
        if path not in self.files:
            message = f"`{path}` does not exist on {self.where}"
            raise NotFoundError(message)
        return self.files[path][offset : offset + max_bytes]


@dataclass
class FakeClock:
    """Time that moves only by sleeping."""

    now_s: float = 1_800_000_000.0
    slept: list[float] = field(default_factory=list)

    def unix_s(self) -> float:
        return self.now_s

    def monotonic_s(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds
