"""`shardengine train --dry-run`: plans the run instead of starting it. Must not know: how a plan is made.

Owns: the order of the calls. No weight is read, no rank is started, and only the default model is written.

Exit codes: 0 it fits into this machine · 1 it does not · 2 wrong usage, or a model that cannot be planned.
"""

from __future__ import annotations

import logging
import os

import torch

from shardengine.app import four_bits, loop, planning
from shardengine.app.settings import Settings
from shardengine.comm import devices
from shardengine.planner import automatic, plan, this_machine


def run(settings: Settings, ranks: int) -> int:
    """Print the plan; return the exit code.

    It assumes that all ranks have devices of this machine's kind, as many on every node.
    """
    config = settings.read_config(ranks)
    tokenizer, model = loop.load_model(settings, config.seed, four_bits.dtype_of(config), values=False)
    blocks = loop.load_data(settings, tokenizer, model)
    where = this_machine(_device(), ranks, config)
    logging.getLogger("shardengine").setLevel(logging.ERROR)  # no run starts: drop its messages
    try:
        config, told = planning.decided_alone(where, settings, config, model, blocks)
    except automatic.NothingFits as error:
        print(error)
        return 1
    batch = planning.first_batch(config, blocks, ranks)
    found = plan(model.train(), config, where, batch=batch, in_slices=not four_bits.is_quantised(model.config))
    for notice in (*config.notices, *told):
        print(f"note: {notice}")
    print(planning.text_of(found))
    return 0 if found.fits else 1


def _device() -> torch.device:
    """Return the kind of device that a rank of this machine computes on."""
    count, local = devices.count(), os.environ.get("LOCAL_RANK", "")
    if not count:
        return torch.device("cpu")
    return torch.device("cuda", (int(local) if local.isdecimal() else 0) % count)
