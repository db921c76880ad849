"""The APIs of other engines, implemented with this one, for scripts and frameworks that use them.

deepspeed  ``import shardengine.compat.deepspeed as deepspeed``, or `shardengine run --as-deepspeed script.py`

Only the command that runs scripts imports these packages. Must not know: engine internals.
"""
