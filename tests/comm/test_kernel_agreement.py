"""agreement.settle_kernels: ranks use kernels of ours together or not at all, with the same bits."""

from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardengine import kernels
from shardengine.comm import agreement
from shardengine.errors import UsageError
from shardengine.kernels import Offer, Offers, operations
from shardengine.kernels.native import build
from tests.support import HANG_S, parts
from tests.support.raising import raises

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
compiled = pytest.mark.skipif(isinstance(build.find_compiler(), str), reason="no C++ compiler (g++ or clang++)")

PROGRAM = """
import hashlib, sys, torch
import torch.distributed as dist
import shardengine
from shardengine.kernels import operations

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
digest = hashlib.sha256()
for _ in range(2):
    torch.manual_seed(1)
    model = torch.nn.Linear(40, 30)
    engine = shardengine.initialize(model, config={
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.1, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    engine = engine[0] if isinstance(engine, tuple) else engine
    for step in range(3):
        engine.backward(engine(torch.randn(2, 40, generator=torch.Generator().manual_seed(step + rank))).square().sum())
        engine.step()
    digest.update(engine.module.weight.detach().numpy().tobytes())
    engine.close()
chosen = operations.implementation(torch.device("cpu"))
print(chosen.__name__ if chosen else "torch", digest.hexdigest())
"""


def run_ranks(folder: Path, *changes: dict[str, str]) -> list[tuple[int, str, str]]:
    """PROGRAM in a process per element of ``changes`` (of the environment): exit code, stdout and stderr of each."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHARDENGINE_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    if "SHARDENGINE_CACHE" in os.environ:
        environment["SHARDENGINE_CACHE"] = os.environ["SHARDENGINE_CACHE"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(folder / "store")],
            cwd=ROOT, env={**environment, "RANK": str(rank), **change},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, change in enumerate(changes)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=HANG_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


def without_compiler(folder: Path) -> dict[str, str]:
    (folder / "empty").mkdir()
    return {"PATH": str(folder / "empty"), "CXX": "", "SHARDENGINE_CACHE": str(folder / "cache")}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest where both ranks have native kernels and nothing is set."""
    found = run_ranks(tmp_path_factory.mktemp("native"), {}, {})
    assert [code for code, _, _ in found] == [0, 0], found
    assert not any("CPU kernels" in errors for _, _, errors in found)
    (said,) = {out.strip() for _, out, _ in found}
    name, digest = said.split()
    assert name == "shardengine.kernels.native"
    return digest


@compiled
@pytest.mark.parametrize("what", ["switched off", "no compiler"])
def test_one_rank_without_native_kernels_takes_all_to_torch_and_rank_0_says_so_once(
    tmp_path: Path, together: str, what: str
) -> None:
    change = {"SHARDENGINE_NATIVE": "off"} if what == "switched off" else without_compiler(tmp_path)
    found = run_ranks(tmp_path, {}, change)
    assert [(code, out.split()) for code, out, _ in found] == [(0, ["torch", together])] * 2, found
    lines = [line for line in found[0][2].splitlines() if "CPU kernels" in line]
    assert len(lines) == 1 and "torch does their work on all ranks" in lines[0] and "ranks [1] have no" in lines[0]
    assert "CPU kernels" not in found[1][2]


@compiled
def test_what_one_rank_requires_and_cannot_have_ends_all(tmp_path: Path) -> None:
    require = {"SHARDENGINE_NATIVE": "require"}
    (good, _, theirs), (bad, _, own) = run_ranks(tmp_path, require, require | without_compiler(tmp_path))
    assert good and bad
    assert "UsageError: SHARDENGINE_NATIVE=require: the native CPU kernels cannot be had: no compiler" in own
    assert "MismatchError: looking at the model failed on rank 1: UsageError: SHARDENGINE_NATIVE=require" in theirs


@pytest.fixture
def fresh() -> Iterator[None]:
    """This process as it was, afterwards."""
    agreement._say.cache_clear()
    yield
    for device_type in ("cpu", "cuda"):
        kernels.withdraw(device_type, False)
    agreement._say.cache_clear()


NO, YES, MUST, FAILED = Offer
SETTLED = [
    ([YES], True, 0),
    ([YES, YES, MUST], True, 0),
    ([NO], False, 0),
    ([NO, NO], False, 0),  # the library itself has said why
    ([NO, YES], False, 1),
    ([YES, NO, YES, NO], False, 1),
]


