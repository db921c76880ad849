"""``shardengine.initialize``: an engine, after a plan has decided the values that are "auto" in its config.

Must not know: the parts of an engine, how it is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardengine.comm import Mesh
from shardengine.config import Config, load_or_default, undecided
from shardengine.core import mesh_of
from shardengine.engine import Engine, Monitor, arguments
from shardengine.loading import Weights
from shardengine.uncaught import told_in_short


@arguments.checked
def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | Config,
    *,
    optimizer: arguments.OptimizerLike = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    lr_scheduler: Any = None,
    mesh: Mesh | DeviceMesh | ProcessGroup | None = None,
    monitors: Sequence[Monitor] = (),
    weights: Weights = None,
    batch: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> Engine:
    """Partition ``model`` over the data-parallel ranks as ``config`` describes and return the engine that trains it.

    Collective: every rank calls it with the same model, config and optimizer. The model moves to this rank's device
    (one flat buffer at a time) and takes rank 0's values, so on other ranks it may be on the meta device. A model made
    inside of ``meta_init`` has no values on any rank, and each rank gets only its own part of them. The model's
    parameters stay the user's own objects under their own names.

    config: a dict, the path of a JSON file, or a Config · optimizer: a torch optimizer over ``model.parameters()`` that
    has not stepped yet (class, options and groups are taken over; its ``step()`` and ``zero_grad()`` are the engine's
    until ``close()``), [torch.optim.Muon(...), torch.optim.AdamW(...)], a function from a list of parameters to one, or
    None (from the config, over ``model_parameters`` or all trainable parameters) · lr_scheduler: a scheduler, a
    function from the engine's optimizer to one, or None (from the config) · mesh: the data-parallel ranks, if they are
    not all ranks: torch's DeviceMesh of one dimension, or of two, ("replicate", "shard"), for hybrid sharding; a
    process group; or the result of an own ``comm.mesh.build`` · monitors: objects that rank 0 gives the numbers of
    every step (`monitors.Monitor`), beside those of the config · weights: for a model without values: a folder of
    safetensors files, one such file, or a `loading.Reader`. Every rank reads the parts that it keeps; tensors that the
    weights lack begin with the values of the model's own code.

    If the config says "auto" for ``zero_optimization.stage`` or ``train_micro_batch_size_per_gpu``, rank 0 plans the
    fastest values that fit, as ``shardengine.choose`` does, and all ranks use them; all other keys keep their values.
    Only the plan uses the last two arguments. batch: a micro-batch of any number of samples, as passed to
    ``engine(**batch)``, default 512 tokens for a model of transformers; longer ones need more memory · loss: a function
    of forward's result, default its ``loss``.

    Raises ConfigError (every problem of the config at once), UsageError (model or optimizer that cannot be served),
    MismatchError (ranks disagree; names them).
    """
    with told_in_short():
        auto = arguments.said_by(optimizer)
        values: Mapping[str, int] | None = None
        if undecided(config):
            from shardengine.planner import automatic, batches

            options = {} if optimizer is None else {"optimizer": optimizer}
            asked = automatic.question_of(
                config, model, batch=batch, loss=loss or batches.loss_of, options=options, auto=auto
            )
            if asked is not None:
                mesh = mesh_of(mesh, load_or_default(config, auto).timeout_s)
                try:
                    values = automatic.decide(asked, mesh)
                except BaseException:
                    mesh.abandon()
                    raise
        return Engine(model, config, optimizer, model_parameters, lr_scheduler, mesh, monitors, weights, values)
