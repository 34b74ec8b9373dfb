"""flash-attn as a backend, against the reference, with a package that keeps its contract.

The real package has not been run: it needs a card and a wheel.
"""

import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_core.config.run import RunConfig
from nsa_core.config.training import RuntimeConfig
from nsa_core.kernels import dispatch, flash
from nsa_core.kernels.backend import DeviceFacts, RowLayout
from nsa_core.kernels.flash import FlashBackend, parse_version, refusal, residue_sequences
from nsa_core.kernels.geometry import BlockGeometry
from nsa_core.kernels.packing import Packing
from nsa_core.kernels.reference import ReferenceBackend
from tests.core.kernels import flash_package

CARD = DeviceFacts("cuda", (9, 0), torch.bfloat16, (64, 64), RowLayout(2048, is_packed=True))
GEOMETRY = BlockGeometry(
    compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=10
)
LENGTHS = [1, 3, 8, 61, 10, 7, 30]


def backend(package=flash_package) -> FlashBackend:
    return FlashBackend(package, ReferenceBackend())


def draw(rows: int, heads: int, width: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, heads, width)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def compare(call, q, k, v) -> None:
    """Output and all gradients, in float64, to the last few bits."""
    gradient = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    found = call(backend())
    wanted = call(ReferenceBackend())
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(found, (q, k, v), gradient),
        torch.autograd.grad(wanted, (q, k, v), gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [1, 2, 10, 61, 500])
def test_the_window_is_that_of_the_reference_in_output_and_gradients(window):
    packing = Packing.from_lengths(LENGTHS)
    geometry = BlockGeometry(8, 4, 8, 3, window)
    q, k, v = draw(packing.num_tokens, 6), draw(packing.num_tokens, 2), draw(packing.num_tokens, 2)
    compare(lambda b: b.sliding(q, k, v, geometry, packing), q, k, v)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    stride=st.integers(1, 6),
    strides=st.integers(1, 4),
    heads=st.sampled_from([1, 3]),
)
def test_the_compressed_branch_is_causal_attention_of_every_residue(
    lengths, stride, strides, heads
):
    packing = Packing.from_lengths(lengths)
    block = stride * strides
    geometry = BlockGeometry(block, stride, block, 3, 10)
    slots = geometry.num_slots(packing.num_tokens)
    q, k, v = draw(packing.num_tokens, 2 * heads), draw(slots, 2, seed=1), draw(slots, 2, seed=2)
    lses = []

    def call(b):
        out, lse = b.compressed(q, k, v, geometry, packing)
        lses.append(lse)
        return out

    if slots:
        compare(call, q, k, v)
    else:
        assert torch.equal(call(backend()), torch.zeros_like(q))
        call(ReferenceBackend())
    torch.testing.assert_close(lses[0].double(), lses[1].detach(), rtol=0, atol=1e-12)


def test_slots_that_no_block_owns_never_count_even_as_nan():
    packing = Packing.from_lengths(LENGTHS)
    slots = GEOMETRY.num_slots(packing.num_tokens)
    q, k, v = draw(packing.num_tokens, 2), draw(slots, 1, seed=1), draw(slots, 1, seed=2)
    plain, _ = backend().compressed(q, k, v, GEOMETRY, packing)
    owned = torch.zeros(slots, dtype=torch.bool)
    for start, length in zip(packing.cu_seqlens.tolist(), LENGTHS, strict=False):
        first = start // 4
        owned[first : first + GEOMETRY.num_compressed(length)] = True
    assert not owned.all()
    poisoned = [torch.where(owned[:, None, None], x, float("nan")) for x in (k, v)]
    out, _ = backend().compressed(q, *poisoned, GEOMETRY, packing)
    assert torch.equal(out, plain)


def test_residue_sequences_cover_every_token_once():
    packing = Packing.from_lengths(LENGTHS)
    groups = residue_sequences(packing, GEOMETRY)
    assert groups.place_N.sort().values.tolist() == list(range(packing.num_tokens))
    assert torch.equal(groups.token_N[groups.place_N], torch.arange(packing.num_tokens))
    assert int(groups.cu_keys[-1]) <= packing.num_tokens


def test_documents_padded_with_empty_ones_give_the_same():
    ids = torch.tensor([[0] * 13 + [1] * 19, [2] * 32])
    padded = Packing.from_document_ids(ids)
    exact = Packing.from_lengths([13, 19, 32])
    slots = GEOMETRY.num_slots(64)
    q, k, v = draw(64, 2), draw(slots, 1, seed=1), draw(slots, 1, seed=2)
    k_N, v_N = draw(64, 1, seed=3), draw(64, 1, seed=4)
    for call in (
        lambda packing: backend().compressed(q, k, v, GEOMETRY, packing)[0],
        lambda packing: backend().sliding(q, k_N, v_N, GEOMETRY, packing),
    ):
        torch.testing.assert_close(call(padded), call(exact), rtol=0, atol=1e-12)


def test_the_selected_branch_is_refused_with_the_reason():
    reason = refusal("selected", CARD)
    assert reason is not None
    assert "every token chooses its own blocks" in reason


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_type": "cpu", "capability": None}, "CUDA device, and the device is cpu"),
        ({"capability": (7, 5)}, "sm_80 or newer, and the card is sm_75"),
        ({"dtype": torch.float32}, "torch.float32"),
        ({"widths": (64, 128)}, "d_k = d_v"),
        ({"widths": (512, 512)}, "up to 256"),
        ({}, "flash-attn is not installed"),
    ],
)
def test_each_thing_that_flash_needs_is_named(changes, says):
    facts = DeviceFacts(**{**vars(CARD), **changes})
    assert says in refusal("sliding", facts)


