"""Models that do not fit where they are loaded: values of parameters that have no memory yet, slice by slice.

source              what placing asks: elements of a parameter; which come from files, which from initialisers
recording           how a model is made, written down instead of done
values              whole tensors and intervals, computed from that
safetensors_files   tensors of a folder by name and interval

Must not know: ranks, layouts, who keeps what.
"""

from __future__ import annotations

from shardengine.loading.recording import Recording, recording
from shardengine.loading.safetensors_files import SafetensorsFiles
from shardengine.loading.source import Source, Weights, meta_init
from shardengine.loading.values import Reader, Values

__all__ = [
    "Reader",
    "Recording",
    "SafetensorsFiles",
    "Source",
    "Values",
    "Weights",
    "meta_init",
    "recording",
]
