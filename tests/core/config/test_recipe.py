import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from nsa_core.config.backend_policy import (
    ALL_BRANCHES,
    RowLayout,
    branch_policy,
    expected_backend,
)
from nsa_core.config.base import ConfigError
from nsa_core.config.profile import list_profiles, load_profile
from nsa_core.config.recipe import leaves, list_recipes, resolve
from nsa_core.config.run import RunConfig


def test_flags_win_over_variables_over_profile_over_recipe_and_each_value_knows_its_origin() -> (
    None
):
    found = resolve(
        "m7c-125m",
        "a100",
        ["batch.accumulation=3"],
        {"NSA_BATCH_SIZE": "2", "NSA_ACCUM": "5"},
    )
    batch = found.config.batch
    assert (batch.micro_batch, batch.accumulation) == (2, 3)
    assert found.origin("batch.micro_batch") == "NSA_BATCH_SIZE"
    assert found.origin("batch.accumulation") == "--set"
    assert found.origin("runtime.precision") == "profile a100"
    assert found.origin("schedule.steps") == "recipe m7c-125m"
    assert found.origin("schedule.min_ratio") == "default"


@pytest.mark.parametrize("recipe", list_recipes())
@pytest.mark.parametrize("profile", list_profiles())
def test_every_recipe_resolves_on_every_profile(recipe, profile) -> None:
    sets = ["runtime.device=cpu"] if profile == "cpu" else []
    config = resolve(recipe, profile, sets).config
    hardware = load_profile(profile)
    assert config.runtime.precision in hardware.precisions


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("scheduel.steps=5", "schedule.steps"),
        ("model.nsa.l=16", "model.nsa.compress_block"),
        ("model.nsa=16", "is a section"),
        ("nonsense", "must look like"),
        ("schedule.steps=-1", "schedule.steps"),
        ("schedule.steps=abc", "abc"),
        ("model.nsa.compress_stride=7", "compress_stride 7"),
        ("data.tokenizer=gpt2", "vocab_size 320"),
        (
            "model.rope.scale=4",
            "scale 4 does nothing while scaling is none; set model.rope.scaling",
        ),
        ("model.rope.scale=.inf", "model.rope.scale: Input should be a finite number"),
        ("model.rope.scale=.nan", "model.rope.scale: Input should be a finite number"),
        ("model.rope.base=.inf", "model.rope.base: Input should be a finite number"),
        ("=3", "unknown key ''"),
        ("schedule.steps=" + "9" * 5000, "schedule.steps: a value or a key cannot be read"),
        ("schedule.steps=0x" + "f" * 5000, "… (5,004 characters) is 0xffff"),
        ("schedule.steps='99999999999999999999'", "schedule.steps: it must be at most"),
        ("seed=99999999999999999999", "seed: it must be at most"),
        ("optimizer.weight_decay=1" + "0" * 400, "optimizer.weight_decay: "),
        ("schedule.steps=yes", "schedule.steps: it must be a number (got True)"),
        ("optimizer.weight_decay=on", "optimizer.weight_decay: it must be a number (got True)"),
        ("schedule.steps=" + "[" * 5000, "schedule.steps: its values are nested too deep"),
        ("schedule.steps=2026-13-45", "a value or a key cannot be read: month must be"),
        ("schedule.steps={[1]: 2}", "a value or a key cannot be read: unhashable"),
        ("schedule.steps=!!int x", "a value or a key cannot be read: invalid literal"),
        ("schedule.steps=!!bool x", "a value or a key cannot be read"),
        ("schedule.steps=!!timestamp x", "a value or a key cannot be read"),
        ("schedule.steps=" + "x" * 5000, "… (5,002 characters)"),
        ('data.cache_dir="a\\0b"', "data.cache_dir: it holds a NUL"),
        ('data.path="a\\0b"', "data.path: it holds a NUL"),
        ('evaluation.sample_prompt="\\ud800"', "half of a surrogate pair (got '\\ud800')"),
        ("telemetry.beat_interval_s=1e300", "telemetry.beat_interval_s: "),
        ("watchdog.interval_s=1e300", "watchdog.interval_s: "),
        ("runtime.threads=1000000000", "runtime.threads: "),
        ("optimizer.learning_rate=1e300", "optimizer.learning_rate: "),
        ("optimizer.muon_learning_rate=1e300", "optimizer.muon_learning_rate: "),
    ],
    ids=lambda text: text[:60],
)
def test_a_bad_flag_is_one_line_that_names_the_nearest_key_or_both_values(
    flag: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        resolve("tiny-cpu", "cpu", [flag])
    assert says in str(caught.value)


@pytest.mark.parametrize("length", ["0", "-1", "1"])
def test_a_length_that_no_row_has_is_refused_on_a_profile_with_batches(length: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set: batch\.seq_len: Input should be greater"):
        resolve("m7c-125m", "a100", [f"batch.seq_len={length}"])


def test_a_row_of_more_tokens_than_there_are_positions_is_refused_with_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"seq_len: .* less than or equal to 16777216"):
        resolve("m7c-125m", sets=["batch.seq_len=16777217"])


BROKEN_PROFILES: list[tuple[dict[str, Any], str]] = [
    ({"batch_tiers": [{"micro_batch": {2048: True}}]}, "micro_batch: yes and no in it must be"),
    ({"batch_tiers": [{"micro_batch": {True: 8}}]}, "micro_batch: yes and no in it must be"),
    ({"batch_tiers": [{"micro_batch": {2048: 0}}]}, "micro_batch.2048: Input should be greater"),
    ({"batch_tiers": [{"micro_batch": {0: 8}}]}, "Input should be greater than 0 (got 0)"),
    ({"expected": {"tokens_per_s": {"m7c-125m": True}}}, "tokens_per_s: yes and no in it must"),
    ({"memory_gib": [True]}, "memory_gib: yes and no in it must be numbers"),
    ({"card_pattern": "A100("}, "card_pattern: it is no regular expression: missing )"),
]


@pytest.mark.parametrize(("change", "says"), BROKEN_PROFILES, ids=lambda value: str(value)[:60])
def test_a_broken_profile_is_one_line_that_names_the_value(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    values = {
        "description": "a card", "precisions": ["bf16"], "torch_requirement": "torch",
        "torch_backend": "cpu", "expected": {"source": "nothing"},
    } | change  # fmt: skip
    for tier in values.get("batch_tiers", []):
        tier |= {"min_memory_gib": 0, "tokens_per_step": 4096}
    values["expected"] = {"source": "nothing"} | values["expected"]
    path = tmp_path / "card.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"^profile card\.yaml: [^\n]+$") as caught:
        load_profile(str(path))
    assert says in str(caught.value)


def test_a_seed_of_63_bits_is_taken_and_its_record_loads() -> None:
    seed = 2**63 - 1
    config = resolve("tiny-cpu", "cpu", [f"seed={seed}"]).config
    assert RunConfig.model_validate_json(config.model_dump_json()).seed == seed
    with pytest.raises(ConfigError, match="seed: it must be at most"):
        resolve("tiny-cpu", "cpu", [f"seed={seed + 1}"])


@pytest.mark.parametrize("key", ["watchdog.straggler_factor", "optimizer.learning_rate"])
@pytest.mark.parametrize("value", [".inf", "1e999", ".nan"])
def test_a_number_that_no_manifest_can_hold_is_refused_in_one_line(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^[^\n]*{key}[^\n]*finite[^\n]*$"):
        resolve("tiny-cpu", "cpu", [f"{key}={value}"])


def test_a_scale_with_its_scaling_is_taken_and_a_scaling_may_wait_for_its_scale() -> None:
    sets = ["model.rope.scale=4", "model.rope.scaling=linear"]
    rope = resolve("tiny-cpu", "cpu", sets).config.model.rope
    assert (rope.scale, rope.scaling) == (4, "linear")
    assert resolve("tiny-cpu", "cpu", ["model.rope.scaling=yarn"]).config.model.rope.scale == 1
    assert resolve("tiny-cpu", "cpu", [], {"NSA_ROPE_SCALE": "2"}).config.model.rope.scale == 2


def test_an_unknown_variable_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="NSA_ACCUM"):
        resolve("tiny-cpu", environment={"NSA_ACUM": "4"})


def test_the_operators_own_variables_are_not_the_runs() -> None:
    assert resolve("tiny-cpu", environment={"NSA_OPS_STATE_DIR": "x"}).notes == []


def test_minus_one_is_off_for_flash_attention_and_a_branch_overrides_the_global_switch() -> None:
    off = resolve("tiny-cpu", environment={"NSA_USE_FA2": "-1"}).config.runtime
    assert (off.flash_min_len_sliding, off.flash_min_len_compressed) == (-1, -1)
    mixed = resolve(
        "tiny-cpu", environment={"NSA_USE_FA2": "1", "NSA_USE_FA2_WIN": "0"}
    ).config.runtime
    assert (mixed.flash_min_len_sliding, mixed.flash_min_len_compressed) == (-1, 0)


@pytest.mark.parametrize(
    ("variables", "sliding", "origin"),
    [
        ({"NSA_USE_FA2": "1", "NSA_FA2_MIN_LEN_WIN": "4096"}, 4096, "NSA_FA2_MIN_LEN_WIN"),
        ({"NSA_FA2_MIN_LEN_WIN": "4096"}, 4096, "NSA_FA2_MIN_LEN_WIN"),
        ({"NSA_USE_FA2": "1", "NSA_FA2_MIN_LEN_WIN": "-1"}, -1, "NSA_FA2_MIN_LEN_WIN"),
        ({"NSA_USE_FA2": "0", "NSA_FA2_MIN_LEN_WIN": "4096"}, -1, "NSA_USE_FA2"),
        ({"NSA_USE_FA2_WIN": "-1", "NSA_FA2_MIN_LEN_WIN": "0"}, -1, "NSA_USE_FA2_WIN"),
        (
            {"NSA_USE_FA2": "0", "NSA_USE_FA2_WIN": "1", "NSA_FA2_MIN_LEN_WIN": "512"},
            512,
            "NSA_FA2_MIN_LEN_WIN",
        ),
    ],
)
def test_a_switch_that_is_off_wins_over_a_length(
    variables: dict[str, str], sliding: int, origin: str
) -> None:
    found = resolve("m7c-125m", "a100", environment=variables)
    assert found.config.runtime.flash_min_len_sliding == sliding
    assert found.origin("runtime.flash_min_len_sliding") == origin


@pytest.mark.parametrize("others", [{}, {"NSA_USE_TRITON_SEL": "1", "NSA_USE_FA2": "1"}])
def test_forced_parity_is_sdpa_everywhere(tmp_path: Path, others) -> None:
    recipe = tmp_path / "named.yaml"
    recipe.write_text("runtime: {backend_sliding: triton, backend_dense: flash}\n")
    found = resolve(str(recipe), environment={"NSA_FORCE_PARITY": "1", **others})
    for branch in ALL_BRANCHES:
        policy = branch_policy(found.config.runtime, branch, RowLayout.of(found.config))
        assert policy.backends == ("sdpa",)
        assert found.origin(f"runtime.backend_{branch}") == "NSA_FORCE_PARITY"
    flag = resolve(
        str(recipe), None, ["runtime.backend_selected=triton"], {"NSA_FORCE_PARITY": "1"}
    )
    assert flag.config.runtime.backend_selected == "triton"


@pytest.mark.parametrize("value", ["0", "-1"])
def test_parity_that_is_not_forced_changes_nothing(value: str) -> None:
    found = resolve("m7c-125m", "a100", environment={"NSA_FORCE_PARITY": value})
    assert found.config.runtime == resolve("m7c-125m", "a100").config.runtime


@pytest.mark.parametrize("value", ["2", "-2", "10"])
@pytest.mark.parametrize(
    "name", ["NSA_USE_TRITON_SEL", "NSA_FORCE_PARITY", "NSA_USE_FA2", "NSA_FWE_PREFETCH"]
)
def test_a_switch_that_is_neither_on_nor_off_is_refused_in_one_line(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}='{value}' must be 1, 0 or -1; [^\n]*$"):
        resolve("m7c-125m", "a100", environment={name: value})


@pytest.mark.parametrize("profile", ["a100", None])
@pytest.mark.parametrize("key", ["runtime.backend_selected", "runtime.backend"])
def test_flash_for_the_selected_branch_is_refused_where_the_configuration_is_made(
    profile: str | None, key: str
) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        resolve("m7c-125m", profile, [f"{key}=flash"])
    assert f"flash cannot run the selected branch ({key})" in str(caught.value)


@pytest.mark.parametrize(
    "sets",
    [
        ["runtime.backend=flash", "runtime.backend_selected=triton"],
        ["runtime.backend=flash", "model.attention=dense"],
        ["runtime.backend_compressed=flash", "runtime.backend_sliding=flash"],
    ],
)
def test_flash_may_be_named_for_every_branch_that_it_can_run(sets: list[str]) -> None:
    assert "flash" in resolve("m7c-125m", "a100", sets).config.runtime.model_dump().values()


@pytest.mark.parametrize(
    ("profile", "sets", "branch", "says"),
    [
        ("a100", [], "selected", "triton expected on a100"),
        ("4090", [], "selected", "triton expected on 4090"),
        ("v100", [], "sliding", "sdpa: named by the configuration (runtime.backend)"),
        ("v100", ["runtime.backend=auto"], "sliding", "triton does not run on sm_70"),
        ("h100", ["runtime.precision=fp32"], "selected", "sdpa expected on h100; triton computes"),
        ("h100", ["model.head_dim_k=48"], "selected", "sdpa expected on h100; triton needs d_k"),
        ("h100", ["model.nsa.select_block=48"], "dense", "sdpa expected on h100"),
        (
            "h100",
            ["model.nsa.select_block=128", "runtime.backend=triton"],
            "sliding",
            "triton: named by the configuration (runtime.backend), and refused: triton needs",
        ),
        ("h100", ["runtime.flash_min_len_sliding=0"], "sliding", "flash expected on h100, if the"),
        ("h100", ["runtime.flash_min_len_sliding=4096"], "sliding", "flash is off below 4096"),
        ("h100", [], "dense", "torch's own attention knows no document borders"),
        ("h100", ["data.pack_documents=false"], "dense", "sdpa expected on h100; torch's own"),
        ("h100", ["runtime.backend_dense=flash"], "dense", "flash: named by the configuration"),
    ],
)
def test_the_laptop_predicts_the_backend_of_a_branch(
    profile: str, sets, branch: str, says: str
) -> None:
    config = resolve("m7c-125m", profile, sets).config
    assert says in expected_backend(config, load_profile(profile), branch)


def test_a_variable_without_effect_says_what_replaced_it() -> None:
    notes = resolve("tiny-cpu", environment={"NSA_PREFILL_BATCHED": "1"}).notes
    assert len(notes) == 1
    assert notes[0].startswith("NSA_PREFILL_BATCHED: accepted and without effect")


@pytest.mark.parametrize("profile", ["v100", "t4"])
def test_bf16_and_triton_are_refused_on_cards_without_them(profile: str) -> None:
    for flag in ("runtime.precision=bf16", "runtime.backend_selected=triton"):
        with pytest.raises(ConfigError, match=f"--set: .*profile {profile}"):
            resolve("m7c-125m", profile, [flag])


def test_a_duplicate_yaml_key_is_refused_with_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text("seed: 1\nbatch: {seq_len: 64}\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"'seed' is there twice \(line 3\)"):
        resolve(str(recipe))


#: What YAML 1.1 takes for a number, and which.
STRANGE_NUMBERS = {
    "010": "8", "-010": "-8", "00": "0", "1_000": "1000", "1_": "1", "1:30": "90",
    "12:30:00": "45000", "0x10": "16", "0b11": "3", "1_0.5": "10.5", "1:30.5": "90.5",
    "!!int '0x10'": "16", "!!float 1_0": "10.0",
}  # fmt: skip


@pytest.mark.parametrize(("written", "read"), STRANGE_NUMBERS.items())
def test_a_number_is_written_in_decimal_digits_or_refused(
    tmp_path: Path, written: str, read: str
) -> None:
    shown = written.rpartition(" ")[2].strip("'")
    says = re.escape(f"'{shown}' is {read} in YAML: write a number in decimal digits alone")
    for key in ("schedule.steps", "optimizer.learning_rate", "data.subset"):
        with pytest.raises(ConfigError, match=rf"^--set {key}: {says}[^\n]*$"):
            resolve("tiny-cpu", sets=[f"{key}={written}"])
    recipe, profile = tmp_path / "own.yaml", tmp_path / "card.yaml"
    recipe.write_text(f"seed: 1\nschedule: {{steps: {written}}}\n")
    with pytest.raises(ConfigError, match=rf"^recipe own\.yaml: {says}[^\n]* \(line 2\)$"):
        resolve(str(recipe))
    profile.write_text(f"name: card\nbatch_tiers: {{{written}: {{}}}}\n")
    with pytest.raises(ConfigError, match=rf"^profile card\.yaml: {says}[^\n]* \(line 2\)$"):
        load_profile(str(profile))


@pytest.mark.parametrize(
    ("written", "read"),
    [("7", 7), ("+7", 7), ("'010'", 10), ("09", 9), ("7.0", 7), ("2.5e-1", 0.25), (".5", 0.5),
     ("1e-4", 1e-4), ("1.e+1", 10.0), ("0", 0), ("0.0", 0)],
)  # fmt: skip
def test_a_number_in_decimal_digits_is_that_number(written: str, read: float) -> None:
    key = "schedule.steps" if read >= 1 and read == int(read) else "schedule.min_ratio"
    assert leaves(resolve("tiny-cpu", sets=[f"{key}={written}"]).config)[key] == read


@pytest.mark.parametrize(
    "written", ["part #1", "two\nlines", "two\rlines", "two\x85lines", "7 #00", "#1"]
)
def test_a_value_of_set_that_yaml_would_cut_or_fold_is_refused(written: str) -> None:
    """` #` begins a comment, which nobody writes into a flag."""
    with pytest.raises(ConfigError, match=r"^--set data\.subset: YAML reads [^\n]+$") as caught:
        resolve("tiny-cpu", sets=[f"data.subset={written}"])
    (flag,) = shlex.split(str(caught.value).partition("write --set ")[2])
    assert resolve("tiny-cpu", sets=[flag]).config.data.subset == written
    assert resolve("tiny-cpu", sets=["data.subset= part#1 "]).config.data.subset == "part#1"


@pytest.mark.parametrize(
    ("written", "read"),
    [("\n part \n", "part"), ("'two\n  words'", "two words"), ("|\n  two\n  lines", "two\nlines"),
     ("'a #1'", "a #1")],
)  # fmt: skip
def test_a_value_of_set_whose_lines_are_meant_is_taken(written: str, read: str) -> None:
    assert resolve("tiny-cpu", sets=[f"data.subset={written}"]).config.data.subset == read


@pytest.mark.parametrize("content", ["- 1\n", "a: [", "seed: 1\n  b: 2\n", "\x00", ""])
def test_a_broken_recipe_is_one_line(tmp_path: Path, content: str) -> None:
    recipe = tmp_path / "broken.yaml"
    recipe.write_text(content)
    with pytest.raises(ConfigError, match=r"^[^\n]*broken\.yaml[^\n]*$"):
        resolve(str(recipe))


def test_a_recipe_that_is_far_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "endless.yaml").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=r"endless\.yaml has more than 1,000,000 characters"):
        resolve(str(tmp_path / "endless.yaml"))


def test_an_unknown_recipe_or_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="tiny-cpu"):
        resolve("tiny-cpuu")
    with pytest.raises(ConfigError, match="a100"):
        resolve("tiny-cpu", "a10")


