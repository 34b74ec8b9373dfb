"""Policy and capability decide; nothing falls back in silence."""

import importlib
from dataclasses import replace

import pytest
import torch

from nsa_core.config.backend_policy import branch_policy
from nsa_core.config.recipe import resolve
from nsa_core.config.training import RuntimeConfig
from nsa_core.kernels import dispatch
from nsa_core.kernels.backend import DeviceFacts

CPU = DeviceFacts("cpu", None, torch.float32)


def test_auto_on_a_cpu_is_sdpa_and_says_why():
    chosen = dispatch.choose_backends(RuntimeConfig(), CPU)
    assert [choice.name for choice in chosen.choices] == ["sdpa"] * 3
    assert all("triton needs a CUDA device" in choice.reason for choice in chosen.choices)


def test_on_a_cpu_only_sdpa_is_imported(monkeypatch):
    imported, plain = [], importlib.import_module

    def spy(name):
        imported.append(name)
        return plain(name)

    monkeypatch.setattr(importlib, "import_module", spy)
    dispatch.choose_backends(RuntimeConfig(), CPU)
    assert set(imported) == {"nsa_core.kernels.gathered_backend"}


@pytest.mark.parametrize("name", ["triton", "flash"])
def test_a_named_backend_that_cannot_run_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}.*selected.*CUDA device.*cpu"):
        dispatch.choose_backends(RuntimeConfig(backend_selected=name), CPU)


def test_a_branch_overrides_the_common_backend():
    with pytest.raises(ValueError, match="compressed"):
        dispatch.choose_backends(RuntimeConfig(backend="triton", backend_sliding="sdpa"), CPU)
    runtime = RuntimeConfig(backend="sdpa")
    reasons = {choice.reason for choice in dispatch.choose_backends(runtime, CPU).choices}
    assert reasons == {"named by the configuration (runtime.backend)"}


def test_a_missing_module_is_named(monkeypatch):
    missing = "nsa_core.kernels.absent"
    monkeypatch.setitem(dispatch.BACKEND_MODULES, "flash", missing)
    facts = DeviceFacts("cuda", (8, 0), torch.bfloat16)
    policy = branch_policy(RuntimeConfig(backend_sliding="flash"), "sliding", None)
    with pytest.raises(ValueError, match=missing):
        dispatch.choose_backend(policy, facts)


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ((7, 0), "sdpa"),
        ((7, 5), "sdpa"),
        ((8, 0), "triton"),
        ((8, 9), "triton"),
        ((9, 0), "triton"),
    ],
)
def test_auto_follows_the_architecture_and_says_why_not(capability, name):
    facts = DeviceFacts("cuda", capability, torch.float16)
    for choice in dispatch.choose_backends(RuntimeConfig(), facts).choices:
        assert choice.name == name
        if name == "sdpa":
            assert f"sm_{capability[0]}{capability[1]}" in choice.reason


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "Hopper's Gluon kernels: key gradients, query gradients, forward; Triton's: backward"),
        ({}, "backward of items (heads are 128 wide, not 64)"),
        ({"widths": (64, 64)}, "backward of items; Triton's: forward (heads are 64 wide, not 128)"),
        ({"heads": (12, 4)}, "query gradients (a group has 3 heads, not a multiple of 2)"),
        ({"widths": (64, 64), "heads": (16, 4)}, "a group has 4 heads, not a multiple of 3"),
        ({"dtype": torch.float16}, "the inputs are torch.float16, not bfloat16"),
        ({"capability": (8, 0)}, "any card: the card is not sm_90"),
        ({"capability": (10, 0)}, "any card: the card is not sm_90"),
        ({"widths": (64, 128)}, "64 and 128 wide"),
        ({"widths": (32, 32)}, "32 and 32 wide"),
        ({"blocks": (32, 16)}, "the selection block has 32 tokens, not 64"),
    ],
)
def test_the_reason_names_the_kernels_of_hopper(change, said, monkeypatch):
    triton = pytest.importorskip("triton", reason="the Triton kernels need the train extra")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    known = DeviceFacts("cuda", (9, 0), torch.bfloat16, widths=(128, 128), blocks=(64, 16))
    for choice in dispatch.choose_backends(RuntimeConfig(), replace(known, **change)).choices:
        assert choice.name == "triton"
        assert said in choice.reason


