"""Ask the agents on the pod: one round trip each, JSON in, JSON out, errors in our words."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from nsa_core.config.base import one_line
from nsa_core.rundir.bounded_json import MANIFEST, parse_model
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.context import PodLink
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    OpsError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.pod.messages import OFFSETS, Offsets, ProbeDocument, Reply, ReplyCode, RunReport
from nsa_ops.pod.verify import Verification
from nsa_ops.quantities import sentence_case
from nsa_ops.remote.transport import QUICK_S, Completed

#: Hashing runs at a few hundred MiB a second; the largest checkpoints take minutes.
VERIFY_S = 900.0

_ERRORS: Mapping[ReplyCode, type[OpsError]] = {
    ReplyCode.USAGE: ConfigurationError,
    ReplyCode.NOT_FOUND: NotFoundError,
    ReplyCode.CONFLICT: StateConflictError,
    ReplyCode.LOCAL_RESOURCE: LocalResourceError,
}


def ask(link: PodLink, code_id: str, action: BaseModel, *, timeout_s: float = QUICK_S) -> Reply:
    """Have one action carried out on the pod.

    Raises:
        OpsError: The error that the reply's code stands for, with the agent's own words.
    """
    argv = link.module(code_id, "nsa_ops.pod.act")
    done = link.transport.run(argv, stdin=action.model_dump_json().encode(), timeout_s=timeout_s)
    try:
        reply = parse_model(Reply, done.stdout)
    except ValueError as error:
        raise _no_answer(link, done) from error
    if reply.code is not ReplyCode.OK:
        run = str(getattr(action, "run_dir", "")).rpartition("/")[2]
        raise _ERRORS[reply.code](sentence_case(reply.message, run), hint=reply.hint)
    return reply


def probe(
    link: PodLink,
    code_id: str,
    run_ids: Sequence[str] = (),
    offsets: Mapping[str, Offsets] | None = None,
    *,
    timeout_s: float = QUICK_S,
) -> ProbeDocument:
    """What the pod shows of these runs, or of all runs in its folder, in one round trip.

    Args:
        link: Pod to ask.
        code_id: Version of the code whose agent answers.
        run_ids: Runs to look at; all if empty.
        offsets: Where earlier probes stopped reading, by run id.
        timeout_s: Deadline.
    """
    words: list[str] = ["--runs-root", str(link.runs)]
    for run_id in run_ids:
        words += ["--run-id", run_id]
    argv = link.module(code_id, "nsa_ops.pod.probe", *words)
    stdin = OFFSETS.dump_json(dict(offsets or {}))
    done = link.transport.run(argv, stdin=stdin, timeout_s=timeout_s)
    try:
        return parse_model(ProbeDocument, done.stdout)
    except ValueError as error:
        raise _no_answer(link, done) from error


def probe_run(
    link: PodLink, code_id: str, run_id: str, offsets: Offsets | None = None
) -> RunReport:
    """What the pod shows of one run.

    Raises:
        NotFoundError: If there is no such run on the pod, or its manifest cannot be read.
    """
    document = probe(link, code_id, [run_id], {run_id: offsets} if offsets else None)
    for report in document.runs:
        if report.run_id == run_id:
            return report
    said = document.problems[0].message if document.problems else "it is not there"
    message = f"Run `{run_id}` cannot be read on pod `{link.record.name}`: {said}"
    raise NotFoundError(message, hint="See what is there with `nsa-ops run ls`")


def verify(link: PodLink, code_id: str, *, run_id: str = "", checkpoint: str = "") -> Verification:
    """Hash a checkpoint on the pod, or a run's newest ones up to the first whole one.

    Args:
        link: Pod to ask.
        code_id: Version of the code whose agent answers.
        run_id: Run whose newest whole checkpoint is sought.
        checkpoint: Folder of one checkpoint, instead of a run.
    """
    run_dir = str(link.run_dir(run_id))
    words = ("--checkpoint", checkpoint) if checkpoint else ("--run-dir", run_dir)
    argv = link.module(code_id, "nsa_ops.pod.verify", *words)
    done = link.transport.run(argv, timeout_s=VERIFY_S)
    try:
        return parse_model(Verification, done.stdout)
    except ValueError as error:
        raise _no_answer(link, done) from error


def read_run_manifest(link: PodLink, run_id: str) -> RunManifest:
    """A run's manifest, from its pod.

    Raises:
        NotFoundError: If there is none.
        VerificationError: If it cannot be used, or is of another run.
    """
    path = f"{link.run_dir(run_id)}/manifest.json"
    content = link.transport.tail(path, 0, max_bytes=MANIFEST.max_bytes, timeout_s=QUICK_S)
    manifest = parse_run_manifest(content, path, f"pod `{link.record.name}`")
    require_run(link, manifest, run_id)
    return manifest


def parse_run_manifest(content: bytes, path: str, pod: str = "the pod") -> RunManifest:
    """A run's manifest from the bytes of its file on a pod.

    Args:
        content: Of the file.
        path: Where it is on the pod.
        pod: The pod in words.

    Raises:
        VerificationError: If it is none; names the file and why.
    """
    try:
        return parse_model(RunManifest, content, MANIFEST)
    except ValueError as error:
        message = f"`{path}` on {pod} cannot be used: {one_line(error)}"
        raise VerificationError(message, hint="Restore the run from its backup") from error


def require_run(link: PodLink, manifest: RunManifest, run_id: str) -> None:
    """Refuse a manifest that a pod gives for one run and that is of another.

    The registry keeps what it says, and would otherwise name this pod for a run of another one.

    Raises:
        VerificationError: If it is.
    """
    if manifest.run_id != run_id:
        message = (
            f"Pod `{link.record.name}` gives the manifest of run `{manifest.run_id}` for `{run_id}`"
        )
        hint = f"Look at `{link.run_dir(run_id)}` with `nsa-ops pod ssh {link.record.name}`"
        raise VerificationError(message, hint=hint)


def _no_answer(link: PodLink, done: Completed) -> OpsError:
    said = done.last_error_line or "nothing"
    message = (
        f"The agent on pod `{link.record.name}` gave no answer (exit code {done.exit_code}): {said}"
    )
    hint = f"See that `{link.record.python} -c 'import pydantic, yaml'` works on the pod"
    return VerificationError(message, hint=hint)
