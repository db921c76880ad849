"""Models that do not fit where they are loaded: values of parameters that have no memory yet, slice by slice.

source              what placing asks: elements of a parameter; which come from files, which from initialisers
recording           how a model is made, written down instead of done
values              whole tensors and intervals, computed from that
safetensors_files   tensors of a folder by name and interval
pretrained_files    the same, found, renamed and converted by transformers

Must not know: ranks, layouts, who keeps what.
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
