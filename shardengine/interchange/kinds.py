"""What a directory is, by the names of the files in it, for messages. Must not know: what is inside of those files."""

from __future__ import annotations

from pathlib import Path

_KINDS = (
    ("*.distcp", "a checkpoint of torch.distributed.checkpoint (`shardengine import` reads it)"),
    ("*model_states.pt", "a checkpoint of DeepSpeed (`shardengine import` reads it)"),
    ("*/*model_states.pt", "a directory of DeepSpeed checkpoints (`shardengine import` reads them)"),
    ("adapter_config.json", "adapters of peft (PeftModel.from_pretrained loads them)"),
    ("config.json", "a Hugging Face model (from_pretrained loads it)"),
    ("*.safetensors", "a directory with safetensors, but without index.json"),
    ("*.bin", "a directory with PyTorch files"),
    ("*.pt", "a directory with PyTorch files"),
)


def describe(directory: Path) -> str:
    """A phrase for what ``directory`` is; "" where nothing in it is known."""
    try:
        if not any(directory.iterdir()):
            return "an empty directory"
    except OSError as error:
        return f"a directory that cannot be read ({error.strerror})"
    return next((phrase for pattern, phrase in _KINDS if next(directory.glob(pattern), None) is not None), "")
