"""Each probe of `python -m nsa_core.checks --full` on a card: what planted faults are held to."""

import pytest

from nsa_core.checks.probes import _Probes, run_probes
from nsa_core.config.recipe import resolve

pytestmark = pytest.mark.gpu
PROBES = ("parity", "choice", "layer", "gradients", "decode", "decode_kernels", "packing")


def config():
    return resolve("m7c-125m", sets=["runtime.device=cuda"]).config


@pytest.mark.parametrize("probe", PROBES)
def test_a_probe_of_the_full_tier_passes(probe):
    checks = list(getattr(_Probes(config(), "cuda", "full"), probe)())
    assert checks
    assert [check for check in checks if check.status != "pass"] == []


def test_the_full_tier_passes():
    report = run_probes(config(), "cuda", "full")
    assert [check for check in report.checks if check.status != "pass"] == []
