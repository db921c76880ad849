"""Conversion between our checkpoints and those of other libraries; no code from those checkpoints runs.

ours       stored (a checkpoint opened without an engine; the kind of a directory), summary (its contents)
export     hugging_face, adapters, weight_files (from_pretrained, peft) · dcp_export
import     deepspeed, shards, unsharded · dcp, dcp_files · options, unpickling (pickles without their code)
between    foreign (the imported data) → writing (a checkpoint of ours)

Must not know: engines, ranks.
"""
