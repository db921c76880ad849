"""``benchmarks.kernels`` and ``benchmarks.device``: bytes, verdicts, counters on made-up events, and a tiny run."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardengine.kernels
from benchmarks import device, kernel_cases, kernels
from benchmarks.kernel_cases import COPY, FOREACH_COPY, OURS, Case, Work
from benchmarks.reporting import short_gpu_name

CPU = torch.device("cpu")
WORK = Work("large", (1000, 33, 64), CPU)
"""Starts 0, 1024, 1088; 1152 elements with the gaps."""


def test_tensors_start_where_they_are_aligned() -> None:
    assert WORK.starts == [0, 1024, 1088] and WORK.length == 1152
    views = WORK.views(WORK.flat())
    assert [view.numel() for view in views] == [1000, 33, 64]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (lambda: kernel_cases.flatten_case(WORK), 4 * 1097 + 4 * 1152),
        (lambda: kernel_cases.flatten_case(WORK, torch.bfloat16), 2 * 1097 + 2 * 1152),
        (lambda: kernel_cases.unflatten_case(WORK), 8 * 1097),
        (lambda: kernel_cases.sum_case(WORK, 2), 12 * 1152),
        (lambda: kernel_cases.sum_case(WORK, 4), 20 * 1152),
        (lambda: kernel_cases.sum_case(WORK, 8), 36 * 1152),
        (lambda: kernel_cases.norm_case(WORK), 4 * 1152),
        (lambda: kernel_cases.update_case(WORK, "AdamW"), 28 * 1152),
        (lambda: kernel_cases.sum_case(WORK, 64), 4 * 65 * 128),
        (lambda: kernel_cases.sum_case(WORK, 256), 4 * 257 * 32),
        (lambda: kernel_cases.update_case(WORK, "AdamW", mixed=True), 28 * 1152),
        (lambda: kernel_cases.update_case(WORK, "SGD"), 20 * 1152),
        (lambda: kernel_cases.update_case(WORK, "Lion"), 20 * 1152),
        (lambda: kernel_cases.compress_case(WORK, "int8"), 5 * 1152 + 4 * 5),
        (lambda: kernel_cases.compress_case(WORK, "int4"), 4 * 1152 + 576 + 4 * 5),
        (lambda: kernel_cases.compress_case(WORK, "fp16"), 6 * 1152),
        (lambda: kernel_cases.decompress_case(WORK, "int8"), 5 * 1152 + 4 * 5),
        (lambda: kernel_cases.decompress_case(WORK, "fp16"), 6 * 1152),
    ],
)
def test_minimum_bytes_are_those_counted_by_hand(case: Any, expected: int) -> None:
    """Of 1097 elements in three tensors, 1152 with the gaps between them, five blocks of 256."""
    assert case().minimum_bytes == expected


def arguments_of(case: Case, operation: str, monkeypatch: pytest.MonkeyPatch) -> tuple:
    """What ours calls ``operation`` with."""
    taken: list[tuple] = []
    with monkeypatch.context() as patch:
        patch.setattr(shardengine.kernels, operation, lambda *args, **_: taken.append(args))
        case.calls[OURS]()
    return taken[0]


def test_peers_copy_what_ours_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = kernel_cases.flatten_case(WORK)
    tensors, _, out = arguments_of(case, "flatten", monkeypatch)
    case.calls[OURS]()
    expected = out.clone()
    for view in WORK.views(out):
        view.zero_()
    case.calls[FOREACH_COPY]()
    assert torch.equal(out, expected) and bool(expected[1000:1024].eq(0).all())
    packed: Any = case.calls["torch._utils._flatten_dense_tensors"]()
    assert torch.equal(packed, torch.cat(tensors))
    case = kernel_cases.unflatten_case(WORK)
    flat, _, outs = arguments_of(case, "unflatten", monkeypatch)
    case.calls[FOREACH_COPY]()
    assert all(torch.equal(a, b) for a, b in zip(outs, WORK.views(flat), strict=True))


def test_peers_sum_what_ours_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (4, 64):
        case = kernel_cases.sum_case(WORK, count)
        terms, out = arguments_of(case, "ordered_sum", monkeypatch)
        for call in case.calls.values():
            out.zero_()
            call()
            torch.testing.assert_close(out, torch.stack(terms).mean(0))
    flat = WORK.flat()
    monkeypatch.setattr(Work, "flat", lambda *_: flat.index_fill(0, torch.tensor([1000]), 3.0))
    norm = kernel_cases.norm_case(Work("large", (1152,), CPU))
    total: Any = norm.calls["torch.nn.utils.get_total_norm"]()
    squares: Any = norm.calls[OURS]()
    assert float(total) ** 2 == pytest.approx(float(squares))


@pytest.mark.parametrize("mixed", [False, True])
def test_peers_step_the_weights_that_ours_steps(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's first step of the peer is the learning rate in each element, whatever the gradient."""
    case = kernel_cases.update_case(WORK, "AdamW", mixed=mixed)
    flats, spans, rule = arguments_of(case, "update", monkeypatch)
    assert spans.elements == 1152 and rule.states == ("exp_avg", "exp_avg_sq") and ("low" in flats) is mixed
    before = flats["weight"].clone()
    case.calls["torch.optim.AdamW(fused=True)"]()
    for old, new, gradient in zip(*(WORK.views(x) for x in (before, flats["weight"], flats["gradient"])), strict=True):
        torch.testing.assert_close(new, old * (1 - 1e-6) - 1e-4 * gradient.float().sign(), rtol=0, atol=2e-6)
    assert not mixed or torch.equal(WORK.views(flats["low"])[0], WORK.views(flats["weight"])[0].bfloat16())
    before = flats["weight"].clone()
    case.calls[OURS]()
    assert not torch.equal(before, flats["weight"])


