"""Run the probes of one device and turn what they found into a Report."""

import time
from collections.abc import Callable, Iterator

import torch

from nsa_core.checks.causality import SentinelSettings, perturbation_probe, sentinel_probe
from nsa_core.checks.decoding import (
    DecodeKernelsResult,
    DecodeResult,
    decode_kernels_probe,
    decode_probe,
)
from nsa_core.checks.layer import EXACT_LIMIT, layer_probe
from nsa_core.checks.long_context import (
    ANGLE_LIMIT,
    GROWTH_LIMIT,
    angle_error,
    long_context_probe,
    packing_error,
)
from nsa_core.checks.numerics import (
    LIMITS,
    REGRET_LIMIT,
    choice_regret,
    describe_dead_rows,
    parity_probe,
    short_length,
    trained_rows,
)
from nsa_core.config.backend_policy import policy_text
from nsa_core.config.run import RunConfig
from nsa_core.evaluate.device import COMPUTE_DTYPE
from nsa_core.kernels.backend import BranchBackends
from nsa_core.kernels.dispatch import choose_backends, choose_decode_attention, device_facts
from nsa_core.kernels.gathered_backend import MASKED_LENGTH_FACTOR, GatheredBackend
from nsa_core.model.transformer import LanguageModel
from nsa_core.rundir.report import CheckResult, Report

_PRECISIONS = {dtype: name for name, dtype in COMPUTE_DTYPE.items()}
_ALSO = "python -m nsa_core.checks"
_LEAK_HINT = "do not train with this code: a token sees its future; compare the kernels' masks"
_DECODE_HINT = "generated text would differ from the trained model"
#: Tokens of the long row of the full tier.
LONG_TOKENS = {"cpu": 2**13, "cuda": 2**16}
#: How many blocks a token has chosen follows from its position: only the mean's rounding is left.
_BLOCKS_LIMIT = 1e-4
#: Factor on the loss in fp16, as a gradient scaler has one: small gradients would become 0.
_FP16_SCALE = 2.0**12
#: Vocabulary and layers of the models that the probes build: the widths are the run's own.
_PROBE_SIZE = {"vocab_size": 64, "num_layers": 2}