def test_ordered_sums_of_items_are_not_hoppers(monkeypatch):
    triton = pytest.importorskip("triton", reason="the Triton kernels need the train extra")
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    facts = DeviceFacts("cuda", (9, 0), torch.bfloat16, widths=(64, 64))
    for choice in dispatch.choose_backends(RuntimeConfig(), facts).choices:
        assert "backward of items (repeats have to be equal to the bit)" in choice.reason


def test_a_triton_whose_gluon_was_not_proven_is_named(monkeypatch):
    triton = pytest.importorskip("triton", reason="the Triton kernels need the train extra")
    monkeypatch.setattr(triton, "__version__", "3.99.0")
    facts = DeviceFacts("cuda", (9, 0), torch.bfloat16)
    for choice in dispatch.choose_backends(RuntimeConfig(), facts).choices:
        assert "not proven on Triton 3.99.0, but on 3.6.0, 3.7.1" in choice.reason


def test_float32_on_a_card_is_sdpa_because_of_the_dtype():
    facts = DeviceFacts("cuda", (9, 0), torch.float32)
    for choice in dispatch.choose_backends(RuntimeConfig(), facts).choices:
        assert (choice.name, "torch.float32" in choice.reason) == ("sdpa", True)


#: What no Triton kernel of training serves, and the words for it.
UNSERVED = [
    (["model.head_dim_k=48", "model.head_dim_v=48"], "d_k to be a power of two >= 16, got 48"),
    (["model.head_dim_v=256"], "at most 128, got 64 and 256"),
    (["model.head_dim_v=8"], "d_v to be a power of two >= 16, got 8"),
    (["model.nsa.select_block=128"], "select_block to be at most 64, got 128"),
    (["model.nsa.select_block=48"], "select_block to be a power of two >= 16, got 48"),
    (
        [f"model.nsa.{size}=8" for size in ("select_block", "compress_block", "compress_stride")],
        "select_block to be a power of two >= 16, got 8",
    ),
    (["batch.seq_len=2796203"], "2796203 tokens have up to 2147483904 elements"),
]


def card_facts(config):
    """What a run is on a card that is not here."""
    facts = vars(dispatch.device_facts(torch.device("cpu"), torch.bfloat16, config))
    return DeviceFacts(**{**facts, "device_type": "cuda", "capability": (9, 0)})


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("sets", "words"), UNSERVED)
def test_auto_passes_over_triton_for_sizes_that_its_kernels_refuse(sets, words, attention):
    config = resolve("m7c-125m", sets=sets).config
    chosen = dispatch.choose_backends(config.runtime, card_facts(config), attention)
    assert {choice.name for choice in chosen.choices} == {"sdpa"}
    assert all(words in choice.reason for choice in chosen.choices)


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(("sets", "words"), UNSERVED)
def test_triton_that_is_named_for_sizes_that_its_kernels_refuse_is_refused(sets, words, attention):
    config = resolve("m7c-125m", sets=[*sets, "runtime.backend=triton"]).config
    with pytest.raises(ValueError, match=f"triton cannot run .*{words}"):
        dispatch.choose_backends(config.runtime, card_facts(config), attention)


def test_the_longest_document_that_32_bits_address_is_served():
    config = resolve("m7c-125m", sets=["batch.seq_len=2796202"]).config
    chosen = dispatch.choose_backends(config.runtime, card_facts(config))
    assert {choice.name for choice in chosen.choices} == {"triton"}


def test_widths_alone_are_judged_where_nothing_else_is_known():
    facts = DeviceFacts("cuda", (9, 0), torch.bfloat16, widths=(48, 48))
    chosen = dispatch.choose_backends(RuntimeConfig(), facts)
    assert {choice.name for choice in chosen.choices} == {"sdpa"}


@pytest.mark.parametrize(("groups", "name"), [(2, "triton"), (1, "gathered")])
def test_decode_is_triton_only_for_groups_that_its_kernels_serve(groups, name):
    sets = ["model.num_heads=32", f"model.num_kv_groups={groups}"]
    config = resolve("m7c-125m", sets=sets).config
    chosen = dispatch.choose_backends(config.runtime, card_facts(config))
    assert {choice.name for choice in chosen.choices} == {"triton"}
    assert dispatch.choose_decode_attention(chosen).name == name


def test_flash_without_a_known_length_says_so():
    policy = branch_policy(RuntimeConfig(flash_min_len_sliding=0), "sliding", None)
    assert "the length of the rows is not known" in policy.reason