def test_large_works_have_as_many_elements_as_asked() -> None:
    work = kernel_cases.large(1_000_000, 300, CPU)
    assert len(work.sizes) == 300 and sum(work.sizes) == pytest.approx(1_000_000, rel=0.02)
    assert sorted(set(work.sizes)) == [81, 6666]
    sizes = kernel_cases.small(500, CPU).sizes
    assert len(sizes) == 500 and min(sizes) >= 1000 and max(sizes) <= 5000


CASE = Case("small", "flatten", 1000, {}, fraction=0.90, speedups={FOREACH_COPY: 2.0}, one_launch=True)


def row_of(ours: float, *, copy: float = 1.0, peer: float = 1.0, rounds: int = 20, targets: bool = True) -> dict:
    """The row of ``CASE`` with made-up seconds; the copy moves 2000 bytes."""
    seconds = {COPY: [copy] * rounds, OURS: [ours] * rounds, FOREACH_COPY: [peer] * rounds}
    return kernels.summarise(CASE, seconds, 2000, targets=targets)


@pytest.mark.parametrize(
    ("ours", "fraction", "outcome"),
    [(0.50, 1.0, "reached"), (0.5556, 0.9, "reached"), (0.58, 0.862, "missed"), (1.0, 0.5, "missed")],
)
def test_the_fraction_is_of_the_copys_bandwidth(ours: float, fraction: float, outcome: str) -> None:
    row = row_of(ours)
    assert row["fraction"]["median"] == pytest.approx(fraction, abs=1e-3) and row["verdict"] == outcome
    assert row["gb_per_s"] == pytest.approx(1000 / ours / 1e9) and row["copy_gb_per_s"] == pytest.approx(2e-6)


@pytest.mark.parametrize(("peer", "outcome"), [(1.0, "reached"), (0.99, "reached"), (0.98, "missed")])
def test_a_peer_must_be_twice_as_slow(peer: float, outcome: str) -> None:
    found = row_of(0.5, peer=peer)["peers"][FOREACH_COPY]
    assert found["speedup"]["median"] == pytest.approx(peer / 0.5) and found["verdict"] == outcome


