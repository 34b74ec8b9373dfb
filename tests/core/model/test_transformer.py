"""The language model: counts, seeds, loss, recomputation, statistics."""

import math
from typing import Never

import pytest
import torch
from torch.nn import functional as F

from nsa_core.config.counts import StepShape, count_flops, count_parameters, estimate_memory
from nsa_core.config.model import ModelConfig
from nsa_core.config.training import OptimizerConfig
from nsa_core.evaluate.device import autocast
from nsa_core.kernels.packing import Packing
from nsa_core.model import loss as loss_module
from nsa_core.model import transformer
from nsa_core.model.transformer import LanguageModel
from tests.core.model.cases import small_config, small_model, tokens
from tests.oracle import num_reads

VARIANTS = [
    small_config(nsa={"phi": phi}, gate={"kind": gate, "per": per}, **rest)
    for phi, gate, per, rest in (
        ("avg", "linear", "head", {}),
        ("linear", "mlp", "group", {"tie_embeddings": False}),
        ("mlp", "softmax", "head", {"activation": "silu"}),
        ("mlp", "mlp", "head", {"num_layers": 3}),
        ("mlp", "linear", "head", {"attention": "dense"}),
    )
]


@pytest.mark.parametrize("config", VARIANTS)
def test_the_counted_parameters_are_the_real_ones(config) -> None:
    assert LanguageModel(config).num_parameters() == count_parameters(config).total


def test_the_main_model_has_the_size_the_specification_states() -> None:
    counts = count_parameters(ModelConfig())
    assert round((counts.total - counts.compression) / 1e6) == 117
    byte = count_parameters(ModelConfig(vocab_size=257))
    assert round((byte.total - byte.compression) / 1e6) == 78


def test_flops_count_the_work_of_the_attention_that_is_configured() -> None:
    nsa, dense = ModelConfig(), ModelConfig(attention="dense")
    assert count_flops(nsa, 65_536).attention < 0.2 * count_flops(dense, 65_536).attention
    length = 100
    pairs = sum(range(1, length + 1)) / length
    per_pair = 2 * dense.num_layers * dense.num_heads * 128
    assert count_flops(dense, length).attention == pytest.approx(pairs * per_pair)
    flops = count_flops(nsa, 2048)
    assert flops.train == 3 * (flops.forward - flops.scoring) + flops.scoring


def test_visible_keys_of_the_flop_count_are_the_reads_of_decoding() -> None:
    model = small_model()
    flops = count_flops(model.config, 37)
    reads = sum(num_reads(model.geometry, position) for position in range(37)) / 37
    per_key = 2 * model.config.num_layers * model.config.num_heads * (6 + 5)
    assert flops.attention == pytest.approx(per_key * reads)


