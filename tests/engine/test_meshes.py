"""What ``initialize(mesh=...)`` takes: torch's DeviceMesh, process groups of some ranks, groups that overlap; what is
refused; checkpoints across meshes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh

import shardengine
from shardengine.errors import ConfigError, MismatchError, UsageError
from tests.parity.test_hierarchical_reduce import on_nodes
from tests.support import cases
from tests.support.comparing import assert_equal_to_truth
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]
STEPS = 3


def engine_over(mesh: Any, stage: str, zero: dict[str, Any] | None = None, **options: Any) -> shardengine.Engine:
    model = cases.make_mlp()
    config = cases.config_of(stage, zero={"reduce_bucket_size": 600, **(zero or {})}, **options)
    return shardengine.initialize(model, config, optimizer=cases.make_optimizer(model, "AdamW"), mesh=mesh)


def run_over(mesh: Any, stage: str, zero: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """The name of the record, and what ``cases.run_steps`` gives."""
    engine = engine_over(mesh, stage, zero)
    found = engine._core.stage.name, cases.run_steps(engine, STEPS)
    engine.close()
    return found


def two_dimensions(stage: str) -> tuple[str, dict[str, Any]]:
    return run_over(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), stage)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_device_mesh_of_two_dimensions_is_hybrid(pools: Pools, stage: str) -> None:
    results = pools(4).run(two_dimensions, stage)
    assert {name for name, _ in results} == {f"{stage} hybrid"}
    assert_equal_to_truth([found for _, found in results], cases.truth("mlp", "AdamW", 4, 1, "full", STEPS))


def hpz_on_two_dimensions() -> tuple[str, dict[str, Any]]:
    return run_over(init_device_mesh("cpu", (2, 2)), "3", {"zero_hpz_partition_size": 2})


def test_hpz_takes_the_groups_of_a_device_mesh(pools: Pools) -> None:
    results = pools(4).run(hpz_on_two_dimensions)
    assert {name for name, _ in results} == {"3 hpZ"}
    assert_equal_to_truth([found for _, found in results], cases.truth("mlp", "AdamW", 4, 1, "full", STEPS))


def one_of_two_dimensions(stage: str) -> tuple[str, dict[str, Any]]:
    """Data-parallel ranks 0, 2 and 1, 3: the others would share the matrices of one model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    engine = engine_over(mesh["dp"], stage, **ALONE)
    found = engine._core.stage.name, cases.run_steps(engine, STEPS)
    engine.close()
    return found


ALONE: dict[str, Any] = {"gradient_clipping": 0, "nonfinite_gradients": "raise"}
"""With which ranks of another dimension decide nothing alone."""


@pytest.mark.parametrize("stage", ["0", "2", "3"])
def test_a_part_of_a_device_mesh(pools: Pools, stage: str) -> None:
    results = pools(4).run(one_of_two_dimensions, stage)
    truth = cases.truth("mlp", "AdamW", 2, 1, "full", STEPS, clip=0.0)
    for column in (0, 1):
        assert_equal_to_truth([found for _, found in results[column::2]], truth, f"ranks {column} and {column + 2}")


def decided_alone(stage: str, options: dict[str, Any], sizes: tuple[int, ...], part: str) -> tuple[str, str]:
    """What ``initialize`` on a part of a mesh says, and what ``clip_grad_norm_`` says there."""
    names = ("replicate", "dp", "tp")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    try:
        engine = engine_over(mesh[part], stage, **options)
    except ConfigError as error:
        return str(error), ""
    cases.run_micro_batch(engine, cases.loss_of, 0, 0)
    engine.backward(cases.loss_of(engine, 1, engine.rank, 0))
    try:
        engine.clip_grad_norm_(1.0)
    except UsageError as error:
        return "", str(error)
    finally:
        engine.close()
    return "", ""


@pytest.mark.parametrize("stage", list(cases.STAGES))
def test_parts_of_one_model_do_not_clip_or_skip_alone(pools: Pools, stage: str) -> None:
    for options, what in (
        ({"nonfinite_gradients": "raise"}, f"the config has gradient_clipping {cases.CLIP:g}:"),
        ({"gradient_clipping": 0}, "the config has steps that are skipped where gradients are not finite:"),
        ({**ALONE, "torch_autocast": {"enabled": True, "dtype": "float16"}, "nonfinite_gradients": None}, "skipped"),
    ):
        for refused, _ in pools(4).run(decided_alone, stage, options, (2, 2), "dp"):
            assert "is a part of one with the dimension 'tp' of 2 ranks, and" in refused and what in refused, refused
            assert 'Expected "gradient_clipping": 0, "nonfinite_gradients": "raise"' in refused
    for refused, clipped in pools(4).run(decided_alone, stage, ALONE, (2, 2), "dp"):
        assert not refused and "on a part of a mesh with the dimension 'tp' of 2 ranks" in clipped, clipped
        assert "parameter.grad.mul_(factor)" in clipped


