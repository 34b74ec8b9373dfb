"""The command line of runs on several pods: what cannot go together ends in one line."""

import pytest

from nsa_ops.cli.console import make_console
from nsa_ops.cli.runs import draw_halted
from nsa_ops.runs.halt import Halted
from tests.ops.cli_case import CommandLine


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "--pods", "a,b", "--pod", "a"), "`--pod` names one pod, and `--pods` several"),
        (("launch", "--pods", "a,b,a"), "names pod `a` twice"),
        (("launch", "--pods", "a,b", "--port", "80"), "greater than or equal to 1024"),
        (("launch", "--port", "30000"), "`--port` is where the ranks of several pods meet"),
        (("launch", "--pods", "a,,b"), "has an empty name"),
        (("resume", "r1", "--pods", "a,b", "--pod", "a"), "`--pod` names one pod"),
        (("resume", "r1", "--pods", "a,b", "--prove"), "that stays on its one pod"),
        (("resume", "r1", "--pods", "a", "--port", "30000"), "`--port` is where the ranks of"),
        (
            ("resume", "r1", "--pods", "a,b", "--afresh", "--from", "/x"),
            "`--afresh` begins at the first step",
        ),
    ],
)
def test_words_that_cannot_go_together_are_refused(
    cli: CommandLine, words: tuple[str, ...], said: str
) -> None:
    outcome = cli(*words)
    assert (outcome.exit_code, said in outcome.err) == (2, True), outcome


def test_a_halt_of_one_pod_does_not_miss_the_checkpoints_of_pod_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    halted = Halted("r1", 1, "halted", "enough", True, [], 7, None, [], None, 1.0, node_rank=1)
    draw_halted(make_console("never", is_color_forbidden=True), halted)
    said = capsys.readouterr().out
    assert "this is pod 1 of its pods; pod 0 has the checkpoints" in said
    assert "no whole checkpoint" not in said


@pytest.mark.parametrize("command", ["launch", "resume"])
def test_the_help_names_the_pods(cli: CommandLine, command: str) -> None:
    outcome = cli(command, "--help")
    assert outcome.exit_code == 0
    assert "--pods" in outcome.out
    assert "--port" in outcome.out
