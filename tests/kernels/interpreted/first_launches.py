"""What a training compiles is compiled by ``initialize``, and a rank where that fails takes all ranks to torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardengine.comm import agreement
from shardengine.kernels import operations, reference, reference_update, triton
from shardengine.kernels.triton import compressing, copies, sums, updating
from tests.parity.test_hierarchical_reduce import two_nodes
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankFailure, RankPool

BF16: dict[str, Any] = {"bf16": {"enabled": True}}
ROUNDED: dict[str, Any] = {
    "bf16": {"enabled": True, "master_weights": False, "stochastic_rounding": True},
    "seed": 3,
}
Key = tuple[Any, ...]


def key_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Key:
    """All that Triton's compiler is told: constants, and of each argument what it specialises."""
    told: list[Any] = [kernel.__name__, tuple(sorted((name, str(value)) for name, value in constants.items()))]
    for name, value in zip(kernel.arg_names, arguments, strict=False):
        if isinstance(value, Tensor):
            told.append((str(value.dtype), value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and not isinstance(value, bool):
            specialised = name not in (kernel.kwargs["do_not_specialize"] or ())
            told.append((abs(value) >= 1 << 31, specialised and (value == 1, value % 16 == 0)))
        else:
            told.append(type(value).__name__)
    return tuple(told)


@contextmanager
def launching(launch: Callable[..., None]) -> Iterator[None]:
    """Every launch is this one."""
    with ExitStack() as patches:
        for module in (copies, sums, updating, compressing):
            patches.enter_context(mock.patch.object(module, "launch", launch))
        yield


@contextmanager
def noting(seen: list[Key]) -> Iterator[None]:
    """Note every launch of Triton's; torch computes what it would have."""

    def note(kernel: Any, programs: int, on: Tensor, *arguments: Any, num_warps: int, **constants: Any) -> None:
        if programs:
            seen.append(key_of(kernel, arguments, {**constants, "num_warps": num_warps}))

    def both(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            ours(*arguments, **options)
            return theirs(*arguments, **options)

        return call

    with launching(note), ExitStack() as patches:
        for name in ("flatten", "unflatten", "ordered_sum", "sum_of_squares", "update"):
            theirs = getattr(reference_update if name == "update" else reference, name)
            patches.enter_context(mock.patch.object(triton, name, both(getattr(triton, name), theirs)))
        yield


def compiled_late(runs: list[tuple[str, int, dict[str, Any]]], kind: str) -> list[tuple[Any, list[Key], int]]:
    """Of each run, what a training launches that ``initialize`` has not, and how much it launches."""
    found = []
    for stage, micros, said in runs:
        first: list[Key] = []
        then: list[Key] = []
        with noting(first):
            engine = cases.make_engine(cases.MODELS["mlp"](), cases.config_of(stage, micros, **said), kind)
        with noting(then):
            cases.run_steps(engine, 2)
        engine.close()
        found.append(((stage, micros, said), sorted(set(then) - set(first), key=str), len(set(then))))
    return found


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("AdamW", {}),
        ("AdamW", BF16),
        ("SGD", {"gradient_clipping": 0.0, "nonfinite_gradients": "step", "communication_data_type": "bf16"}),
        ("Lion", ROUNDED),
        ("Adam", {**BF16, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp32"}),
        ("AdamW", {"data_types": {"grad_accum_dtype": "bf16", "reduce_dtype": "bf16"}}),
        ("AdamW", {"fp16": {"enabled": True}}),
        ("SGD", {"reproducible": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_compiles_nothing_that_initialize_has_not(
    ranks: int, kind: str, said: dict[str, Any], pools: Callable[[int], RankPool]
) -> None:
    runs = [(stage, micros, said) for stage in cases.STAGES for micros in (1, 3)]
    for late in pools(ranks).run(compiled_late, runs, kind):
        for run, keys, launched in late:
            assert launched > 3, run
            assert not keys, (run, keys)


def compiled_late_on_nodes(*given: Any) -> list[tuple[Any, list[Key], int]]:
    with two_nodes():
        return compiled_late(*given)


@pytest.mark.parametrize("said", [{}, BF16, {**BF16, "data_types": {"reduce_dtype": "bf16"}}], ids=str)
def test_nor_what_adds_gradients_node_by_node(said: dict[str, Any], pools: Callable[[int], RankPool]) -> None:
    runs = [(stage, micros, {"hierarchical_reduce": True, **said}) for stage, micros in (("0", 1), ("2", 1), ("2", 3))]
    for late in pools(4).run(compiled_late_on_nodes, runs, "AdamW"):
        for run, keys, launched in late:
            assert launched > 3 and not keys, (run, keys)


def without_compiler(*_: Any, **__: Any) -> None:
    raise FileNotFoundError("no C compiler")


def lacking(failing_rank: int, named: bool) -> tuple[dict[str, Any], list[str], str]:
    """A training where one rank cannot launch. named: the environment asks for Triton's kernels by name."""
    told: list[str] = []
    mesh = cases.mesh_of_this_process()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardengine.comm.agreement")
    agreement._say.cache_clear()
    logger.addHandler(handler)
    try:
        lack = launching(without_compiler) if mesh.rank == failing_rank else nullcontext()
        with lack, mock.patch.object(operations, "_named", lambda: named):
            result = cases.train_engine("mlp", "AdamW", cases.config_of("2", 2), 2)
            chosen = operations.implementation(torch.device("cpu"))
    finally:
        logger.removeHandler(handler)
        operations.withdraw("cpu", False)
    return result, told, "torch" if chosen is None else chosen.__name__


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_launch_takes_all_to_torch(failing_rank: int, pools: Callable[[int], RankPool]) -> None:
    found = pools(2).run(lacking, failing_rank, False)
    truth = cases.truth("mlp", "AdamW", 2, 2, "sharded", 2)
    assert_equal_to_truth([result for result, _, _ in found], truth)
    assert [chosen for _, _, chosen in found] == ["torch"] * 2
    (line,) = found[0][1]
    assert f"because a first launch failed on rank {failing_rank} (FileNotFoundError: no C compiler)" in line
    assert "torch does their work on all ranks" in line and found[1][1] == []


def test_what_the_environment_names_must_be_there_on_every_rank(pools: Callable[[int], RankPool]) -> None:
    with pytest.raises(RankFailure) as raised:
        pools(2).run(lacking, 1, True)
    assert "UsageError: SHARDENGINE_KERNELS=triton: a first launch of Triton's kernels" in raised.value.errors[1]
    assert "MismatchError: looking at the model failed on rank 1: UsageError: SHARDENGINE" in raised.value.errors[0]


def test_afterwards_the_kernels_are_used_again(pools: Callable[[int], RankPool]) -> None:
    assert [chosen for _, _, chosen in pools(2).run(lacking, -1, True)] == ["shardengine.kernels.triton"] * 2
