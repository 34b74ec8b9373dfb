import math

import pytest

from nsa_core.config.training import WatchdogLimits
from nsa_ops.health.foreign_logs import parse_log
from nsa_ops.health.log_health import replay

KINDS = {
    "nanoGPT": (
        "iter 10: loss 4.2490, time 1035.33ms, mfu 13.85%",
        {"step": 10, "loss": 4.249, "step_s": 1.03533},
    ),
    "speed run": (
        "step:21/1530 train_loss:6.4316 train_time:2115ms step_avg:115.2ms",
        {"step": 21, "loss": 6.4316},
    ),
    "llm.c short": ("s:12 trl:9.407283", {"step": 12, "loss": 9.407283}),
    "llm.c long": (
        "step   10/19560 | loss 9.123456 (+nanz)| norm 2.5000 (+nanz)| lr 4.29e-06 | 123.45 ms "
        "| 45.1% bf16 MFU | 424242 tok/s",
        {"step": 10, "loss": 9.123456, "grad_norm": 2.5, "lr": 4.29e-06, "tokens_per_s": 424242},
    ),
    "Megatron": (
        "[default3]: iteration       20/  100 | elapsed time per iteration (s): 2.50 | learning "
        "rate: 5.0E-05 | lm loss: 2.5E+00 | loss scale: 4096.0 | grad norm: 0.242 | number of "
        "skipped iterations:   0 | number of nan iterations:   0 |",
        {"step": 20, "loss": 2.5, "loss_scale": 4096.0, "grad_norm": 0.242, "step_s": 2.5},
    ),
    "Hugging Face": (
        "{'loss': 1.25, 'grad_norm': nan, 'learning_rate': 9.7e-06, 'epoch': 0.53}",
        {"loss": 1.25, "lr": 9.7e-06, "grad_norm": math.nan},
    ),
    "Hugging Face strings": (
        "{'loss': '1.25', 'grad_norm': '0.5', 'learning_rate': '9.7e-06'}",
        {"loss": 1.25, "grad_norm": 0.5},
    ),
    "decimal commas": (
        "step 1,200, loss 2,828341, lr 0,001, grad norm 1,25, 45,678 tok/s",
        {"step": 1200, "loss": 2.828341, "lr": 1e-3, "grad_norm": 1.25, "tokens_per_s": 45_678},
    ),
    "OLMo": (
        "INFO    [step=1,200/739328,epoch=0]\n    optim/total_grad_norm=231.7\n"
        "    train/CrossEntropyLoss=12.18\n    throughput/total_tokens=1,048,576",
        {"step": 1200, "loss": 12.18, "grad_norm": 231.7},
    ),
    "fairseq": (
        "| epoch 001:    200 / 1374 loss=14.351, wps=49604, num_updates=190, lr=4.8e-06, "
        "gnorm=3.901, loss_scale=0.062",
        {"step": 190, "loss": 14.351, "grad_norm": 3.901, "tokens_per_s": 49604},
    ),
    "plain words": (
        "2025-05-16 15:36:26,540 - root - INFO - Training step: 5 | Loss: 11.91",
        {"step": 5, "loss": 11.91},
    ),
    "coloured columns": (
        "\x1b[31mstep:  7  \x1b[32mloss:  8.1234  \x1b[33mmemory: 3.2GiB(4%)  \x1b[34mtps: 7,001",
        {"step": 7, "loss": 8.1234, "tokens_per_s": 7001},
    ),
    "example of image training": (
        "Epoch: [0][ 100/5005]  Time  0.350 ( 0.700)  Data  0.010 ( 0.200)  Loss 6.9e+00 (7.0e+00)",
        {"step": 100, "loss": 6.9, "data_s": 0.01, "step_s": 0.35},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_of_each_kind_gives_its_figures(kind: str) -> None:
    text, expected = KINDS[kind]
    (beat,) = parse_log(text).beats
    found = {name: getattr(beat, name) for name in expected}
    assert found == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "text",
    [
        "step 3000: train loss 4.0390, val loss 4.0427",
        "step:0/1530 val_loss:10.8 train_time:0ms",
        "{'eval_loss': 1.0, 'eval_runtime': 3.0, 'epoch': 1.0}",
        "  eval: batch 20/100 running_loss:2.0368",
        "  Step 60000: lr_mul=0.0",
        "warmup_step:3/20",
        "saving checkpoint at step 427",
        "iteration     3385/    8000 | consumed samp",
        'print0(f"step:{step}/{args.num_iterations} train_loss:{train_loss:.4f}")',
        "layer " * 50_000,
        "",
    ],
)
def test_lines_without_a_training_step_give_no_record(text: str) -> None:
    beats = parse_log(f"iter 1: loss 3.0\n{text}\niter 2: loss 3.0").beats
    assert [beat.step for beat in beats if beat.msg == "progress"] == [1, 2]


def test_a_log_with_nothing_but_evaluations_is_judged_by_them() -> None:
    text = "\n".join(f"step:{n * 125}/1750 val_loss:{4 - n / 10} train_time:9ms" for n in range(5))
    assert [beat.loss for beat in parse_log(text).beats] == [4.0, 3.9, 3.8, 3.7, 3.6]


def test_bytes_that_are_no_log_give_nothing() -> None:
    log = parse_log("\x00\xff{[" * 100 + "\n{}\n[1,2]\n")
    assert (log.beats, log.error) == ([], "")
    assert replay(log, WatchdogLimits()).alarms == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [f"iter {'9' * 5000}: loss 3.0", "9," * 10_000, "OVERFLOW! reducing to 6.5.5",
     "read batch time : 0.-", "2025-13-31 23:59:59 step 1 loss 3.0", "1.2.3s/it step 1 loss 3.0",
     "iter 1: loss 3.0\niter 99999999999999: loss 3.0, time 1000ms", '{"a":' * 100_000,
     *(f"step 1 loss{gap * 20_000}3.0" for gap in (" ", "\t", " \u00a0")),
     '{"lm loss": {"values": {"one": 1.0}}}', "step,loss,step_s\n1,2,1e300\n3,3,1e300\n"],
)  # fmt: skip
def test_no_line_of_a_hostile_log_is_an_error_or_takes_long(text: str) -> None:
    replay(parse_log(text), WatchdogLimits())


