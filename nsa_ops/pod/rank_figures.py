"""Bounds of what others say about ranks: a number that can be no measurement is unknown.

A pod applies them to the files of its ranks, and the laptop to what the pod says of them.
"""

from functools import partial
from math import isfinite
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from nsa_core.rundir.heartbeat import BeatHead

#: No figure is larger: seconds of a step, of a time without news, MiB, degrees Celsius, percent.
MOST_S, MOST_AGE_S, MOST_MIB, MOST_C, MOST_PERCENT = 1e6, 1e10, 1e9, 1e3, 100.0
#: Counts beyond this are no counts: a float does not hold them exactly.
MOST_COUNT = 2**53
#: Names and words of a card, and sentences about a rank.
_MOST_WORD, _MOST_SENTENCE = 80, 400
_NumberT = TypeVar("_NumberT", int, float)


def measured(value: _NumberT | None, most: float) -> _NumberT | None:
    """The value, if it can be a measurement; NaN cannot."""
    return value if value is not None and 0 <= value <= most else None


def has_counts(beat: BeatHead) -> bool:
    """Whether the counts of a heartbeat can be counts, and its time stamp a time."""
    counts = (beat.step, beat.micro_step, beat.alive_seq, beat.progress_seq)
    return isfinite(beat.ts) and all(0 <= count <= MOST_COUNT for count in counts)


def _count(value: int) -> int:
    return measured(value, MOST_COUNT) or 0


def _age(value: float) -> float:
    return measured(value, MOST_AGE_S) or 0.0


def _cut(text: str, most: int) -> str:
    return text[:most]


Seconds = Annotated[float | None, AfterValidator(partial(measured, most=MOST_S))]
Milliseconds = Annotated[float | None, AfterValidator(partial(measured, most=1e3 * MOST_S))]
Share = Annotated[float | None, AfterValidator(partial(measured, most=1.0))]
#: How long ago something was, or how long it may take.
Age = Annotated[float | None, AfterValidator(partial(measured, most=MOST_AGE_S))]
#: The same where it is always known; 0 in the place of what can be none.
KnownAge = Annotated[float, AfterValidator(_age)]
Mebibytes = Annotated[int | None, AfterValidator(partial(measured, most=MOST_MIB))]
Celsius = Annotated[float | None, AfterValidator(partial(measured, most=MOST_C))]
Percent = Annotated[float | None, AfterValidator(partial(measured, most=MOST_PERCENT))]
#: Steps and micro-batches; 0 in the place of what can be none.
Count = Annotated[int, AfterValidator(_count)]
Word = Annotated[str, AfterValidator(partial(_cut, most=_MOST_WORD))]
Sentence = Annotated[str, AfterValidator(partial(_cut, most=_MOST_SENTENCE))]