@pytest.mark.parametrize(("ranks", "sizes", "part"), [(2, (1, 2), "dp"), (3, (1, 3), "dp"), (4, (2, 2, 1), "dp")])
def test_whichever_dimension_is_left_out(pools: Pools, ranks: int, sizes: tuple[int, ...], part: str) -> None:
    for refused, _ in pools(ranks).run(decided_alone, "2", {}, sizes, part):
        assert "is a part of one with the dimension" in refused, refused


def test_a_dimension_of_one_rank_is_none(pools: Pools) -> None:
    for refused, clipped in pools(2).run(decided_alone, "2", {}, (2, 1), "dp"):
        assert not refused and not clipped


def hybrid_part() -> tuple[str, dict[str, Any]] | None:
    """Six ranks, of which two are no data-parallel ones; a node is said to have two."""
    group = dist.new_group([0, 1, 3, 5])
    if dist.get_rank() not in (0, 1, 3, 5):
        return None
    return run_over(group, "3", {"shard_group_size": 2})


def test_a_process_group_of_some_ranks_in_shard_groups(pools: Pools) -> None:
    results = [result for result in pools(6).run(hybrid_part) if result is not None]
    assert {name for name, _ in results} == {"3 hybrid"}
    assert_equal_to_truth([found for _, found in results], cases.truth("mlp", "AdamW", 4, 1, "full", STEPS))


def overlapping() -> dict[str, dict[str, Any]]:
    """Engines over all ranks, over 0 and 1, over 1 and 2, at work in turn; made in an order that both ranks share."""
    groups = {"all": None, "low": dist.new_group([0, 1]), "high": dist.new_group([1, 2])}
    engines = {
        name: engine_over(group, stage)
        for (name, group), stage in zip(groups.items(), ("2", "3", "1"), strict=True)
        if group is not dist.GroupMember.NON_GROUP_MEMBER
    }
    losses: dict[str, list[list[float]]] = {name: [] for name in engines}
    for step in range(STEPS):
        for name, engine in engines.items():
            losses[name].append([cases.run_micro_batch(engine, cases.loss_of, step, 0)])
    found: dict[str, dict[str, Any]] = {name: {"losses": rows} for name, rows in losses.items()}
    for name, engine in reversed(engines.items()):
        found[name]["rank"] = engine.rank
        engine.close()
    return found


def test_engines_over_groups_that_overlap(pools: Pools) -> None:
    results = pools(3).run(overlapping)
    members = {"all": (0, 1, 2), "low": (0, 1), "high": (1, 2)}
    for name, ranks in members.items():
        truth = cases.truth("mlp", "AdamW", len(ranks), 1, "full", STEPS)
        for number, rank in enumerate(ranks):
            assert results[rank][name]["rank"] == number
            assert results[rank][name]["losses"] == [row[number] for row in truth.losses], (name, rank)
    assert [sorted(result) for result in results] == [["all", "low"], ["all", "high", "low"], ["all", "high"]]


def on_two_nodes() -> tuple[str, int]:
    with on_nodes(2):
        engine = engine_over(None, "3", {"shard_group_size": "node"})
    found = engine._core.stage.name, engine._core.mesh.replicas
    engine.close()
    return found


def test_a_node_may_be_the_shard_group(pools: Pools) -> None:
    assert pools(4).run(on_two_nodes) == [("3 hybrid", 2)] * 4
    assert pools(2).run(run_in_one_node) == ["3"] * 2


def run_in_one_node() -> str:
    return run_over(None, "3", {"shard_group_size": "node"})[0]


# What is refused


