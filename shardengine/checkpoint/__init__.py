"""Checkpoints: every rank's shards as safetensors and one JSON index, whole or not there, for any topology; no pickle.

saving     write aside, fsync, rename                                  loading    choose, verify, fill
background the same behind training
contents   what an engine holds, in flat slices                        fit        what of it is where in a checkpoint
index      the JSON form, checked before it is believed                state      what is no tensor
tensor_file, reader   writing a file, reading ranges of many          directory  names on disk
model_facts   what Hugging Face wants to know                         atomic     whole or not at all

Must not know: the training loop. Nothing in here imports what a checkpoint names: loading one executes no code.
"""

from __future__ import annotations

from shardengine.checkpoint import contents, directory, index
from shardengine.checkpoint.atomic import check_free, new_directory, write_text
from shardengine.checkpoint.contents import BUFFER, WEIGHT
from shardengine.checkpoint.loading import Checkpoint, load
from shardengine.checkpoint.reader import Reader
from shardengine.checkpoint.saving import finish, save
from shardengine.checkpoint.tensor_file import DTYPES, Stream, header_of

__all__ = [
    "BUFFER",
    "DTYPES",
    "WEIGHT",
    "Checkpoint",
    "Reader",
    "Stream",
    "check_free",
    "contents",
    "directory",
    "finish",
    "header_of",
    "index",
    "load",
    "new_directory",
    "save",
    "write_text",
]