def test_few_rounds_and_a_wide_interval_decide_nothing_and_a_cpu_has_no_targets() -> None:
    assert row_of(0.5, rounds=19)["verdict"] == "not decided"
    seconds = {COPY: [1.0] * 20, OURS: [0.4, 1.0] * 10}
    assert kernels.summarise(CASE, seconds, 2000, targets=True)["verdict"] == "not decided"
    row = row_of(0.5, targets=False)
    assert "verdict" not in row and "verdict" not in row["peers"][FOREACH_COPY]


@pytest.mark.parametrize(("launches", "outcome"), [(1, "reached"), (2, "missed"), (0, "missed"), (None, "not decided")])
def test_one_kernel_per_bucket(launches: int | None, outcome: str) -> None:
    assert kernels.launch_verdict(launches) == outcome


def event(name: str, start: float, on: str = "CPU", end: float = 0.0, note: bool = False) -> Any:
    """What torch's profiler gives."""
    span = SimpleNamespace(start=start, end=end or start + 1)
    return SimpleNamespace(name=name, time_range=span, device_type=SimpleNamespace(name=on), is_user_annotation=note)


def test_calls_are_counted_inside_of_the_region_only() -> None:
    events = [
        event("cudaDeviceSynchronize", 1),
        event(device.REGION, 10, end=20, note=True),
        event("cudaLaunchKernel", 11),
        event("cudaStreamSynchronize", 12),
        event("cudaMemcpyAsync", 13),
        event("cudaEventSynchronize_ptsz", 14),
        event("cuMemcpyDtoH_v2", 15),
        event("cudaMemcpy", 16),
        event("cudaStreamWaitEvent", 17),
        event("cudaEventQuery", 18),
        event("cudaDeviceSynchronize", 21),
        event("void add_kernel<float>", 15, "CUDA"),
        event("triton_flatten", 22, "CUDA"),
        event("Memcpy DtoH (Device -> Pageable)", 16, "CUDA"),
        event("Memset (Device)", 16, "CUDA"),
        event("Stream Sync", 16, "CUDA"),
        event(device.REGION, 10, "CUDA", end=20, note=True),
        event("Optimizer.step#AdamW.step", 10, "CUDA", end=20, note=True),
    ]
    found = device.calls_in(events)
    assert found.kernels == 2 and found.synchronisations == 4
    assert found.waits == {
        "cudaStreamSynchronize": 1, "cudaEventSynchronize": 1, "cuMemcpyDtoH": 1, "cudaMemcpy": 1
    }  # fmt: skip


def test_the_region_is_found_in_a_real_profile_and_nothing_is_counted_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = device.profiled(lambda: torch.ones(3).add(1), CPU)
    assert found == device.CudaCalls(0, {}) and found.synchronisations == 0
    assert device.why_not_counted(CPU) == "not on CPU" and device.counted(lambda: None, CPU) is None
    monkeypatch.setattr(device, "why_not_counted", lambda _: None)
    assert device.counted(lambda: None, CPU) == found


def test_turns_rotate_pair_up_and_end_at_the_deadline() -> None:
    order: list[tuple[str, int]] = []

    def turn(name: str, number: int) -> float:
        order.append((name, number))
        return float(number)

    seconds = device.take_turns({name: partial(turn, name) for name in "ab"}, 2, float("inf"))
    assert order == [("a", 0), ("b", 0), ("b", 1), ("a", 1)] and seconds == {"a": [0.0, 1.0], "b": [0.0, 1.0]}
    assert len(device.take_turns({"a": partial(turn, "a")}, 50, 0.0)["a"]) == device.LEAST_ROUNDS


