"""Run a bench on a pod with the code that is here, or read what one found before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bench_result import (
    BenchResult,
    BenchResultError,
    parse_bench_result,
)
from nsa_ops.bench.panels import panels_of
from nsa_ops.bench.plot import draw_panels
from nsa_ops.configure import RunChoice, resolve_choice
from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import (
    ConfigurationError,
    LocalResourceError,
    OpsError,
    VerificationError,
)
from nsa_ops.local_files import check_writable_place, read_named
from nsa_ops.pods.known import choose_pod
from nsa_ops.quantities import sentence_case
from nsa_ops.remote.snapshot import Snapshot, ship, take_snapshot
from nsa_ops.remote.transport import Completed

BENCH_S, VALIDATE_S = 1800.0, 7200.0
#: Exit codes of `python -m nsa_core.bench` with a result, and of one that could not begin.
_FAILED = 9
_WHERE = "Results are in bench/results"
_KERNELS_HINT = "Do not train with these kernels; compare them with `nsa-ops preflight --full`"
_FAILED_HINTS = {"compare": "Look at both curves with `--plot`, or train for more steps"}
_ERRORS: Mapping[int, type[OpsError]] = {2: ConfigurationError, 11: LocalResourceError}


@dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    Attributes:
        bench: `kernels`, `model`, `decode`, `scale` or `validate`.
        words: Its own flags.
        root: Folder for what it stages and trains, below the pod's root; empty if it makes none.
        stdin: What it reads.
        timeout_s: Deadline unless the operator gave one.
    """

    bench: str
    words: tuple[str, ...] = ()
    root: str = ""
    stdin: bytes = b""
    timeout_s: float = BENCH_S


@dataclass(frozen=True)
class Benched:
    """What a bench found.

    Attributes:
        source: Pod or file that it comes from.
        result: The rows and what they were measured on.
        failure: What the rows prove to be wrong; empty if nothing is.
        kept: Files that were written.
    """

    source: str
    result: BenchResult
    failure: str = ""
    kept: tuple[Path, ...] = ()

    @property
    def error(self) -> VerificationError | None:
        """What the failure means for the command; None without one."""
        if not self.failure:
            return None
        hint = _FAILED_HINTS.get(self.result.bench, _KERNELS_HINT)
        return VerificationError(self.failure, hint=hint)


def run_bench(operator: Operator, pod_name: str | None, request: BenchRequest) -> Benched:
    """Ship the code and measure with it.

    Args:
        operator: Who asks.
        pod_name: Pod; None where only one fits.
        request: What to measure.

    Raises:
        ConfigurationError: If the bench does not take these flags.
        LocalResourceError: If the pod lacks the card that the bench needs.
        VerificationError: If no result came back.
        OpsError: If the pod cannot be asked.
    """
    pod = choose_pod(operator.store, pod_name or operator.settings.values.pod or None)
    link, snapshot = operator.link(pod), take_snapshot()
    ship(snapshot, link.transport, pod.python, link.code(snapshot.code_id))
    deadline_s = operator.deadline_s(request.timeout_s)
    operator.tell(f"bench {request.bench} on pod {pod.name}, at most {deadline_s:g} s")
    root = ("--root", str(link.root / request.root)) if request.root else ()
    words = ("--json", "-", "--commit", commit_of(snapshot), *root, *request.words)
    argv = link.module(snapshot.code_id, "nsa_core.bench", request.bench, *words)
    done = link.transport.run(argv, stdin=request.stdin, timeout_s=deadline_s)
    return _read_answer(link, request.bench, done)


def run_validation(
    operator: Operator, pod_name: str | None, choice: RunChoice, words: Sequence[str]
) -> Benched:
    """Run the matrix of lengths and paths with a configuration, as `run_bench`.

    The data are staged below the pod's root, where a run would have them.

    Raises:
        ConfigurationError: If the configuration cannot be used.
        OpsError: As `run_bench`.
    """
    pod = choose_pod(operator.store, pod_name or operator.settings.values.pod or None)
    resolved = resolve_choice(operator.settings, choice, pod_profile=pod.profile)
    request = BenchRequest(
        "validate",
        ("--config", "-", *words),
        root=".",
        stdin=resolved.config.model_dump_json().encode(),
        timeout_s=VALIDATE_S,
    )
    return run_bench(operator, pod.name, request)


