"""The engine on CUDA with NCCL: these tests need a GPU, and without one nothing here is run.

One GPU is one rank: the path is the same, but nothing is sent. With two GPUs everything is done on two ranks as well.
Two and three ranks that share one GPU send over gloo: everything but NCCL is as on several GPUs.

- bits: one hash of weights and optimizer states over all stages, also for a user who trains on a stream of his own,
  whose kernels are held up so that whatever does not wait for them reads too early
- losses: close to the oracle, which is one process on the CPU. ``CLOSE`` says how close, and why not equal
- memory: the model state by the formula, and what CUDA's allocator was asked for beside it
- kernels: the bits of the reference on the CPU, one launch per bucket, no wait for the device
"""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardengine
from shardengine import kernels
from shardengine.comm import mesh as mesh_module
from shardengine.kernels import Rule, Spans
from tests import oracle
from tests.support import cases
from tests.support.sizes import ALIGN_BYTES_APART, padded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

STEPS = 3
DTYPES: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": {"bf16": {"enabled": True}}}
# Relative, for losses. Matrix products are added in another order than on the CPU: some 5e-7 of each result in fp32; in
# bf16 every activation may be rounded to its neighbour, 4e-3. The oracle, with every module's output and every gradient
# disturbed by that much, has losses that differ by up to 5e-7 and 6e-3. What a GPU adds to that is not known.
CLOSE = {"fp32": 1e-5, "bf16": 3e-2}
BLOCK = re.compile(r"(?:transformer\.h|blocks)\.\d+(?=\.)")
HELD_UP_CYCLES = 10_000_000
"""Some 5 ms."""
SMALL_TENSORS_BYTES = 4096
"""The norm, what gradients are divided by, and the like."""

Run = tuple[str, int, bool]
"""Stage, micro-batches, whether on a stream of its own."""
RUNS: list[Run] = [(stage, k, own) for stage in cases.STAGES for k, own in ((1, False), (3, False), (3, True))]


def make_model(name: str) -> nn.Module:
    """Without dropout, for which devices draw other numbers."""
    model = cases.MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def loss_of(model: Any, step: int, rank: int, micro: int) -> Tensor:
    """As ``cases.loss_of``, on the model's device: the same numbers on each."""
    torch.manual_seed(cases.seed_of(step, rank, micro))
    weight = next(iter(model.parameters()))
    if isinstance(getattr(model, "module", model), cases.Mlp):
        x, y = torch.randn(5, 7), torch.randn(5, 3)
        return (model(x.to(weight.device, weight.dtype)) - y.to(weight.device)).square().mean()
    ids = torch.randint(0, cases.VOCAB, (2, cases.LENGTH)).to(weight.device)
    return model(input_ids=ids, labels=ids).loss


def requested_bytes() -> int:
    """What all living CUDA tensors of this process asked for."""
    gc.collect()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@functools.cache
def the_mesh() -> mesh_module.Mesh:
    """One for all engines of a rank. Over gloo all ranks share the first GPU."""
    shared = dist.is_initialized() and dist.get_backend() == "gloo"
    return mesh_module.build(torch.device("cuda", 0) if shared else None)


@functools.cache
def stream_of_its_own() -> torch.cuda.Stream:
    """One for all runs of a rank: cuBLAS takes a workspace per stream."""
    return torch.cuda.Stream()


def train(model: str, dtype: str, run: Run) -> dict[str, Any]:
    """One rank's run, with what the engine and the allocator say about memory after it."""
    stage, micros, own_stream = run
    before = requested_bytes()
    network = make_model(model)
    config = cases.config_of(stage, micros, reproducible=True, **DTYPES[dtype])
    optimizer = cases.make_optimizer(network, "AdamW")
    engine = shardengine.initialize(network, config, optimizer=optimizer, mesh=the_mesh())
    if own_stream:
        network.register_forward_pre_hook(lambda *_: torch.cuda._sleep(HELD_UP_CYCLES))
    outer = torch.cuda.current_stream()
    stream = stream_of_its_own() if own_stream else outer
    stream.wait_stream(outer)
    with torch.cuda.stream(stream):
        result = cases.run_steps(engine, STEPS, loss_of)
    outer.wait_stream(stream)
    buffers = sum(buffer.nbytes for buffer in network.buffers())
    result |= {"memory": engine.memory(), "requested": requested_bytes() - before - buffers}
    engine.close()
    return result


