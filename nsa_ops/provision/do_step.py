"""Do one step of a provisioning on the pod; what it did is seen by the facts that follow."""

import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from nsa_ops.context import Operator, PodLink
from nsa_ops.errors import LocalResourceError, VerificationError
from nsa_ops.machine.bare import BareFacts, BasePython
from nsa_ops.plan import Step
from nsa_ops.provision import steps as names
from nsa_ops.provision.needs import choose_python, find_needs
from nsa_ops.provision.receipt import ProvisionReceipt, parse_receipt, read_installed
from nsa_ops.provision.want import Wanted, make_bundle
from nsa_ops.remote.snapshot import ship
from nsa_ops.remote.transport import QUICK_S, Completed

#: apt-get waits for another one; a CUDA build of torch is 3 GB.
INSTALL_S, ENVIRONMENT_S, COPY_S = 900.0, 3600.0, 1800.0
#: How tools/setup.sh points at the words of the installer before its own, which nobody sees here.
_ABOVE = "; the reason is above"
_CAUSE = re.compile(r"^\s*(?:cause|caused by|error): ", re.IGNORECASE)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")


@dataclass(frozen=True)
class Site:
    """Where a step is done.

    Attributes:
        want: What is to be there.
        facts: What is there.
    """

    operator: Operator
    link: PodLink
    want: Wanted
    facts: BareFacts

    @property
    def base(self) -> BasePython:
        """The interpreter that was there before us."""
        found = choose_python(self.facts, needs_headers=self.want.profile.triton)
        if found is None:
            message = f"Pod `{self.want.pod}` has no interpreter to make an environment with"
            raise VerificationError(message, hint="Repeat `nsa-ops provision`")
        return found

    @property
    def expected(self) -> ProvisionReceipt:
        """What the receipt has to say, environment and interpreter of runs included."""
        needs = find_needs(self.facts, self.want.profile, is_local=self.want.is_local)
        return names.expected_receipt(self.want, self.facts, self.base, needs)


def do_step(site: Site, step: Step) -> None:
    """Do one step.

    Raises:
        LocalResourceError: If its command failed; with the command's own last words.
        OpsError: From the transport.
    """
    _DO[step.name](site, step)


def _run(site: Site, step: Step, timeout_s: float, stdin: bytes = b"") -> Completed:
    timeout_s = site.operator.deadline_s(timeout_s)
    done = site.link.transport.run(step.command, stdin=stdin, timeout_s=timeout_s)
    if done.exit_code != 0:
        raise _failed(site, step, done)
    return done


def _failed(site: Site, step: Step, done: Completed) -> LocalResourceError:
    """The command's own `error:` and `hint:` lines where it has them, else its last words."""
    said = done.stderr.decode(errors="replace").splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    hints = [line.removeprefix("hint: ") for line in said if line.startswith("hint: ")]
    why = errors[-1].removeprefix("error: ") if errors else done.last_error_line
    full = next((line for line in reversed(said) if _DISK_FULL.search(line)), "")
    if why.endswith(_ABOVE):
        before = said[: len(said) - said[::-1].index(errors[-1]) - 1]
        cause = full or next(
            (line for line in reversed(before) if line.strip()), "nothing was said"
        )
        why = f"{why.removesuffix(_ABOVE)}: {_CAUSE.sub('', cause)}"
    message = f"Step `{step.name}` failed on pod `{site.want.pod}`: "
    message += why or f"exit code {done.exit_code}"
    hint = "Fix it, then repeat `nsa-ops provision`: it continues there"
    if full:
        hint = "Free space there, then repeat `nsa-ops provision`: it continues there"
    elif hints:
        hint = hints[-1]
    return LocalResourceError(message, hint=hint)


def _install(site: Site, step: Step) -> None:
    _run(site, step, INSTALL_S)


def _folders(site: Site, step: Step) -> None:
    _run(site, step, QUICK_S)


