"""Choose what an environment is made from: interpreter, torch build, and the name that says so."""

import hashlib
from dataclasses import dataclass

from nsa_core.config.profile import HardwareProfile
from nsa_ops.errors import RefusedError
from nsa_ops.gpu.judge_outputs import OLDEST_DRIVER
from nsa_ops.machine.bare import BareFacts, BasePython
from nsa_ops.machine.judge_host import MIN_PYTHON

#: The first version that the pinned torch has no wheel for; tools/setup.sh says the same.
TOO_NEW_PYTHON = (3, 15)
#: First driver of CUDA 13 (NVIDIA's CUDA compatibility guide); older ones run builds of CUDA 12.
CUDA_13_DRIVER = 580
CPU_BUILD, CUDA_12_BUILD, CUDA_13_BUILD = "cpu", "cu126", "cu130"


@dataclass(frozen=True)
class TorchBuild:
    """Which torch goes into an environment.

    Attributes:
        name: As uv's `--torch-backend` takes it.
        requirement: What the profile says of its version.
        why: In words, for the plan.
    """

    name: str
    requirement: str
    why: str


def choose_build(profile: HardwareProfile, facts: BareFacts, pod: str) -> TorchBuild:
    """The build that the profile wants and the driver runs.

    Raises:
        RefusedError: If the profile needs a card and there is none, or its driver is too old.
    """
    if not profile.needs_card:
        return TorchBuild(CPU_BUILD, profile.torch_requirement, f"profile {profile.name}: no card")
    driver = facts.driver.partition(".")[0]
    if not driver.isdigit():
        message = f"Profile `{profile.name}` needs a card, and nvidia-smi on pod `{pod}` shows none"
        hint = "See `nvidia-smi` there; a machine without a card is provisioned with `cpu`"
        raise RefusedError(message, hint=hint)
    if int(driver) < OLDEST_DRIVER:
        message = (
            f"Pod `{pod}` has driver {facts.driver}, and current torch builds need "
            f"{OLDEST_DRIVER} or later"
        )
        raise RefusedError(message, hint="Take an image or host with a newer driver")
    newest = CUDA_13_BUILD if int(driver) >= CUDA_13_DRIVER else CUDA_12_BUILD
    name = newest if profile.torch_backend == "auto" else profile.torch_backend
    why = f"profile {profile.name} says {profile.torch_backend}, driver {facts.driver}"
    if name.startswith("cu13") and int(driver) < CUDA_13_DRIVER:
        message = f"Profile `{profile.name}` wants torch for {name}, and driver {facts.driver} of "
        message += f"pod `{pod}` is older than {CUDA_13_DRIVER}"
        raise RefusedError(message, hint="Take an image or host with a newer driver")
    return TorchBuild(name, profile.torch_requirement, why)


def choose_python(facts: BareFacts, *, needs_headers: bool) -> BasePython | None:
    """The first interpreter an environment can be made with; None if there is none.

    Args:
        facts: What is there; the interpreter that was asked for comes first.
        needs_headers: Prefer one with C headers, which Triton compiles its launchers against.
    """
    has_uv = "uv" in facts.tools
    fitting = [one for one in facts.pythons if MIN_PYTHON <= one.pair < TOO_NEW_PYTHON]
    usable = [one for one in fitting if one.has_venv or has_uv]
    complete = [one for one in usable if one.has_headers or not needs_headers]
    return next(iter(complete or usable), None)


def environment_name(python: BasePython, build: TorchBuild, lock_sha256: str) -> str:
    """Name of the environment that all of this makes; another lock or build is another one."""
    parts = (python.version, build.name, build.requirement, lock_sha256)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return f"py{python.version}-{build.name}-{digest[:12]}"
