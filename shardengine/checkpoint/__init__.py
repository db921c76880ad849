"""Checkpoints: every rank's shards as safetensors and one JSON index, whole or not there, for any topology; no pickle.

saving       write aside, fsync, rename
background   the same behind training
loading      choose a checkpoint, verify it, fill the engine
fit          whether a checkpoint fits the model, and which of its elements go where
contents     what an engine holds, in flat slices
index        the JSON form, checked before it is believed
state        what is no tensor
tensor_file  writing a file of tensors
reader       reading ranges of many files
directory    names on disk
atomic       what appears whole or not at all
left_out     frozen weights that are not written, and how they are known again
model_facts  what Hugging Face wants to know of a model

Must not know: the training loop. Nothing in here imports what a checkpoint names: loading one executes no code.
"""

from __future__ import annotations

from shardengine.checkpoint import contents, directory, index, left_out
from shardengine.checkpoint.atomic import check_free, new_directory, write_text
from shardengine.checkpoint.loading import Checkpoint, load
from shardengine.checkpoint.reader import Reader
from shardengine.checkpoint.saving import finish, save
from shardengine.checkpoint.tensor_file import DTYPES, Stream, header_of

__all__ = [
    "DTYPES",
    "Checkpoint",
    "Reader",
    "Stream",
    "check_free",
    "contents",
    "directory",
    "finish",
    "header_of",
    "index",
    "left_out",
    "load",
    "new_directory",
    "save",
    "write_text",
]
