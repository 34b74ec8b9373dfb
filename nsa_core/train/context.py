"""What an attempt has before torch is loaded: its directory, its signals and its voice."""

from dataclasses import dataclass

from nsa_core.env import RankEnvironment
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import RunManifest
from nsa_core.train.heartbeat import HeartbeatWriter
from nsa_core.train.log import RunLog
from nsa_core.train.stop import SignalWatch


@dataclass(frozen=True)
class AttemptContext:
    """What exists before torch is loaded."""

    run: RunDir
    manifest: RunManifest
    rank: RankEnvironment
    log: RunLog
    beats: HeartbeatWriter
    signals: SignalWatch
