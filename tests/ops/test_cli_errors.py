import json
import signal
from pathlib import Path

import pytest

from tests.ops.cli_case import CommandLine


def test_an_unknown_command_names_the_nearest_one(cli: CommandLine) -> None:
    outcome = cli("pods")
    assert outcome.exit_code == 2
    assert outcome.out == ""
    assert outcome.err == (
        "error: No such command `pods`; did you mean `pod`?\n\nhint: See `nsa-ops --help`\n"
    )


def test_an_unknown_flag_names_the_nearest_one(cli: CommandLine) -> None:
    outcome = cli("pod", "ls", "--jsn")
    assert outcome.exit_code == 2
    assert outcome.err.startswith("error: No such option: --jsn; did you mean `--json`?\n\nhint: ")


def test_the_nearest_flag_is_offered_and_none_that_is_far(cli: CommandLine) -> None:
    near = cli("launch", "--sett", "seed=1")
    assert (near.exit_code, near.err.splitlines()[0]) == (
        2, "error: No such option: --sett; did you mean `--set`?"
    )  # fmt: skip
    far = cli("pod", "ls", "--sett", "seed=1")
    assert (far.exit_code, far.err.splitlines()[0]) == (2, "error: No such option: --sett")


@pytest.mark.parametrize(
    ("words", "after"),
    [
        (("launch", "--pod", "here", "--resume-from", ""), "--resume-from"),
        (("resume", "r1", "--from="), "--from"),
        (("backup", "restore", "r1", "--to", "", "--json"), "--to"),
        (("report", ""), "report"),
        (("",), "nsa-ops"),
    ],
)
def test_an_empty_word_stands_for_no_default_and_no_folder(
    cli: CommandLine, words: tuple[str, ...], after: str
) -> None:
    """As of a script whose variable is not set: a run would begin at its first step."""
    outcome = cli(*words)
    assert outcome.exit_code == 2
    assert outcome.err.startswith(f"error: The word after `{after}` is empty\n\nhint: ")


def test_an_unknown_key_names_the_nearest_one(cli: CommandLine) -> None:
    outcome = cli("config", "check", "--set", "model.dm=3")
    assert outcome.exit_code == 2
    assert "unknown key 'model.dm'; did you mean model.dim?" in outcome.err


def test_a_paper_symbol_is_answered_with_its_name_here(cli: CommandLine) -> None:
    outcome = cli("config", "check", "--set", "model.nsa.l=64")
    assert outcome.exit_code == 2
    assert "model.nsa.compress_block" in outcome.err


def test_an_impossible_pair_is_refused_before_any_pod_is_asked(cli: CommandLine) -> None:
    outcome = cli("config", "check", "--profile", "v100", "--set", "runtime.precision=bf16")
    assert outcome.exit_code == 2
    assert "bf16 does not run on profile v100" in outcome.err


def test_an_unknown_profile_is_one_line_and_a_hint(cli: CommandLine) -> None:
    outcome = cli("profile", "show", "a1000")
    assert outcome.exit_code == 2
    assert outcome.err.count("\n") == 3
    assert "nsa-ops profile ls" in outcome.err


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        (("status", "nosuch"), "nsa-ops/status/1"),
        (("preflight", "nosuch"), "nsa-ops/preflight/1"),
        (("pod", "show", "nosuch"), "nsa-ops/pod-show/1"),
        (("profile", "show", "nosuch"), "nsa-ops/profile-show/1"),
        (("bench", "kernels", "nosuch"), "nsa-ops/bench-kernels/1"),
    ],
)
def test_an_error_has_the_schema_of_its_command_whatever_is_named(
    cli: CommandLine, words: tuple[str, ...], schema: str
) -> None:
    outcome = cli(*words, "--json")
    assert outcome.exit_code != 0
    assert json.loads(outcome.out)["schema"] == schema


def test_a_missing_pod_names_the_command_that_adds_it(cli: CommandLine) -> None:
    outcome = cli("pod", "show", "a100-1")
    assert outcome.exit_code == 6
    assert outcome.err == (
        "error: There is no pod `a100-1`\n\n"
        "hint: Add a machine behind ssh with `nsa-ops pod add a100-1 user@host[:port]`, or this "
        "one with `nsa-ops pod add a100-1 local`\n"
    )


def test_an_error_with_json_is_an_envelope_on_stdout(cli: CommandLine) -> None:
    outcome = cli("pod", "show", "nope", "--json")
    document = json.loads(outcome.out)
    assert outcome.exit_code == 6
    assert document["schema"] == "nsa-ops/pod-show/1"
    assert (document["ok"], document["data"]) == (False, None)
    assert document["errors"][0]["exit_code"] == 6


