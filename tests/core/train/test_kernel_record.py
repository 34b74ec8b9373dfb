"""The trainer uses the kernels that were proven, or does not train."""

import pytest

from nsa_core.kernels.backend import BackendChoice
from nsa_core.rundir.exit import TrainerExit
from nsa_core.rundir.manifest import KernelChoice, read_manifest
from nsa_core.train.failure import ConfigurationError
from nsa_core.train.kernel_record import require_recorded

CHOSEN = (
    BackendChoice("compressed", "triton", "the fastest of the known backends"),
    BackendChoice("selected", "sdpa", "triton needs sm_80 or newer, and the card is sm_75"),
)


def test_a_backend_that_is_not_the_proven_one_ends_the_run_with_both_names(manifest):
    proven = {"selected": KernelChoice(name="triton", reason="the fastest")}
    with pytest.raises(
        ConfigurationError, match=r"proved triton .*selected.* sdpa .*sm_75"
    ) as ended:
        require_recorded(manifest.model_copy(update={"kernels": proven}), CHOSEN)
    assert ended.value.code == TrainerExit.CONFIGURATION


def test_the_proven_backends_and_branches_without_a_record_go_on(manifest):
    proven = {"compressed": KernelChoice(name="triton", reason="another reason")}
    require_recorded(manifest.model_copy(update={"kernels": proven}), CHOSEN)
    require_recorded(manifest, CHOSEN)


def test_a_manifest_of_an_earlier_version_has_no_record(run, manifest):
    del manifest
    text = run.manifest.read_text().replace('"kernels"', '"something_else"')
    run.manifest.write_text(text)
    assert read_manifest(run).kernels == {}