def test_memory_estimate_has_exact_state_and_shrinks_with_recomputation() -> None:
    config, adamw = ModelConfig(), OptimizerConfig()
    total = count_parameters(config).total
    plain = estimate_memory(config, adamw, "bf16", StepShape(16_384))
    assert plain.weights + plain.optimizer == pytest.approx(12 * total / 2**20)
    sizes = [
        estimate_memory(
            config, adamw, "bf16", StepShape(16_384, activation_checkpointing=mode)
        ).total
        for mode in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    muon = estimate_memory(config, OptimizerConfig(kind="muon"), "bf16", StepShape(16_384))
    assert muon.optimizer < plain.optimizer


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second, other = (LanguageModel(small_config(), seed=seed) for seed in (1, 1, 2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("chunk", [31 * 2, 2**20])
@pytest.mark.parametrize("is_tied", [True, False])
def test_loss_and_gradients_equal_plain_cross_entropy(
    chunk: int, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", chunk)
    model = small_model(small_config(tie_embeddings=is_tied))
    row = tokens(2, 9)
    targets = row.roll(-1, dims=1)
    targets[:, -2:] = -1
    result = model.loss(row, targets)
    plain = F.cross_entropy(
        model(row).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum"
    )
    torch.testing.assert_close(result.sum, plain)
    assert result.count.item() == 14
    for found, expected in zip(
        torch.autograd.grad(3 * result.sum, list(model.parameters())),
        torch.autograd.grad(3 * plain, list(model.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)


def test_accumulated_micro_batches_equal_one_batch() -> None:
    model = small_model()
    row = tokens(4, 11)
    whole = model.loss(row, row)
    parts = [model.loss(part, part) for part in row.split(1)]
    count = sum(part.count for part in parts)
    torch.testing.assert_close(sum(part.sum for part in parts) / count, whole.sum / whole.count)


def test_the_loss_is_float32_under_half_precision() -> None:
    model = small_model(dtype=torch.float32)
    row = tokens(1, 12)
    with torch.autocast("cpu", torch.bfloat16):
        half = model.loss(row, row)
    assert half.sum.dtype == half.count.dtype == torch.float32
    torch.testing.assert_close(half.sum, model.loss(row, row).sum, rtol=2e-2, atol=0)
    half.sum.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def streams_of(model, row: torch.Tensor) -> list[torch.dtype]:
    """The dtype of what goes into each block, and of the hidden states."""
    found = []
    hooks = [
        block.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].dtype))
        for block in model.block_list
    ]
    found.append(model.hidden(row).dtype)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_half_residual_stream_has_the_dtype_of_autocast_and_learns_the_same(
    attention: str,
) -> None:
    model, row = small_model(small_config(attention=attention)).float(), tokens(1, 12)
    losses, gradients = [], []
    for model.has_half_residual in (False, True):
        expected = torch.bfloat16 if model.has_half_residual else torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert streams_of(model, row) == [expected] * 3
            losses.append(model.loss(row, row).sum)
        gradients.append(torch.autograd.grad(losses[-1], list(model.parameters())))
    assert streams_of(model, row) == [torch.float32] * 3  # without autocast
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
    assert not torch.equal(*losses)
    for wide, half in zip(*gradients, strict=True):
        assert half.dtype == torch.float32
        assert (wide - half).norm() < 0.1 * wide.norm()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_bit_of_the_gradients(mode: str, attention: str) -> None:
    model = small_model(small_config(attention=attention))
    row = tokens(2, 19)
    kept = torch.autograd.grad(model.loss(row, row).sum, list(model.parameters()))
    model.activation_checkpointing = mode
    again = torch.autograd.grad(model.loss(row, row).sum, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def count_forwards(model, mode) -> dict[str, int]:
    """How often each part of a block was begun in one step; torch stops a repetition early."""
    counts = {"attention": 0, "mlp": 0}
    for block in model.block_list:
        for part in counts:

            def count(*_, part=part) -> None:
                counts[part] += 1

            getattr(block, part).register_forward_pre_hook(count)
    model.activation_checkpointing = mode
    model.loss(tokens(1, 9), tokens(1, 9)).sum.backward()
    return counts


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize(
    ("mode", "counts"), [("none", (2, 2)), ("selective", (4, 2)), ("full", (4, 4))]
)
def test_recomputation_runs_what_its_mode_names_again(
    mode: str, counts: tuple[int, int], attention: str
) -> None:
    model = small_model(small_config(attention=attention))
    assert tuple(count_forwards(model, mode).values()) == counts


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_recomputation_keeps_less_for_the_backward_pass(attention: str) -> None:
    row, kept = tokens(1, 40), {}
    for mode in ("none", "selective", "full"):
        model = small_model(small_config(attention=attention))
        model.activation_checkpointing = mode
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = model.hidden(row)
        kept[mode] = sum(sizes.values())
        assert hidden.requires_grad
    assert kept["full"] < kept["selective"] < kept["none"]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_nothing_is_prepared_for_recomputation_without_gradients(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_, **__) -> Never:
        raise AssertionError

    monkeypatch.setattr(transformer, "checkpoint", refuse)
    model = small_model()
    model.activation_checkpointing = mode
    with torch.no_grad():
        model(tokens(1, 9))
    with pytest.raises(AssertionError):
        model(tokens(1, 9))


def test_statistics_are_off_until_asked_for_and_then_true() -> None:
    model = small_model()
    row = tokens(2, 19)
    model.loss(row, row)
    assert model.gate_statistics() is None
    with model.recording_statistics():
        model.loss(row, row)
    statistics = model.gate_statistics()
    assert [layer.layer for layer in statistics.layers] == [0, 1]
    geometry = model.geometry
    chosen = sum(geometry.num_chosen(position) for position in range(19)) / 19
    for layer in statistics.layers:
        assert sum(layer.branch_shares) == pytest.approx(1)
        assert 0 <= layer.entropy_min <= layer.entropy_mean <= math.log(3)
        assert layer.selected_blocks == pytest.approx(chosen)
    assert statistics.worst.entropy_mean == min(layer.entropy_mean for layer in statistics.layers)


def test_statistics_recognise_collapsed_and_equal_gates() -> None:
    model = small_model()
    row = tokens(1, 9)
    with torch.no_grad():
        for block in model.block_list:
            block.attention.gate.logits.weight.zero_()
            block.attention.gate.logits.bias.zero_()
        model.block_list[1].attention.gate.logits.bias[0::3] = -30.0
        model.block_list[1].attention.gate.logits.bias[1::3] = -30.0
    with model.recording_statistics():
        model(row)
    equal, collapsed = model.gate_statistics().layers
    assert equal.entropy_mean == pytest.approx(math.log(3), abs=1e-6)
    assert equal.collapse_frac == 0
    assert collapsed.collapse_frac == 1
    assert collapsed.branch_shares[2] == pytest.approx(1)
    assert model.gate_statistics().worst.layer == 1


def test_dense_models_have_no_gate_statistics() -> None:
    model = small_model(small_config(attention="dense"))
    with model.recording_statistics():
        model(tokens(1, 9))
    assert model.gate_statistics() is None


def test_documents_that_do_not_fill_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="hold 7 tokens and the batch has 8"):
        small_model()(tokens(2, 4), Packing.from_lengths([7]))


def test_weight_decay_leaves_norms_biases_and_tables_alone() -> None:
    infos = {info.name: info for info in LanguageModel(small_config()).parameter_infos()}
    kept = [name for name, info in infos.items() if not info.is_decayed]
    assert set(kept) == {
        name
        for name in infos
        if "norm" in name or name.endswith(("bias", "position_LD")) or name.startswith("embedding")
    }
    muon = {name.split(".", 2)[2] for name, info in infos.items() if info.is_block_matrix}
    assert muon == {
        *(f"attention.{part}.weight" for part in ("q", "kv", "out")),
        *(f"attention.phi_{a}.{part}.weight" for a in "kv" for part in ("up", "down")),
        "mlp.up.weight",
        "mlp.down.weight",
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler itself, which are not ours to mend
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_compiled_as_a_whole_keeps_its_gradients(precision: str) -> None:
    row = torch.randint(8, (1, 40), generator=torch.Generator().manual_seed(0))
    grads = []
    for is_compiled in (False, True):
        model = small_model(small_config(num_layers=1), dtype=torch.float32)
        loss = torch.compile(model.loss, backend="aot_eager") if is_compiled else model.loss
        with autocast(torch.device("cpu"), precision):
            loss(row, row).sum.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(grad.norm() > 0 for grad in grads[0])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_an_operator_that_a_compiler_need_not_look_into(
    dtype: torch.dtype, needs_grad: bool
) -> None:
    hidden, weight = torch.randn(7, 4).to(dtype), torch.randn(5, 4).to(dtype)
    target = torch.tensor([0, 4, -1, 2, 3, 1, -1])
    torch.library.opcheck(
        torch.ops.nsa.cross_entropy.default, (hidden, weight, target, needs_grad, False)
    )


def test_the_gradient_of_the_head_is_summed_over_the_chunks_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(loss_module.CHUNK_LOGITS, "cpu", 1)  # a row is a chunk
    num_rows = 600  # in bfloat16 a sum of equals stands still at 256 of them
    hidden, weight = torch.ones(num_rows, 2).bfloat16(), torch.zeros(2, 2).bfloat16()
    target = torch.zeros(num_rows, dtype=torch.long)
    _, _, grad = torch.ops.nsa.cross_entropy(hidden, weight, target, True, False)
    assert grad.dtype == torch.float32
    torch.testing.assert_close(grad, num_rows * torch.tensor([[-0.5, -0.5], [0.5, 0.5]]))
