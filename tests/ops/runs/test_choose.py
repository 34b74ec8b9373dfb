"""Many pods are asked at once: the slowest decides, and one that fails says so."""

import threading
from collections.abc import Sequence
from pathlib import Path

from nsa_ops.context import Operator
from nsa_ops.errors import PodUnreachableError
from nsa_ops.pod.messages import ProbeDocument
from nsa_ops.remote.transport import MAX_OUTPUT_BYTES, Completed
from nsa_ops.runs.choose import look_at_pods
from nsa_ops.settings import Settings, read_settings
from nsa_ops.store import PodRecord, RunRecord, Store
from tests.ops.fakes import FakeClock, FakeTransport

NUM_PODS = 20
ANSWER = ProbeDocument(pod_unix_s=1.0, boot_id="b", runs=[]).model_dump_json().encode()


class Together(FakeTransport):
    """A transport that answers only when all pods are being asked."""

    def __init__(self, everybody: threading.Barrier, name: str) -> None:
        super().__init__()
        self._everybody, self._name = everybody, name

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float,
        max_bytes: int = MAX_OUTPUT_BYTES,
    ) -> Completed:  # fmt: skip
        self._everybody.wait(10)
        if self._name == "pod7":
            message = "pod7 does not answer"
            raise PodUnreachableError(message)
        return Completed(tuple(argv), 0, ANSWER, b"")


def test_twenty_pods_are_asked_at_once_and_answers_keep_their_order(tmp_path: Path) -> None:
    everybody = threading.Barrier(NUM_PODS)

    def connect(pod: PodRecord, _settings: Settings) -> Together:
        return Together(everybody, pod.name)

    store = Store(tmp_path / "registry.sqlite")
    operator = Operator(read_settings({}, folder=tmp_path), store, FakeClock(), str.strip, connect)
    runs = []
    for number in range(NUM_PODS):
        name = f"pod{number}"
        store.add_pod(PodRecord(name, name, "local", "/p", "python3", "", 0.0))
        runs.append(RunRecord(f"r{number}", name, "", "", "c", "", 0.0))
    looked = look_at_pods(operator, [*runs, RunRecord("x", "gone", "", "", "c", "", 0.0)])
    assert [one.pod for one in looked] == [*(f"pod{number}" for number in range(NUM_PODS)), "gone"]
    problems = {one.pod: one.problem for one in looked if one.problem}
    assert problems == {"pod7": "pod7 does not answer", "gone": "no longer known"}
