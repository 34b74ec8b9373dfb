"""The receipt of a provisioning: what was made of what, on the pod and in the registry."""

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.bounded_json import parse_json, parse_model
from nsa_core.rundir.report import CheckResult, checked
from nsa_ops.context import PodLink
from nsa_ops.errors import VerificationError
from nsa_ops.remote.transport import QUICK_S
from nsa_ops.store import PodRecord

#: The receipt, in the root of a pod.
RECEIPT_NAME = "provision.json"
#: Versions from the packages' own records: nothing is imported, so a broken driver cannot hang it.
_VERSIONS = """
import importlib.metadata, json, sys
names = {}
for one in importlib.metadata.distributions():
    names[one.metadata["Name"].lower().replace("_", "-")] = one.version
print(json.dumps({
    "python_version": ".".join(map(str, sys.version_info[:3])),
    "torch_version": names.get("torch", ""), "triton_version": names.get("triton", ""),
    "flash_attention_version": names.get("flash-attn", ""), "num_packages": len(names),
}))
"""


class Installed(TolerantModel):
    """What an environment holds, by its packages' own records; empty where one is missing."""

    python_version: str
    torch_version: str = ""
    triton_version: str = ""
    flash_attention_version: str = ""
    num_packages: int = 0


class ProvisionReceipt(TolerantModel):
    """What a pod was provisioned with.

    Attributes:
        at: When, by the laptop's clock.
        profile: Hardware profile the torch build was chosen for.
        code_id: Version of the code that is there.
        code_commit: Its commit; `unknown` outside a checkout.
        bundle_sha256: Hash of the bundle of that commit; empty if there is none.
        diff_sha256: Hash of the uncommitted difference; empty if there is none.
        lock_sha256: Hash of the lock files the packages come from.
        python: Interpreter of runs.
        base_python: Interpreter that the environment was made with.
        torch_build: Build that was asked for, and why.
        flash_attention: Wheel `NAME SHA256`, or why there is none.
        missing: Tools that are not there and that a run can do without.
    """

    schema_version: int = 1
    pod_id: str
    at: float
    profile: str
    code_id: str
    code_commit: str
    bundle_sha256: str = ""
    diff_sha256: str = ""
    lock_sha256: str
    environment: str
    python: str
    base_python: str
    torch_build: str
    flash_attention: str
    driver: str = ""
    tools: dict[str, str] = {}
    missing: list[str] = []
    installed: Installed | None = None

    def is_same(self, other: "ProvisionReceipt") -> bool:
        """Whether both say the same of the pod; when, and what can be read off it, do not count."""
        free = {"at", "installed"}
        return self.model_dump(exclude=free) == other.model_dump(exclude=free)


def parse_receipt(text: str) -> ProvisionReceipt | None:
    """A receipt from its file; None if there is none, or none that can be read."""
    try:
        return parse_model(ProvisionReceipt, text.encode())
    except ValueError:
        return None


def read_installed(link: PodLink, python: str) -> Installed:
    """Ask an environment what it holds.

    Raises:
        VerificationError: If it gives no answer, or holds no torch.
    """
    done = link.transport.run((python, "-I", "-c", _VERSIONS), timeout_s=QUICK_S)
    try:
        found = Installed.model_validate(parse_json(done.stdout.strip() or b"null"))
    except ValueError as error:
        message = f"`{python}` on {link.transport.where} gives no answer: {done.last_error_line}"
        raise VerificationError(message, hint="Repeat `nsa-ops provision`") from error
    if not found.torch_version:
        message = f"The environment of `{python}` on {link.transport.where} holds no torch"
        raise VerificationError(message, hint="Remove its folder, then repeat `nsa-ops provision`")
    return found


def judge_environment(receipt: ProvisionReceipt | None, pod: PodRecord, lock: str) -> CheckResult:
    """Whether runs use an environment of ours, made from the packages this code is locked to."""
    name, hint = "python.environment", f"Run `nsa-ops provision {pod.name}`"
    if receipt is None or receipt.python != pod.python:
        message = f"its packages are not checked: `nsa-ops provision` did not make `{pod.python}`"
        return checked(name, "skipped", message)
    measured, limit = receipt.lock_sha256[:12], lock[:12]
    if lock and receipt.lock_sha256 != lock:
        message = "it was made from other lock files than this code has"
        return checked(name, "warn", message, measured=measured, limit=limit, hint=hint)
    flash = receipt.flash_attention
    message = f"made from these lock files; torch {receipt.torch_build}; flash-attn {flash}"
    return checked(name, "pass", message)
