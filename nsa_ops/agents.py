"""Ask the agents on the pod: one round trip each, JSON in, JSON out, errors in our words."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel

from nsa_core.config.base import one_line
from nsa_core.rundir.bounded_json import MANIFEST, parse_model
from nsa_core.rundir.manifest import RunManifest
from nsa_ops.context import PodLink, RunHandle
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    OpsError,
    StateConflictError,
    VerificationError,
)
from nsa_ops.pod.messages import (
    OFFSETS,
    Offsets,
    ProbeDocument,
    Reply,
    ReplyCode,
    RunReport,
    keep_own,
)
from nsa_ops.pod.verify import HashedCheckpoints
from nsa_ops.quantities import sentence_case
from nsa_ops.remote.transport import QUICK_S

_ModelT = TypeVar("_ModelT", bound=BaseModel)
_AskedT = TypeVar("_AskedT")
_AnswerT = TypeVar("_AnswerT")
#: Pods that are asked at the same time.
MAX_AT_ONCE = 32
#: Hashing runs at a few hundred MiB a second; the largest checkpoints take minutes.
VERIFY_S = 900.0

_ERRORS: Mapping[ReplyCode, type[OpsError]] = {
    ReplyCode.USAGE: ConfigurationError,
    ReplyCode.NOT_FOUND: NotFoundError,
    ReplyCode.CONFLICT: StateConflictError,
    ReplyCode.LOCAL_RESOURCE: LocalResourceError,
}


def ask_each(asked: Sequence[_AskedT], ask: Callable[[_AskedT], _AnswerT]) -> list[_AnswerT]:
    """Ask pods at once; the answers in their order, or the first error."""
    if len(asked) == 1:  # in this thread, which Ctrl-C interrupts
        return [ask(asked[0])]
    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:
        return list(pool.map(ask, asked))


def ask(run: RunHandle, action: BaseModel) -> Reply:
    """Have one action carried out on the pod.

    Raises:
        OpsError: The error that the reply's code stands for, with the agent's own words.
    """
    stdin = action.model_dump_json().encode()
    reply = _call(run.link, run.module("nsa_ops.pod.act"), Reply, stdin=stdin)
    if reply.code is not ReplyCode.OK:
        raise _ERRORS[reply.code](sentence_case(reply.message, run.run_id), hint=reply.hint)
    return reply


def probe(
    link: PodLink,
    code_id: str,
    run_ids: Sequence[str] = (),
    offsets: Mapping[str, Offsets] | None = None,
) -> ProbeDocument:
    """What the pod shows of these runs, or of all runs in its folder, in one round trip.

    Args:
        link: Pod to ask.
        code_id: Version of the code whose agent answers.
        run_ids: Runs to look at; all if empty.
        offsets: Where earlier probes stopped reading, by run id.
    """
    words: list[str] = ["--runs-root", str(link.runs)]
    for run_id in run_ids:
        words += ["--run-id", run_id]
    argv = link.module(code_id, "nsa_ops.pod.probe", *words)
    document = _call(link, argv, ProbeDocument, stdin=OFFSETS.dump_json(dict(offsets or {})))
    return document.model_copy(update={"runs": [_as_said(one) for one in document.runs]})


def _as_said(report: RunReport) -> RunReport:
    """A report without what a pod cannot know: its name, other pods, and ranks of theirs."""
    manifest = report.manifest
    return keep_own(report, manifest.node_rank, manifest.ranks_per_pod or len(report.ranks))


def probe_run(run: RunHandle, offsets: Offsets | None = None) -> RunReport:
    """What the pod shows of one run.

    Raises:
        NotFoundError: If there is no such run on the pod, or its manifest cannot be read.
    """
    known = {run.run_id: offsets} if offsets else None
    document = probe(run.link, run.code_id, [run.run_id], known)
    for report in document.runs:
        if report.run_id == run.run_id:
            return report
    said = document.problems[0].message if document.problems else "it is not there"
    message = f"Run `{run.run_id}` cannot be read on pod `{run.pod}`: {said}"
    raise NotFoundError(message, hint="See what is there with `nsa-ops run ls`")


def verify(run: RunHandle, checkpoint: str = "") -> HashedCheckpoints:
    """Hash one checkpoint on the pod, or without one the newest of the run up to a whole one."""
    words = ("--checkpoint", checkpoint) if checkpoint else ("--run-dir", str(run.run_dir))
    argv = run.module("nsa_ops.pod.verify", *words)
    return _call(run.link, argv, HashedCheckpoints, timeout_s=VERIFY_S)


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


def find_run_manifest(link: PodLink, run_id: str) -> RunManifest | None:
    """As `read_run_manifest`; None if the pod has no such run."""
    try:
        return read_run_manifest(link, run_id)
    except NotFoundError:
        return None


def parse_run_manifest(content: bytes, path: str, pod: str = "the pod") -> RunManifest:
    """A run's manifest from the bytes of its file on a pod."""
    try:
        return parse_model(RunManifest, content, MANIFEST)
    except ValueError as error:
        message = f"`{path}` on {pod} cannot be used: {one_line(error)}"
        raise VerificationError(message, hint="Restore the run from its backup") from error


def require_run(link: PodLink, manifest: RunManifest, run_id: str) -> None:
    """Refuse a manifest that a pod gives for one run and that is of another.

    The registry keeps what it says, and would otherwise name this pod for a run of another one.
    """
    if manifest.run_id != run_id:
        message = (
            f"Pod `{link.record.name}` gives the manifest of run `{manifest.run_id}` for `{run_id}`"
        )
        hint = f"Look at `{link.run_dir(run_id)}` with `nsa-ops pod ssh {link.record.name}`"
        raise VerificationError(message, hint=hint)


def _call(
    link: PodLink,
    argv: Sequence[str],
    kind: type[_ModelT],
    *,
    stdin: bytes = b"",
    timeout_s: float = QUICK_S,
) -> _ModelT:
    done = link.transport.run(argv, stdin=stdin, timeout_s=timeout_s)
    try:
        return parse_model(kind, done.stdout)
    except ValueError as error:
        pod = link.record
        said = done.last_error_line or (one_line(error) if done.stdout.strip() else "nothing")
        message = (
            f"The agent on pod `{pod.name}` gave no answer (exit code {done.exit_code}): {said}"
        )
        hint = f"Check that `{pod.python} -c 'import pydantic, yaml'` works on the pod"
        raise VerificationError(message, hint=hint) from error
