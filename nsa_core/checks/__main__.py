"""`python -m nsa_core.checks`: prove the model on this device and print a Report.

Prints a line for each check as it ends and the verdict last; `--json` prints one document at the
end, with `--progress` behind a line of JSON before each probe. Reads nothing but its flags and,
with `--config -`, a resolved configuration on stdin. Exit code 0 when every check passed, 9 when
one failed, 2 for flags that cannot be used.
"""

import argparse
import sys
from pathlib import Path

from nsa_core.collector import collect_nothing
from nsa_core.config.base import ConfigError, one_line
from nsa_core.config.recipe import resolve
from nsa_core.config.run import RunConfig
from nsa_core.env import set_before_torch
from nsa_core.rundir.report import CheckResult, ProbeBegun
from nsa_core.terminal import run_to_exit_code, tell

EXIT_FAILED = 9
EXIT_USAGE = 2


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; unknown ones end with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_core.checks", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="print the Report as JSON")
    parser.add_argument(
        "--progress", action="store_true", help="with --json: say before each probe which it is"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--tier", default="standard", choices=["quick", "standard", "full"])
    parser.add_argument(
        "--full", dest="tier", action="store_const", const="full", help="same as --tier full"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="RunConfig as JSON, `-` for stdin; a recipe without it"
    )
    return parser.parse_args(argv)


def read_config(source: str | None, device: str) -> RunConfig:
    """The configuration whose model and kernels are to be proven.

    Raises:
        ConfigError: If the file cannot be read or is not a configuration.
    """
    if source is None:
        recipe = "tiny-cpu" if device == "cpu" else "m7c-125m"
        return resolve(recipe, sets=[f"runtime.device={device}"]).config
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return RunConfig.model_validate_json(content)
    except (OSError, ValueError) as error:
        message = (
            f"--config {source}: not a configuration: {one_line(error)}; a checkpoint of a run "
            "holds one as config.json"
        )
        raise ConfigError(message) from error


def describe(check: CheckResult) -> str:
    """A check for people: status, name, what was measured, its limit, and what to do if not well.

    The limit of a `kernels.` line is the policy that chose the backend, as a launch is held to it.
    """
    limit = f" (limit {check.limit})" if check.limit else ""
    found = f"{check.measured}{limit}: " if check.measured else ""
    line = f"{check.status:8} {check.name:24} {found}{check.message}"
    return line if check.status == "pass" or not check.hint else f"{line}\n{'':8} {check.hint}"


def say(check: CheckResult) -> None:
    """Print a check at once."""
    print(describe(check), flush=True)  # noqa: T201 - the tool's result


def say_begun(done: int, total: int, probe: str) -> None:
    """Print which probe begins, for who waits on the other end."""
    line = ProbeBegun(done=done, total=total, probe=probe).model_dump_json()
    print(line, flush=True)  # noqa: T201 - the tool's progress


def main(argv: list[str] | None = None) -> int:
    """Run the probes, print the Report and return the exit code."""
    arguments = parse_arguments(argv)
    set_before_torch("OMP_WAIT_POLICY", "PASSIVE")
    # torch reads the variable when it is imported, so it is imported after it.
    with collect_nothing():
        from nsa_core.checks.probes import run_probes
        from nsa_core.evaluate.device import choose_device

    try:
        device = choose_device(arguments.device).type
        config = read_config(arguments.config, device)
        show = None if arguments.json else say
        begin = say_begun if arguments.json and arguments.progress else None
        report = run_probes(config, device, arguments.tier, show, begin)
    except (ConfigError, ValueError) as error:
        tell(f"error: {error}")
        return EXIT_USAGE
    if arguments.json:
        print(report.model_dump_json(indent=None if arguments.progress else 2))  # noqa: T201 - the tool's result
    else:
        print(f"verdict: {report.verdict}")  # noqa: T201 - as above
    return EXIT_FAILED if report.verdict == "fail" else 0


if __name__ == "__main__":
    raise SystemExit(run_to_exit_code(main))
