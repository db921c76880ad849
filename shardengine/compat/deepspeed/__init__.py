"""DeepSpeed's API as frameworks and scripts use it: ``import shardengine.compat.deepspeed as deepspeed``.

table          every name that is provided or rejected; builds the modules from it
stand_in       makes ``import deepspeed`` find this package, in one process
facade         DeepSpeedEngine around our engine; initialize
config_classes, getters  values of a config, without an engine and with one
monitors       metrics that a script writes itself
foreign        settings of a config whose meaning differs from ours
client_state   a program's own data beside a checkpoint
checkpoints    DeepSpeed's own checkpoints, whole weights from ours
gathering      zero.Init, GatheredParameters, attributes of parameters
processes      init_distributed and comm
helpers        small functions of utils, checkpoint.utils and accelerator
hosts          patches of frameworks, each with its reason

Must not know: engine internals. It never imports a framework.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardengine.compat.deepspeed.table import VERSION, fill, install_below

fill(sys.modules[__name__], "")
install_below(__name__)
__version__ = VERSION

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a module or an object of the table."""
