"""Run the command line inside the test and see what a shell would see."""

from dataclasses import dataclass

import pytest

from nsa_ops.cli.app import main


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    out: str
    err: str


@dataclass(frozen=True)
class CommandLine:
    capture: pytest.CaptureFixture[str]

    def __call__(self, *words: str) -> Outcome:
        self.capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        out, err = self.capture.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, out, err)
