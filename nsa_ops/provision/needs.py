"""What an environment is made from, and which tools a pod lacks; pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from nsa_core.config.profile import HardwareProfile
from nsa_ops.errors import RefusedError
from nsa_ops.gpu.judge_outputs import OLDEST_DRIVER, driver_branch
from nsa_ops.machine.bare import BareFacts, BasePython
from nsa_ops.machine.judge_host import MIN_PYTHON

#: The first version that the pinned torch has no wheel for; tools/setup.sh says the same.
TOO_NEW_PYTHON = (3, 15)
#: First driver of CUDA 13 (NVIDIA's CUDA compatibility guide); older ones run builds of CUDA 12.
CUDA_13_DRIVER = 580
CPU_BUILD, CUDA_12_BUILD, CUDA_13_BUILD = "cpu", "cu126", "cu130"
#: Stands for the distribution's newest Python that fits; `INSTALL` looks for its name.
ANY_PYTHON = "python"

#: Installs packages as root or by a sudo without password; continues where a cut left dpkg.
INSTALL = f"""
set -e
how=$1; shift
as_root() {{
  if [ "$how" = sudo ]; then sudo -n env DEBIAN_FRONTEND=noninteractive "$@" </dev/null
  else env DEBIAN_FRONTEND=noninteractive "$@" </dev/null; fi
}}
apt() {{ as_root apt-get -q -y -o DPkg::Lock::Timeout=300 "$@"; }}
pick() {{
  for name in python3 python3.13 python3.12 python3.11; do
    case $(apt-cache policy "$name" | sed -n 's/^ *Candidate: //p') in
    3.1[1-4]*) echo "$name $name-venv $name-dev"; return ;;
    esac
  done
  echo 'error: this distribution has no Python 3.11 or later' >&2
  exit 1
}}
as_root dpkg --configure -a
apt update
packages=
for package; do
  if [ "$package" = {ANY_PYTHON} ]; then package=$(pick); fi
  packages="$packages $package"
done
# shellcheck disable=SC2086  # one word a package
apt install --no-install-recommends $packages
"""


@dataclass(frozen=True)
class TorchBuild:
    """Which torch goes into an environment.

    Attributes:
        name: As uv's `--torch-backend` takes it.
        requirement: What the profile says of its version.
    """

    name: str
    requirement: str
    why: str


def choose_build(profile: HardwareProfile, facts: BareFacts, pod: str) -> TorchBuild:
    """The build that the profile wants and the driver runs."""
    if not profile.needs_card:
        return TorchBuild(CPU_BUILD, profile.torch_requirement, f"profile {profile.name}: no card")
    driver = driver_branch(facts.driver)
    if driver is None:
        message = f"Profile `{profile.name}` needs a card, and nvidia-smi on pod `{pod}` shows none"
        hint = "See `nvidia-smi` there; a machine without a card is provisioned with `cpu`"
        raise RefusedError(message, hint=hint)
    if driver < OLDEST_DRIVER:
        message = (
            f"Pod `{pod}` has driver {facts.driver}, and current torch builds need "
            f"{OLDEST_DRIVER} or later"
        )
        raise RefusedError(message, hint="Take an image or host with a newer driver")
    newest = CUDA_13_BUILD if driver >= CUDA_13_DRIVER else CUDA_12_BUILD
    name = newest if profile.torch_backend == "auto" else profile.torch_backend
    why = f"profile {profile.name} says {profile.torch_backend}, driver {facts.driver}"
    if name.startswith("cu13") and driver < CUDA_13_DRIVER:
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


@dataclass(frozen=True)
class Need:
    """A tool that is not there.

    Attributes:
        packages: Debian packages that bring it.
        is_required: Without it no run can be launched; else its lack is a recorded fact.
    """

    what: str
    packages: tuple[str, ...]
    is_required: bool = True


def find_needs(facts: BareFacts, profile: HardwareProfile, *, is_local: bool) -> list[Need]:
    """What a pod lacks, what matters most first."""
    needs = []
    if "tmux" not in facts.tools:
        needs.append(Need("tmux", ("tmux",)))
    if "find" not in facts.tools:
        needs.append(Need("find", ("findutils",)))
    if "rsync" not in facts.tools:
        needs.append(Need("rsync", ("rsync",), is_required=not is_local))
    python = choose_python(facts, needs_headers=profile.triton)
    if python is None:
        needs.append(_python_need(facts))
    if profile.triton:
        if "cc" not in facts.tools:
            needs.append(Need("a C compiler, which Triton uses", ("gcc", "libc6-dev")))
        if python is not None and not python.has_headers:
            what = f"the C headers of Python {python.version}, which Triton uses"
            needs.append(Need(what, (f"{_package(python.path, python.pair)}-dev",)))
    if "git" not in facts.tools:
        needs.append(Need("git", ("git",), is_required=False))
    return needs


def _python_need(facts: BareFacts) -> Need:
    """An interpreter, or only what makes environments with the one that is there."""
    fitting = [one for one in facts.pythons if (3, 11) <= one.pair < (3, 15)]
    if not fitting:
        return Need("Python 3.11 to 3.14", (ANY_PYTHON,))
    first = fitting[0]
    what = f"the venv module of {first.path} (or uv)"
    return Need(what, (f"{_package(first.path, first.pair)}-venv",))


def _package(path: str, pair: tuple[int, int]) -> str:
    """The Debian package of an interpreter, without its suffix."""
    name = path.rpartition("/")[2]
    return name if name.startswith("python3") else f"python{pair[0]}.{pair[1]}"


def install_command(rights: str, needs: Sequence[Need]) -> tuple[str, ...]:
    """What installs everything that is missing, in one go."""
    packages = dict.fromkeys(package for need in needs for package in need.packages)
    return ("sh", "-c", INSTALL, "sh", rights, *packages)


def refuse_needs(needs: Sequence[Need], pod: str) -> None:
    """Stop if something that every run needs is missing and this login cannot install it.

    Raises:
        RefusedError: With one list of what to ask for.
    """
    if not any(need.is_required for need in needs):
        return
    listed = ", ".join(need.what for need in needs)
    packages = dict.fromkeys(
        word
        for need in needs
        for package in need.packages
        for word in (("python3", "python3-venv") if package == ANY_PYTHON else (package,))
    )
    message = (
        f"Pod `{pod}` lacks {listed}, and this login cannot install packages there "
        "(no apt-get as root, no sudo without a password)"
    )
    raise RefusedError(message, hint=f"Ask its owner for: apt-get install {' '.join(packages)}")
