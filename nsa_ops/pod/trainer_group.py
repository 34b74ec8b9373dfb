"""The processes of one attempt on this pod as one thing: the trainer, and its ranks if several.

torchrun gives each rank a session of its own, and USR1 or USR2 would end torchrun: so signals go to
the ranks, and all sessions are ended together. Each process is named by its recorded identity.
"""

import signal
from dataclasses import dataclass

from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.process import (
    ProcessIdentity,
    boot_id,
    catches,
    children_of,
    identify,
    is_alive,
)
from nsa_core.rundir.ranks import read_rank_process
from nsa_ops.pod.processes import RunProcesses, kill_session, send


@dataclass(frozen=True)
class TrainerGroup:
    """The trainer that process.json records, and the ranks that it has started."""

    run: RunDir
    attempt: int
    leader: ProcessIdentity
    ranks: range = range(0)

    @property
    def has_ranks(self) -> bool:
        """Whether the leader is torchrun."""
        return bool(self.ranks)

    @property
    def name(self) -> str:
        """The leader, and how many ranks it has."""
        ranks = f" and its {len(self.ranks)} ranks" if self.has_ranks else ""
        return f"pid {self.leader.pid}{ranks}"

    def members(self) -> dict[int, ProcessIdentity]:
        """By rank, the processes of this pod that train, as far as they are recorded."""
        if not self.has_ranks:
            return {0: self.leader}
        found = ((rank, read_rank_process(self.run, rank, self.attempt)) for rank in self.ranks)
        here = boot_id()
        return {rank: one.process for rank, one in found if one and one.process.boot_id == here}

    def living(self) -> dict[int, ProcessIdentity]:
        """Those of `members` that run."""
        return {rank: one for rank, one in self.members().items() if is_alive(one)}

    def is_alive(self) -> bool:
        """Whether anything of it runs: a rank may outlive torchrun."""
        return is_alive(self.leader) or (self.has_ranks and bool(self.living()))

    @property
    def survivors(self) -> str:
        """The leader, or the ranks that have outlived it, each with its pid; and the attempt."""
        ranks = {} if is_alive(self.leader) else self.living()
        who = ", ".join(f"rank {rank} pid {one.pid}" for rank, one in ranks.items())
        return f"{who or f'trainer pid {self.leader.pid}'} (attempt {self.attempt})"

    def signal(self, number: signal.Signals, *, only_first: bool = False) -> dict[int, int]:
        """Signal the processes that train; the pids that it reached, by rank.

        A rank that has no handler for USR1 or USR2 yet would die of it, and is left out. TERM goes
        to torchrun, which ends what it has started, while no rank is recorded.
        """
        living = self.living()
        if only_first:
            living = {rank: living[rank] for rank in list(living)[:1]}
        if self.has_ranks and number in {signal.SIGUSR1, signal.SIGUSR2}:
            living = {rank: one for rank, one in living.items() if catches(one.pid, number)}
        elif not living:
            living = {self.ranks.start: self.leader}
        return {rank: one.pid for rank, one in living.items() if send(one, number)}

    def kill_ranks(self) -> list[int]:
        """KILL the sessions of the ranks, also of those that are not recorded yet; their pids."""
        if not self.has_ranks:
            return []
        started = children_of(self.leader.pid) if is_alive(self.leader) else []
        leaders = [*self.members().values(), *filter(None, map(identify, started))]
        return [pid for leader in leaders for pid in kill_session(leader)]

    def kill(self) -> list[int]:
        """KILL everything of it; the pids."""
        return [*self.kill_ranks(), *kill_session(self.leader)]


def group_of(run: RunDir, record: RunProcesses | None) -> TrainerGroup | None:
    """The processes of the attempt of a record; None where no trainer was started."""
    if record is None or record.trainer is None:
        return None
    ranks = range(record.first_rank, record.first_rank + record.num_ranks)
    return TrainerGroup(run, record.attempt, record.trainer, ranks)


def is_trainer_running(run: RunDir, record: RunProcesses | None) -> bool | None:
    """Whether anything of the recorded trainer lives; None if none was recorded."""
    group = group_of(run, record)
    return None if group is None else group.is_alive()
