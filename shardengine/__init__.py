"""Memory-sharded training (ZeRO stages 0 to 3) for PyTorch.

    engine = shardengine.initialize(model, config)
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

Importing it loads torch and nothing else that is heavy.

Beside the packages: errors · trace (events in the Chrome trace format) · other_engines (names of other libraries that
people call here, and what to call instead) · start (initialize) · pretrained (load_pretrained) · lion, monitors (public
names) · version
"""

import gc
from typing import TYPE_CHECKING, Any

_collects = gc.isenabled()
gc.disable()  # a collection looks at every object of torch, which takes longer than all that follows
try:
    from shardengine.comm import Mesh, launch
    from shardengine.config import Config, load_config
    from shardengine.engine import Engine
    from shardengine.errors import ConfigError, ShardEngineError
    from shardengine.loading import meta_init
    from shardengine.other_engines import missing_in_package
    from shardengine.planner import Choice, Hardware, Plan, choose, plan
    from shardengine.pretrained import load_pretrained
    from shardengine.start import initialize
    from shardengine.version import __version__
finally:
    if _collects:
        gc.enable()

__all__ = [
    "Choice",
    "Config",
    "ConfigError",
    "Engine",
    "Hardware",
    "Mesh",
    "Plan",
    "ShardEngineError",
    "__version__",
    "choose",
    "initialize",
    "launch",
    "load_config",
    "load_pretrained",
    "meta_init",
    "plan",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """AttributeError says what there is instead of what other packages of this kind have."""
        raise missing_in_package(name, __all__)