def refused(what: str) -> str:
    meshes: dict[str, Callable[[], Any]] = {
        "three dimensions": lambda: init_device_mesh("cpu", (1, 2, 2)),
        "tensor parallel": lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
        "a list": lambda: [0, 1],
        "not a member": lambda: dist.GroupMember.NON_GROUP_MEMBER,
    }
    zeros: dict[str, Any] = {
        "no divisor": {"shard_group_size": 3},
        "hpZ no divisor": {"zero_hpz_partition_size": 8},
        "no nodes": {"shard_group_size": "node"},
        "stage 0": {"stage": 0, "shard_group_size": 2},
        "both": {"shard_group_size": 2, "zero_hpz_partition_size": 2},
        "hpZ at stage 2": {"stage": 2, "zero_hpz_partition_size": 2},
    }
    try:
        if what == "not alike":
            engine_over(init_device_mesh("cpu", (2, 2)), "3", {"shard_group_size": 1})
        elif what == "stage 0 on two dimensions":
            engine_over(init_device_mesh("cpu", (2, 2)), "0")
        elif what == "no nodes":
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("LOCAL_WORLD_SIZE", "3" if dist.get_rank() < 3 else "1")
                patch.setenv("LOCAL_RANK", str(dist.get_rank() % 3))
                engine_over(None, "3", zeros[what])
        else:
            engine_over(meshes[what]() if what in meshes else None, "3", zeros.get(what))
    except (UsageError, ConfigError) as error:
        return str(error)
    return ""


REFUSED = {
    "three dimensions": "with one dimension, the data-parallel ranks, or two",
    "tensor parallel": "{'dp': 2, 'tp': 2}; give the part that is data-parallel, mesh[name]",
    "a list": "expected mesh to be a DeviceMesh, a process group or None, got one of type list",
    "not a member": "this rank is in none, and does not call initialize",
    "no divisor": "shard_group_size: expected a divisor of the number of ranks, 4, got 3",
    "hpZ no divisor": "zero_hpz_partition_size: expected a divisor of the number of ranks, 4, got 8",
    "no nodes": "expects nodes of equally many consecutive ranks, but the nodes have 1, 3 ranks; write a number",
    "stage 0": "shard_group_size: expected stage 1, 2 or 3: stage 0 shards nothing",
    "both": "zero_hpz_partition_size: expected shard_group_size",
    "hpZ at stage 2": "zero_hpz_partition_size: expected stage 3 with stage3_reshard_after_forward",
    "not alike": "shard_group_size: expected the shard group of the mesh that initialize was given, 2 ranks, got 1",
    "stage 0 on two dimensions": "zero_optimization.stage: expected 1, 2 or 3 on a mesh of 2 replicas, got 0",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_in_one_sentence_on_every_rank(pools: Pools, what: str) -> None:
    for text in pools(4).run(refused, what):
        assert REFUSED[what] in text, text


def of_unequal_size() -> str:
    with pytest.raises(MismatchError) as raised:
        engine_over(None, "2", {"shard_group_size": 2 if dist.get_rank() < 2 else 4})
    return str(raised.value)


def test_ranks_with_other_shard_groups_are_told(pools: Pools) -> None:
    for text in pools(4).run(of_unequal_size):
        assert "number of ranks in a shard group" in text and "2" in text and "4" in text, text


# Checkpoints


def train_and_save(stage: str, folder: str) -> dict[str, Any]:
    engine = engine_over(None, stage)
    cases.run_steps(engine, STEPS)
    engine.save_checkpoint(folder)
    engine.close()
    return {}


def load_and_train(stage: str, folder: str) -> list[list[float]]:
    engine = engine_over(None, stage)
    engine.load_checkpoint(folder)
    losses = [[cases.run_micro_batch(engine, cases.loss_of, step, 0)] for step in range(STEPS, 2 * STEPS)]
    engine.close()
    return losses


@pytest.mark.parametrize(
    ("saved", "loaded", "ranks"),
    [
        ("3 hybrid", "3", 4),
        ("3", "2 hybrid", 4),
        ("3 hpZ", "1 hybrid", 4),
        ("2 hybrid", "3 hpZ", 4),
        ("0", "3 hybrid", 4),
        ("3 hybrid", "3", 2),
    ],
)
def test_checkpoints_load_across_meshes(pools: Pools, tmp_path: Path, saved: str, loaded: str, ranks: int) -> None:
    """Saved on four ranks; where as many load, training goes on as without."""
    pools(4).run(train_and_save, saved, str(tmp_path))
    losses = pools(ranks).run(load_and_train, loaded, str(tmp_path))
    if ranks == 4:
        truth = cases.truth("mlp", "AdamW", 4, 1, "full", 2 * STEPS)
        for rank, rows in enumerate(losses):
            assert rows == [row[rank] for row in truth.losses[STEPS:]], rank
    saved_elements = 0
    for file in tmp_path.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            saved_elements += sum(tensors.get_tensor(name).numel() for name in tensors.keys() if "[" in name)  # noqa: SIM118
    assert saved_elements == 3 * sum(parameter.numel() for parameter in cases.make_mlp().parameters())
