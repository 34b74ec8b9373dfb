"""Documents as the agents on a pod would answer them."""

from typing import Any

from nsa_core.config.run import RunConfig
from nsa_core.rundir.exit import ExitRecord
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_ops.pod.messages import ManifestSummary, ProbeDocument, RunReport
from nsa_ops.pod.rules.verdict import Verdict
from nsa_ops.remote.transport import Completed
from nsa_ops.store import RunRecord
from tests.ops.fakes import completed
from tests.ops.operators import POD

RUN = RunRecord("r1", POD.name, "tiny-cpu", "cpu", "code-1", "sha", 1.0)


def beat(step: int, **fields: Any) -> Heartbeat:
    return Heartbeat(
        run_id="r1", attempt=1, rank=0, pid=1, ts=1.0, iso="1970-01-01T00:00:01+00:00",
        msg="progress", alive_seq=step, progress_seq=step, step=step,
        **({"phase": "train"} | fields),
    )  # fmt: skip


def ended(code: int, reason: str) -> ExitRecord:
    return ExitRecord(
        run_id="r1", attempt=1, code=code, reason=reason, step=7, checkpoint_step=None, at=1.0,
        by="trainer",
    )  # fmt: skip


def report(state: str = "running", run_id: str = "r1", **fields: Any) -> RunReport:
    config = RunConfig()
    summary = ManifestSummary(
        run_id=run_id, attempt=1, recipe="tiny-cpu", profile="cpu", config_sha256="sha",
        code_id="code-1", code_commit="unknown", steps=config.schedule.steps, tokens_per_step=1,
        save_every=1, created_unix_s=1.0,
    )  # fmt: skip
    values = {
        "run_id": run_id, "run_dir": f"/pod/runs/{run_id}", "manifest": summary, "state": state,
        "why": f"it is {state}", "verdict": Verdict(level="healthy"),
    }  # fmt: skip
    return RunReport.model_validate(values | fields)


def answer(*reports: RunReport) -> Completed:
    document = ProbeDocument(pod_unix_s=1.0, boot_id="b", runs=list(reports))
    return completed(document.model_dump_json())


class Sequence:
    """Answers one after the other; the last one for ever."""

    def __init__(self, *answers: Completed | Exception) -> None:
        self.answers = list(answers)

    def __call__(self, _words: tuple[str, ...], _stdin: bytes) -> Completed:
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(found, Exception):
            raise found
        return found
