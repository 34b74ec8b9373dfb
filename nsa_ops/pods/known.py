"""Pods: add one, list them, show one, forget one."""

import re
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from nsa_core.config.base import ConfigError
from nsa_core.config.profile import load_profile
from nsa_ops.context import LOCAL, Operator, target_of
from nsa_ops.errors import ConfigurationError, NotFoundError, StateConflictError
from nsa_ops.local_files import expand_home
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.quantities import count_of
from nsa_ops.remote.openssh import forget_link
from nsa_ops.remote.ssh.host_keys import read_pin
from nsa_ops.store import PodRecord, RunRecord, Store

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}")
_LOCAL = re.compile(r"local(?::(?P<root>.+))?")
_LOCAL_ROOT = "~/nsa-pod"


@dataclass(frozen=True)
class PodDetails:
    """A pod and the runs that were launched on it from here.

    Attributes:
        runs: Its runs, newest first.
        fingerprint: Of its pinned host key; empty for this machine.
    """

    pod: PodRecord
    runs: list[RunRecord]
    fingerprint: str = ""


def plan_add(
    operator: Operator,
    name: str,
    address: str,
    *,
    root: str = "",
    profile: str = "",
    python: str = "",
) -> tuple[PodRecord, Plan]:
    """The record of a new pod and what adding it does.

    Args:
        operator: Who asks.
        name: Name to give it.
        address: `local` or `local:ROOT`.
        root: ROOT, where the address names none.
        profile: Hardware profile to use there.
        python: Interpreter on the pod; for `local` the one that runs this command.

    Raises:
        ConfigurationError: If name, address, profile or interpreter cannot be used.
        StateConflictError: If the name is taken by another pod.
    """
    check_name(name)
    folder = _local_root(address, root)
    check_profile(profile)
    pod = PodRecord(
        name=name,
        pod_id=new_pod_id(),
        kind="local",
        root=str(folder),
        python=_check_python(python or sys.executable),
        profile=profile,
        added_unix_s=operator.clock.unix_s(),
    )
    known = operator.store.find_pod(name)
    if known is not None:
        refuse_another(
            known, {key: getattr(pod, key) for key in ("kind", "root", "python", "profile")}
        )
        return known, plan_known(known)
    step = Step(
        "register", f"remember `{name}` as this machine with root `{folder}`", files=(str(folder),)
    )
    return pod, plan_of(f"Add pod `{name}`", [step])


def refuse_another(known: PodRecord, asked: Mapping[str, str]) -> None:
    """Refuse a name that another pod has: one of the fields that were asked for differs."""
    for key, value in asked.items():
        if getattr(known, key) != value:
            message = f"Pod `{known.name}` exists with {key} `{getattr(known, key)}`, not `{value}`"
            hint = f"Choose another name, or forget it first with `nsa-ops pod rm {known.name}`"
            raise StateConflictError(message, hint=hint)


def plan_known(known: PodRecord) -> Plan:
    """Adding the same pod again changes nothing."""
    step = Step("register", f"`{known.name}` is known already", is_done=True)
    return plan_of(f"Add pod `{known.name}`", [step])


def execute_add(operator: Operator, pod: PodRecord, plan: Plan) -> PodRecord:
    """Make the pod's root and remember it."""
    if not plan.changes:
        return pod
    with operator.store.intent("pod add", pod.name, root=pod.root):
        for folder in ("code", "runs", "data"):
            (Path(pod.root) / folder).mkdir(parents=True, exist_ok=True)
        operator.store.add_pod(pod)
    return pod


def show_pod(operator: Operator, name: str | None) -> PodDetails:
    """A pod and its runs."""
    pod = meant_pod(operator, name)
    runs = operator.store.runs(pod.name)
    if pod.kind == LOCAL:
        return PodDetails(pod, runs)
    return PodDetails(pod, runs, read_pin(target_of(pod, operator.settings)).fingerprint)


