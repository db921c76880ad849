"""Memory-sharded training (ZeRO stages 0 to 3) for PyTorch.

    engine = shardengine.initialize(model, config)
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()

Importing the package loads nothing; the first use of a name loads torch, and nothing else that is heavy. So the command
line answers at once if torch is not needed: help, a config with errors.

Beside the packages: errors · trace (events in the Chrome trace format) · other_engines (names of other libraries that
people call here, and what to call instead) · start (initialize) · pretrained (load_pretrained) · lion, muon, monitors
(public names) · uncaught (a ConfigError that ends the script) · version
"""

from typing import TYPE_CHECKING, Any

from shardengine.other_engines import missing_in_package
from shardengine.version import __version__

if TYPE_CHECKING:
    from shardengine.comm import Mesh, launch
    from shardengine.config import Config, load_config
    from shardengine.engine import Engine
    from shardengine.errors import ConfigError, ShardEngineError
    from shardengine.loading import meta_init
    from shardengine.planner import Choice, Hardware, Plan, choose, plan
    from shardengine.pretrained import load_pretrained
    from shardengine.start import initialize

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
    _PLACES = {
        **dict.fromkeys(("Mesh", "launch"), "comm"),
        **dict.fromkeys(("Config", "load_config"), "config"),
        **dict.fromkeys(("ConfigError", "ShardEngineError"), "errors"),
        **dict.fromkeys(("Choice", "Hardware", "Plan", "choose", "plan"), "planner"),
        "Engine": "engine",
        "initialize": "start",
        "load_pretrained": "pretrained",
        "meta_init": "loading",
    }

    def __getattr__(name: str) -> Any:
        """Return a public name or a package, imported at its first use.

        Raises AttributeError, which names the replacement for names of other packages of this kind.
        """
        import gc
        from importlib import import_module
        from importlib.util import find_spec

        place = _PLACES.get(name, name)
        if name.startswith("__") or find_spec(f"{__name__}.{place}") is None:
            raise missing_in_package(name, __all__)
        collects = gc.isenabled()
        gc.disable()  # a collection looks at every object of torch, which takes longer than the import
        try:
            found = import_module(f"{__name__}.{place}")
        finally:
            if collects:
                gc.enable()
        globals()[name] = value = getattr(found, name) if name in _PLACES else found
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