@compiled
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("offers", "native", "lines"), SETTLED)
def test_the_least_that_a_rank_has_is_what_all_use(
    offers: list[Offer], native: bool, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (1, 0, 0):
        agreement.settle_type("cpu", offers, [], rank)
        assert (operations.implementation(CPU) is not None) == native
        assert len(caplog.records) == (0 if rank else lines)
    without = [rank for rank, offer in enumerate(offers) if offer is NO]
    assert all(record.levelno == logging.WARNING and str(without) in record.message for record in caplog.records)
    agreement.settle_type("cpu", [YES] * len(offers), [], 0)
    assert operations.implementation(CPU) is not None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("offers", [[FAILED], [YES, FAILED], [YES, FAILED, FAILED], [FAILED, FAILED]], ids=str)
def test_a_gpu_on_which_no_kernel_starts_takes_all_ranks_to_torch(
    offers: list[Offer], caplog: pytest.LogCaptureFixture
) -> None:
    cuda, problems = torch.device("cuda"), [f"OSError: no compiler on {rank}" for rank in range(len(offers))]
    kernels.withdraw("cpu", True)
    for rank in (1, 0, 0):
        agreement.settle_type("cuda", offers, problems, rank)
        assert operations.implementation(cuda) is None
        assert len(caplog.records) == (0 if rank else 1)
    first = offers.index(FAILED)
    assert "GPU kernels: torch does their work on all ranks" in caplog.text
    assert f"a first launch failed on rank {first} (OSError: no compiler on {first}); Triton's" in caplog.text
    assert "cpu" in operations._withdrawn, "each type of device is settled on its own"
    agreement.settle_type("cuda", [YES] * len(offers), [], 0)
    assert operations._is_tritons("cuda")


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("lacks", [NO, FAILED])
def test_requiring_what_another_rank_lacks_is_an_error_on_every_rank(lacks: Offer) -> None:
    for rank, (device_type, name) in itertools.product(range(3), (("cpu", "CPU"), ("cuda", "GPU"))):
        words = rf"ranks \[0, 2\] require {name} .* ranks \[1\] have none.*this is rank {rank}"
        with pytest.raises(UsageError, match=words):
            agreement.settle_type(device_type, [MUST, lacks, MUST], ["", "no compiler", ""], rank)


def never() -> None:
    raise AssertionError("nothing of Triton's is to be launched")


@pytest.mark.parametrize(
    ("kernels_are", "native_is", "expected"),
    [("auto", "auto", YES), ("auto", "require", MUST), ("native", "auto", MUST), ("reference", "require", NO)],
)
@compiled
def test_what_a_rank_offers(monkeypatch: pytest.MonkeyPatch, kernels_are: str, native_is: str, expected: Offer) -> None:
    monkeypatch.setattr(operations, "wanted", lambda: kernels_are)
    monkeypatch.setenv("SHARDENGINE_NATIVE", native_is)
    assert kernels.offer(CPU, never) == (expected, expected, "")
    monkeypatch.setattr(operations, "_native", lambda: None)
    assert kernels.offer(CPU, never) == (NO, NO, "")


@compiled
@pytest.mark.usefixtures("fresh")
def test_what_a_rank_with_a_gpu_offers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "wanted", lambda: "auto")
    cuda, tried = torch.device("cuda"), list[bool]()
    kernels.withdraw("cuda", True)  # by an earlier engine
    assert kernels.offer(cuda, lambda: tried.append(operations._is_tritons("cuda"))) == (YES, YES, "")
    assert tried == [True]
    assert kernels.offer(cuda, never) == (YES, FAILED, "AssertionError: nothing of Triton's is to be launched")
    monkeypatch.setattr(operations, "wanted", lambda: "triton")
    with raises("kernels-triton-launch-failed", "cuda", "Asser"):
        kernels.offer(cuda, never)
    monkeypatch.setattr(operations, "wanted", lambda: "reference")
    assert kernels.offer(cuda, never) == (NO, NO, "")


def test_two_offers_travel_in_a_byte() -> None:
    for cpu, device in itertools.product(Offer, Offer):
        offers = Offers(cpu, device, "why not")
        assert 0 <= offers.packed < 256 and Offers.unpacked(offers.packed) == (cpu, device, "")


def bytes_of_all() -> list[int]:
    link = parts.collectives()
    return agreement.compare(link, {"config": ["x"]}, 200 + link.mesh.rank)


def test_a_byte_of_each_rank_travels_with_the_facts(pools) -> None:
    assert pools(3).run(bytes_of_all) == [[200, 201, 202]] * 3
