"""Stepping in backward: what would need it undone is refused, no failure loses a step silently, it runs beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardengine import Engine, errors
from shardengine.offload import direct_io
from shardengine.optim import in_backward, update
from shardengine.optim.in_backward import StepsInBackward
from tests.parity.test_step_in_backward import SMALL, config_of, count_early
from tests.support import cases
from tests.support.raising import raises
from tests.support.ranks import RankPool

Pools = Callable[[int], RankPool]


def make(stage: str, place: dict[str, Any] | None = None, **options: Any) -> Engine:
    place = place or {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    return cases.make_engine(cases.make_mlp(), config_of(stage, place, **options))


def backward(engine: Engine, step: int = 0) -> None:
    engine.backward(cases.loss_of(engine, step, engine.rank, 0))


def weights_of(engine: Engine) -> dict[str, bytes]:
    found = {name: cases.copy_out(value).float().numpy().tobytes() for name, value in engine.state_dict().items()}
    engine.close()
    return found


def write_a_weight(engine: Engine) -> None:
    with torch.no_grad():
        cast(cases.Mlp, engine.module).scale.mul_(2)
    engine(torch.randn(5, 7))


def write_all(engine: Engine) -> None:
    with engine.full_params(writable=True):
        pass


def write_gradients(engine: Engine) -> None:
    with engine.full_grads(writable=True):
        pass


REFUSED: dict[str, tuple[Callable[[Engine, Path], Any], str]] = {
    "another backward": (lambda engine, _: backward(engine), r"expected engine\.step\(\) first"),
    "zero_grad": (lambda engine, _: engine.zero_grad(), r"expected engine\.step\(\) first"),
    "clipping": (lambda engine, _: engine.clip_grad_norm_(1.0), "before the norm is known"),
    "gradients": (lambda engine, _: write_gradients(engine), "step_in_backward to be false"),
    "a weight": (
        lambda engine, _: write_a_weight(engine),
        "a parameter was written after the last step .*the write is lost",
    ),
    "weights": (lambda engine, _: write_all(engine), r"full_params\(writable=True\) after the window's last backward"),
    "saving": (lambda engine, folder: engine.save_checkpoint(folder), r"expected engine\.step\(\) first"),
    "offloading": (lambda engine, _: engine.offload_states(), "in which buckets are stepped"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_undo_a_step_is_refused_and_changes_nothing(tmp_path: Path, what: str) -> None:
    call, message = REFUSED[what]
    plain, engine = make("2", {"offload_optimizer": {"device": "cpu"}}), make("2")
    for each in (plain, engine):
        for step in range(2):
            backward(each, step)
            each.step()
        backward(each, 2)
    with pytest.raises(errors.UsageError, match=message):
        call(engine, tmp_path)
    for each in (plain, engine):
        if what == "a weight" and each is engine:
            engine.reset()  # as it says
            assert engine.global_steps == 3
        else:
            each.step()
        backward(each, 3)
        each.step()
    assert weights_of(engine) == weights_of(plain)


def test_options_are_those_of_backward(tmp_path: Path) -> None:
    plain, engine = make("1", {"offload_optimizer": {"device": "cpu"}}), make("1")
    for step in range(3):
        for each in (plain, engine):
            assert each.optimizer is not None
            each.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            backward(each, step)
        if step:
            assert engine.optimizer is not None
            engine.optimizer.param_groups[0]["lr"] = 0.5
            with raises("optimizer-changed-after-backward"):
                engine.step()
            engine.optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
        for each in (plain, engine):
            each.step()
    assert weights_of(engine) == weights_of(plain)


class Twice(nn.Module):
    """A layer that re-entrant checkpointing calls twice, from step ``late_from`` on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inp, self.shared, self.out = (nn.Linear(16, 16) for _ in range(3))
        self.twice = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for _ in range(2 if self.twice else 1):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.out(x)