def test_an_unknown_setting_names_the_nearest_one(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_OPS_TMUX_SOKET", "x")
    outcome = cli("pod", "ls")
    assert outcome.exit_code == 2
    assert "did you mean `tmux_socket`?" in outcome.err


def test_an_unknown_training_variable_is_an_error(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_BATCHSIZE", "4")
    outcome = cli("config", "check")
    assert outcome.exit_code == 2
    assert "NSA_BATCH_SIZE" in outcome.err
    assert outcome.err.endswith("hint: See docs/variables.md\n")


@pytest.mark.parametrize(
    ("name", "value"), [("NSA_FOO", "1"), ("NSA_ACCUM", "two"), ("NSA_OPS_FOO", "1")]
)
def test_a_variable_that_cannot_be_used_names_the_page_of_the_variables(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    outcome = cli("config", "check")
    assert outcome.exit_code == 2
    assert "hint: See docs/variables.md" in outcome.err


def test_the_same_pod_added_twice_is_fine_and_another_one_is_a_conflict(
    cli: CommandLine, tmp_path: Path
) -> None:
    address = f"local:{tmp_path / 'pod'}"
    assert cli("pod", "add", "here", address).exit_code == 0
    assert cli("pod", "add", "here", address).exit_code == 0
    outcome = cli("pod", "add", "here", f"local:{tmp_path / 'other'}")
    assert outcome.exit_code == 7
    assert "Pod `here` exists with root" in outcome.err


def test_plan_changes_nothing(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli("pod", "add", "here", f"local:{tmp_path / 'pod'}", "--plan")
    assert outcome.exit_code == 0
    assert outcome.out.startswith("plan: Add pod `here`\n  1. register: ")
    assert not (tmp_path / "pod").exists()
    assert cli("pod", "ls", "--json").out.count("here") == 0


def test_what_cannot_be_undone_needs_yes_where_nobody_can_be_asked(
    cli: CommandLine, tmp_path: Path
) -> None:
    cli("pod", "add", "here", f"local:{tmp_path / 'pod'}")
    assert cli("pod", "rm", "here", "--no-input").exit_code == 2
    assert cli("pod", "rm", "here", "-y").exit_code == 0
    assert (tmp_path / "pod").is_dir()


def test_a_bug_is_one_line_and_exit_code_1(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        message = "planted\nproblem"
        raise RuntimeError(message)

    monkeypatch.setattr("nsa_ops.configure.all_hardware", broken)
    outcome = cli("profile", "ls")
    assert outcome.exit_code == 1
    assert outcome.err.startswith(
        "error: This is a bug in nsa-ops: RuntimeError: planted problem\n"
    )


def test_ctrl_c_ends_with_a_line_and_130(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nsa_ops.configure.all_hardware", interrupted)
    outcome = cli("profile", "ls")
    assert outcome.exit_code == 130
    assert outcome.err == "error: Stopped by Ctrl-C: no command was running on a pod\n"


def test_term_ends_with_a_line_and_143(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def terminated(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("nsa_ops.configure.all_hardware", terminated)
    outcome = cli("profile", "ls")
    assert outcome.exit_code == 143
    assert outcome.err == "error: Stopped by TERM: no command was running on a pod\n"


def test_quiet_tells_no_story(cli: CommandLine, tmp_path: Path) -> None:
    outcome = cli("pod", "add", "here", f"local:{tmp_path / 'pod'}", "-q")
    assert outcome.err == ""
    assert outcome.out.startswith("pod ")


def test_a_value_that_an_option_does_not_take_is_named(cli: CommandLine) -> None:
    colour = cli("pod", "ls", "--color", "pink")
    assert (colour.exit_code, colour.out) == (2, "")
    assert "`--color pink` must be auto, always or never" in colour.err
    deadline = cli("pod", "ls", "--timeout", "soon")
    assert deadline.exit_code == 2
    assert "--timeout" in deadline.err


def test_each_setting_tells_where_it_comes_from(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_OPS_POD", "here")
    values = json.loads(cli("config", "show", "--operator", "--json").out)["data"]
    origins = {one["key"]: one["origin"] for one in values}
    assert origins["pod"] == "NSA_OPS_POD"
    assert origins["recipe"] == "default"


def test_each_value_of_a_run_tells_where_it_comes_from(
    cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSA_BATCH_SIZE", "4")
    words = ("config", "show", "--profile", "cpu", "--set", "seed=7", "--json")
    values = {one["key"]: one for one in json.loads(cli(*words).out)["data"]}
    assert values["seed"]["origin"] == "--set"
    assert values["batch.micro_batch"]["origin"] == "NSA_BATCH_SIZE"
    assert values["runtime.precision"]["origin"] == "profile cpu"
    assert values["model.dim"]["origin"] == "recipe tiny-cpu"
    assert values["model.norm_eps"]["origin"] == "default"


def test_what_this_machine_refuses_is_one_line_and_11(cli: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = cli("pod", "add", "here", f"local:{tmp_path / 'file' / 'below'}")
    assert outcome.exit_code == 11
    assert "Not a directory" in outcome.err
    assert cli("pod", "ls", "--json").out.count("here") == 0


def test_the_root_of_a_local_pod_may_be_a_flag(cli: CommandLine, tmp_path: Path) -> None:
    root = str(tmp_path / "asked")
    said = cli("pod", "add", "here", "local", "--root", root, "--json")
    assert (said.exit_code, json.loads(said.out)["data"]["root"]) == (0, root)
    both = cli("pod", "add", "two", f"local:{tmp_path / 'other'}", "--root", root)
    assert (both.exit_code, "names a root" in both.err) == (2, True)


@pytest.mark.parametrize(
    "flags",
    [("--transport", "fabric"), ("--fingerprint", "SHA256:x"), ("--password-from", "-")],
)
def test_a_flag_of_ssh_is_refused_for_this_machine(
    cli: CommandLine, flags: tuple[str, str]
) -> None:
    said = cli("pod", "add", "here", "local", *flags)
    assert (said.exit_code, f"`{flags[0]}` is for a pod behind ssh" in said.err) == (2, True)