def train_all(model: str, dtype: str) -> dict[Run, dict[str, Any]]:
    """All runs of one rank, after one that is thrown away: it loads kernels and takes workspaces."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # so that products and sums have one order, on any stream
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)  # whose backward adds with atomics
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    for warm_up in RUNS[:3]:
        train(model, dtype, warm_up)
    return {run: train(model, dtype, run) for run in RUNS}


def assert_memory(found: dict[str, Any], model: str, dtype: str, run: Run, ranks: int) -> None:
    """The formula from the model's own sizes: weights, gradients, and fp32 states with masters for bf16."""
    stage, micros, _ = run
    shards_weights, size = stage.startswith("3"), 2 if dtype == "bf16" else 4
    storages: dict[str, list[int]] = {}
    for name, parameter in make_model(model).named_parameters():
        block = BLOCK.match(name) if shards_weights else None
        storages.setdefault(block.group() if block else "", []).append(parameter.numel())
    elements = sum(padded(counts, ranks, size, ALIGN_BYTES_APART) for counts in storages.values())
    weights = elements * size // (ranks if shards_weights else 1)
    states = elements * (8 if size == 4 else 12) // (1 if stage == "0" else ranks)
    resting = elements * (size if micros == 1 else 4) // (ranks if cases.LETTER[stage] == "sharded" else 1)
    complete = elements * size if stage == "0" else resting  # there it is gathered in the wire's dtype
    memory = found["memory"]
    assert memory["predicted_model_state_bytes"] == weights + resting + states, run
    assert memory["measured_model_state_bytes"] == weights + complete + states, run
    assert (memory["live_weight_bytes"], memory["live_state_bytes"]) == (weights, states), run
    kept = weights + states + memory["buffer_bytes"]
    assert kept <= found["requested"] <= kept + SMALL_TENSORS_BYTES, run


@functools.cache
def truth_of(model: str, dtype: str, ranks: int, micros: int, order: str) -> oracle.Trace:
    network = make_model(model)
    return oracle.train(
        network, loss_of, ranks=ranks, micros=micros, steps=STEPS, kind="AdamW",
        groups=cases.groups_of(network, "AdamW"), order=order, clip=cases.CLIP,
        low=torch.bfloat16 if dtype == "bf16" else None,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"))]
)
def test_every_stage_on_cuda(ranks: int, dtype: str, model: str) -> None:
    check_every_stage(ranks, dtype, model)