def test_an_error_counts_only_if_no_record_follows() -> None:
    crash = "Traceback (most recent call last):\n  File\nRuntimeError: CUDA error"
    assert parse_log(f"iter 1: loss 3.0\n{crash}\niter 2: loss 3.0").error == ""
    replayed = replay(parse_log(f"iter 1: loss 3.0\n{crash}"), WatchdogLimits())
    assert replayed.first("halt").finding.rule == "process_gone"


def test_a_loss_scale_that_falls_at_the_start_is_healthy() -> None:
    lines = [
        f"OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2**k}, reducing to {2 ** (k - 1)}"
        for k in range(32, 16, -1)
    ] + [
        f"iteration {n}/ 100 | lm loss: {10 - n / 9} | loss scale: 65536.0 |" for n in range(17, 60)
    ]
    assert replay(parse_log("\n".join(lines)), WatchdogLimits()).first("halt") is None


def test_a_loss_scale_at_its_floor_is_an_alarm() -> None:
    lines = [f"iteration {n}/ 100 | lm loss: 3.0 | loss scale: 4.0 |" for n in range(1, 5)] + [
        "OVERFLOW! Skipping step. Attempted loss scale: 1, reducing to 1" for _ in range(12)
    ]
    replayed = replay(parse_log("\n".join(lines)), WatchdogLimits())
    assert replayed.first("halt").finding.rule == "loss_scale_falling"


def test_a_policy_loss_of_zero_is_healthy_and_two_nan_are_not() -> None:
    line = "{{'loss': {}, 'reward': -2.0, 'learning_rate': 5e-05}}"
    zero = "\n".join(line.format("0.0") for _ in range(9))
    assert replay(parse_log(zero), WatchdogLimits()).alarms == []
    nan = "\n".join(line.format("nan") for _ in range(2))
    assert replay(parse_log(nan), WatchdogLimits()).first("halt") is not None


def test_experts_that_share_the_tokens_are_healthy() -> None:
    text = "\n".join(
        f"[XXX] layer: {n} topk_idx: [3, 17, 20, 9, 30, 1, 4, 8]\nexpert load: [9, 8, 10, 7]"
        for n in range(9)
    )
    assert replay(parse_log(text), WatchdogLimits()).alarms == []


def test_a_spike_of_every_step_passes_and_a_divergence_of_every_step_does_not() -> None:
    def lines(losses):
        return "\n".join(
            f"iteration {n}/ 9999 | lm loss: {loss} | grad norm: {0.2 if loss < 2.5 else 40.0} |"
            for n, loss in enumerate(losses, 100)
        )

    spike = [2.2] * 30 + [3.1, 4.5, 5.0, 4.0, 3.2, 2.7] + [2.2] * 30
    assert replay(parse_log(lines(spike)), WatchdogLimits()).first("halt") is None
    diverged = [2.2] * 30 + [3.1, 4.5, 5.5, 6.2, 6.6, 6.9, 7.0]
    alarm = replay(parse_log(lines(diverged)), WatchdogLimits()).first("halt")
    assert (alarm.finding.rule, alarm.step) == ("loss_jump", 134)