def test_short_calls_are_repeated() -> None:
    assert device.repeats_for(lambda: None, CPU, 1.0, 7) == 7
    assert device.repeats_for(lambda: torch.ones(1_000_000).sum(), CPU, 0.0, 7) == 1
    assert device.peak_flops(CPU, 16, rounds=3) > 0


def test_events_time_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: events whose clock is the number of calls, in milliseconds."""
    calls: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(calls)

        def synchronize(self) -> None:
            assert len(calls) == self.at

        def elapsed_time(self, later: Event) -> float:
            return float(later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert device.seconds_per_call(lambda: calls.append(0), torch.device("cuda"), 5) == 1e-3 and len(calls) == 5


def test_elements_are_fewer_where_memory_is_short_and_the_result_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available_bytes", lambda: 600_000)
    assert kernels.elements_for(CPU, 5000) == (5000, "5000 elements instead of 1000000000: as asked")
    fewer, why = kernels.elements_for(CPU, 32_000_000)
    assert fewer == 10_000 and why is not None and "0.0 GiB are free" in why


@pytest.mark.parametrize(
    ("name", "short"),
    [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"), ("Tesla T4", "t4"), ("", "gpu")],
)
def test_a_gpu_names_the_machine(name: str, short: str) -> None:
    assert short_gpu_name(name) == short


def test_a_tiny_run_measures_every_operation(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(kernels, "LEAST_S", {"cpu": 0.0})
    monkeypatch.setattr(kernels, "machine", lambda device: {"name": device})
    arguments = ["--device", "cpu", "--elements", "20000", "--tensors", "6", "--small-tensors", "8", "--rounds", "2"]
    assert kernels.main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert "not written: results are kept for the default sizes only" in captured.err
    assert result["works"]["large"]["tensors"] == 6 and result["why_not_counted"] == "not on CPU"
    assert result["failed"] == []
    names = [(row["work"], row["operation"]) for row in result["rows"]]
    assert len(names) == len(set(names)) == 25
    for operation in ("ordered_sum of 8", "update AdamW bf16 → fp32 → bf16", "update Lion fp32", "decompress int4"):
        assert ("large", operation) in names
    for row in result["rows"]:
        assert row["rounds"] == 2 and row["gb_per_s"] > 0 and row["fraction"]["rounds"] == 2
        assert row["launches"] is None and "verdict" not in row
        assert set(row["seconds"]) == {OURS, COPY, *row["peers"]}
    kernels.print_report(result)
    assert "kernels and waits were not counted: not on CPU" in capsys.readouterr().out


def test_the_default_sizes_are_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "write_result", lambda name, result: tmp_path / f"{name}.json")
    whole: dict[str, Any] = {"failed": []}
    assert kernels.write(whole, kernels.parse(["--device", "cpu"])).endswith("kernels.json")
    assert "default sizes only" in kernels.write(whole, kernels.parse(["--device", "cpu", "--elements", "5"]))
    assert "1 operations failed" in kernels.write({"failed": ["x"]}, kernels.parse(["--device", "cpu"]))


def test_an_operation_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RuntimeError("no kernel\nfor this")

    bad = Case("small", "flatten", 1, {OURS: fails})
    makers = [lambda: bad, partial(kernel_cases.norm_case, WORK), lambda: 1 // 0]
    monkeypatch.setattr(kernels, "cases", lambda *_: makers)
    monkeypatch.setattr(kernels, "LEAST_S", {"cpu": 0.0})
    result = kernels.measure((WORK, Work("small", (8,), CPU)), 2, 10.0)
    assert [row["operation"] for row in result["rows"]] == ["sum_of_squares"]
    first, second = result["failed"]
    assert first == "small: flatten: RuntimeError: no kernel" and second.startswith("case 3: ZeroDivisionError")


@pytest.mark.parametrize("bad", [["--rounds", "0"], ["--elements", "0"], ["--device", "tpu"]])
def test_bad_usage_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.parse(bad)
    assert stopped.value.code == 2 and bad[0] in capsys.readouterr().err
