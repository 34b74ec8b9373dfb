"""A run with 8-bit products: refused where the device has none, recorded, resumed to the bit."""

import shutil

import pytest
import torch

from nsa_core.config.run import RunConfig
from nsa_core.kernels.backend import DeviceFacts
from nsa_core.rundir.bounded_json import read_records
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.heartbeat import Heartbeat
from nsa_core.rundir.layout import RunDir
from nsa_core.rundir.manifest import read_manifest
from nsa_core.train import learner
from nsa_core.train.failure import TrainerConfigurationError
from nsa_core.train.learner import require_fp8
from tests.core.train.models import same
from tests.core.train.sessions import SMALL, new_run, run_here, saved
from tests.integration.trainer_runs import losses, merge, next_attempt

#: torch multiplies 8-bit numbers on a processor as well, slowly; the trainer refuses it.
IN_FP8 = {"device": "auto", "precision": "bf16", "fp8": "mlp"}


def config_of(**runtime) -> RunConfig:
    changes = {"data": {"path": "text.jsonl"}, "runtime": IN_FP8 | runtime}
    return RunConfig.model_validate(merge(SMALL, changes))


@pytest.mark.parametrize("capability", [None, (7, 0), (8, 0), (8, 6)])
def test_a_device_without_8_bit_products_ends_the_run_in_one_line(capability):
    device = "cuda" if capability else "cpu"
    facts = DeviceFacts(device, capability, torch.bfloat16)
    with pytest.raises(TrainerConfigurationError, match=r"^[^\n]*8\.9 or newer[^\n]*$") as ended:
        require_fp8(config_of(), facts)
    assert ended.value.code == TrainerExit.CONFIGURATION
    require_fp8(config_of(fp8="none"), facts)
    require_fp8(config_of(), DeviceFacts("cuda", (8, 9), torch.bfloat16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a card")
def test_the_trainer_refuses_before_the_first_step(tmp_path, text):
    with pytest.raises(TrainerConfigurationError, match="the device is cpu"):
        run_here(new_run(tmp_path, text, runtime=IN_FP8))


def test_a_run_records_what_it_multiplies_in_fp8_and_resumes_to_the_bit(
    tmp_path, text, monkeypatch
):
    monkeypatch.setattr(learner, "require_fp8", lambda config, facts: None)
    whole = new_run(tmp_path, text, "whole", runtime=IN_FP8)
    assert run_here(whole).code == 0
    assert read_manifest(whole).config.runtime.fp8 == "mlp"
    beats = read_records(whole.heartbeat(), Heartbeat).records
    assert {b.kernel_paths["mlp"] for b in beats if b.kernel_paths} == {"fp8"}

    root = tmp_path / "again" / "runs" / "whole"
    shutil.copytree(whole.root, root)
    cut = RunDir(root)
    for step in range(3, 6):
        shutil.rmtree(cut.checkpoint(step))
    next_attempt(cut)
    assert run_here(cut).code == 0
    assert losses(cut) == losses(whole)
    for found, expected in zip(saved(cut, 5), saved(whole, 5), strict=True):
        assert same(found, expected)
