"""Doors for scripts and frameworks that know another engine: that engine's names, over this one.

deepspeed  ``import shardengine.compat.deepspeed as deepspeed``, or `shardengine run --as-deepspeed script.py`

Nothing imports these packages but the command that runs scripts. Must not know: the engine behind its public surface.
"""