@pytest.fixture
def installed(monkeypatch):
    """Make the stand-in importable under the package's name, in a version of choice."""

    def install(version: str) -> None:
        monkeypatch.setitem(sys.modules, "flash_attn", flash_package)
        monkeypatch.setattr(flash, "read_version", lambda: version)
        real = dispatch.refusal

        def without_a_card(name, branch, facts):
            return None if name == "triton" else real(name, branch, facts)

        monkeypatch.setattr(dispatch, "refusal", without_a_card)

    return install


BROKEN = {
    "a build for another torch": (
        'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104")',
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104",
    ),
    "a library that is missing": ('raise OSError("libcudart.so.11.0: not found")', "OSError: lib"),
    "an error of its own": ('raise RuntimeError("no kernel image\\nfor this")', "no kernel image"),
    "another package": ("x = 1", "it has no flash_attn_varlen_func"),
}


@pytest.mark.parametrize(("code", "says"), BROKEN.values(), ids=BROKEN)
def test_a_package_that_cannot_be_imported_is_not_usable_in_its_own_words(
    tmp_path, monkeypatch, installed, code, says
):
    installed("2.8.0")
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text(code + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    chosen = dispatch.choose_backends(RuntimeConfig(flash_min_len_sliding=0), CARD).choices[2]
    assert chosen.name == "triton"
    assert says in chosen.reason
    assert chosen.reason.startswith("flash-attn 2.8.0 is installed and not usable: ")
    with pytest.raises(ValueError, match="not usable"):
        dispatch.choose_backends(RuntimeConfig(backend_sliding="flash"), CARD)


def test_an_old_package_serves_the_window_but_not_the_compressed_branch(installed):
    installed("2.5.9.post1")
    assert refusal("sliding", CARD) is None
    assert "2.5.9.post1 is installed" in refusal("compressed", CARD)
    assert "2.7 or later" in refusal("compressed", CARD)


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.7.4.post1", (2, 7, 4)),
        ("2.8.0+cu12torch2.6", (2, 8, 0)),
        ("3.0.0b1", (3, 0, 0)),
        ("", ()),
    ],
)
def test_versions_are_read_as_far_as_they_are_numbers(version, numbers):
    assert parse_version(version) == numbers


def test_flash_runs_where_it_is_allowed_from_its_length_on_and_its_reason_is_recorded(installed):
    installed("2.8.0")
    runtime = RuntimeConfig(flash_min_len_sliding=1024, flash_min_len_compressed=4096)
    chosen = dispatch.choose_backends(runtime, CARD)
    names = {choice.branch: choice.name for choice in chosen.choices}
    assert names == {"compressed": "triton", "selected": "triton", "sliding": "flash"}
    reasons = {choice.branch: choice.reason for choice in chosen.choices}
    assert "below 4096 tokens (runtime.flash_min_len_compressed)" in reasons["compressed"]


def test_flash_that_is_allowed_but_absent_costs_nothing_and_leaves_its_reason(monkeypatch):
    monkeypatch.setattr(flash, "read_version", lambda: None)
    runtime = RuntimeConfig(flash_min_len_sliding=0)
    chosen = dispatch.choose_backends(runtime, CARD)
    sliding = chosen.choices[2]
    assert sliding.name == "triton"
    assert sliding.reason.startswith("flash-attn is not installed; Hopper's Gluon kernels: ")


@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_flash_that_is_named_and_cannot_run_is_refused_and_never_replaced(monkeypatch, branch):
    monkeypatch.setattr(flash, "read_version", lambda: None)
    runtime = RuntimeConfig(**{f"backend_{branch}": "flash"})
    with pytest.raises(
        ValueError, match=rf"flash cannot run the {branch} branch: .*backend_{branch}"
    ):
        dispatch.choose_backends(runtime, CARD)


def test_the_dense_control_takes_flash_only_where_it_is_named(installed):
    installed("2.8.0")
    for runtime, rows, name in (
        (RuntimeConfig(flash_min_len_sliding=0), RowLayout(2048, is_packed=False), "sdpa"),
        (RuntimeConfig(flash_min_len_sliding=0), RowLayout(2048, is_packed=True), "triton"),
        (RuntimeConfig(backend_dense="flash"), RowLayout(2048, is_packed=True), "flash"),
    ):
        facts = DeviceFacts("cuda", (9, 0), torch.bfloat16, (64, 64), rows)
        chosen = dispatch.choose_backends(runtime, facts, "dense")
        assert [(one.branch, one.name) for one in chosen.choices] == [("dense", name)]
        assert chosen.dense is not None
        assert chosen.dense.name == name


def test_too_many_sequences_are_refused_before_the_card_does(monkeypatch):
    monkeypatch.setattr(flash, "MAX_SEQUENCES", 10)
    packing = Packing.from_lengths([4] * 11)
    q, k = draw(44, 1), draw(44, 1)
    with pytest.raises(ValueError, match="10 sequences a call, and this one has 11"):
        backend().sliding(q, k, k, GEOMETRY, packing)


def test_an_lse_of_another_layout_is_not_taken_for_ours():
    def per_batch(*args, **options):
        out, lse, _ = flash_package.flash_attn_varlen_func(*args, **options)
        return out, lse[None], None

    packing = Packing.from_lengths([20])
    q, k = draw(20, 1), draw(5, 1)
    package = types.SimpleNamespace(flash_attn_varlen_func=per_batch)
    with pytest.raises(ValueError, match="lse of shape"):
        backend(package).compressed(q, k, k, GEOMETRY, packing)


def test_the_facts_of_a_run_hold_its_widths_and_rows():
    config = RunConfig()
    facts = dispatch.device_facts(torch.device("cpu"), torch.float32, config)
    assert facts.widths == (64, 64)
    assert facts.rows == RowLayout(2048, is_packed=True)
