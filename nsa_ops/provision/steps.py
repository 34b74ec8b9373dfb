"""The steps from a bare machine to a provisioned one: facts in, plan out; pure.

Each step says whether it is done already, so a second run does nothing and a run after a cut
continues where the first one stopped.
"""

from collections.abc import Iterator
from hashlib import sha256

from nsa_ops.machine.bare import FOLDERS, BareFacts, BasePython
from nsa_ops.plan import Step
from nsa_ops.provision.needs import (
    Need,
    choose_build,
    choose_python,
    environment_name,
    find_needs,
    install_command,
    refuse_needs,
)
from nsa_ops.provision.receipt import ProvisionReceipt, parse_receipt
from nsa_ops.provision.want import Wanted, lock_sha256
from nsa_ops.quantities import count_of, format_bytes

TOOLS, PYTHON, FOLDERS_STEP, CODE, SOURCE = "tools", "python", "folders", "ship code", "pin source"
ENVIRONMENT, LAUNCHER_STEP, FLASH, RECEIPT = "environment", "launcher", "flash-attn", "receipt"
REGISTER = "register"
NO_FLASH = "none: no wheel was given; its branches run on SDPA or Triton"
_UV_PYTHON = "3.12"

#: Writes its stdin to a file, whole or not at all, with a mode.
WRITE = 'cat >"$1.part" && chmod "$2" "$1.part" && mv -f "$1.part" "$1"'


def plan_steps(want: Wanted, facts: BareFacts, registered: str) -> tuple[Step, ...]:
    """Every step in order, with its exact command or files; `registered` is the receipt kept here.

    Raises:
        RefusedError: If something is missing that this login cannot install, or the driver does not
            fit the profile.
    """
    needs = find_needs(facts, want.profile, is_local=want.is_local)
    steps = list(_ground(want, facts, needs))
    python = choose_python(facts, needs_headers=want.profile.triton)
    if python is not None:
        return (*steps, *_made(want, facts, python, needs, registered))
    later = "as soon as there is an interpreter to make it with"
    return (*steps, Step(ENVIRONMENT, later), Step(RECEIPT, later), Step(REGISTER, later))


def _ground(want: Wanted, facts: BareFacts, needs: list[Need]) -> Iterator[Step]:
    """Tools, folders, and an interpreter."""
    rest = needs
    lacks_python = choose_python(facts, needs_headers=False) is None
    if facts.rights == "none" and lacks_python and "uv" in facts.tools:
        rest = [need for need in needs if not need.what.startswith("Python")]
        place = want.root / "python"
        command = ("env", f"UV_PYTHON_INSTALL_DIR={place}", "uv", "python", "install", _UV_PYTHON)
        yield Step(PYTHON, f"Python {_UV_PYTHON} by uv into `{place}`", command)
    if not rest:
        yield Step(TOOLS, f"all there: {', '.join(sorted(facts.tools))}", is_done=True)
    elif facts.rights != "none":
        what = ", ".join(need.what for need in rest)
        how = "as root" if facts.rights == "root" else "by sudo, which needs no password"
        yield Step(TOOLS, f"install {what} {how}", install_command(facts.rights, rest))
    else:
        refuse_needs(rest, want.pod)
        what = ", ".join(need.what for need in rest)
        yield Step(TOOLS, f"a run works without {what}, and that is recorded", is_done=True)
    folders = tuple(str(want.root / name) for name in FOLDERS)
    is_made = facts.folders >= set(FOLDERS)
    detail = f"{', '.join(FOLDERS)} in `{want.root}`"
    yield Step(FOLDERS_STEP, detail, ("mkdir", "-p", "--", *folders), is_done=is_made)