def plan_remove(store: Store, name: str) -> tuple[PodRecord, Plan]:
    """What forgetting a pod does: only this laptop's record goes."""
    pod = choose_pod(store, name)
    notes = [f"Nothing under `{pod.root}` on the pod is deleted"]
    runs = store.runs(pod.name)
    if runs:
        notes.append(f"{count_of(len(runs), 'run')} on it can no longer be reached by name")
    return pod, plan_of(f"Forget pod `{name}`", [Step("forget", f"forget `{name}`")], notes)


def execute_remove(operator: Operator, pod: PodRecord) -> PodRecord:
    """Forget a pod."""
    with operator.store.intent("pod rm", pod.name):
        if pod.kind != LOCAL:
            forget_link(target_of(pod, operator.settings))
        operator.store.remove_pod(pod.name)
    return pod


def meant_pod(operator: Operator, name: str | None) -> PodRecord:
    """The named pod, else the one that the settings name, else as `choose_pod`."""
    return choose_pod(operator.store, name or operator.settings.values.pod or None)


def choose_pod(store: Store, name: str | None) -> PodRecord:
    """The named pod, or the only one, or the only one that trains: that has a hardware profile.

    A pod without a profile, such as a host that only keeps backups, makes no other one ambiguous.

    Raises:
        NotFoundError: If there is none of that name, or none at all.
        ConfigurationError: If several fit and none was named.
    """
    pods = store.pods()
    known = ", ".join(f"`{pod.name}`" for pod in pods)
    if name is not None:
        found = store.find_pod(name)
        if found is None:
            message = f"There is no pod `{name}`"
            raise NotFoundError(message, hint=f"Known pods: {known}" if pods else how_to_add(name))
        return found
    if not pods:
        message = "No pod is known yet"
        raise NotFoundError(message, hint="Add this machine with `nsa-ops pod add here local`")
    fitting = [pod for pod in pods if pod.profile] if len(pods) > 1 else pods
    if len(fitting) != 1:
        message = f"Which pod? There are {len(pods)}: {known}"
        raise ConfigurationError(message, hint="Name one, or set `NSA_OPS_POD`")
    return fitting[0]


def how_to_add(name: str) -> str:
    """How a pod gets known under a name; only its owner knows what it is."""
    return (
        f"Add a machine behind ssh with `nsa-ops pod add {quote(name)} user@host[:port]`, or this "
        f"one with `nsa-ops pod add {quote(name)} local`"
    )


def is_local(address: str) -> bool:
    """Whether an address means this machine."""
    return address == LOCAL or address.startswith(f"{LOCAL}:")


def _local_root(address: str, asked: str) -> Path:
    match = _LOCAL.fullmatch(address)
    if match is None:
        message = f"Pod address `{address}` is not `local` or `local:ROOT`"
        raise ConfigurationError(message, hint="See `nsa-ops pod add --help`")
    if match["root"] and asked:
        message = f"Pod address `{address}` names a root, and `--root {asked}` another one"
        raise ConfigurationError(message, hint="Give one of them")
    root = expand_home(match["root"] or asked or _LOCAL_ROOT).absolute()
    if root.exists() and not root.is_dir():
        message = f"Pod root `{root}` is a file, and it must be a folder"
        raise ConfigurationError(message)
    return root


def check_name(name: str) -> None:
    """Raise ConfigurationError unless this can be the name of a pod."""
    if not _NAME.fullmatch(name):
        message = f"Pod name `{name}` must be 1 to 40 letters, digits, dots, dashes or underscores"
        raise ConfigurationError(message, hint="Begin it with a letter or a digit")


def new_pod_id() -> str:
    """An identity that no pod had before."""
    return f"pod-{secrets.token_hex(6)}"


def check_profile(profile: str) -> None:
    """Raise ConfigurationError unless there is such a profile, or none is named."""
    if not profile:
        return
    try:
        load_profile(profile)
    except ConfigError as error:
        raise ConfigurationError(str(error), hint="See `nsa-ops profile ls`") from error


def _check_python(python: str) -> str:
    path = expand_home(python).absolute()
    if not path.is_file():
        message = f"Interpreter `{python}` does not exist on this machine"
        raise ConfigurationError(message, hint="Name another one with `--python PATH`")
    return str(path)
