"""What a pod's machine and its interpreter offer: tools, disk, memory, limits, clock, packages."""

from typing import TypeVar

from pydantic import Field

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.bounded_json import parse_model
from nsa_ops.errors import DeadlineError, NotFoundError, VerificationError
from nsa_ops.remote.transport import QUICK_S, Transport

#: Version of an interpreter, such as 3.11.2; anything else that a machine says is no answer.
VERSION = r"^[0-9]{1,3}(\.[0-9]{1,3}){1,2}$"
#: Tools that our scripts on a pod call by name; `sh` itself answers the first call.
NEEDED = ("tmux", "find", "dd", "head", "stat", "sha256sum")
#: Those, and tools that some commands use.
TOOLS = (*NEEDED, "rsync", "git", "nvidia-smi")
#: Asks the interpreter that will train, in one round trip; runs on Python 3.8 and later.
SCRIPT = """
import json, os, platform, resource, shutil, subprocess, sys, time
path = sys.argv[1]
while not os.path.isdir(path):
    path = os.path.dirname(path)
def free(folder):
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
def memory(name):
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
def processors():
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count()
def ends_at_logout():
    try:
        with open("/proc/1/comm") as file:
            has_logind = file.read().strip() == "systemd"
        if not has_logind or os.getuid() == 0:
            return False
        manager = ("org.freedesktop.login1", "/org/freedesktop/login1",
                   "org.freedesktop.login1.Manager", "KillUserProcesses")
        said = subprocess.run(("busctl", "get-property") + manager, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return {b"b true": True, b"b false": False}.get(said.strip())
print(json.dumps({
    "system": platform.system() + " " + platform.release(),
    "python_version": ".".join(map(str, sys.version_info[:3])),
    "num_cpus": processors(),
    "memory_bytes": memory("MemTotal"), "memory_free_bytes": memory("MemAvailable"),
    "disk_free_bytes": free(path), "disk_path": path, "disk_writable": os.access(path, os.W_OK),
    "shm_free_bytes": free("/dev/shm"),
    "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "tools": {name: shutil.which(name) for name in sys.argv[2:]},
    "ends_at_logout": ends_at_logout(),
    "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "unix_s": time.time(),
}))
"""
#: Importing torch from a cold disk takes long; its own thread settings keep it from spinning.
IMPORT_S = 120.0
PACKAGES = ("pydantic", "yaml", "numpy", "safetensors", "tokenizers", "tensorboard")
PYTHON_SCRIPT = """
import importlib.util, json, sys, warnings
found = {"missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]}
warned = []
warnings.showwarning = lambda message, *rest, **more: warned.append(str(message))
try:
    import torch
    found["torch_version"] = torch.__version__
    found["cuda_version"] = torch.version.cuda
    found["architectures"] = torch.cuda.get_arch_list()
    found["hip_version"] = torch.version.hip
    found["cuda_available"] = torch.cuda.is_available()
    found["num_cards"] = torch.cuda.device_count()
    spread = torch.distributed
    if spread.is_available() and spread.is_nccl_available():
        found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))
    if found["cuda_available"]:
        one = torch.ones(64, 64, device="cuda")
        found["product"] = float((one @ one).sum())
except BaseException as error:
    found["error"] = type(error).__name__ + ": " + str(error).splitlines()[0][:200]
if warned and not found.get("cuda_available") and "error" not in found:
    found["error"] = warned[-1].splitlines()[0][:300]
print(json.dumps(found))
"""
#: Asks for tools with nothing but the shell.
_LACKS = """
for tool; do command -v "$tool" >/dev/null || printf '%s\\n' "$tool"; done
"""


