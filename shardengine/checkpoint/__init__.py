"""Checkpoints: every rank's shards as safetensors and one JSON index, written atomically, for any topology; no pickle.

saving       write to a temporary directory, fsync, rename
background   the same in background threads (``async_save``)
loading      choose a checkpoint, verify it, fill the engine
fit          check that a checkpoint fits the model, and map its elements to the engine's
contents     the tensors of an engine as flat slices
index        the JSON index, validated before use
state        everything but tensors
tensor_file  write a file of tensors, with a checksum (CRC-32) of each chunk
reader       read ranges of many files, and verify their checksums
directory    names on disk
atomic       files and directories that appear complete or not at all
left_out     frozen weights that are not written, and their fingerprints
model_facts  the facts about a model that Hugging Face needs

Must not know: the training loop. No name in a checkpoint is ever imported: loading one executes no code.
"""

from __future__ import annotations

from shardengine.checkpoint import contents, directory, index, left_out
from shardengine.checkpoint.atomic import check_free, new_directory, write_text
from shardengine.checkpoint.loading import Checkpoint, load
from shardengine.checkpoint.reader import BlockReader
from shardengine.checkpoint.saving import finish, save
from shardengine.checkpoint.tensor_file import DTYPES, Stream, header_of

__all__ = [
    "DTYPES",
    "BlockReader",
    "Checkpoint",
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