def commit_of(snapshot: Snapshot) -> str:
    """The commit that a result names: with `-dirty` where files differ from it."""
    if snapshot.commit == "unknown":
        return f"code {snapshot.code_id}"
    return snapshot.commit + ("-dirty" if snapshot.dirty_sha256 else "")


def _read_answer(link: PodLink, bench: str, done: Completed) -> Benched:
    name, said = link.record.name, done.last_error_line.removeprefix("error: ")
    if done.exit_code in _ERRORS:
        message = f"Pod `{name}` cannot run it: {said}"
        hint = "See the pods with `nsa-ops pod ls`, and the flags with `--help`"
        raise _ERRORS[done.exit_code](message, hint=hint)
    if done.exit_code not in {0, _FAILED}:
        message = f"`bench {bench}` ended on pod `{name}` with exit code {done.exit_code}: {said}"
        raise VerificationError(message, hint=f"Look at the pod with `nsa-ops pod show {name}`")
    try:
        result = parse_bench_result(done.stdout, f"the answer of pod `{name}`")
    except BenchResultError as error:
        raise VerificationError(sentence_case(str(error))) from error
    return Benched(f"pod {name}", result, said if done.exit_code == _FAILED else "")


def read_benched(path: Path, bench: str) -> Benched:
    """What a bench found before.

    Raises:
        ConfigurationError: If it is no result of this bench.
        OpsError: As `read_named`.
    """
    content = read_named(path, "Result", hint=_WHERE)
    try:
        result = parse_bench_result(content, f"`{path}`")
    except BenchResultError as error:
        raise ConfigurationError(sentence_case(str(error)), hint=_WHERE) from error
    if result.bench != bench:
        message = f"`{path}` is a result of `bench {result.bench}`"
        raise ConfigurationError(message, hint=f"Show it with `bench {result.bench}`")
    return Benched(str(path), result)


def check_places(*, read: Path | None, out: Path | None, plot: Path | None) -> None:
    """Refuse files that `keep` could never write or must not, before anything is measured.

    Raises:
        ConfigurationError: If the picture would take the place of a result.
        OpsError: As `check_writable_place`.
    """
    for path, flag in ((out, "--out"), (plot, "--plot")):
        if path is not None:
            check_writable_place(path, flag)
    for path, flag in ((out, "--out"), (read, "--from")):
        if path is not None and plot is not None and path.resolve() == plot.resolve():
            message = f"`{flag} {path}` and `--plot {plot}` are the same file"
            raise ConfigurationError(message, hint="Give `--plot` another file, such as `plot.svg`")


def check_only_shown(read: Path | None, pod: str | None, words: Sequence[str]) -> None:
    """Refuse what would measure beside a result that is only shown; pure.

    Raises:
        ConfigurationError: If so; the message names all of it.
    """
    flags = dict.fromkeys(word for word in words if word.startswith("--"))
    ignored = [*([pod] if pod else []), *flags]
    if read is not None and ignored:
        named = ", ".join(f"`{word}`" for word in ignored)
        message = f"`--from {read}` measures nothing, so {named} cannot be combined with it"
        raise ConfigurationError(
            message, hint="Leave out `--from` to measure, or the other flags to show the file"
        )


def keep(found: Benched, *, out: Path | None, plot: Path | None) -> Benched:
    """Write the result and its picture where asked.

    Raises:
        ConfigurationError: If nothing in it can be drawn.
        OSError: If a file cannot be written.
    """
    kept = []
    if out is not None:
        write_text(out, found.result.model_dump_json(indent=1) + "\n")
        kept.append(out)
    if plot is not None:
        write_text(plot, _draw(found))
        kept.append(plot)
    return Benched(found.source, found.result, found.failure, tuple(kept))


def _draw(found: Benched) -> str:
    """The SVG document of rows that may come from any file.

    Raises:
        ConfigurationError: If they are not such as this bench writes, or none can be drawn.
    """
    try:
        panels = panels_of(found.result)
        if panels.panels:
            return draw_panels(panels)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        message = (
            f"The rows of {found.source} are not those of `bench {found.result.bench}`: "
            f"{type(error).__name__}: {error}"
        )
        raise ConfigurationError(message, hint="Show it without `--plot`") from error
    message = f"The result of `bench {found.result.bench}` has no rows that can be drawn"
    raise ConfigurationError(message, hint="Show it without `--plot`")
