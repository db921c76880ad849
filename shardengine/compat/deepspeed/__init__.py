"""What frameworks and scripts use of DeepSpeed, over shardengine: ``import shardengine.compat.deepspeed as deepspeed``.

table        every name that is provided or refused; modules that are made of it
stand_in     ``import deepspeed`` finds this one, in one process
facade       DeepSpeedEngine around our engine; initialize
config_classes, getters, monitors  what a config says without an engine, with one; numbers of a script's own
foreign      what of a config means something else there than here
client_state what a program keeps beside a checkpoint
checkpoints  DeepSpeed's own checkpoints, whole weights of ours
gathering    zero.Init, GatheredParameters, what parameters carry
processes    init_distributed and comm
helpers      small functions of utils, checkpoint.utils and accelerator
hosts        what has to be changed in frameworks, each with its reason

Must not know: the engine behind its public surface. Frameworks are never imported, only met.
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
        """What the table has, a module or an object."""