def norms(*printed):
    lines = [f"step {n} loss {9 - n}.000 norm: {word}" for n, word in enumerate(printed)]
    return [beat.grad_norm for beat in parse_log("\n".join(lines)).beats]


def test_a_printed_zero_is_a_small_number_unless_the_figure_fell_to_it() -> None:
    assert norms("0.010", "0.002", "0.000") == [0.01, 0.002, None]
    assert norms("2.100", "0.000") == [2.1, 0.0]
    assert norms("1.5e-3", "0.0e+00") == [0.0015, 0.0]
    assert norms("0.0013", "0.0") == [0.0013, 0.0]


def test_a_figure_that_is_always_zero_is_not_measured_where_the_run_learns() -> None:
    assert norms("0.0", "0.0", "0.0") == [None, None, None]
    stuck = parse_log("\n".join(f"step {n} loss 9.000 norm: 0.0" for n in range(3)))
    assert [beat.grad_norm for beat in stuck.beats] == [0.0, 0.0, 0.0]


def test_a_printed_loss_of_zero_is_a_small_one_unless_it_fell_there_from_a_large_one() -> None:
    def losses(*words):
        return [b.loss for b in parse_log("\n".join(f"step 1 loss {w}" for w in words)).beats]

    assert losses("0.02", "0.01", "0.00") == [0.02, 0.01, 0.005]
    assert losses("2.80", "0.00") == [2.8, 0.0]
    assert losses("0.02", "0.0") == [0.02, 0.0]
    table = parse_log("step,loss\n1,0.02\n2,0.00\n")
    assert [beat.loss for beat in table.beats] == [0.02, 0.005]


def test_a_line_with_both_losses_is_a_record_with_a_validation() -> None:
    (beat,) = parse_log("epoch 3 train_loss 2.10 val_loss 2.4").beats
    assert (beat.loss, beat.val_loss) == (2.1, 2.4)


@pytest.mark.parametrize("words", ["tok/s 330.5", "Tokens/sec 330.5", "samples/s: 330.5"])
def test_a_rate_may_stand_after_its_unit(words: str) -> None:
    assert parse_log(f"epoch 1 | iter 4 | loss 2.0 | {words}").beats[0].tokens_per_s == 330.5


@pytest.mark.parametrize(
    "line",
    [
        "steps: 40 loss: 2.5000 iter time (s): 0.5 samples/sec: 32.1",  # DeepSpeed's pipelines
        "Training epoch 0, iteration 40/99 | lr: 3e-05 | global_step: 40 | reduced_train_loss: 2.5",
    ],
)
def test_lines_of_other_trainers_are_records(line: str) -> None:
    (beat,) = parse_log(line).beats
    assert (beat.step, beat.loss) == (40, 2.5)


def test_steps_that_each_epoch_counts_anew_are_continued() -> None:
    lines = [f"Epoch: {e} Batch: {b}/40 Loss: 2.5" for e in (1, 2) for b in (10, 20, 30)]
    beats = parse_log("\n".join(lines)).beats
    assert [beat.step for beat in beats] == [10, 20, 30, 40, 50, 60]
    assert {beat.attempt for beat in beats} == {1}


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***", "stopped"),
        ("Traceback (most recent call last):\nKeyboardInterrupt", "stopped"),
        ("Terminated", "stopped"),
        ("RuntimeError: x\nsrun: Job step aborted: Waiting", "crashed"),
        ("Traceback (most recent call last):\nOutOfMemoryError: CUDA", "out_of_memory"),
        ("kernel: oom-kill:constraint=CONSTRAINT_MEMCG", "out_of_memory"),
        ("=>> PBS: job killed: walltime 86430 exceeded limit 86400", "stopped"),
        ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", "stopped"),
        ("elastic.SignalException: Process 12 got signal: 15", "stopped"),
        ("api.py:7] Received Signals.SIGTERM death signal, shutting down workers", "stopped"),
        ("api.py:7] Received 15 death signal, shutting down workers", "stopped"),
        ("Spot interruption notice: the instance goes in 120 s", "stopped"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out_of_memory"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9", "out_of_memory"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "out_of_memory"),
        ("MemoryError", "out_of_memory"),
        ("command terminated with exit code 137", "crashed"),
        ("saved the model", ""),
    ],
)  # fmt: skip
def test_how_a_run_ended_is_read_from_the_last_lines_of_its_log(last: str, ending: str) -> None:
    assert parse_log(f"step 1 loss 3.0\n{last}").ending == ending
    assert parse_log(f"step 1 loss 3.0\n{last}\nstep 2 loss 2.9").ending == ""