@pytest.mark.parametrize("model", ["mlp", "gpt2"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_stage_on_ranks_that_share_a_gpu(
    ranks: int, dtype: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDENGINE_DEVICE", "cpu")  # so the process group is gloo's; ``the_mesh`` names the device
    check_every_stage(ranks, dtype, model)


def check_every_stage(ranks: int, dtype: str, model: str) -> None:
    """Bits over all stages, then losses, then memory."""
    by_rank = shardengine.launch(train_all, ranks, (model, dtype))
    hashes: dict[tuple[int, str], set[str]] = {}
    for run in RUNS:
        state = [results[run]["state"] for results in by_rank]
        hashes.setdefault((run[1], order_of(run, ranks)), set()).add(cases.digest(state))
    assert all(len(found) == 1 for found in hashes.values()), hashes
    for run in RUNS:
        truth = truth_of(model, dtype, ranks, run[1], order_of(run, ranks))
        for rank, results in enumerate(by_rank):
            expected = [row[rank] for row in truth.losses]
            for ours, theirs in zip(results[run]["losses"], expected, strict=True):
                assert ours == pytest.approx(theirs, rel=CLOSE[dtype]), f"{run}, rank {rank}"
    for run, results in itertools.product(RUNS, by_rank):
        assert_memory(results[run], model, dtype, run, ranks)


def order_of(run: Run, ranks: int) -> str:
    """The order of the sums over ranks and micro-batches, as the oracle calls it."""
    stage, micros, _ = run
    return cases.LETTER[stage] if micros > 1 and ranks > 1 else "full"


CUDA = torch.device("cuda")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (0, 1, 17, 1023, 1024, 1025, 4096, 4097, 200_003)
MOMENTS: dict[str, Any] = {"keep": 0.9, "take": 0.1, "keep_square": 0.95, "take_square": 0.05, "epsilon": 1e-8}
RULES = [
    Rule("AdamW", 0.01, decay=0.999, **MOMENTS), Rule("Adam", 0.01, l2=0.1, maximize=True, **MOMENTS),
    Rule("Lion", 0.001, decay=0.999, **MOMENTS), Rule("SGD", 0.1, l2=0.1),
    Rule("SGD", 0.1, keep=0.9, take=0.9), Rule("SGD", 0.1, keep=0.9, take=1.0, nesterov=True, first=True),
]  # fmt: skip


@pytest.fixture(scope="module")
def cases_of_kernels() -> Any:
    """Imported where there is a GPU: it needs Triton."""
    return importlib.import_module("tests.kernels.kernel_cases")


@pytest.mark.parametrize(("source", "out"), [*itertools.product(FLOATS, repeat=2)])
def test_copies_have_the_bits_of_the_reference(source: torch.dtype, out: torch.dtype, cases_of_kernels: Any) -> None:
    for length, offset in itertools.product(LENGTHS, (0, 1)):
        lengths, gaps = [length, 5, length], [16, -length % 16, 11, 30]
        for options in ({}, {"scale": 0.3}, {"add": True}, {"scale": 0.3, "add": True}):
            cases_of_kernels.check_flatten(CUDA, lengths, gaps, source, out, offset, **options)
        cases_of_kernels.check_unflatten(CUDA, lengths, gaps, [out, torch.float32], source, offset)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 100, 256])
def test_sums_have_the_bits_of_the_reference(count: int, cases_of_kernels: Any) -> None:
    make, lengths = cases_of_kernels.Sum, LENGTHS if count <= 16 else (0, 1, 1023, 1024, 1025, 4097)
    for length, dtype, buffer in itertools.product(lengths, FLOATS, (True, False)):
        cases_of_kernels.check_ordered_sum(CUDA, make(count, length, dtype, buffer=buffer))
        more = {"total": torch.float32, "divisor": 3, "rounded": dtype, "nonfinite": True, "offset": 1}
        for reduce_dtype, special in itertools.product((torch.float32, torch.bfloat16), (True, False)):
            case = make(count, length, dtype, reduce_dtype=reduce_dtype, special=special, buffer=buffer, **more)
            cases_of_kernels.check_ordered_sum(CUDA, case)
        cases_of_kernels.check_ordered_sum(CUDA, make(count, length, dtype, total=torch.float32, alias="total"))
        cases_of_kernels.check_ordered_sum(CUDA, make(count, length, buffer=buffer, alias=count - 1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_squares_have_the_bits_of_the_reference(dtype: torch.dtype, cases_of_kernels: Any) -> None:
    for length, offset in itertools.product((*LENGTHS, 65_535, 65_536, 65_537, 5_000_001), (0, 1)):
        values = cases_of_kernels.numbers(length, 1, dtype, special=False)
        cases_of_kernels.check_sum_of_squares(CUDA, values, offset)


LONG = 2**31 + 4096 + 5
"""Elements, more than 32 bits count."""


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 10 * LONG, reason="needs 20 GiB of free GPU memory"
)
def test_a_tensor_may_be_longer_than_32_bits_count() -> None:
    """Few elements are not zero, at both sides of 2^31 and at the ends, so that the results are known."""
    values, out = (torch.zeros(LONG, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    places = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 1, LONG - 1], device=CUDA)
    marks = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.bfloat16, device=CUDA)
    values[places] = marks
    assert kernels.sum_of_squares(values).item() == 55.0
    kernels.flatten([values[: 2**31], values[2**31 : LONG]], [0, 2**31], out)
    assert torch.equal(out[places], marks) and kernels.sum_of_squares(out).item() == 55.0
    kernels.ordered_sum([values, out], out)
    assert torch.equal(out[places], 2 * marks) and kernels.sum_of_squares(out).item() == 220.0
    back = torch.ones(4101, dtype=torch.bfloat16, device=CUDA)
    kernels.unflatten(out, [2**31], [back])
    assert torch.equal(back, out[2**31 :])
    kernels.update({"weight": values, "gradient": out}, Spans([(0, LONG)]), Rule("SGD", 0.5))
    assert kernels.sum_of_squares(values).item() == 0.0


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_updates_have_the_bits_of_the_reference(rule: Rule, cases_of_kernels: Any) -> None:
    ragged = Spans([(3, 40), (100, 100), (101, 5000, cases_of_kernels.FIRST)])
    aligned = Spans([(16, 2048), (4096, 100_000, cases_of_kernels.FIRST)])
    for spans, weight, gradient in itertools.product((ragged, aligned), FLOATS, FLOATS):
        case = functools.partial(cases_of_kernels.Step, rule, spans, weight, gradient)
        cases_of_kernels.check_update(CUDA, case())
        cases_of_kernels.check_update(CUDA, case(special=False, low=torch.bfloat16, factor=0.37, skip=False))
        cases_of_kernels.check_update(CUDA, case(noise=cases_of_kernels.ONE, offset=1))
        cases_of_kernels.check_update(CUDA, case(skip=True, low=torch.float16))


@pytest.mark.parametrize("kind", ["fp16", "bf16", "int8", "int4"])
def test_compression_has_the_bits_of_the_reference(kind: str, cases_of_kernels: Any) -> None:
    for length, dtype, special in itertools.product(LENGTHS, FLOATS, (True, False)):
        values = cases_of_kernels.numbers(length, 1, dtype, special)
        for block, noise in itertools.product((2, 250, 256), (None, cases_of_kernels.ONE)):
            cases_of_kernels.check_compress(CUDA, values, kind, block, noise, cases_of_kernels.FIRST, FLOATS)


def calls_of_kernels() -> dict[str, tuple[Callable[[], object], int]]:
    """One call of every operation, on a bucket of 200 tensors, with the launches that it may take."""
    shapes = [16 * (1 + i % 7) for i in range(200)]
    starts = list(itertools.accumulate(shapes, initial=0))
    length = starts.pop()
    flat, low, zero = torch.ones(length, device=CUDA), torch.ones(length, device=CUDA).bfloat16(), torch.zeros(length)
    tensors = [torch.ones(shape, device=CUDA) for shape in shapes]
    halves = [tensor.bfloat16() if i % 2 else tensor for i, tensor in enumerate(tensors)]
    spans = Spans([(start, start + shape) for start, shape in zip(starts, shapes, strict=True)])
    flats = {name: zero.to(CUDA) for name in ("weight", "gradient", "exp_avg", "exp_avg_sq")} | {"low": low}
    factor, flag = torch.ones((), device=CUDA), torch.zeros((), dtype=torch.bool, device=CUDA)
    apart = [torch.ones(length, device=CUDA) for _ in range(5)]
    packed = kernels.compress(flat, "int4")
    return {
        "flatten": (lambda: kernels.flatten(tensors, starts, low, scale=0.5), 1),
        "unflatten": (lambda: kernels.unflatten(flat, starts, halves), 2),
        "ordered_sum": (lambda: kernels.ordered_sum(apart, flat, divisor=5, nonfinite=flag), 1),
        "sum_of_squares": (lambda: kernels.sum_of_squares(torch.empty(1 << 20, device=CUDA)), 2),
        "update": (lambda: kernels.update(flats, spans, RULES[0], factor=factor, skip=flag), 1),
        "compress": (lambda: kernels.compress(flat, "int4"), 1),
        "decompress": (lambda: kernels.decompress(packed, flat), 1),
    }


@pytest.mark.parametrize("name", ["flatten", "unflatten", "ordered_sum", "sum_of_squares", "update", "compress",
                                  "decompress"])  # fmt: skip
def test_a_kernel_is_launched_once_per_bucket_and_never_waited_for(name: str) -> None:
    call, launches = calls_of_kernels()[name]
    call()  # compiles, and makes the table of the spans, once
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event.name for event in profile.events() if str(event.device_type).endswith("CUDA")]
    started = [each for each in on_device if not each.startswith(("Memcpy", "Memset"))]
    assert len(started) == launches, on_device
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
