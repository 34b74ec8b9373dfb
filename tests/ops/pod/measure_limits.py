"""Measure the watchdog's limits on the logs of the collection, each at its value and beside it.

usage: python -m tests.ops.pod.measure_limits

Prints a table for docs/watchdog.md: what a rule says of the healthy and passing logs (`HEALTHY` and
`WARNED` of test_calibration), and with what delay it catches the logs whose alarm is its own.
"""

import sys
from collections.abc import Iterator

from nsa_core.config.training import WatchdogLimits
from nsa_ops.health.foreign_logs import parse_log
from nsa_ops.health.foreign_reader import ForeignLog
from nsa_ops.pod.rules.rulebook import RULES
from nsa_ops.pod.tracker import HealthEvidence, MachineEvidence, ProcessEvidence, Tracker
from tests.ops.health.test_calibration import ALARMS, HEALTHY, LOGS, TRIALS, WARNED

#: Limit: its rule, and the values that are tried beside its own.
VARIED = {
    "nonfinite_in_row": ("loss_nonfinite", (1, 2, 4)),
    "nonfinite_in_100": ("loss_nonfinite", (1, 3, 6)),
    "jump_nats": ("loss_jump", (0.25, 0.5, 1.0)),
    "jump_noise_factor": ("loss_jump", (2.5, 5.0, 10.0)),
    "jump_in_row": ("loss_jump", (2, 3, 6)),
    "jump_patience": ("loss_jump", (3, 30, 60)),
    "grad_spike_factor": ("grad_spike", (5.0, 10.0, 20.0)),
    "leak_bits_per_byte": ("loss_too_good", (0.3, 0.6, 1.2)),
    "leak_fall_nats": ("loss_fall", (0.25, 0.5, 1.0)),
    "leak_fall_share": ("loss_fall", (0.7, 0.8, 0.9)),
    "validation_in_row": ("validation_rising", (1, 3, 6)),
    "validation_nats": ("validation_rising", (0.25, 0.5, 1.0)),
    "throughput_fraction": ("throughput_low", (0.25, 0.5, 0.75)),
    "throughput_window_s": ("throughput_low", (60.0, 600.0, 1800.0)),
    "fetch_warn_s": ("data_slow", (0.5, 2.0, 8.0)),
    "zero_in_row": ("not_learning", (1, 3, 6)),
    "skipped_in_row": ("loss_scale_falling", (2, 5, 10)),
    "plateau_share": ("loss_plateau", (0.0, 0.1, 0.2)),
}
#: The made logs that a rule is for, and the step at which the trouble begins.
MADE = {
    "t02": ("loss_jump", 800), "t04": ("loss_jump", 75), "t05": ("validation_rising", 1000),
    "t08": ("throughput_low", 200), "h01": ("loss_fall", 0), "h02": ("throughput_low", 50),
    "h03": ("validation_rising", 1500),
}  # fmt: skip
OWN = {name: (rule, step) for name, (rule, step, _) in ALARMS.items()} | WARNED | MADE
VARIANTS = [
    (limit, value, rule, WatchdogLimits(**{limit: value}))
    for limit, (rule, values) in VARIED.items()
    for value in values
]


def evidences(log: ForeignLog) -> Iterator[HealthEvidence]:
    """What a watchdog that is never late knows after each record."""
    tracker = Tracker(log.facts, attempt=1)
    for beat in log.beats:
        if beat.attempt != tracker.attempt:
            tracker = Tracker(log.facts, beat.attempt)
        tracker.feed([beat])
        yield tracker.evidence(beat.ts, ProcessEvidence(), MachineEvidence())


def measure() -> None:
    """Judge every log once with all variants, and print the sums."""
    apply = {rule.id: rule.apply for rule in RULES}
    warned = dict.fromkeys(range(len(VARIANTS)), 0)
    halted: dict[int, list[str]] = {number: [] for number in warned}
    delays: dict[int, list[str]] = {number: [] for number in warned}
    num_records = 0
    for name in (*HEALTHY, *OWN):
        path = next((LOGS if name.startswith("L") else TRIALS).glob(f"{name}_*"))
        log = parse_log(path.read_text(errors="replace"))
        is_own = {n for n, one in enumerate(VARIANTS) if OWN.get(name, ("", 0))[0] == one[2]}
        is_sound = name in HEALTHY or name in WARNED
        begin = next((n for n, b in enumerate(log.beats) if b.step >= OWN.get(name, ("", 0))[1]), 0)
        for index, evidence in enumerate(evidences(log)):
            num_records += name in HEALTHY
            for number, (_, _, rule, limits) in enumerate(VARIANTS):
                found = apply[rule](evidence, limits)
                if found is None:
                    continue
                warned[number] += name in HEALTHY
                if is_sound and found.level == "halt" and name not in halted[number]:
                    halted[number].append(name)
                wanted = found.level == "halt" or name not in ALARMS
                if number in is_own and wanted and not any(
                    one.startswith(name) for one in delays[number]
                ):  # fmt: skip
                    delays[number].append(f"{name} {index - begin}")
    sys.stdout.write(f"{num_records} records of healthy logs\n")
    for number, (limit, value, rule, _) in enumerate(VARIANTS):
        sys.stdout.write(
            f"{limit} {value:g} {rule}: {warned[number]} findings on healthy logs, halted "
            f"{', '.join(halted[number]) or 'none'}; delays {', '.join(delays[number]) or 'none'}\n"
        )


if __name__ == "__main__":
    measure()
