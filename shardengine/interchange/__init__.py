"""Checkpoints of other libraries: read into ours, and ours written for them; no code of theirs runs.

ours       stored (one opened without an engine; what a directory is), summary (what is in it)
out        hugging_face, adapters, weight_files (from_pretrained, peft) · dcp_export
in         deepspeed, shards, unsharded · dcp, dcp_files · options, unpickling (pickles without their code)
between    foreign (what was read) → writing (a checkpoint of ours)

Must not know: engines, ranks.
"""
