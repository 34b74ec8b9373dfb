"""A pod that a watchdog has marked: nothing starts there before a preflight is green again."""

from collections.abc import Mapping

from nsa_core.rundir.bounded_json import parse_model
from nsa_ops.context import PodLink
from nsa_ops.errors import NotFoundError, RefusedError
from nsa_ops.pod.card_watch import MARK_NAME, PodMark
from nsa_ops.preflight.guardrails import PREFLIGHT
from nsa_ops.remote.transport import QUICK_S

_MAX_BYTES = 65_536


def refuse_marked(link: PodLink, overrides: Mapping[str, str] | None = None) -> None:
    """Refuse a pod whose cards have failed a run, unless the preflight itself is overridden.

    Raises:
        RefusedError: With the run and the rule that marked it.
    """
    mark = _read_mark(link)
    if mark is None or PREFLIGHT in (overrides or {}):
        return
    pod = link.record.name
    message = f"Pod `{pod}` was marked by the watchdog of `{mark.run_id}`: {mark.sentence}"
    hint = f"A green `nsa-ops preflight {pod}` takes the mark away; else go on on another pod"
    raise RefusedError(message, hint=hint)


def clear_mark(link: PodLink) -> bool:
    """Take a mark away after a green preflight; whether there was one."""
    if _read_mark(link) is None:
        return False
    link.transport.run(("rm", "-f", "--", _path(link)), timeout_s=QUICK_S)
    return True


def _read_mark(link: PodLink) -> PodMark | None:
    try:
        content = link.transport.tail(_path(link), 0, max_bytes=_MAX_BYTES, timeout_s=QUICK_S)
        return parse_model(PodMark, content)
    except NotFoundError:
        return None
    except ValueError:
        return PodMark(run_id="unknown", rule="unknown", sentence="its mark cannot be read", at=0.0)


def _path(link: PodLink) -> str:
    return str(link.root / MARK_NAME)
