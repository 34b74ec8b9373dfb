"""Pods behind ssh: add one with its host key pinned, trust another key, open a terminal."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from nsa_ops.context import FABRIC, SSH, Operator, look_at_host, ssh_settings, target_of
from nsa_ops.errors import (
    AuthenticationError,
    ConfigurationError,
    LocalResourceError,
    NotFoundError,
    OpsError,
)
from nsa_ops.plan import Plan, Step, plan_of
from nsa_ops.pods.first_login import find_public_key, install_key
from nsa_ops.pods.known import (
    check_name,
    check_profile,
    choose_pod,
    is_local,
    meant_pod,
    new_pod_id,
    plan_known,
    refuse_another,
)
from nsa_ops.remote.openssh import forget_link, known_terminal, run_terminal
from nsa_ops.remote.ssh.config import require_alias
from nsa_ops.remote.ssh.host_keys import HostKey, pin, read_pin, unpin
from nsa_ops.remote.ssh.target import Address, parse_address
from nsa_ops.remote.transport import QUICK_S, Transport
from nsa_ops.store import PodRecord

DEFAULT_ROOT = "~/nsa-pod"
DEFAULT_PYTHON = "python3"
KINDS = (SSH, FABRIC)
_NO_RIGHT = 77
#: A command about a pod that has to be known for it.
_OF_A_POD = re.compile(r"`nsa-ops pod (?:ssh|show|trust|rm)\b")
#: By whether it was the login that failed.
_NEW_POD_HINTS = {
    True: "The pod was not added. Name a key for {pod.address} in ~/.ssh/config or load it into "
    "your agent, or put yours there with `--password-from ask`; then repeat the command",
    False: "The pod was not added: see that {pod.address} is right and the machine is up",
}

# Prints the absolute root and the absolute interpreter, empty if there is none.
_PREPARE = f"""
case $1 in
  /*) root=$1 ;;
  "~") root=$HOME ;;
  "~/"*) root=$HOME/${{1#"~/"}} ;;
  *) root=$HOME/$1 ;;
esac
mkdir -p -- "$root/code" "$root/runs" "$root/data" || exit {_NO_RIGHT}
cd -- "$root" || exit {_NO_RIGHT}
printf '%s\\0%s\\0' "$(pwd -P)" "$(command -v -- "$2")"
"""


@dataclass(frozen=True)
class SshPodRequest:
    """What the operator asked for.

    Attributes:
        address: `user@host[:port]`, or an alias of the ssh configuration.
        kind: Transport: `ssh` or `fabric`.
        root: Folder on the pod; relative to the login's home unless it is absolute.
        python: Interpreter on the pod; empty looks for `python3`.
        fingerprint: Of the host key that is expected; empty asks.
        has_password: It is entered by a password once, to put our key there.
    """

    name: str
    address: str
    kind: str = SSH
    root: str = ""
    python: str = ""
    profile: str = ""
    fingerprint: str = ""
    has_password: bool = False


@dataclass(frozen=True)
class KeyPlan:
    """A pod whose host key is to be pinned.

    Attributes:
        pod: Record to be written; root and interpreter are still as they were asked for.
        is_agreed: The operator named this very key, so nobody has to be asked.
        public_key: Key of ours to put there by a password; None without one.
    """

    pod: PodRecord
    key: HostKey
    plan: Plan
    is_agreed: bool
    public_key: Path | None = None


def choose_address(address: str | None, alias: str | None) -> str:
    """The address that was typed, or the alias of the ssh configuration.

    Raises:
        ConfigurationError: If both or neither were given, or the address names no login.
    """
    if (address is None) == (alias is None):
        message = "A pod needs either an ADDRESS or `--from-ssh-config ALIAS`"
        raise ConfigurationError(message, hint="See `nsa-ops pod add --help`")
    if alias is not None:
        return alias
    found = address or ""
    if not is_local(found) and not parse_address(found).user:
        message = f"Pod address `{found}` names no login: it is `user@host[:port]` or `local`"
        hint = f"If it is a host of your ssh configuration: `--from-ssh-config {found}`"
        raise ConfigurationError(message, hint=hint)
    return found


def plan_add_ssh(operator: Operator, request: SshPodRequest) -> KeyPlan:
    """Look at the host key of a new pod; changes nothing and logs in nowhere.

    Raises:
        ConfigurationError: If name, address or profile cannot be used.
        NotFoundError: If the ssh configuration has no such host, or there is no key to install.
        StateConflictError: If the name is taken by another pod.
        AuthenticationError: If the key is not the expected one.
        PodUnreachableError: If nobody answers.
    """
    check_name(request.name)
    check_profile(request.profile)
    _check_kind(request.kind)
    settings = ssh_settings(operator.settings)
    address = parse_address(request.address)
    pod = _record(operator, request, address)
    known = operator.store.find_pod(request.name)
    if known is not None:
        asked = {
            "address": str(address),
            "kind": request.kind,
            "root": request.root if request.root.startswith("/") else "",
            "python": request.python,
            "profile": request.profile,
        }  # what was left out does not differ
        refuse_another(known, {key: value for key, value in asked.items() if value})
    if known is None and not address.user and request.kind == SSH:
        require_alias(address, settings)
    with nullcontext() if known is not None else _hints_for_a_new_pod(pod):
        route, key = look_at_host(request.kind, address, settings)
    _check_expected(key, request.fingerprint, str(address))
    if known is not None:
        return _plan_known(operator, known, key)
    public_key = find_public_key(address, settings) if request.has_password else None
    steps = [
        Step("pin host key", f"{key.kind} {key.fingerprint} of {route}"),
        *_install_steps(public_key),
        Step("log in", f"make the root `{pod.root}` and find `{pod.python}`"),
        Step("register", f"remember `{pod.name}` as {pod.kind} pod"),
    ]
    notes = [
        f"Pod `{other.name}` has this address too; a recycled address is a new pod"
        for other in operator.store.pods()
        if other.address == pod.address
    ]
    plan = plan_of(f"Add pod `{pod.name}`: host key {key.fingerprint}", steps, notes)
    return KeyPlan(pod, key, plan, is_agreed=bool(request.fingerprint), public_key=public_key)


@contextmanager
def _hints_for_a_new_pod(pod: PodRecord) -> Iterator[None]:
    """Put what can be done in place of a hint that names the pod, which is not added yet."""
    try:
        yield
    except OpsError as error:
        if _OF_A_POD.search(error.hint):
            is_login = isinstance(error, AuthenticationError) and "host key" not in error.message
            error.hint = _NEW_POD_HINTS[is_login].format(pod=pod)
        raise


def _install_steps(public_key: Path | None) -> list[Step]:
    if public_key is None:
        return []
    detail = f"log in once with the password and add `{public_key}` to ~/.ssh/authorized_keys"
    return [Step("install key", detail, files=(str(public_key),))]


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        message = f"Transport `{kind}` must be one of {', '.join(f'`{one}`' for one in KINDS)}"
        raise ConfigurationError(message, hint="See `nsa-ops pod add --help`")


def _record(operator: Operator, request: SshPodRequest, address: Address) -> PodRecord:
    return PodRecord(
        name=request.name,
        pod_id=new_pod_id(),
        kind=request.kind,
        root=request.root or DEFAULT_ROOT,
        python=request.python or DEFAULT_PYTHON,
        profile=request.profile,
        added_unix_s=operator.clock.unix_s(),
        address=str(address),
    )


def _check_expected(key: HostKey, fingerprint: str, where: str) -> None:
    if fingerprint and key.fingerprint != fingerprint:
        message = f"{where} shows the host key {key.fingerprint}, and {fingerprint} was expected"
        raise AuthenticationError(message, hint="Compare it with what the provider's console says")


def _plan_known(operator: Operator, known: PodRecord, key: HostKey) -> KeyPlan:
    """Adding the same pod again changes nothing, unless another machine answers now."""
    pinned = read_pin(target_of(known, operator.settings))
    if pinned != key:
        message = (
            f"{known.address} shows the host key {key.fingerprint}, "
            f"and {pinned.fingerprint} is pinned to pod `{known.name}`"
        )
        hint = (
            "A recycled address is a new pod: add it under another name; if you know why the key "
            f"changed, see `nsa-ops pod trust {known.name}`"
        )
        raise AuthenticationError(message, hint=hint)
    return KeyPlan(known, key, plan_known(known), is_agreed=True)


def execute_add_ssh(operator: Operator, planned: KeyPlan, password: str = "") -> PodRecord:
    """Pin the key, log in, make the root, and remember the pod; a failed login leaves nothing.

    Args:
        operator: Who adds it.
        planned: What was agreed to.
        password: Enters once where the plan puts our key there; kept nowhere.

    Raises:
        AuthenticationError: If the login is refused.
        NotFoundError: If a named interpreter is not there.
        LocalResourceError: If the root cannot be made.
    """
    pod = planned.pod
    if not planned.plan.changes:
        return pod
    target = target_of(pod, operator.settings)
    with operator.store.intent("pod add", pod.name, address=pod.address, pod_id=pod.pod_id):
        pin(target, planned.key)
        try:
            with _hints_for_a_new_pod(pod):
                if planned.public_key is not None:
                    install_key(operator, pod, planned.public_key, password)
                    operator.tell(f"`{planned.public_key}` logs in from now on")
                pod = _log_in(operator.connect(pod, operator.settings), pod)
        except OpsError:
            unpin(target)
            raise
        operator.store.add_pod(pod)
    return pod


def _log_in(transport: Transport, pod: PodRecord) -> PodRecord:
    """Make the root, and learn its absolute path and that of the interpreter."""
    argv = ("sh", "-c", _PREPARE, "sh", pod.root, pod.python)
    done = transport.run(argv, timeout_s=QUICK_S)
    if done.exit_code == _NO_RIGHT:
        message = f"The root `{pod.root}` cannot be made on the pod: {done.last_error_line}"
        raise LocalResourceError(message, hint="Name another one with `--root`")
    root, _, rest = done.text.partition("\0")
    python = rest.rstrip("\0")
    if not python and pod.python != DEFAULT_PYTHON:
        message = f"Interpreter `{pod.python}` does not exist on {transport.where}"
        raise NotFoundError(message, hint="Name another one with `--python PATH`")
    return replace(pod, root=root, python=python or pod.python)


def plan_trust(operator: Operator, name: str | None, fingerprint: str = "") -> KeyPlan:
    """What trusting the key that answers now would mean: the pod gets a new identity.

    Raises:
        ConfigurationError: If the pod is this machine.
        AuthenticationError: If the key is not the expected one.
    """
    pod = choose_pod(operator.store, name)
    if not pod.address:
        message = f"Pod `{pod.name}` is this machine and has no host key"
        raise ConfigurationError(message)
    target = target_of(pod, operator.settings)
    _, key = look_at_host(pod.kind, target.address, target.settings)
    _check_expected(key, fingerprint, pod.address)
    has_pin = target.known_hosts.is_file()
    pinned = read_pin(target).fingerprint if has_pin else "none"
    if pinned == key.fingerprint:
        step = Step("pin host key", f"{pinned} is pinned already", is_done=True)
        return KeyPlan(pod, key, plan_of(f"Trust pod `{pod.name}`", [step]), is_agreed=True)
    step = Step("pin host key", f"{key.kind} {key.fingerprint} instead of {pinned}")
    note = "A machine with another key is a new pod: its preflight has to be done again"
    title = f"Trust the host key {key.fingerprint} for pod `{pod.name}`"
    is_agreed = bool(fingerprint)
    return KeyPlan(pod, key, plan_of(title, [step], [note]), is_agreed=is_agreed)


def execute_trust(operator: Operator, planned: KeyPlan) -> PodRecord:
    """Pin another key under a new identity, so that no older report or link counts for it."""
    old = planned.pod
    if not planned.plan.changes:
        return old
    new = replace(old, pod_id=new_pod_id())
    with operator.store.intent("pod trust", old.name, pod_id=new.pod_id):
        pin(target_of(new, operator.settings), planned.key)
        operator.store.replace_pod(new)
        forget_link(target_of(old, operator.settings))
    return new


def open_terminal(operator: Operator, name: str | None) -> int:
    """Give the operator a shell on a pod; the exit code of ssh.

    Raises:
        ConfigurationError: If the pod is this machine.
        LocalResourceError: If ssh is not installed.
    """
    pod = meant_pod(operator, name)
    if not pod.address:
        message = f"Pod `{pod.name}` is this machine: you are there"
        raise ConfigurationError(message)
    target = target_of(pod, operator.settings)
    term = target.settings.environment.get("TERM", "")
    known = known_terminal(term)
    if term and known != term:
        operator.tell(f"the pod may not know the terminal `{term}`; `{known}` is used there")
    return run_terminal(target, known)
