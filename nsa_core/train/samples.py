"""samples.json: text that the finished model writes, greedy and drawn."""

import json
from typing import Any

from nsa_core.evaluate.sampling import Sampling, stream
from nsa_core.rundir.atomic import write_text
from nsa_core.train.session import Session

#: Greedy text shows what the model is sure of; the draw shows what it has learned beside it.
SAMPLINGS = (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=0))


def write_samples(session: Session) -> None:
    """Continue the configured prompt; 0 tokens write nothing. A full disk costs the file."""
    if session.config.evaluation.sample_tokens == 0:
        return
    found = [_sample(session, sampling) for sampling in SAMPLINGS]
    text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    session.telemetry.writes.attempt(
        "samples.json", lambda: write_text(session.context.run.samples, text)
    )


def _sample(session: Session, sampling: Sampling) -> dict[str, Any]:
    evaluation, tokenizer = session.config.evaluation, session.tokenizer
    prompt = [int(token) for token in tokenizer.encode(evaluation.sample_prompt)]
    new = list(
        stream(
            session.model,
            prompt or [tokenizer.end_id],  # an empty prompt asks for the beginning of a document
            max_new_tokens=evaluation.sample_tokens,
            sampling=sampling,
            stop_token=tokenizer.end_id,
        )
    )
    return {
        "step": session.step,
        "prompt": evaluation.sample_prompt,
        "text": tokenizer.decode(new),
        "num_tokens": len(new),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
    }
