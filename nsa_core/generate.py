"""`python -m nsa_core.generate --run DIR --prompt TEXT`: let the model of a run write.

Loads the newest whole checkpoint after verifying its hashes. The text goes to stdout as it is
drawn, everything else to stderr. Exit code 2 for flags that cannot be used, 14 without the run's
tokenizer, 15 without whole weights, 141 when the reader of the text leaves.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from nsa_core.env import set_before_torch
from nsa_core.rundir.exit import TrainerExit
from nsa_core.terminal import add_run_flags, run_to_exit_code, shown_on, tell

if TYPE_CHECKING:
    from nsa_core.evaluate.run_model import RunModel
    from nsa_core.evaluate.sampling import Sampling
    from nsa_core.model.transformer import LanguageModel

#: Memory of the decode cache is reserved for all of them at once.
MAX_NEW_TOKENS = 2**20
#: Characters; far more than any model here was trained to read.
MAX_PROMPT = 2**24


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags; unknown ones end with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m nsa_core.generate",
        description="Continue a prompt with the model of a run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_run_flags(parser)
    add("--prompt", required=True, help="text to continue; empty begins a document, `-` is stdin")
    add("--max-new-tokens", type=int, default=128, metavar="N")
    add("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens up to this share")
    add("--seed", type=int, default=0, help="of the draws")
    add("--json", action="store_true", help="print one JSON object instead of the text")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Open the run, write, and return the exit code."""
    arguments = parse_arguments(argv)
    set_before_torch("OMP_WAIT_POLICY", "PASSIVE")
    # torch reads the variable when it is imported, so it is imported after it.
    from nsa_core.evaluate.run_model import RunModelError, open_by_flags

    try:
        sampling = read_sampling(arguments)
        opened = open_by_flags(arguments)
        prompt = read_prompt(sys.stdin) if arguments.prompt == "-" else arguments.prompt
        written = write(opened, prompt, sampling, arguments.max_new_tokens, is_quiet=arguments.json)
    except RunModelError as error:
        tell(f"error: {error}")
        return error.code
    except ValueError as error:
        tell(f"error: {error}")
        return TrainerExit.CONFIGURATION
    rate = "" if written.tokens_per_s is None else f", {written.tokens_per_s:.1f} tokens/s"
    tell(f"{written.num_tokens} tokens{rate} ({written.decode})")
    if arguments.json:
        print(json.dumps(describe(opened, arguments, prompt, written), ensure_ascii=False))  # noqa: T201 - the result
    return TrainerExit.FINISHED


def read_prompt(stdin: TextIO, most: int = MAX_PROMPT) -> str:
    """The prompt on stdin; ValueError if it has more characters."""
    prompt = stdin.read(most + 1)
    if len(prompt) > most:
        message = f"the prompt on stdin has more than {most:,} characters"
        raise ValueError(message)
    return prompt


def read_sampling(arguments: argparse.Namespace) -> "Sampling":
    """How to draw, once the flags have been found usable."""
    from nsa_core.evaluate.sampling import Sampling

    if not 1 <= arguments.max_new_tokens <= MAX_NEW_TOKENS:
        message = (
            f"--max-new-tokens must be at least 1 and at most {MAX_NEW_TOKENS:,}, "
            f"got {arguments.max_new_tokens}"
        )
        raise ValueError(message)
    temperature, top_p, seed = arguments.temperature, arguments.top_p, arguments.seed
    try:
        return Sampling(temperature, top_p, seed)
    except ValueError as error:
        message = f"--temperature {temperature} --top-p {top_p} --seed {seed}: {error}"
        raise ValueError(message) from error


@dataclass(frozen=True)
class GeneratedText:
    """What the model wrote; it ended by itself if it drew the end token before the limit.

    Attributes:
        tokens_per_s: From the first id to the last, so without the prompt and the graph's capture;
            None for fewer than two ids.
    """

    text: str
    num_tokens: int
    tokens_per_s: float | None
    decode: str


def check_memory(model: "LanguageModel", num_tokens: int) -> None:
    """Refuse a text whose decode cache this machine or its card could never hold."""
    from nsa_core.evaluate.device import memory_bytes
    from nsa_core.model.cache import DecodeCache

    weight = model.embedding.weight
    needed = DecodeCache.allocate(
        model.config, batch=1, capacity=num_tokens, dtype=weight.dtype, device="meta"
    ).num_bytes
    limit = memory_bytes(weight.device)
    if needed > limit:
        message = (
            f"a decode cache of {num_tokens:,} tokens takes {needed >> 20:,} MiB, and "
            f"{weight.device} has {limit >> 20:,}; give a smaller --max-new-tokens"
        )
        raise ValueError(message)


def write(
    opened: "RunModel", prompt: str, sampling: "Sampling", max_new_tokens: int, *, is_quiet: bool
) -> GeneratedText:
    """Continue the prompt, printing each piece of text as soon as it is whole."""
    from nsa_core.evaluate.sampling import pieces, stream
    from nsa_core.model.decode_step import describe_decode

    tokenizer = opened.tokenizer
    ids = [int(token) for token in tokenizer.encode(prompt)]
    check_memory(opened.model, max(1, len(ids)) + max_new_tokens)
    arrived_s: list[float] = []

    def timed(token: int) -> int:
        arrived_s.append(time.monotonic())
        return token

    found = stream(
        opened.model,
        ids or [tokenizer.end_id],  # an empty prompt asks for the beginning of a document
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_token=tokenizer.end_id,
        num_ids=tokenizer.vocab_size,
    )
    texts = []
    for piece in pieces(tokenizer, map(timed, found)):
        texts.append(piece)
        if not is_quiet:
            print(shown_on(sys.stdout, piece), end="", flush=True)  # noqa: T201 - the result
    if not is_quiet:
        print()  # noqa: T201 - the result ends with a line break
    return GeneratedText(
        "".join(texts), len(arrived_s), rate_of(arrived_s), describe_decode(opened.model)
    )


def rate_of(arrived_s: Sequence[float]) -> float | None:
    """Tokens per second after the first one; None where no time has passed."""
    if len(arrived_s) < 2 or arrived_s[-1] == arrived_s[0]:
        return None
    return (len(arrived_s) - 1) / (arrived_s[-1] - arrived_s[0])


def describe(
    opened: "RunModel", arguments: argparse.Namespace, prompt: str, written: GeneratedText
) -> dict[str, object]:
    """The JSON object: the fields of samples.json, and which weights wrote it."""
    return {
        "run": str(arguments.run),
        "weights": str(opened.weights.path),
        "step": opened.weights.step,
        "device": str(opened.device),
        "prompt": prompt,
        "text": written.text,
        "num_tokens": written.num_tokens,
        "tokens_per_s": written.tokens_per_s,
        "decode": written.decode,
        "is_ended": written.num_tokens < arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
    }


if __name__ == "__main__":
    raise SystemExit(run_to_exit_code(main))
