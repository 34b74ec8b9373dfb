"""Have a trainer write the stacks of all its threads, every rank of it, and read them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_core.config.training import MAX_RANKS
from nsa_core.rundir.layout import RunDir
from nsa_ops.context import Operator, RunHandle
from nsa_ops.errors import DeadlineError, NotFoundError, OpsError, VerificationError
from nsa_ops.pod.rank_evidence import RankEvidence, list_ranks
from nsa_ops.pod.stacks import StackGroup, group_stacks
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.runs.choose import FoundRun
from nsa_ops.runs.halt import find_live, send_signal
from nsa_ops.runs.members import runs_of

STACK_S = 10.0
_POLL_S = 0.2
_PIECE_BYTES = 2**20
#: So many pieces of older stacks are passed over on a pod, and for so long.
_MOST_PIECES, _PAST_S = 256, 60.0
#: New stacks of all ranks together, and what each may have of them in any case.
_MOST_BYTES, _BYTES_OF_EACH = 16 * 2**20, 64 * 1024


@dataclass(frozen=True)
class Stacks:
    """Stacks of all threads of a trainer.

    Attributes:
        text: As they are shown: of several ranks those that are alike once, under their names.
        groups: Ranks whose stacks read the same, the smallest group first; empty for one rank.
        silent: Ranks that wrote none.
    """

    run_id: str
    text: str
    groups: tuple[StackGroup, ...] = ()
    silent: tuple[int, ...] = ()


@dataclass(frozen=True)
class _StackFile:
    """Where the stacks of one rank appear; new ones begin at `offset`."""

    run: RunHandle
    path: str
    rank: int
    offset: int = 0

    def read(self, offset: int, max_bytes: int = _PIECE_BYTES) -> bytes:
        transport = self.run.link.transport
        try:
            return transport.tail(self.path, offset, max_bytes=max_bytes, timeout_s=QUICK_S)
        except NotFoundError:
            return b""


def dump_stacks(operator: Operator, run_id: str | None) -> Stacks:
    """Have the trainer write the stacks of all its threads, and read them.

    Raises:
        StateConflictError: If no trainer of the run is alive.
        DeadlineError: If nothing was written in time.
    """
    found = find_live(operator, run_id)
    files = [file for pod in _stack_files(operator, found) for file in _ask(operator, found, pod)]
    texts = _await_stacks(operator, files)
    if not texts:
        message = f"Run `{found.record.run_id}` wrote no stacks within {STACK_S:g} s"
        raise DeadlineError(message, hint=f"See `nsa-ops status {found.record.run_id}`")
    return stacks_of(found.record.run_id, texts, found.report.ranks)


def _stack_files(operator: Operator, found: FoundRun) -> list[list[_StackFile]]:
    """The files of the ranks of each pod, pod 0 first; that of rank 0 where there is one rank."""
    runs = [run for run in runs_of(operator, found.record).values() if run is not None]
    handles = {run.pod: (run, Path(run.run_dir)) for run in runs}
    handles[found.run.pod] = found.run, Path(found.report.run_dir)
    files: dict[str, list[_StackFile]] = {name: [] for name in handles}
    for rank in found.report.ranks[:MAX_RANKS] or (RankEvidence(rank=0),):
        name = rank.pod if rank.pod in handles else found.run.pod
        run, run_dir = handles[name]
        path = str(RunDir(run_dir).stack_dump(rank.rank))
        files[name].append(_StackFile(run, path, rank.rank))
    return [of_pod for of_pod in files.values() if of_pod]


def _ask(operator: Operator, found: FoundRun, files: list[_StackFile]) -> list[_StackFile]:
    """Have a pod's ranks write their stacks; where they will begin.

    A pod other than the first that cannot be asked is told of, and its ranks are left out.
    """
    run = files[0].run
    is_first = run.pod == found.run.pod
    place = {} if is_first else {"run_dir": str(run.run_dir)}
    try:
        begun = _pass_over(operator, files)
        report = found.report.model_copy(update=place)
        operator.tell(send_signal(run, report, "USR1", "stacks"))
    except OpsError as error:
        if is_first:
            raise
        operator.tell(f"pod `{run.pod}`: {error.message}")
        return []
    return begun


def _pass_over(operator: Operator, files: Sequence[_StackFile]) -> list[_StackFile]:
    """The same files, whose new stacks begin at their ends.

    Raises:
        VerificationError: If a pod has more than anybody reads.
        DeadlineError: If it takes too long to give what it has.
    """
    deadline_s = operator.clock.monotonic_s() + _PAST_S
    begun, num_pieces = [], 0
    for file in files:
        offset, size = 0, _PIECE_BYTES
        while size == _PIECE_BYTES:
            if operator.clock.monotonic_s() > deadline_s:
                message = (
                    f"Pod `{file.run.pod}` did not give the older stacks of its ranks within "
                    f"{_PAST_S:g} s: `{file.path}` is next"
                )
                hint = f"The link may be slow: `nsa-ops status {file.run.run_id}`, then repeat this"
                raise DeadlineError(message, hint=hint)
            if num_pieces >= _MOST_PIECES:
                message = (
                    f"`{file.path}` on pod `{file.run.pod}` is too long to look for new stacks"
                )
                raise VerificationError(message, hint="Move it away there, then repeat this")
            size = len(file.read(offset))
            offset += size
            num_pieces += size == _PIECE_BYTES
        begun.append(replace(file, offset=offset))
    return begun


def _await_stacks(operator: Operator, files: Sequence[_StackFile]) -> dict[int, str]:
    """By rank, what was written until it did not grow between two looks, or time was up."""
    deadline_s = operator.clock.monotonic_s() + operator.deadline_s(STACK_S)
    max_bytes = max(_BYTES_OF_EACH, min(_PIECE_BYTES, _MOST_BYTES // max(1, len(files))))
    texts: dict[int, bytes] = {}
    waiting = list(files)
    while waiting and operator.clock.monotonic_s() < deadline_s:
        operator.clock.sleep(_POLL_S)
        growing = []
        for file, latest in _read_new(operator, waiting, max_bytes, deadline_s):
            if not latest or latest != texts.get(file.rank):
                growing.append(file)
            if latest:
                texts[file.rank] = latest
        waiting = growing
    return {rank: text.decode(errors="replace") for rank, text in sorted(texts.items())}


def _read_new(
    operator: Operator, files: Sequence[_StackFile], max_bytes: int, deadline_s: float
) -> Iterator[tuple[_StackFile, bytes]]:
    """What each file has now; those of a pod that fails are left out, and it is told of."""
    lost = set()
    for file in files:
        is_late = operator.clock.monotonic_s() > deadline_s + QUICK_S  # it gives a little at a time
        if is_late or file.run.pod in lost:
            continue
        try:
            yield file, file.read(file.offset, max_bytes)
        except OpsError as error:
            lost.add(file.run.pod)
            operator.tell(f"pod `{file.run.pod}`: {error.message}")


def stacks_of(run_id: str, texts: Mapping[int, str], ranks: Sequence[RankEvidence]) -> Stacks:
    """The stacks of a run, by rank; those of several ranks in groups, the odd one first; pure."""
    if not ranks:
        return Stacks(run_id, "".join(texts.values()))
    groups = tuple(group_stacks(dict(texts)))
    silent = tuple(rank.rank for rank in ranks[:MAX_RANKS] if rank.rank not in texts)
    parts = [f"=== {list_ranks(group.ranks)}\n{group.text}" for group in groups]
    if silent:
        parts.append(
            f"=== {list_ranks(silent)} wrote no stacks within {STACK_S:g} s: stopped, or in a call "
            "of the kernel that no signal ends\n"
        )
    text = "\n".join(part.rstrip("\n") + "\n" for part in parts)
    return Stacks(run_id, text, groups, silent)
