"""Models of the Hub by the shapes that their config.json says: to be planned where there is no Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MODELS: Mapping[str, Mapping[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    "meta-llama/Llama-3.1-70B": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "meta-llama/Llama-3.2-3B": {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-14B": {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40,
    },
    "Qwen/Qwen3-32B": {
        "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
    },
}  # fmt: skip
"""What their own config.json says of shapes."""
OF_A_KIND: Mapping[str, Mapping[str, Any]] = {
    "meta-llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256},
    "Qwen": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936},
}


def folder_of(name: str, place: Path) -> str:
    """A new folder in ``place`` with the config.json of the model ``name``."""
    folder = place / name.replace("/", "-")
    folder.mkdir()
    common = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    tree = {**common, "dtype": "bfloat16", **OF_A_KIND[name.partition("/")[0]], **MODELS[name]}
    (folder / "config.json").write_text(json.dumps(tree), encoding="utf-8")
    return str(folder)
