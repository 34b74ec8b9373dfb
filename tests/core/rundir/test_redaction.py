"""What looks like a secret in a person's words is hidden, and the words around it are kept."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_core.rundir.halt import HaltRequest, describe_halt_file, read_halt, write_halt
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.redaction import redact

CANARY = "c4n4ry7QxW9zKpLm2VtB"
KEY = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{CANARY}\n"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"stop, the HF_TOKEN={CANARY} leaked", "stop, the HF_TOKEN=[redacted] leaked"),
        (f"WANDB_API_KEY: {CANARY}", "WANDB_API_KEY: [redacted]"),
        (f"the password is {CANARY}, oops", "the password is [redacted] oops"),
        (f'password="two words {CANARY}" ok', "password=[redacted] ok"),
        (f"secret='{CANARY} never closed", "secret=[redacted]"),
        (f"the token is ''{CANARY}\"{CANARY} \"{CANARY}", "the token is [redacted]"),
        (f'password="{CANARY}", then', "password=[redacted], then"),
        (f'{{"api-key": "{CANARY}"}}', '{"api-key": [redacted]}'),
        (f"it ran with --db-password {CANARY} -v", "it ran with --db-password [redacted] -v"),
        (f"Authorization: Basic {CANARY}==", "Authorization: Basic [redacted]"),
        (f"curl with bearer {CANARY}", "curl with bearer [redacted]"),
        (f"https://me:{CANARY}@host/x is down", "https://me:[redacted]@host/x is down"),
        (f"hf_{CANARY} is revoked", "[redacted] is revoked"),
        (f"ghp_{CANARY}, rotate", "[redacted], rotate"),
        (f"github_pat_{CANARY}", "[redacted]"),
        (f"glpat-{CANARY}", "[redacted]"),
        (f"sk-proj-{CANARY}", "[redacted]"),
        (f"xoxb-{CANARY}", "[redacted]"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        (f"AIzaSy{CANARY}{CANARY}", "[redacted]"),
        (f"eyJhbGciOiJI.{CANARY}.{CANARY}", "[redacted]"),
        (f"{KEY}-----END OPENSSH PRIVATE KEY----- done", "[redacted] done"),
        (KEY, "[redacted]"),
    ],
)
def test_a_secret_is_hidden_and_the_words_around_it_are_kept(text: str, kept: str) -> None:
    assert redact(text) == kept
    assert redact(kept) == kept
    assert CANARY not in kept


@pytest.mark.parametrize(
    "text",
    [
        "asked by the operator",
        "loss spike at step 4,000: 2.3 -> 7.1",
        "the token is expired; the password is wrong.",
        "5 tokens/s per token = 8192, and max_new_tokens=128",
        "data.tokenizer=byte",
        "basic preprocessing, bearer certificates",
        "commit 58033a5 58033a5e1c9d4b7f8a6e2d3c4b5a69788f7e6d5c",
        "see https://host:8080/runs and root@192.0.2.7:40022",
        "disk: 31 GiB free; key value cache too large",
        "",
    ],
)
def test_text_without_a_secret_stays_as_it_is(text: str) -> None:
    assert redact(text) == text


@given(
    st.lists(
        st.sampled_from([*"ab1:=@/-'\" .,\n", "[redacted]", "token", "password", " is ", "://"])
    ).map("".join)
)
def test_hiding_twice_hides_nothing_more(text: str) -> None:
    assert redact(redact(text)) == redact(text)


def test_a_long_text_takes_no_time() -> None:
    began_s = time.process_time()
    for piece in (
        "token-",
        "-",
        "a_",
        "password is ",
        "eyJ.",
        "eyJ-",
        "'",
        "password=''a",
        "-----BEGIN ",
        "://a:",
    ):
        redact(piece * 20_000)
    assert time.process_time() - began_s < 5


def test_a_stop_file_written_by_hand_is_read_without_its_secret(tmp_path) -> None:
    run = RunDir(tmp_path)
    run.halt.write_text(f"halt: password={CANARY}\n")
    request = read_halt(run, run_id="r", attempt=1)
    assert request is not None
    assert request.reason == "password=[redacted]"
    assert CANARY not in (describe_halt_file(run) or CANARY)


def test_a_stop_request_is_written_without_its_secret(tmp_path) -> None:
    run = RunDir(tmp_path)
    write_halt(run, HaltRequest(run_id="r", attempt=1, reason=f"hf_{CANARY}", by="me", at=1.0))
    assert CANARY not in run.halt.read_text()