def _code(site: Site, step: Step) -> None:  # noqa: ARG001 (one signature for all steps)
    ship(site.want.snapshot, site.link.transport, site.base.path, site.want.code)


def _source(site: Site, step: Step) -> None:  # noqa: ARG001 (one signature for all steps)
    want = site.want
    if not site.facts.bundle_sha256:
        _put(site, make_bundle(want.snapshot.root, want.source.commit), want.bundle)
    if want.source.diff:
        _put(site, want.source.diff, want.diff)


def _put(site: Site, content: bytes, target: PurePosixPath) -> None:
    with tempfile.TemporaryDirectory(prefix="nsa-put-") as folder:
        path = Path(folder) / target.name
        path.write_bytes(content)
        site.link.transport.put(path, str(target), timeout_s=site.operator.deadline_s(COPY_S))


def _environment(site: Site, step: Step) -> None:
    site.operator.tell("making the environment; the first time takes minutes, torch is large")
    _run(site, step, ENVIRONMENT_S)


def _launcher(site: Site, step: Step) -> None:
    _run(site, step, QUICK_S, site.want.launcher_text(site.expected.environment).encode())


def _flash(site: Site, step: Step) -> None:
    """Install the wheel that was given; one that cannot be imported is taken out again."""
    want = site.want
    if want.flash is None:
        return
    deadline_s = site.operator.deadline_s(COPY_S)
    transport, wheel = site.link.transport, want.caches / want.flash.path.name
    transport.put(want.flash.path, str(wheel), timeout_s=deadline_s)
    _run(site, step, INSTALL_S)
    place = want.environment(site.expected.environment)
    python, mark = str(place / "bin" / "python"), str(place / "flash-attn")
    tried = transport.run((python, "-c", "import flash_attn"), timeout_s=deadline_s)
    if tried.exit_code != 0:
        remove = (python, "-m", "pip", "uninstall", "--quiet", "--yes", "flash-attn")
        transport.run(remove, timeout_s=deadline_s)
        message = (
            f"`{wheel.name}` cannot be imported on pod `{want.pod}`, and was taken out again: "
            f"{tried.last_error_line}"
        )
        hint = "Take a wheel for this very torch, CUDA and Python, or go without it"
        raise VerificationError(message, hint=hint)
    write = ("sh", "-c", names.WRITE, "sh", mark, "644")
    transport.run(write, stdin=want.flash.mark.encode(), timeout_s=QUICK_S)


def _receipt(site: Site, step: Step) -> None:  # noqa: ARG001 (one signature for all steps)
    expected = site.expected
    installed = read_installed(site.link, expected.python)
    facts = {"at": site.operator.clock.unix_s(), "installed": installed}
    content = expected.model_copy(update=facts).model_dump_json().encode()
    _put(site, content, site.want.receipt)


def _register(site: Site, step: Step) -> None:  # noqa: ARG001 (one signature for all steps)
    """Keep the receipt, and let runs use the interpreter that it names."""
    receipt = parse_receipt(site.facts.receipt)
    if receipt is None:
        message = f"The receipt `{site.want.receipt}` on pod `{site.want.pod}` cannot be read"
        raise VerificationError(message, hint="Remove it, then repeat `nsa-ops provision`")
    store = site.operator.store
    store.save_provision(site.want.pod_id, receipt.at, site.facts.receipt)
    store.replace_pod(replace(site.link.record, python=receipt.python))


_DO: Mapping[str, Callable[[Site, Step], None]] = {
    names.TOOLS: _install,
    names.PYTHON: _install,
    names.FOLDERS_STEP: _folders,
    names.CODE: _code,
    names.SOURCE: _source,
    names.ENVIRONMENT: _environment,
    names.LAUNCHER_STEP: _launcher,
    names.FLASH: _flash,
    names.RECEIPT: _receipt,
    names.REGISTER: _register,
}