class _Probes:
    """The checks on one device with one configuration; every check is a method."""

    def __init__(self, config: RunConfig, device: str, tier: str) -> None:
        self.is_full = tier == "full"
        self.config = config
        self.device = torch.device(device)
        self.dtype = COMPUTE_DTYPE[config.runtime.precision if device == "cuda" else "fp32"]
        facts = device_facts(self.device, self.dtype, config)
        self.backends = choose_backends(config.runtime, facts, config.model.attention)
        self.model_config = config.model.model_copy(update=_PROBE_SIZE)

    def model(self) -> LanguageModel:
        """A fresh model on the device; its gates are drawn wide so that every branch counts."""
        return LanguageModel(self.model_config, self.backends, seed=1).to(self.device)

    def long_length(self) -> int:
        """Tokens from which every backend takes its path for long documents."""
        sizes = self.model_config.nsa
        return MASKED_LENGTH_FACTOR * sizes.num_selected * sizes.select_block + 37

    def reach(self) -> int:
        """Tokens after which every branch has more than one key, two compressed blocks included."""
        sizes = self.model_config.nsa
        compressed = sizes.compress_block + 2 * sizes.compress_stride
        return max(2 * sizes.window, compressed, 2 * sizes.select_block) + 7

    def autocast(self) -> torch.autocast:
        """The precision of the run."""
        is_low = self.dtype != torch.float32
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=is_low)

    def kernels(self) -> Iterator[CheckResult]:
        """Which backend each branch has here, and why: what the other checks hold for."""
        for choice in self.backends.choices:
            yield CheckResult(
                name=f"kernels.{choice.branch}",
                status="pass",
                message=choice.reason,
                measured=choice.name,
                limit=policy_text(self.config, choice.branch),
            )

    def parity(self) -> Iterator[CheckResult]:
        """Each branch against the reference, forward and gradients.

        Where the rows of the run are so long, and in the full tier, once more beyond the length at
        which every backend takes its path for long documents.
        """
        yield from self._parity("", None)
        if self.is_full or self.config.batch.seq_len >= self.long_length():
            yield from self._parity(".long", self.long_length())

    def _parity(self, suffix: str, num_tokens: int | None) -> Iterator[CheckResult]:
        config, length = self.model_config, num_tokens or short_length(self.model_config)
        for found in parity_probe(config, self.backends, self.device, self.dtype, num_tokens):
            yield _judged(
                name=f"parity.{found.branch}{suffix}",
                is_good=found.is_close,
                message=f"{found.backend} in {self.dtype}, {length} tokens: worst is {found.worst}",
                measured=f"{found.error:.1e} relative L2",
                limit=f"{found.limit:.0e}",
                hint="choose another backend for this branch",
            )

    def choice(self) -> Iterator[CheckResult]:
        """The chosen blocks against the exact choice, where there is one.

        Once more in rows of the run where these are shorter: an operator of all branches may have
        other kernels for them.
        """
        yield self._choice("", self.long_length() if self.is_full else None)
        sizes, row = self.model_config.nsa, self.config.batch.seq_len
        has_choice = sizes.num_selected * sizes.select_block < row
        is_shorter = row < short_length(self.model_config)
        if self.backends.fused is not None and has_choice and is_shorter:
            yield self._choice(".rows", row)

    def _choice(self, suffix: str, num_tokens: int | None) -> CheckResult:
        found = choice_regret(self.model_config, self.backends, self.device, self.dtype, num_tokens)
        return _judged(
            name=f"parity.choice{suffix}",
            is_good=found.is_good,
            message=f"free blocks of {found.num_choices} choices against the exact ones",
            measured=f"{found.regret:.1e} of their score lost",
            limit=f"{REGRET_LIMIT:.0e}",
            hint="use runtime.backend_compressed=sdpa",
        )

    def layer(self) -> Iterator[CheckResult]:
        """A whole attention layer against the paper written out, and the backends in it."""
        sizes, length = self.model_config.nsa, short_length(self.model_config)
        found = layer_probe(
            self.model(), self._plain_model(), num_tokens=length, autocast=self.autocast()
        )
        limit = LIMITS[self.dtype]
        is_good = found.exact <= EXACT_LIMIT and found.kernels <= limit
        yield _judged(
            name="parity.layer",
            is_good=is_good,
            message=f"attention of layer 0, {length} tokens, {sizes.num_selected} blocks chosen",
            measured=f"{found.exact:.1e} from the paper in float64, {found.kernels:.1e} from "
            f"plain PyTorch in {self.dtype}",
            limit=f"{EXACT_LIMIT:.0e} and {limit:.0e}",
            hint="the layer is not what decode and the paper compute",
        )

    def perturbation(self) -> Iterator[CheckResult]:
        """Changed tokens must not move an earlier output or another document by one bit."""
        window = self.model_config.nsa.window
        lengths = [window // 2 + 1, window, self.reach(), self.long_length()]
        if self.is_full:
            lengths.append(16 * window + 9)
        model = self.model()
        with self.autocast():
            vocab_size = self.model_config.vocab_size
            found = perturbation_probe(
                model, vocab_size=vocab_size, lengths=lengths, device=self.device
            )
        message = "no output moved when tokens it cannot see were changed"
        if found.leaks:
            leak = found.leaks[0]
            message = f"token {leak.token} of {leak.length} moved by {leak.difference:.1e}"
        yield _judged(
            name="causality.perturbation",
            is_good=found.is_causal,
            message=message,
            measured=f"{len(found.leaks)} leaks in {found.num_cases} cases",
            limit="0 leaks",
            hint=_LEAK_HINT,
        )

    def gradients(self) -> Iterator[CheckResult]:
        """Every row of every parameter must get a finite gradient that is not zero.

        A fused matrix holds several branches: as a whole it is trained even if one of them is cut
        off. Every id of the vocabulary occurs, so that the rows of the embedding are held to it.
        """
        model = self.model()
        generator = torch.Generator().manual_seed(0)
        length = max(self.reach(), self.model_config.vocab_size) + 1
        ids = torch.randperm(length, generator=generator) % self.model_config.vocab_size
        row = ids[None].to(self.device)
        with self.autocast():
            loss = model.loss(row[:, :-1], row[:, 1:])
        scale = _FP16_SCALE if self.dtype == torch.float16 else 1.0
        torch.autograd.backward(loss.sum * (scale / loss.count))
        trained = {name: trained_rows(one) for name, one in model.named_parameters()}
        dead = [describe_dead_rows(name, rows) for name, rows in trained.items() if not rows.all()]
        all_rows = torch.cat(list(trained.values()))
        yield _judged(
            name="gradients.reach",
            is_good=not dead,
            message=f"no gradient reaches {dead[0]}" if dead else "every parameter is trained",
            measured=f"{int(all_rows.sum())} of {len(all_rows)} rows of {len(trained)} parameters",
            limit="all, finite and not zero",
            hint="a branch or its compression is cut off from the loss",
        )

    def statistics(self) -> Iterator[CheckResult]:
        """A step must record the choice that plain PyTorch records; nothing for a dense model."""
        found = self._recorded_blocks(self.model())
        if not found:
            return
        expected = self._recorded_blocks(self._plain_model())
        gap = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        is_same = gap <= _BLOCKS_LIMIT
        yield _judged(
            name="statistics",
            is_good=is_same,
            message=f"chosen blocks a token in layer 0: {found[0]:.2f}, recorded with the gates",
            measured=f"{gap:.1e} blocks from plain PyTorch",
            limit=f"{_BLOCKS_LIMIT:.0e}",
            hint="what the heartbeat says of gates and choice is not so",
        )

    def _recorded_blocks(self, model: LanguageModel) -> list[float]:
        """Chosen blocks a token, layer by layer, as a training step records them."""
        row = torch.arange(self.reach(), device=self.device)[None] % self.model_config.vocab_size
        with self.autocast(), torch.no_grad(), model.recording_statistics():
            model.loss(row, row)
        recorded = model.gate_statistics()
        return [layer.selected_blocks for layer in recorded.layers] if recorded else []

    def sentinel(self) -> Iterator[CheckResult]:
        """Random tokens cannot be predicted by a model that sees only the past."""
        settings = SentinelSettings() if self.is_full else SentinelSettings.on(self.device)
        model = self.model()
        with self.autocast():
            found = sentinel_probe(list(model.parameters()), model.loss, settings, self.device)
        yield _judged(
            name="causality.sentinel",
            is_good=found.is_causal,
            message=f"{settings.steps} steps on random tokens",
            measured=f"mean loss {found.mean_loss:.4f} nats",
            limit=f">= {found.limit:.4f} nats (ln {settings.vocab_size} - {settings.margin})",
            hint=_LEAK_HINT,
        )

    def decode(self) -> Iterator[CheckResult]:
        """Prefill and token-by-token decode must agree, in float32 with plain PyTorch."""
        yield _judge_decode("decode.prefill", "", self._decode(self._plain_model()))

    def decode_kernels(self) -> Iterator[CheckResult]:
        """The kernels that generation decodes with; nothing where it decodes with plain PyTorch.

        Layer by layer in float32 and in the precision of the run; then whole steps as generation
        makes them, through one CUDA graph on a card.
        """
        kernels = choose_decode_attention(self.backends)
        if kernels.name != "triton":
            return
        model = self.model()
        for dtype in dict.fromkeys((torch.float32, self.dtype)):
            yield _judge_kernels(decode_kernels_probe(model, kernels, dtype))
        steps = self._decode(model, self._plain_model())
        yield _judge_decode("decode.steps", f" with {kernels.name} kernels", steps)

    def _plain_model(self) -> LanguageModel:
        plain = BranchBackends.of(GatheredBackend())
        return LanguageModel(self.model_config, plain, seed=1).to(self.device)

    def _decode(self, model: LanguageModel, one_pass: LanguageModel | None = None) -> DecodeResult:
        """Steps from beyond the window and the first blocks on, where a token has a choice."""
        nsa = self.model_config.nsa
        all_chosen = nsa.num_selected * nsa.select_block
        prompt = max(nsa.window, all_chosen, nsa.compress_block + nsa.compress_stride) + 23
        return decode_probe(model, num_tokens=prompt + 38, prompt=prompt, one_pass=one_pass)

    def long_context(self) -> Iterator[CheckResult]:
        """One long row, forward: its end moves nothing before it, memory grows with the row."""
        num_tokens = LONG_TOKENS[self.device.type]
        model = self.model()
        with self.autocast():
            found = long_context_probe(model, num_tokens=num_tokens)
        moved = found.moved_token
        yield _judged(
            name="long_context",
            is_good=found.is_good,
            message=f"{num_tokens} tokens forward in {found.memory_mib:.0f} MiB, last quarter new"
            + ("" if moved is None else f": token {moved} moved"),
            measured=f"forward memory grew {found.growth:.2f} x linear, first moved output {moved}",
            limit=f"{GROWTH_LIMIT} x linear from half the row, none moved",
            hint="train with shorter rows, or choose another backend",
        )

    def angles(self) -> Iterator[CheckResult]:
        """Rotary angles stay float32 beyond position 32,768, whatever the precision of the run."""
        rotary, config = self.model().rotary, self.model_config
        with self.autocast():
            error = angle_error(rotary, config.rope, config.head_dim_k, self.device)
        table = rotary.frequency.dtype
        is_exact = error <= ANGLE_LIMIT and table == torch.float32
        yield _judged(
            name="rope.angles",
            is_good=is_exact,
            message=f"positions 32,768 to 65,535 under {self.dtype} against float64",
            measured=f"{error:.1e} max abs, frequencies in {table}",
            limit=f"{ANGLE_LIMIT:.0e}, frequencies in torch.float32",
            hint="positions beyond a few thousand get the same angles",
        )

    def packing(self) -> Iterator[CheckResult]:
        """Documents packed in a row give what each of them gives alone."""
        nsa = self.model_config.nsa
        lengths = [nsa.window + 37, nsa.select_block - 1, 1, 2 * nsa.select_block + 5]
        model = self.model()
        with self.autocast():
            error = packing_error(model, lengths)
        limit = LIMITS[self.dtype]
        yield _judged(
            name="packing",
            is_good=error <= limit,
            message=f"documents of {lengths} tokens packed and one by one in {self.dtype}",
            measured=f"{error:.1e} relative L2",
            limit=f"{limit:.0e}",
            hint="set data.pack_documents=false",
        )


def _judged(
    *, name: str, is_good: bool, message: str, measured: str, limit: str, hint: str
) -> CheckResult:
    """A check that passed or failed; the hint is for the failure."""
    return CheckResult(
        name=name, status="pass" if is_good else "fail", message=message, measured=measured,
        limit=limit, hint="" if is_good else hint,
    )  # fmt: skip


def _judge_decode(name: str, with_what: str, found: DecodeResult) -> CheckResult:
    return _judged(
        name=name,
        is_good=found.is_equal,
        message=f"{found.num_tokens} tokens one by one{with_what} against one prefill, in float32",
        measured=f"{found.difference:.1e} max abs",
        limit=f"{found.limit:.0e}",
        hint=_DECODE_HINT,
    )


def _judge_kernels(found: DecodeKernelsResult) -> CheckResult:
    return _judged(
        name=f"decode.kernels.{_PRECISIONS[found.dtype]}",
        is_good=found.is_equal,
        message=f"{found.num_steps} tokens decoded by the kernels against plain PyTorch in float64",
        measured=f"{found.error:.1e} relative L2, {found.wrong_choices} wrong choices "
        f"({found.ties} ties), {found.wrong_reads} wrong counts of keys",
        limit=f"{found.limit:.0e}, 0 wrong",
        hint=_DECODE_HINT,
    )


def run_probes(
    config: RunConfig,
    device: str,
    tier: str,
    tell: Callable[[CheckResult], None] | None = None,
    begin: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Run the probes of a tier.

    `quick` leaves out the sentinel, which takes longest; `full` runs it at the specification's
    size on every device, perturbs a row of 16 windows, compares branches and choice beyond the
    length at which backends change their path, and adds a long row, far angles and packing.

    `tell` gets each check as soon as its probe has ended; `begin`, before each probe, how many are
    done, how many there are, and its name.
    """
    probes = _Probes(config, device, tier)
    wanted = [
        probes.kernels, probes.parity, probes.choice, probes.layer, probes.gradients,
        probes.statistics, probes.perturbation, probes.decode, probes.decode_kernels,
    ]  # fmt: skip
    if tier != "quick":
        wanted.append(probes.sentinel)
    if tier == "full":
        wanted += [probes.angles, probes.packing, probes.long_context]
    checks = []
    for done, probe in enumerate(wanted):
        if begin is not None:
            begin(done, len(wanted), probe.__name__)
        for check in _timed(probe):
            if tell is not None:
                tell(check)
            checks.append(check)
    return Report(at=time.time(), tier=tier, checks=checks)


def _timed(probe: Callable[[], Iterator[CheckResult]]) -> list[CheckResult]:
    started = time.monotonic()
    found = [check.model_copy(update={"command": _ALSO}) for check in probe()]
    spent_s = (time.monotonic() - started) / max(1, len(found))
    return [check.model_copy(update={"seconds": round(spent_s, 2)}) for check in found]