class HostFacts(TolerantModel):
    """A machine; None where a value is unknown."""

    system: str = ""  # name and release of its kernel
    python_version: str = Field(pattern=VERSION)  # of the interpreter that trains
    num_cpus: int | None = None  # that this login may use
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    disk_free_bytes: int | None = None  # for this login, where the pod's root is or will be
    disk_path: str = ""  # existing folder that was measured
    disk_writable: bool = True
    shm_free_bytes: int | None = None
    open_files_limit: int | None = None  # soft limit
    tools: dict[str, str | None] = {}  # path of each; None where it is missing
    #: systemd ends the processes of this login with its last session, tmux too.
    ends_at_logout: bool | None = None
    #: CUDA_VISIBLE_DEVICES, which says what cards a program sees; None where it is not set.
    visible_devices: str | None = Field(None, max_length=4096)
    unix_s: float

    @property
    def python_pair(self) -> tuple[int, int]:
        """Major and minor version of Python."""
        major, minor, *_ = self.python_version.split(".")
        return int(major), int(minor)


class PythonFacts(TolerantModel):
    """Packages of an interpreter, and whether torch can really use what is there."""

    missing: list[str] = []  # packages that a run needs
    torch_version: str | None = None  # None if torch cannot be imported
    cuda_version: str | None = None  # that torch was built with; None for a CPU build
    architectures: list[str] = []  # cards that this torch has code for, such as sm_80
    hip_version: str | None = None  # of ROCm, for AMD's cards
    nccl_version: str | None = None  # None if this torch cannot sum over cards
    num_cards: int | None = None  # that torch counts
    cuda_available: bool = False  # torch can open a card
    product: float | None = None  # sum of a 64 x 64 product of ones: 262144 if the card computes
    error: str = ""  # what torch said or warned instead


ModelT = TypeVar("ModelT", bound=TolerantModel)


def parse_answer(kind: type[ModelT], stdout: str) -> ModelT | None:
    """Facts from the last line that a script printed; None if it is not an answer."""
    try:
        return parse_model(kind, stdout.strip().splitlines()[-1].encode())
    except (ValueError, IndexError):
        return None


def read_host(transport: Transport, python: str, root: str) -> HostFacts:
    """Ask the machine, with the interpreter that will train.

    Raises:
        NotFoundError: If the interpreter is not there; names every other tool that is missing too.
        VerificationError: If it gives no answer that can be read, with the same list.
    """
    try:
        done = transport.run((python, "-I", "-c", SCRIPT, root, *TOOLS), timeout_s=QUICK_S)
    except NotFoundError as error:
        lacks = ", ".join(_lacking(transport))
        more = f", which also lacks {lacks}" if lacks else ""
        message = f"`{python}` does not exist on {transport.where}{more}"
        hint = "Run `nsa-ops provision`, or install them; `pod add --python` names an interpreter"
        raise NotFoundError(message, hint=hint) from error
    facts = parse_answer(HostFacts, done.text)
    if facts is None:
        lacks = "".join(f"; {tool} is missing" for tool in _lacking(transport))
        said = done.last_error_line or "nothing"
        message = f"`{python}` on {transport.where} gave no answer: {said}{lacks}"
        raise VerificationError(message, hint="Name a Python 3.11 or later with `pod add --python`")
    return facts


def _lacking(transport: Transport) -> list[str]:
    """Needed tools that a machine without our interpreter lacks."""
    try:
        done = transport.run(("sh", "-c", _LACKS, "sh", *NEEDED), timeout_s=QUICK_S)
    except NotFoundError:
        return ["sh"]
    return [tool for tool in NEEDED if tool in done.text.split()]


def read_python(transport: Transport, python: str) -> PythonFacts:
    """Ask the interpreter; no answer in time, or a crash, is itself a fact."""
    try:
        done = transport.run((python, "-I", "-c", PYTHON_SCRIPT, *PACKAGES), timeout_s=IMPORT_S)
    except DeadlineError as error:
        return PythonFacts(error=error.message)
    facts = parse_answer(PythonFacts, done.text)
    said = done.last_error_line or "nothing"
    return facts or PythonFacts(error=f"exit code {done.exit_code}: {said}")
