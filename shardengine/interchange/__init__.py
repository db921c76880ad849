"""Checkpoints of other programs, brought into shardengine's own form; no code of theirs runs.

unpickling.py  pickles of strangers: what may be in them, inert stand-ins for the rest
options.py     which optimizer of ours theirs is, and its options
foreign.py     the form between: what was read, whole tensors one at a time
shards.py      DeepSpeed's files of optimizer states: where each parameter's elements lie
deepspeed.py   reads DeepSpeed's checkpoints
dcp.py         reads those of torch.distributed.checkpoint

Must not know: engines, ranks.
"""
