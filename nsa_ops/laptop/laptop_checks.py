"""Doctor: look at this laptop and judge it: one result a check, each problem with its fix."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from nsa_core.rundir.report import CheckResult, Status, checked, verdict_of
from nsa_ops.errors import RefusedError
from nsa_ops.laptop.laptop_facts import LaptopFacts, read_laptop
from nsa_ops.machine.judge_host import MIN_PYTHON
from nsa_ops.quantities import count_of, format_bytes, format_duration
from nsa_ops.settings import Settings
from nsa_ops.store.database import UPDATE

#: A pulled checkpoint is larger; the registry and the audit log need no more.
MIN_FREE_BYTES = 2 * 2**30
#: Difference that two correctly set clocks may have.
MAX_AHEAD_S = 60.0
#: Programs that every operator needs, and what each is for.
_NEEDED = frozenset({"ssh"})
_USED_FOR = {
    "ssh": "pods over ssh; without it add them with `pod add --transport fabric`",
    "git": "the pinned source of `provision`",
    "rsync": "`backup push` and copies of folders",
    "tmux": "pods that are this machine",
}


@dataclass(frozen=True)
class Examined:
    """Every check of this laptop, and the verdict by the worst of them."""

    checks: list[CheckResult]
    verdict: Literal["pass", "warn", "fail"]


def examine(settings: Settings, settings_problem: str = "") -> Examined:
    """Look at this laptop; see `read_laptop` for the arguments."""
    checks = judge_laptop(read_laptop(settings, settings_problem))
    return Examined(checks, verdict_of(checks))


def refusal_of(found: Examined) -> RefusedError | None:
    """What a laptop that is not fit means; None if it is."""
    failed = [check.name for check in found.checks if check.status == "fail"]
    if not failed:
        return None
    message = f"This laptop is not fit to operate: {', '.join(failed)}"
    return RefusedError(message, hint="Fix what failed above, then run `nsa-ops doctor` again")


def judge_laptop(facts: LaptopFacts) -> list[CheckResult]:
    """Every check of this laptop; pure."""
    return [
        _python(facts),
        _settings(facts),
        *(_tool(name, version) for name, version in facts.versions.items()),
        _state(facts),
        _private(facts),
        _registry(facts),
        _intents(facts),
        _audit(facts),
        *_links(facts),
        *_pins(facts),
        *_clock(facts),
    ]


def _python(facts: LaptopFacts) -> CheckResult:
    found, limit = ".".join(map(str, facts.python)), ".".join(map(str, MIN_PYTHON))
    status: Status = "pass" if facts.python >= MIN_PYTHON else "fail"
    hint = f"Run nsa-ops with Python {limit} or later"
    return checked(
        "laptop.python", status, f"Python {found}", measured=found, limit=f">= {limit}", hint=hint
    )


def _settings(facts: LaptopFacts) -> CheckResult:
    if facts.settings_problem:
        hint = "Fix the file or variable it names; see docs/variables.md"
        return checked("laptop.settings", "fail", facts.settings_problem, hint=hint)
    files = ", ".join(f"`{one}`" for one in facts.config_files) or "no file"
    return checked("laptop.settings", "pass", f"all settings are valid ({files})")


def _tool(name: str, version: str) -> CheckResult:
    if version:
        return checked(f"laptop.{name}", "pass", version)
    status: Status = "fail" if name in _NEEDED else "warn"
    message = f"{name} is missing, fails or hangs; it is needed for {_USED_FOR[name]}"
    return checked(f"laptop.{name}", status, message, hint=f"Install {name}")


def _state(facts: LaptopFacts) -> CheckResult:
    name = "state.folder"
    # Another folder knows none of the runs of this one.
    other = "" if facts.registry.is_there else ", or name another folder with `NSA_OPS_STATE_DIR`"
    if facts.state_problem:
        hint = f"Check the permissions there, and whether the disk is mounted read-only{other}"
        return checked(name, "fail", facts.state_problem, hint=hint)
    free = facts.state_free_bytes
    status: Status = "pass" if free is not None and free >= MIN_FREE_BYTES else "warn"
    measured = format_bytes(free) if free is not None else "unknown"
    return checked(
        name, status, f"{measured} free in `{facts.state_dir}`", measured=measured,
        limit=f">= {format_bytes(MIN_FREE_BYTES)}", hint=f"Free space{other}",
    )  # fmt: skip


def _private(facts: LaptopFacts) -> CheckResult:
    name, found = "state.private", facts.state_open
    if not found:
        return checked(name, "pass", "no other user has access to the state folder")
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    message = f"other users have access to `{found[0]}`{more}"
    hint = "The next command removes that access; where it cannot, it says why"
    return checked(name, "warn", message, measured=str(len(found)), limit="0", hint=hint)


def _registry(facts: LaptopFacts) -> CheckResult:
    name, registry = "state.registry", facts.registry
    path = facts.state_dir / "registry.sqlite"
    if not registry.is_there:
        return checked(name, "skipped", "there is none yet; the first command creates it")
    if registry.newer:
        return checked(name, "fail", f"the registry {registry.newer}", hint=UPDATE)
    if registry.problem:
        hint = (
            f"Try `sqlite3 {path} .recover | sqlite3 NEW_FILE`, or move it away and add the pods "
            "again; the runs stay on their pods"
        )
        message = f"the registry is damaged: {registry.problem}"
        return checked(name, "fail", message, command=f"sqlite3 {path}", hint=hint)
    return checked(name, "pass", f"undamaged, with {count_of(len(registry.pods), 'pod')}")


def _intents(facts: LaptopFacts) -> CheckResult:
    name, cut = "state.intents", facts.registry.open_intents
    if not cut:
        return checked(name, "pass", "no command was interrupted")
    some = ", ".join(f"{one.act} {one.subject}" for one in cut[:3])
    more = f" and {len(cut) - 3} more" if len(cut) > 3 else ""
    message = f"begun and not finished: {some}{more}"
    hint = "Run `nsa-ops reconcile`, or repeat the same command: it continues where it stopped"
    return checked(name, "warn", message, measured=str(len(cut)), limit="0", hint=hint)


def _audit(facts: LaptopFacts) -> CheckResult:
    name = "state.audit"
    if facts.audit_problem:
        hint = "Check the permissions there, and `nsa-ops audit`"
        return checked(name, "unknown", facts.audit_problem, hint=hint)
    if facts.audit is None:
        return checked(name, "skipped", "there is no audit log yet")
    num_lines, path = facts.audit.num_lines, facts.state_dir / "audit.jsonl"
    if facts.audit.missing:
        hint = f"Look for a copy of `{path}`; see `nsa-ops audit --last 0`"
        return checked(name, "fail", f"the log lacks {facts.audit.missing}", hint=hint)
    if facts.audit.broken_line is None:
        return checked(name, "pass", f"{count_of(num_lines, 'line')}, none changed or lost")
    message = f"the chain of hashes breaks at line {facts.audit.broken_line} of {num_lines}"
    hint = (
        "A kill or a full disk cuts a line off, an edit changes it: see `nsa-ops audit --last 0`, "
        f"and keep a copy of `{path}`"
    )
    return checked(name, "fail", message, hint=hint)


def _links(facts: LaptopFacts) -> Iterator[CheckResult]:
    links = facts.links
    hint = "Set XDG_RUNTIME_DIR or TMPDIR to a short folder of your own"
    if links.problem:
        yield checked("links.socket", "fail", links.problem, hint=hint)
    else:
        yield checked("links.socket", "pass", "a shared connection can have its socket")
    for folder in links.folders:
        message = f"other users may enter `{folder}`, which holds the sockets of open connections"
        yield checked("links.folder", "fail", message, hint=f"Run `chmod 700 {folder}`")
    if links.stale:
        paths = " ".join(map(str, links.stale))
        sockets = count_of(len(links.stale), "socket")
        message = f"{sockets} whose ssh is gone or does not answer"
        yield checked("links.stale", "warn", message, hint=f"Run `rm {paths}`")
    else:
        yield checked(
            "links.stale", "pass", f"{count_of(links.num_open, 'open connection')}, no dead socket"
        )


def _pins(facts: LaptopFacts) -> Iterator[CheckResult]:
    reached = [pod for pod in facts.registry.pods if pod.address]
    for name, problem in facts.pin_problems.items():
        hint = f"See `nsa-ops pod trust {name}`, and `ssh -G` of its address"
        yield checked(f"pods.{name}", "fail", problem, hint=hint)
    if reached and not facts.pin_problems:
        message = (
            f"{count_of(len(reached), 'pod')}, each with its host key pinned and a usable address"
        )
        yield checked("pods.host_keys", "pass", message)
    elif not reached:
        yield checked("pods.host_keys", "skipped", "no pod is reached over ssh")
    if facts.unknown_pins:
        paths = " ".join(map(str, facts.unknown_pins))
        keys = count_of(len(facts.unknown_pins), "pinned key")
        message = f"{keys} of pods that are no longer in the registry"
        yield checked("pods.unknown_keys", "warn", message, hint=f"Run `rm {paths}`")


def _clock(facts: LaptopFacts) -> Iterator[CheckResult]:
    """No pod is asked; a clock that was set back is seen by what the registry has from later."""
    hint = "Synchronise the clock with a time server (`timedatectl set-ntp true`)"
    if facts.is_synchronised is None:
        message = "clock synchronisation unknown"
        yield checked("clock.sync", "unknown", message, hint=hint)
    else:
        status: Status = "pass" if facts.is_synchronised else "warn"
        words = "is" if facts.is_synchronised else "is not"
        message = f"the clock {words} synchronised with a time server"
        yield checked("clock.sync", status, message, hint=hint)
    newest = facts.registry.newest_unix_s
    if newest is None:
        return
    ahead_s = newest - facts.unix_s
    is_good = ahead_s <= MAX_AHEAD_S
    message = "nothing in the registry is from the future"
    if not is_good:
        message = f"the registry holds something from {format_duration(ahead_s)} in the future"
    yield checked("clock.order", "pass" if is_good else "warn", message, hint=hint)
