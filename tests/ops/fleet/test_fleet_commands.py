"""The command line of runs on several pods: what cannot go together ends in one line."""

import pytest

from tests.ops.cli_case import CommandLine


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("launch", "--pods", "a,b", "--pod", "a"), "`--pod` names one pod, and `--pods` several"),
        (("launch", "--pods", "a,b,a"), "names pod `a` twice"),
        (("launch", "--pods", "a,b", "--port", "80"), "greater than or equal to 1024"),
        (("resume", "r1", "--pods", "a,b", "--prove"), "`--prove` works for a run on one pod"),
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


@pytest.mark.parametrize("command", ["launch", "resume"])
def test_the_help_names_the_pods(cli: CommandLine, command: str) -> None:
    outcome = cli(command, "--help")
    assert outcome.exit_code == 0
    assert "--pods" in outcome.out
    assert "--port" in outcome.out
