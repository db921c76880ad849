"""What goes wrong under the name deepspeed is one sentence, with the cause and the way on, on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.program_runs import MISSING, Runs

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed")
SCRIPTS = {
    "tensor_parallel": "tensor_parallel.autotp_size",
    "sequence_parallel_size": "sequences are not cut over ranks",
    "elasticity": "the number of ranks does not choose the batch size",
    "pipeline": "stage 3 trains models that one device cannot hold",
    "zero_optimisation": 'the nearest valid key is "zero_optimization"',
    "OneBitAdam": "it compresses its own communication; use one of AdamW, Adam, SGD, Lion",
    "Lamb": "it needs the norm of each full parameter; use one of AdamW",
    "SOAP": "it needs the rows and columns of full matrices; use one of AdamW",
    "AdamWW": 'unknown optimizer "AdamWW"; the nearest known one is "AdamW"',
    "mpu": "mpu= is not available: all ranks are data-parallel",
    "mesh_param": "mesh_param= is not available: all ranks are data-parallel",
    "unknown argument": "optimiser= is unknown; expected config=, optimizer=, lr_scheduler=",
    "unknown name": "the nearest is deepspeed.initialize",
    "unknown module": "deepspeed.ops.transformer is not provided by shardengine",
    "Ulysses": "UlyssesSPAttentionHF is not available through shardengine: sequences are not cut over ranks",
    "DistributedAttention": "DistributedAttention is not available through shardengine: sequences are not cut over",
    "PipelineModule": "PipelineModule is not available through shardengine: the model is not cut into pipeline stages",
    "MoE": "MoE is not available through shardengine: every rank holds all experts of the model",
    "init_inference": "call generate() of the engine",
    "LBFGS": "it evaluates the loss several times per step",
    "unknown attribute": "did you mean engine.get_lr?",
    "lr_kwargs": "set learning rates in engine.optimizer.param_groups",
    "to": "call .to(), .half(), .cuda() and the like on the model before initialize",
    "destroyed": "this DeepSpeedEngine was destroyed",
}
"""What a script does → what it is told."""
_DESTROYED = "make a new Trainer or Accelerator for that"
_SHARDED = "with a Trainer trainer.save_model(dir), each on every rank"
_WHOLE = "nothing"
TRAINER = {
    "adafactor": ("nothing",) * 2,
    "save_pretrained on rank 0": (_WHOLE, _SHARDED),
    "save_pretrained on every rank": (_WHOLE, _SHARDED),
    "torch.save on rank 0": (_WHOLE, _SHARDED),
    "torch.save on every rank": (_WHOLE, _SHARDED),
    "train twice": (_DESTROYED,) * 2,
    "evaluate after": ("nothing",) * 2,
    "evaluate before": ("ZeRO inference only makes sense with ZeRO Stage 3", "nothing"),  # transformers says it
    "train after that": ("nothing", _DESTROYED),
}
"""What a user of Trainer does → what he is told at stages 2 and 3."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(tmp_path_factory.mktemp("misuses"), "tests.compat.misuses", "scripts")
    yield runs
    runs.end()


@pytest.fixture(scope="module")
def of_scripts(runs: Runs) -> list[dict[str, str]]:
    return [words for (words,) in runs.said("scripts", 3)]


@pytest.fixture(scope="module", params=[2, 3])
def of_trainer(runs: Runs, request: pytest.FixtureRequest) -> tuple[int, list[dict[str, str]]]:
    return request.param, [words for (words,) in runs.said("of_trainer", request.param)]


def test_every_act_has_a_line(of_scripts: list[dict[str, str]], of_trainer: tuple[int, list[dict[str, str]]]) -> None:
    assert of_scripts[0].keys() == SCRIPTS.keys() and of_trainer[1][0].keys() == TRAINER.keys()


@pytest.mark.parametrize("act", SCRIPTS)
def test_a_script_is_told_on_every_rank(act: str, of_scripts: list[dict[str, str]]) -> None:
    for said in of_scripts:
        assert SCRIPTS[act] in said[act]


@pytest.mark.parametrize("act", TRAINER)
def test_a_user_of_trainer_is_told_on_every_rank(act: str, of_trainer: tuple[int, list[dict[str, str]]]) -> None:
    stage, ranks = of_trainer
    for rank, said in enumerate(ranks):
        expected = TRAINER[act][stage - 2] if rank == 0 or "rank 0" not in act else "nothing"
        assert expected in said[act] and (expected == "nothing") == (said[act] == "nothing")


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_what_stock_trainer_would_not_say(runs: Runs, stage: int, ranks: int) -> None:
    for rank, (said,) in enumerate(runs.said("words_of_trainer", stage, ranks=ranks)):
        expected = "transformers leaves out the optimizer that it was given" if rank == 0 else ""
        assert expected in said["optimizers"] and bool(said["optimizers"]) == (rank == 0)
        assert said["none given"] == ""
        if stage == 3:
            assert "deepspeed.zero.GatheredParameters(parameters)" in said["a read"], said["a read"]
            assert "engine.full_params" not in said["a read"]
        else:
            assert said["a read"] == "nothing"
        failed = said["a save that fails on rank 0"]
        if rank == 0:
            assert failed == "OSError: [Errno 28] No space left on device"
        else:
            assert failed.startswith("CommunicationError: rank 0 raised: OSError: [Errno 28] No space left"), failed
