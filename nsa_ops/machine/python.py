"""Which packages the pod's interpreter has, and whether torch can really use what is there."""

from nsa_core.config.base import TolerantModel
from nsa_core.rundir.bounded_json import parse_model
from nsa_ops.errors import DeadlineError
from nsa_ops.remote.transport import Transport

#: Importing torch from a cold disk takes long; its own thread settings keep it from spinning.
IMPORT_S = 120.0
PACKAGES = ("pydantic", "yaml", "numpy", "safetensors", "tokenizers", "tensorboard")
SCRIPT = """
import importlib.util, json, sys, warnings
found = {"missing": [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]}
warned = []
warnings.showwarning = lambda message, *rest, **more: warned.append(str(message))
try:
    import torch
    found["torch_version"] = torch.__version__
    found["cuda_version"] = torch.version.cuda
    found["architectures"] = torch.cuda.get_arch_list()
    found["cuda_available"] = torch.cuda.is_available()
    if found["cuda_available"]:
        one = torch.ones(64, 64, device="cuda")
        found["product"] = float((one @ one).sum())
except BaseException as error:
    found["error"] = type(error).__name__ + ": " + str(error).splitlines()[0][:200]
if warned and not found.get("cuda_available") and "error" not in found:
    found["error"] = warned[-1].splitlines()[0][:300]
print(json.dumps(found))
"""


class PythonFacts(TolerantModel):
    """Packages of an interpreter.

    Attributes:
        missing: Packages that a run needs and that are not there.
        torch_version: None if torch cannot be imported.
        cuda_version: CUDA that torch was built with; None for a CPU build.
        architectures: Cards that this torch has code for, such as sm_80.
        cuda_available: torch can open a card.
        product: Sum of a 64 x 64 product of ones on the card: 262144 if it computes.
        error: What torch said or warned instead.
    """

    missing: list[str] = []
    torch_version: str | None = None
    cuda_version: str | None = None
    architectures: list[str] = []
    cuda_available: bool = False
    product: float | None = None
    error: str = ""


def parse_python(stdout: str) -> PythonFacts | None:
    """Facts from the script's answer; None if it is not one."""
    try:
        return parse_model(PythonFacts, stdout.strip().splitlines()[-1].encode())
    except (ValueError, IndexError):
        return None


def read_python(transport: Transport, python: str) -> PythonFacts:
    """Ask the interpreter; no answer in time, or a crash, is itself a fact."""
    try:
        done = transport.run((python, "-I", "-c", SCRIPT, *PACKAGES), timeout_s=IMPORT_S)
    except DeadlineError as error:
        return PythonFacts(error=error.message)
    facts = parse_python(done.text)
    said = done.last_error_line or "nothing"
    return facts or PythonFacts(error=f"exit code {done.exit_code}: {said}")