def train_twice(config: dict[str, Any], twice: list[list[bool]]) -> Any:
    """twice: per step, whether each rank calls the layer twice. Weights, early counts; or the error."""
    engine = cases.make_engine(Twice(), config, "SGD")
    early, error = [], ""
    try:
        for step, where in enumerate(twice):
            cast(Twice, engine.module).twice = where[engine.rank]
            torch.manual_seed(step * 10 + engine.rank)
            engine.backward(engine(torch.randn(4, 16)).square().mean())
            early.append(count_early(engine))
            engine.step()
        weights = {name: cases.copy_out(value).numpy().tobytes() for name, value in engine.state_dict().items()}
    except errors.UsageError as raised:
        error, weights = str(raised), {}
    engine.close()
    return weights, early, error


def test_late_gradients(pools: Pools) -> None:
    """From the start on they keep buckets from going early, on all ranks; the first one of a run is an error on all."""
    host = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}, "reduce_bucket_size": 200}
    plain = config_of("2", {"reduce_bucket_size": 200})
    always = [[True, False]] * 3
    expected = pools(2).run(train_twice, plain, always)
    found = pools(2).run(train_twice, config_of("2", host), always)
    assert [each[1] for each in found] == [[0, 0, 0]] * 2
    assert [each[0] for each in found] == [each[0] for each in expected] and found[0][0]
    once = pools(2).run(train_twice, config_of("2", host), [[False, False]] * 2 + [[True, False]])
    assert all("a parameter received two gradients in one backward" in each[2] for each in once)
    assert all(each[1][1] > 0 for each in once)


@contextmanager
def boom(engine: Engine, name: str) -> Iterator[None]:
    """The gradient of the parameter cannot be computed."""

    def raises(*_: Any) -> None:
        raise RuntimeError("boom")

    handle = engine.module.get_parameter(name).register_hook(raises)
    with pytest.raises(RuntimeError, match="boom"):
        yield
    handle.remove()


@pytest.mark.parametrize(
    ("where", "steps"), [("inp.weight", "some"), ("blocks.2.0.weight", "none landed"), ("out.weight", "none")]
)
@pytest.mark.parametrize("announced", [True, False])
def test_a_backward_that_fails_is_for_reset(tmp_path: Path, where: str, steps: str, announced: bool) -> None:
    """It goes back where no bucket was stepped, and a checkpoint is asked for where some were; nothing forgets them."""
    engine, plain = make("2"), make("2", {"offload_optimizer": {"device": "cpu"}})
    for each, folder in ((engine, tmp_path / "a"), (plain, tmp_path / "b")):
        for step in range(2):
            backward(each, step)
            each.step()
        each.save_checkpoint(folder)
    loss = cases.loss_of(engine, 2, 0, 0)
    with boom(engine, where):
        (engine.backward if announced else torch.Tensor.backward)(loss)
    assert engine.optimizer is not None and bool(engine.optimizer.stepped_early) is (steps == "some")
    others = (lambda: backward(engine, 2), lambda: engine.save_checkpoint(tmp_path)) if announced else ()
    for call in (engine.zero_grad, *others):
        with pytest.raises(errors.UsageError):
            call()
    if steps == "some":
        with pytest.raises(errors.UsageError, match="load_checkpoint"):
            engine.reset()
        engine.load_checkpoint(tmp_path / "a")
    else:
        engine.reset()
    assert not engine.optimizer.stepped_early and engine.global_steps == 2
    for each in (engine, plain):
        for step in (2, 3, 4):
            backward(each, step)
            each.step()
    assert weights_of(engine) == weights_of(plain)