def test_the_hash_follows_the_values_and_not_their_origin() -> None:
    by_flag = resolve("tiny-cpu", sets=["batch.micro_batch=3"])
    by_variable = resolve("tiny-cpu", environment={"NSA_BATCH_SIZE": "3"})
    assert by_flag.sha256 == by_variable.sha256
    assert by_flag.sha256 != resolve("tiny-cpu").sha256


def test_the_batch_tier_follows_memory_and_the_sequence_length_that_is_asked_for() -> None:
    small = resolve("m7c-125m", "a100", memory_gib=40).config.batch
    large = resolve("m7c-125m", "a100", memory_gib=80).config.batch
    assert (small.micro_batch, large.micro_batch) == (8, 16)
    assert small.tokens_per_step == large.tokens_per_step == 262_144
    longer = resolve("m7c-125m", "a100", ["batch.seq_len=8192"], memory_gib=80).config.batch
    assert (longer.micro_batch, longer.tokens_per_step) == (4, 262_144)


@pytest.mark.parametrize(
    ("card", "profile"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla T4", "t4"),
    ],
)
def test_each_card_has_exactly_one_profile(card: str, profile: str) -> None:
    assert [name for name in list_profiles() if load_profile(name).matches(card)] == [profile]


def test_a_card_without_a_profile_matches_none() -> None:
    for card in ("NVIDIA GeForce RTX 4080 SUPER", "NVIDIA L40S", "NVIDIA T400 4GB"):
        assert not [name for name in list_profiles() if load_profile(name).matches(card)]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["runtime.num_gpus=2", "runtime.device=cpu"], "cards talk through NCCL, which needs CUDA"),
        (["runtime.cpu_ranks=2", "runtime.device=cuda"], "the run has cards"),
        (["runtime.cpu_ranks=2", "runtime.num_gpus=2"], "the run has cards"),
        (["runtime.num_gpus=2", "batch.accumulation=3"], "3 does not divide among 2 ranks"),
        (["runtime.num_pods=4", "batch.accumulation=6"], "6 does not divide among 4 ranks"),
        (["runtime.sharding=fsdp", "runtime.precision=fp16"], "set runtime.precision to bf16"),
        (
            ["runtime.sharding=fsdp", "runtime.num_pods=2", "batch.accumulation=2"],
            "would never be",
        ),
        (
            ["runtime.half_residual=true", "runtime.precision=fp16"],
            "runtime.precision is fp16; set runtime.half_residual=false",
        ),
        (
            ["runtime.half_residual=true", "runtime.precision=fp32"],
            "runtime.precision is fp32; set runtime.half_residual=false",
        ),
        (["runtime.num_gpus=-1"], "a number of cards from 0 to 256, or auto"),
        (["runtime.num_gpus=257"], "a number of cards from 0 to 256, or auto"),
        (["runtime.num_gpus=all"], "a number of cards from 0 to 256, or auto"),
        (["runtime.num_pods=4097"], "less than or equal to 4096"),
    ],
)
def test_what_could_not_train_is_refused_with_the_configuration(
    sets: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve("m7c-125m", None, sets)
    assert message in str(refused.value)


def test_a_step_has_the_same_tokens_for_any_number_of_ranks() -> None:
    found = [resolve("m7c-125m", None, [f"runtime.num_gpus={count}"]).config for count in (1, 2, 8)]
    assert len({config.batch.tokens_per_step for config in found}) == 1
    assert [config.num_ranks for config in found] == [1, 2, 8]


def test_the_speed_that_was_measured_is_expected_of_the_recipe_as_it_was_measured() -> None:
    expected = load_profile("h100").expected.tokens_per_s["m7c-125m"]
    found = resolve("m7c-125m", "h100", sets=["data.source=stdlib", "schedule.steps=9"])
    assert found.config.watchdog.expected_tokens_per_s == expected > 0
    assert found.origin("watchdog.expected_tokens_per_s") == "profile h100"


@pytest.mark.parametrize(
    ("recipe", "profile", "sets"),
    [
        ("m7c-125m", "h100", ["model.num_layers=2"]),
        ("m7c-125m", "h100", ["batch.seq_len=65536"]),
        ("m7c-125m", "h100", ["runtime.compile=false"]),
        ("m7c-125m", "h100", ["data.pack_documents=false"]),
        ("m7c-125m-64k", "h100", []),
        ("m7c-125m", "a100", []),
        ("m7c-125m", None, []),
    ],
)
def test_no_speed_is_expected_of_what_was_not_measured(
    recipe: str, profile: str | None, sets
) -> None:
    assert resolve(recipe, profile, sets=sets).config.watchdog.expected_tokens_per_s == 0


@pytest.mark.parametrize("name", ["h100", "a100", "4090", "t4", "v100", "cpu"])
def test_the_blocks_are_compiled_wherever_the_profile_has_a_card(name: str) -> None:
    profile = load_profile(name)
    assert resolve("m7c-125m", name).config.runtime.compile is profile.needs_card
