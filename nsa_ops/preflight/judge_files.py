"""Judge files with what tools printed on a machine that cannot be asked."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nsa_core.rundir.report import CheckResult, verdict_of
from nsa_ops.configure import all_hardware, load_hardware
from nsa_ops.errors import ConfigurationError, OpsError, RefusedError, UnknownVerdictError
from nsa_ops.gpu.judge_outputs import is_unread, judge_texts
from nsa_ops.local_files import read_named
from nsa_ops.quantities import count_of

#: More of a kernel log is no more evidence; the newest lines are at its end.
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Judgement:
    """What files tell.

    Attributes:
        profile: What the cards were held against; empty if nothing was named.
        verdict: `fail`, `warn` or `pass` over all checks; `unknown` where no check failed and a
            file holds nothing that is known.
    """

    files: list[str]
    profile: str
    verdict: Literal["pass", "warn", "fail", "unknown"]
    checks: list[CheckResult]


def judge_files(paths: Sequence[Path], profile: str, pod: str | None = None) -> Judgement:
    """Judge files about one machine together; without a profile the cards are judged alone.

    Raises:
        ConfigurationError: If a pod is named too, or there is no such profile.
        OpsError: As `read_named`.
    """
    if pod is not None:
        message = f"`--evidence` judges files, and pod `{pod}` cannot be asked at once"
        raise ConfigurationError(
            message, hint="Leave the pod out; repeat `--evidence` for each file"
        )
    texts = {str(path): _read(path) for path in paths}
    wanted = load_hardware(profile) if profile else None
    checks = judge_texts(texts, wanted, all_hardware())
    verdict = verdict_of(checks)
    if verdict != "fail" and any(is_unread(check) for check in checks):
        return Judgement(list(texts), profile, "unknown", checks)
    return Judgement(list(texts), profile, verdict, checks)


def refusal_by_evidence(judged: Judgement) -> OpsError | None:
    """What red files mean, or files that tell nothing; None if they are read and none is red."""
    failed = [check.name for check in judged.checks if check.status == "fail"]
    if failed:
        message = f"The evidence is red: {', '.join(failed)}"
        return RefusedError(message, hint="Each failed check names its fix in the table")
    unread = [check for check in judged.checks if is_unread(check)]
    if unread:
        files = count_of(len(judged.files), "file")
        message = f"Nothing that is known was found in {len(unread)} of {files}"
        return UnknownVerdictError(message, hint=unread[0].hint)
    return None


def _read(path: Path) -> str:
    """The text of a file, whatever wrote it; bytes that are none are shown as replacements."""
    content = read_named(path, "Evidence")[-MAX_BYTES:]
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return content.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")
