"""Start the ranks of one measurement as a launched run starts them, and read what they measured."""

import subprocess
import sys
from pathlib import Path

from nsa_core.bench.scale_rank import REQUEST, RankRequest, RankTimes
from nsa_core.env import MEETING_ON_ONE_POD, ranks_environment, trainer_environment
from nsa_core.rundir.atomic import write_text
from nsa_core.rundir.bounded_json import read_model

#: Of all processes of one measurement: they compile, and may be the first to fill the caches.
DEADLINE_S = 900.0
#: torchrun gives its workers 30 s to end before it kills them.
END_S = 45.0
_WORKER = "nsa_core.bench.scale_rank"
_MAX_SAID_BYTES = 65_536


def run_ranks(folder: Path, asked: RankRequest) -> str:
    """Run all ranks to their end; why they did not finish, or empty."""
    write_text(folder / REQUEST, asked.model_dump_json())
    ranks, said = asked.config.num_ranks, folder / "said.txt"
    command = [sys.executable, "-m", *_meeting(ranks), _WORKER, str(folder)]
    environment = trainer_environment(asked.config.runtime.allocator)
    if ranks > 1:
        environment |= ranks_environment(
            num_local=ranks,
            threads=asked.config.runtime.threads,
            uses_cards=asked.config.runtime.device == "cuda",
            interface=None,
            recorder_prefix=folder / "flight_record_",
        )
    with said.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            code = process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return f"not finished within {DEADLINE_S:g} s"
        finally:
            _end(process)
    return "" if code == 0 else f"exit code {code}: {_last_words(said)}"


def _meeting(ranks: int) -> list[str]:
    """torchrun, whose ranks meet as those of a launched run; nothing for one rank."""
    torchrun = [
        "torch.distributed.run", *MEETING_ON_ONE_POD, "--nproc-per-node", str(ranks),
        "--max-restarts", "0", "--module",
    ]  # fmt: skip
    return torchrun if ranks > 1 else []


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End what still runs; torchrun ends its workers."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(path: Path) -> str:
    """The last line that names an error, else the last one."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_SAID_BYTES))
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    said = [line for line in lines if line]
    named = [line for line in said if "error:" in line.lower()]
    return (named or said or ["nothing was said"])[-1][:300]


def read_times(path: Path) -> RankTimes | None:
    """What one rank measured; None where it left nothing that can be used."""
    try:
        return read_model(RankTimes, path)
    except (OSError, ValueError):
        return None