@pytest.mark.parametrize("bucket", [SMALL, 1 << 20])
def test_a_backward_without_the_engine_is_stepped_or_refused(bucket: int) -> None:
    """Calls that end it must not forget that buckets are stepped then, however many there are."""
    place: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": bucket}
    plain = make("2", place)
    place = {**place, "offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    engine = make("2", place)
    for step in range(4):
        for each in (engine, plain):
            cases.loss_of(each, step, 0, 0).backward()
        if step:
            for call in (engine.zero_grad, lambda step=step: cases.loss_of(engine, step, 0, 0).backward()):
                with pytest.raises(errors.UsageError, match=r"expected engine\.step\(\) first"):
                    call()
        for each in (engine, plain):
            each.step()
    assert weights_of(engine) == weights_of(plain)


def test_several_backwards_from_the_first_window_on_keep_buckets_from_going_early() -> None:
    plain, engine = make("2", {"offload_optimizer": {"device": "cpu"}}), make("2")
    for step in range(3):
        for each in (plain, engine):
            backward(each, step)
            assert not count_early(each)
            backward(each, step + 10)
            each.step()
    assert weights_of(engine) == weights_of(plain)


def test_states_that_are_written_while_a_backward_runs_inside_are_kept() -> None:
    plain, engine = make("2", {"offload_optimizer": {"device": "cpu"}}), make("2")
    for each in (plain, engine):
        for step in range(2):
            backward(each, step)
            each.step()
        with each.full_optimizer_state(writable=True) as states:
            backward(each, 2)
            for entry in states.values():
                assert entry is not None
                entry["exp_avg"].mul_(2)
        assert not count_early(each)
        each.step()
    assert weights_of(engine) == weights_of(plain)


def test_nothing_is_refused_where_nothing_can_go_early() -> None:
    """fp32 weights that rest in host memory with their state have no masters apart from them."""
    host: dict[str, Any] = {"offload_optimizer": {"device": "cpu", "step_in_backward": True}}
    engine = make("3", {**host, "offload_param": {"device": "cpu"}})
    for step in range(3):
        backward(engine, step)
        engine.clip_grad_norm_(1.0)
        engine.step()
    engine.close()


def test_a_disk_that_fails_in_backward_is_told_in_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost: the step goes on when the disk works again."""
    on_disk = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 2}
    plain = make("2", {"offload_optimizer": on_disk})
    engine = make("2", {"offload_optimizer": {**on_disk, "step_in_backward": True}})
    for each in (plain, engine):
        for step in range(2):
            backward(each, step)
            each.step()
    backward(plain, 2)
    plain.step()
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        patch.setattr(direct_io, "preadv", fails)
        backward(engine, 2)
        with pytest.raises(errors.OffloadError, match="Input/output error"):
            engine.step()
    engine.reset()
    assert engine.global_steps == 3
    assert weights_of(engine) == weights_of(plain)


def test_it_happens_beside_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket is stepped before backward ends: that of the last layer, while the first layer's hook waits for it."""
    engine, begun = make("2"), []
    begin = StepsInBackward.begin

    def noted(self: StepsInBackward, state: Any, *rest: Any) -> None:
        begin(self, state, *rest)
        begun.append(self._early[state.bucket.layout.index].done)

    monkeypatch.setattr(StepsInBackward, "begin", noted)
    for step in range(2):
        if step:
            cast(cases.Mlp, engine.module).inp.weight.register_hook(lambda grad: begun[0].result(timeout=60))
        backward(engine, step)
        assert bool(begun) is bool(step)
        engine.step()
    engine.close()


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_close_waits_for_what_is_being_stepped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Its memory and its file are used until then; the module has the weights from before the step."""
    place = {"device": device, "nvme_path": str(tmp_path), "step_in_backward": True}
    engine, plain = make("2", {"offload_optimizer": place}), make("2", {"offload_optimizer": {"device": "cpu"}})
    for each in (engine, plain):
        backward(each, 0)
        each.step()
    compute, ended = update.compute, []

    def slowly(*given: Any) -> None:
        time.sleep(0.3)
        compute(*given)
        ended.append(list(tmp_path.iterdir()))

    monkeypatch.setattr(in_backward, "compute", slowly)
    backward(engine, 1)
    begun = count_early(engine)
    assert begun > len(ended)
    engine.close()
    assert len(ended) == begun and all(bool(files) is (device == "nvme") for files in ended)
    assert list(tmp_path.iterdir()) == []
    plain.close()
    for ours, theirs in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
