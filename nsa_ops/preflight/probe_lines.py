"""What the probes of a card say while they run: how far they are, and at last their Report."""

from nsa_core.rundir.bounded_json import parse_model
from nsa_core.rundir.report import ProbeBegun
from nsa_ops.work import Work


class ProbeLines:
    """The answer of the probes as it arrives: lines that say which one begins, the Report last."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._rest = self._whole = b""

    @property
    def last_line(self) -> bytes:
        """The Report, once all has arrived: the last line that is not about a probe."""
        return self._rest.strip() or self._whole

    def __call__(self, piece: bytes) -> None:
        """Take the next bytes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            try:
                begun = parse_model(ProbeBegun, line)
            except ValueError:  # the Report, or what the pod's start-up files print
                self._whole = line.strip() or self._whole
                continue
            self._work.done, self._work.total = begun.done, begun.total
            self._work.detail = begun.probe
