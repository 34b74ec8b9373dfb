"""A run under a locale whose encoding is not UTF-8, as of a pod with LC_ALL=de_DE.ISO-8859-1."""

import json
import locale
import sys

import pytest

from nsa_core.train.checkpoint_files import read_config
from tests.core.train.sessions import new_run, opened, run_here
from tests.integration.trainer_runs import next_attempt

PROMPT = "Grüße, 世界"


@pytest.fixture
def plain_locale(tmp_path):
    """Files without a named encoding are read and written as ASCII."""
    if sys.flags.utf8_mode:
        pytest.skip("Python is in its UTF-8 mode and heeds no locale; LC_ALL=C.UTF-8 turns it off")
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    with (tmp_path / "probe").open("w") as file:
        assert file.encoding != "utf-8"
    yield
    locale.setlocale(locale.LC_CTYPE, before)


def test_a_run_with_a_prompt_beyond_ascii_saves_and_resumes_under_any_locale(
    tmp_path, text, plain_locale
):
    run = new_run(
        tmp_path, text, schedule={"steps": 2},
        evaluation={"sample_tokens": 1, "sample_prompt": PROMPT},
    )  # fmt: skip
    assert run_here(run).code == 0
    assert read_config(run.checkpoint(2)).evaluation.sample_prompt == PROMPT
    assert json.loads(run.samples.read_bytes())[0]["prompt"] == PROMPT
    next_attempt(run)
    with opened(run) as session:
        assert session.step == 2
