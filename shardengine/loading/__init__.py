"""Models that do not fit into one rank's memory: values of parameters without memory, computed slice by slice.

source              elements of a parameter, for placing; the choice between files and initialisers
recording           the operations that make a model, recorded instead of carried out
values              whole tensors and intervals, computed from the recording
safetensors_files   tensors of a folder by name and interval
pretrained_files    the same, found, renamed and converted by transformers

Must not know: ranks, layouts, the owner of an element.
"""

from __future__ import annotations

from shardengine.loading.pretrained_files import NotInSlices
from shardengine.loading.safetensors_files import SafetensorsFiles
from shardengine.loading.source import Source, Weights, is_in_slices, meta_init
from shardengine.loading.values import Reader

__all__ = [
    "NotInSlices",
    "Reader",
    "SafetensorsFiles",
    "Source",
    "Weights",
    "is_in_slices",
    "meta_init",
]