@pytest.mark.parametrize(
    "last",
    [
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "[rank3]: torch.OutOfMemoryError: HIP out of memory. Tried to allocate 20.00 MiB.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: MPS backend out of memory (MPS allocated: 17 GB, other: 1 GB, max: 18 GB).",
        "node7: NCCL WARN Cuda failure 2 'out of memory'",
        "failed to allocate 2.0G from device: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "[CUDA ERROR] at file train_gpt2.cu:1203:\nout of memory",
        "cudaErrorMemoryAllocation",
        "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 38654705664 bytes.",
        "Out of memory while trying to allocate 7 bytes.",
        "[84.1] Out of memory: Killed process 4711 (python) total-vm:99kB",
        "Memory cgroup out of memory: Killed process 4711 (python)",
        "python invoked oom-killer: gfp_mask=0xcc0, order=0, oom_score_adj=0",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4.0.",
        "Some of the step tasks have been killed by the cgroup out-of-memory handler.",
        '{"reason": "OOMKilled", "exitCode": 137}',
        "OSError: [Errno 12] Cannot allocate memory",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 9.3 GiB for an array",
        "error: out of memory: a batch of 12 MiB finds no room",
        "RuntimeError: out of memory",
        "RuntimeError: cuda runtime error (2) : out of memory at THCStorage.cu:58",
        "thrust::system::system_error: out of memory",
        "[enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: not enough memory",
        "GPU 0 ran out of memory",
        "deepspeed: rank 3 out of memory",
        "slurmstepd: error: Exceeded job memory limit",
        "slurmstepd: error: Step 7.0 exceeded memory limit (9 > 8), being killed",
        "srun: error: node1: task 0: Out Of Memory",
        "srun: error: node1: tasks 0,2-3: Out Of Memory",
        "JaxRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G",
        "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 crashed",
        "2026-11-30 12:00:00 UTC  1  ended by trainer: exit code 13: out of memory: a tensor",
    ],
)
def test_each_form_in_which_machines_say_that_memory_ran_out_is_one(last: str) -> None:
    assert parse_log(f"step 1 loss 3.0\n{last}").ending == "out_of_memory"


@pytest.mark.parametrize(
    "last",
    [
        'INFO sample text: "we ran out of memory of him"',
        "We ran out of memory of him, and the castle could not allocate memory to his name.",
        "note to self: last week we were out of memory with 8 rows, so 4 now",
        "a run that is out of memory ends with 13",
        'sample: "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"',
        '{"step": 7, "text": "Traceback (most recent call last): KeyboardInterrupt"}',
        "generated: 'exit code: 1, said the door'",
        "The lands had been preempted, and the feast was cancelled at noon.",
        '{"oom": 0, "out_of_memory": false}',
        "the page on the oom killer of Linux",
        "hint: if you get CUDA out of memory, take fewer rows",
        "checkpointing avoids that the GPU runs out of memory",
    ],
)
def test_prose_is_no_end_of_a_run(last: str) -> None:
    assert parse_log(f"step 1 loss 3.0\n{last}").ending == ""


@pytest.mark.parametrize("last", ["Job 7 was preempted", "Instance was preempted.", "PREEMPTED"])
def test_a_job_that_was_preempted_is_one_that_was_stopped(last: str) -> None:
    assert parse_log(f"step 1 loss 3.0\n{last}").ending == "stopped"


def test_our_own_training_table_is_read_with_its_empty_cells() -> None:
    table = (
        "step,tokens,loss,lr,grad_norm,tokens_per_s,mfu,step_s,data_s,skipped,attempt\n"
        "1,192,5.5,0.02,0.9,,,0.09,7e-05,0,1\n2,384,nan,0.01,1.4,2549.2,,0.07,9e-05,0,1\n"
    )
    first, second = parse_log(table).beats
    assert (first.step, first.loss, first.lr, first.tokens_per_s) == (1, 5.5, 0.02, 1 / 0.09)
    assert math.isnan(second.loss)
    assert second.tokens_per_s == 2549.2


def test_the_loss_of_a_record_with_a_validation_is_read() -> None:
    (beat,) = parse_log('{"step": 5, "loss": 2.1, "val_loss": 2.2}').beats
    assert (beat.loss, beat.val_loss) == (2.1, 2.2)
