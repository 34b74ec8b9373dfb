"""The figures in one line of another trainer's log, found by the kind of line.

The spellings are those of nanoGPT and its speed runs, llm.c, Megatron, NeMo and DeepSpeed, Hugging
Face trainers, OLMo, fairseq, MXNet and plain `step … loss …` lines.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

_NUMBER = (
    r"[-+]?(?:nan|inf(?:inity)?|\d[\d,]{0,40}\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)(?![\w.])"
)
_IS = r"""['"]?\s*[:=]?\s*['"]?"""


def _after(names: str, number: str = _NUMBER) -> re.Pattern[str]:
    """A number after one of the names, where the name is a word of its own."""
    return re.compile(rf"(?<![\w./-])(?:{names}){_IS}({number})", re.IGNORECASE)


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: No figure has so many digits; patterns must not wander through more, nor Python read them.
_LONG_NUMBER = re.compile(r"\d{40,}")
#: Nor does so much space stand before one; patterns try every way to share it out.
_LONG_SPACE = re.compile(r"\s{40,}")
_DECIMAL_COMMA = re.compile(r"[-+]?(?:0,\d+|\d+,(?:\d{1,2}|\d{4,}))(?:e[-+]?\d+)?", re.IGNORECASE)
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_STEPS = (
    re.compile(r"(?<![\w-])iteration\s*[:=]?\s*(\d+)\s*(?:/\s*(\d+))?", re.IGNORECASE),
    re.compile(r"(?<![\w-])num_updates\W+(\d+)()", re.IGNORECASE),
    re.compile(
        r"(?<![\w-])(?:global[ _]?step|steps?|iter|update)\b['\"]?\s*[:=]?\s*(\d[\d,]{0,40})"
        r"(?:\s*/\s*(\d[\d,]{0,40}))?",
        re.IGNORECASE,
    ),
    re.compile(r"^s:(\d+)() "),
    # Counted anew in every epoch, so what follows the slash is no total.
    re.compile(r"\bEpoch:?\s*\[\d+\]\s*\[\s*(\d+)\s*/\s*\d+\s*\]()"),
    re.compile(r"\bIter \[(\d+)/(\d+)\]"),
    re.compile(r"\bbatch:?\s*\[?(\d+)(?![.\d])()", re.IGNORECASE),
)
_EPOCH = re.compile(r"\bepoch\W{0,3}(\d+)(?![.\d])", re.IGNORECASE)
_BAR = re.compile(r"%\|[^|]*\|\s*(\d+)/(\d+) \[")
_EVALUATION = re.compile(
    r"\b(?:val|valid|validation|eval|test)[ _/]?loss|(?<!\w)tel:|eval[_/]|running_loss|"
    r"train_runtime",
    re.IGNORECASE,
)
_POLICY = re.compile(r"\b(?:rewards?|kl|policy|advantages?|approx_kl)\b[^:=]{0,20}['\"]?\s*[:=]")
_RATE = _after(
    r"(?:throughput/device/)?(?:tokens?|samples?|steps)[ _]per[ _]s(?:ec(?:ond)?)?|wps|tps|speed|"
    r"(?:tok(?:en)?s?|samples?|steps?|it)/s(?:ec(?:ond)?)?|throughput"
)
_RATE_UNIT = re.compile(
    r"(?<![\w.])(\d[\d,]{0,40}\.?\d*)\s{0,99}"
    r"(?:tok(?:ens?)?|samples|images|img|examples|sentences|seqs?|steps|it)/s",
    re.IGNORECASE,
)
_BAR_TIME = re.compile(r"(\d{1,40}(?:\.\d{0,40})?)s/it\b")
_TIME = re.compile(rf"elapsed time per iteration \((ms|s)\):\s*({_NUMBER})", re.IGNORECASE)
_TIME_MS = re.compile(
    r"(?<![\w_])(?:time )?(\d[\d,]{0,40}(?:\.\d{0,40})?)\s{0,99}ms\b(?!\s*\w*avg)", re.IGNORECASE
)
_STEP_S = _after(r"itime|step[ _]time|sec/step|time(?=:? +\d+\.\d+[ ,(])")
_FIGURES = {
    "loss": _after(
        r"lm loss|(?:reduced_)?(?:train(?:ing)?[ _/])?loss|train/CrossEntropyLoss|"
        r"(?:train/)?ce[ _]loss|trl"
    ),
    "evaluation_loss": _after(r"(?:val|valid|validation|eval|test)[ _/]?loss|tel"),
    "lr": _after(r"(?:optim/)?(?:learning[ _]rate(?:_group0)?|lr)"),
    "grad_norm": _after(r"(?:optim/)?(?:total[ _])?grad(?:ient)?[ _]norm|gnorm|norm"),
    "loss_scale": _after(r"loss[ _]scale"),
    "skipped": _after(r"number of skipped iterations"),
    "num_nan": _after(r"number of nan iterations"),
    "data_s": _after(r"rtime|data[ _]time|data_s|data(?=\s+\d+\.\d)"),
    "train_ms": re.compile(rf"train_time:({_NUMBER[:-9]})ms"),
}


@dataclass(frozen=True)
class LineFigures:
    """Figures of one line; None is what it does not have.

    A `_unit` is that of the last printed place: a figure of 0 says that the value is below it.
    """

    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None
    evaluation_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: float | None = None
    num_nan: float | None = None
    step_s: float | None = None
    data_s: float | None = None
    train_ms: float | None = None
    rate: float | None = None
    unix_s: float | None = None
    loss_unit: float = 0.0
    lr_unit: float = 0.0
    grad_norm_unit: float = 0.0
    epoch: int | None = None
    is_evaluation: bool = False
    is_policy: bool = False
    is_dictionary: bool = False

    @property
    def is_record(self) -> bool:
        """Whether the line is a record of training steps.

        A line without a loss still is one if what is usually around the loss is there; a line that
        was cut before it is not.
        """
        around = (self.grad_norm, self.loss_scale, self.lr)
        if self.is_dictionary and self.loss is not None:
            return True
        if self.is_evaluation:
            return False
        if self.is_dictionary:
            return any(value is not None for value in around)
        if self.step is None:
            return False
        figures = (self.loss, self.rate, self.loss_scale, self.grad_norm)
        return any(value is not None for value in figures)


def clean(line: str) -> str:
    """A line without colours, long gaps and numbers of more digits than any figure has."""
    return _LONG_NUMBER.sub("?", _LONG_SPACE.sub(" ", _ANSI.sub("", line)))


def number(text: str) -> float:
    """A number as logs write it: thousands separators, a decimal comma, nan and inf in any case.

    One comma before three digits separates thousands, unless only a zero stands before it.
    """
    digits = text.rstrip(",")  # that of a list is no part of the number
    return float(digits.replace(",", "." if _DECIMAL_COMMA.fullmatch(digits) else ""))


def _search(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return number(found[1]) if found else None


def printed_unit(text: str) -> float:
    """Unit of the last place of a figure; 0 where it is printed in full (`0`, `0.0`, `0.00E+00`).

    Programs that print every digit they have write a zero as `0.0`.
    """
    decimals = len(text.partition(".")[2])
    return 10.0**-decimals if decimals > 1 and "e" not in text.lower() else 0.0


def _unit(pattern: re.Pattern[str], line: str) -> float:
    found = pattern.search(line)
    return printed_unit(found[1]) if found else 0.0


def find_step(line: str) -> tuple[int | None, int | None]:
    """Step and total steps."""
    for pattern in (*_STEPS, _BAR):
        found = pattern.search(line)
        if found:
            total = found[2]
            return int(found[1].replace(",", "")), int(total.replace(",", "")) if total else None
    return None, None


def _find_time(line: str) -> float | None:
    """Unix seconds of the time stamp, taken as UTC."""
    found = _STAMP.search(line)
    if not found:
        return None
    try:
        at = datetime.fromisoformat(f"{found[1]} {found[2]}").replace(tzinfo=UTC)
    except ValueError:  # a month 13
        return None
    return at.timestamp() + float(f"0.{found[3] or 0}")


def _find_step_s(line: str) -> float | None:
    found = _TIME.search(line)
    if found:
        return number(found[2]) / (1000 if found[1].lower() == "ms" else 1)
    step_s = _search(_STEP_S, line)
    if step_s is not None:
        return step_s
    bar = _search(_BAR_TIME, line)
    if bar is not None:
        return bar
    milliseconds = _search(_TIME_MS, line) if "train_time" not in line else None
    return None if milliseconds is None else milliseconds / 1000


def parse_line(line: str) -> LineFigures:
    """The figures of one line; pure."""
    step, total = find_step(line)
    rate, epoch = _search(_RATE_UNIT, line), _EPOCH.search(line)
    return LineFigures(
        **{name: _search(pattern, line) for name, pattern in _FIGURES.items()},
        step=step,
        total_steps=total,
        step_s=_find_step_s(line),
        rate=_search(_RATE, line) if rate is None else rate,
        unix_s=_find_time(line),
        loss_unit=_unit(_FIGURES["loss"], line),
        lr_unit=_unit(_FIGURES["lr"], line),
        grad_norm_unit=_unit(_FIGURES["grad_norm"], line),
        epoch=int(epoch[1]) if epoch else None,
        is_evaluation=bool(_EVALUATION.search(line)),
        is_policy=bool(_POLICY.search(line)),
        is_dictionary=line.strip().startswith("{") and line.rstrip().endswith("}"),
    )