def _made(
    want: Wanted, facts: BareFacts, python: BasePython, needs: list[Need], registered: str
) -> Iterator[Step]:
    """What is made with the interpreter that is there."""
    yield _code(want, facts)
    yield _source(want, facts)
    build = choose_build(want.profile, facts, want.pod)
    name = environment_name(python, build, lock_sha256(want.snapshot))
    made = facts.environment(name)
    installer = "uv" if "uv" in facts.tools else "the uv of the lock, which pip installs"
    yield Step(
        ENVIRONMENT,
        f"Python {python.version}, {build.requirement} built for {build.name} ({build.why}), "
        f"locked packages with their hashes; with {installer}",
        want.setup_command(name, python.path, build.name),
        (str(want.environment(name)),),
        is_done=made is not None,
    )
    launcher = want.launcher(name)
    yield Step(
        LAUNCHER_STEP,
        "the interpreter of runs, with its caches on the pod's own disk",
        ("sh", "-c", WRITE, "sh", str(launcher), "755"),
        (f"{launcher} sha256 {want.launcher_sha256(name)[:12]}",),
        is_done=made is not None and made.launcher_sha256 == want.launcher_sha256(name),
    )
    yield _flash(want, name, made.flash_attention if made is not None else "")
    yield from _records(want, facts, registered, expected_receipt(want, facts, python, needs))


def _code(want: Wanted, facts: BareFacts) -> Step:
    snapshot = want.snapshot
    dirty = " and uncommitted changes" if snapshot.dirty_sha256 else ""
    detail = (
        f"{count_of(len(snapshot.files), 'file')}, {format_bytes(snapshot.total_bytes)}, hash "
        f"{snapshot.code_id}, of commit {snapshot.commit[:12]}{dirty}"
    )
    return Step(CODE, detail, files=(str(want.code),), is_done=facts.has_code)


def _source(want: Wanted, facts: BareFacts) -> Step:
    source = want.source
    if not source.commit:
        return Step(SOURCE, "this nsa-ops is no git checkout: nothing to pin", is_done=True)
    files = [f"{want.bundle}"]
    if source.diff:
        files.append(f"{want.diff} sha256 {source.diff_sha256[:12]}")
    # Git packs the same history into other bytes the next time, so a bundle counts by its commit.
    is_done = bool(facts.bundle_sha256) and facts.diff_sha256 == source.diff_sha256
    detail = f"git bundle of commit {source.commit[:12]}"
    if source.diff:
        detail += f", and the uncommitted changes ({format_bytes(len(source.diff))})"
    return Step(SOURCE, detail, files=tuple(files), is_done=is_done)


def _flash(want: Wanted, name: str, installed: str) -> Step:
    """Only from a wheel that was given; one that is there already stays."""
    if want.flash is None:
        return Step(FLASH, installed or NO_FLASH, is_done=True)
    wheel = want.caches / want.flash.path.name
    python = str(want.environment(name) / "bin" / "python")
    return Step(
        FLASH,
        f"{want.flash.path.name}, without its dependencies; kept only if it can be imported",
        (python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel)),
        (f"{wheel} sha256 {want.flash.sha256[:12]}",),
        is_done=installed == want.flash.mark,
    )


def expected_receipt(
    want: Wanted, facts: BareFacts, python: BasePython, needs: list[Need]
) -> ProvisionReceipt:
    """What the receipt has to say once everything else is done."""
    build = choose_build(want.profile, facts, want.pod)
    name = environment_name(python, build, lock_sha256(want.snapshot))
    made = facts.environment(name)
    there = made.flash_attention if made is not None else ""
    return ProvisionReceipt(
        pod_id=want.pod_id,
        at=0.0,
        profile=want.profile.name,
        code_id=want.snapshot.code_id,
        code_commit=want.snapshot.commit,
        bundle_sha256=facts.bundle_sha256,
        diff_sha256=facts.diff_sha256,
        lock_sha256=lock_sha256(want.snapshot),
        environment=name,
        python=str(want.launcher(name)),
        base_python=python.path,
        torch_build=f"{build.name} ({build.why})",
        flash_attention=there or NO_FLASH,
        driver=facts.driver,
        tools=facts.tools,
        missing=[need.what for need in needs],
    )


def _records(
    want: Wanted, facts: BareFacts, registered: str, expected: ProvisionReceipt
) -> Iterator[Step]:
    written = parse_receipt(facts.receipt)
    is_written = written is not None and written.is_same(expected)
    digest = sha256(facts.receipt.encode()).hexdigest()[:12] if is_written else "made last"
    files = (f"{want.receipt} sha256 {digest}",)
    yield Step(RECEIPT, "what was made of what", files=files, is_done=is_written)
    yield Step(
        REGISTER,
        f"runs on `{want.pod}` use `{expected.python}`",
        is_done=is_written and registered == facts.receipt,
    )
