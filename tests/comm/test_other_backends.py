"""Backends of torch.distributed that shardengine has not heard of: torch says what they serve, and data goes over them.

One is played: it is registered with torch under a name of its own, and has gloo behind it.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardengine.comm import devices
from shardengine.comm.devices import Gpus, RankFacts, backend_for, choose
from shardengine.comm.group_kind import GroupKind, NamedGroupKind, NcclGroupKind, kind_of
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.forks import Forks
from tests.support.scripts import printed

ROOT = Path(__file__).parents[2]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("backends", "cpu", "cuda", "xpu"),
    [
        ("cpu:gloo,cuda:nccl", "gloo", "nccl", ""),
        ("cpu:gloo,cuda:ucc", "gloo", "ucc", ""),
        ("cpu:gloo,xpu:xccl", "gloo", "", "xccl"),
        ("cuda:nccl", "", "nccl", ""),
        ("nccl", "", "nccl", ""),
        ("gloo", "gloo", "gloo", ""),
        ("mpi", "mpi", "mpi", ""),
        ("ucc", "ucc", "ucc", ""),
        ("xccl", "", "", "xccl"),
        ("fake", "fake", "fake", "fake"),
        ("nobody", "", "", ""),
        ("", "", "", ""),
    ],
)
def test_torch_says_what_a_backend_serves(backends: str, cpu: str, cuda: str, xpu: str) -> None:
    assert [backend_for(backends, device) for device in ("cpu", "cuda", "xpu")] == [cpu, cuda, xpu]
    assert devices.has_nccl(backends) is (cuda == "nccl")


def test_it_says_so_of_one_that_a_package_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_for("ours", "cuda") == ""
    known = {**dist.Backend.backend_capability, "ours": ["cuda"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", known)
    assert (backend_for("ours", "cuda"), backend_for("ours", "cpu")) == ("ours", "")


@pytest.mark.parametrize(
    ("backends", "visible", "wish", "device", "backend"),
    [
        ("cpu:gloo,cuda:ucc", True, "", GPU, "ucc"),
        ("cpu:gloo,cuda:ucc", True, "cpu", CPU, "gloo"),
        ("cpu:gloo,cuda:ucc", False, "", CPU, "gloo"),
        ("cpu:mpi,cuda:mpi", True, "", GPU, "mpi"),
        ("cpu:mpi,cuda:gloo", True, "", CPU, "mpi"),
        ("cpu:gloo,cuda:gloo", True, "", CPU, "gloo"),
        ("cpu:gloo,cuda:gloo", True, "cuda", GPU, "gloo"),
        ("cpu:gloo,cuda:nccl", True, "", GPU, "nccl"),
        ("cuda:nccl", True, "cpu", CPU, "gloo"),
        ("cpu:gloo,xpu:xccl", False, "", CPU, "gloo"),
    ],
)
def test_data_goes_over_the_groups_own_backend(
    backends: str, visible: bool, wish: str, device: torch.device, backend: str
) -> None:
    ranks = [RankFacts(f"node{n}", Gpus((f"GPU-{n}",) if visible else (), nccl=True), wish) for n in range(2)]
    found = choose(ranks, 0, devices.has_nccl(backends), backends)
    assert (found.device, found.backend) == (device, backend)
    kinds = {"gloo": GroupKind, "nccl": NcclGroupKind}
    assert type(kind_of(found.backend)) is kinds.get(backend, NamedGroupKind)


RANK = """
import os, pickle, sys
import torch, torch.distributed as dist
from tests.support import cases

def make(store, rank, size, timeout):
    made.append(rank)
    return dist.ProcessGroupGloo(store, rank, size, timeout)

made = []
dist.Backend.register_backend("played", make, devices=["cpu"])
rank = int(os.environ["RANK"])
dist.init_process_group("cpu:played", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
found = {}
for stage in sys.argv[2:]:
    config = cases.config_of(stage, 2)
    found[stage] = cases.train_engine("mlp", "AdamW", config, 3)
mesh = cases.mesh_of_this_process()
found["backends"] = [mesh.backend, *(dist.get_backend(group) for group in (mesh.gather, mesh.reduce, mesh.control))]
found["made"] = len(made)
with open(f"rank{rank}", "wb") as file:
    pickle.dump(found, file)
dist.barrier()
"""


def test_a_training_over_a_played_backend_equals_the_oracle(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RANK, encoding="utf-8")
    printed(forks, 2, tmp_path / "script.py", tmp_path / "store", *cases.STAGES, where=tmp_path)
    results: list[dict[str, Any]] = [pickle.loads((tmp_path / f"rank{rank}").read_bytes()) for rank in range(2)]
    for found in results:
        assert found["backends"] == ["played", "played", "played", "gloo"]
        assert found["made"] == 3, "the default one, and one each for gathers and reductions"
    for stage in cases.STAGES:
        truth = cases.truth("mlp", "AdamW", 2, 2, cases.LETTER[stage], 3)
        assert_equal_to_truth([found[stage] for found in results], truth, stage)


NO_STORE = """
import os, sys
import torch.distributed as dist
import shardengine.comm.mesh as mesh
from shardengine.errors import UsageError

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
store = dist.distributed_c10d._get_default_store()
dist.distributed_c10d._get_default_store = dist.Store
try:
    mesh.build(timeout_s=30)
except UsageError as error:
    print(error)
store.set("end of " + os.environ["RANK"], "")
store.wait(["end of 0", "end of 1"])  # the other one may be connecting still
"""


def test_a_group_without_a_store_is_refused(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(NO_STORE, encoding="utf-8")
    said = printed(forks, 2, tmp_path / "script.py", tmp_path / "store", where=tmp_path)
    assert said.count("the default process group (cpu:gloo,cuda:gloo) has no store") == 2
