"""What ``benchmarks.plan`` runs: small models of many architectures, and the configs of its matrix.

Owns: which models, batches and configs. Must not know: how bytes are measured or planned.

Sizes: a rank keeps 50 to 300 MB, and a bucket is 2 to 4% of that, as in training of real size (50M elements in bf16,
100 MB, of some GB), because what depends on the moment (a buffer more or less that waits for other ranks) is of the
size of a bucket.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROWS, TOKENS, WORDS, WIDTH = 2, 256, 2048, 256
BUCKET = 700_000
"""Elements: the largest parameter of most models here has 524,288."""


@dataclass(frozen=True)
class Text:
    """Makes a model of transformers. kind, config: classes · values: of the config."""

    kind: str
    config: str
    values: Mapping[str, Any]

    def __call__(self) -> nn.Module:
        """With weights."""
        import transformers

        model: nn.Module = getattr(transformers, self.kind)(getattr(transformers, self.config)(**self.values))
        return model.train()


LLAMA = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 688, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": TOKENS, "use_cache": False,
}  # fmt: skip
_BERT = {
    "hidden_size": WIDTH, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024,
}  # fmt: skip
_WHISPER = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024, "max_source_positions": TOKENS,
    "max_target_positions": TOKENS, "num_mel_bins": 80, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def _lora() -> nn.Module:
    import peft

    base = Text("LlamaForCausalLM", "LlamaConfig", LLAMA | {"num_hidden_layers": 12})()
    chosen = peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj", "up_proj"])
    model: nn.Module = peft.get_peft_model(base, chosen)
    return model.train()


def words(rows: int = ROWS, tokens: int = TOKENS, count: int = WORDS) -> dict[str, Any]:
    """Of a language model."""
    ids = torch.randint(0, count, (rows, tokens))
    return {"input_ids": ids, "labels": ids}


def _pictures(side: int, count: int) -> dict[str, Any]:
    return {"pixel_values": torch.rand(count, 3, side, side), "labels": torch.zeros(count, dtype=torch.int64)}


def _sounds() -> dict[str, Any]:
    return {"input_features": torch.rand(ROWS, 80, 2 * TOKENS), "labels": torch.randint(3, WORDS, (ROWS, TOKENS // 2))}


@dataclass(frozen=True)
class Architecture:
    """make: the model · batch: a micro-batch of it · in_parts: what makes it moves its parts, so that a dry run leaves
    the weights out of a whole one."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Mapping[str, Any]] = words
    in_parts: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "GPT-2": Architecture(Text("GPT2LMHeadModel", "GPT2Config", {
        "vocab_size": WORDS, "n_positions": TOKENS, "n_embd": WIDTH, "n_layer": 6, "n_head": 8, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0})),
    "Llama": Architecture(Text("LlamaForCausalLM", "LlamaConfig", LLAMA)),
    "T5": Architecture(Text("T5ForConditionalGeneration", "T5Config", {
        "vocab_size": WORDS, "d_model": WIDTH, "d_kv": 32, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 3,
        "num_heads": 8, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0})),
    "ViT": Architecture(Text("ViTForImageClassification", "ViTConfig", _BERT | {"image_size": 128, "patch_size": 8}),
                        functools.partial(_pictures, 128, 4)),
    "Mixtral": Architecture(Text("MixtralForCausalLM", "MixtralConfig", LLAMA | {
        "num_hidden_layers": 3, "intermediate_size": 384, "num_local_experts": 4})),
    "LoRA Llama": Architecture(_lora, functools.partial(words, 4), in_parts=True),
    "Qwen3": Architecture(Text("Qwen3ForCausalLM", "Qwen3Config", LLAMA | {"head_dim": 32})),
    "BERT": Architecture(Text("BertForMaskedLM", "BertConfig", _BERT | {
        "vocab_size": WORDS, "max_position_embeddings": TOKENS})),
    "Whisper": Architecture(Text("WhisperForConditionalGeneration", "WhisperConfig", _WHISPER), _sounds),
    "Mamba": Architecture(Text("MambaForCausalLM", "MambaConfig", {
        "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 4, "state_size": 8, "use_cache": False}),
        functools.partial(words, 2, 64)),
    "ResNet": Architecture(Text("ResNetForImageClassification", "ResNetConfig", {
        "embedding_size": 64, "hidden_sizes": [256, 512, 1024], "depths": [2, 3, 2]}),
        functools.partial(_pictures, 64, 8)),
}  # fmt: skip

PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bf16"}},
}
DEVICE, STATES, BOTH, DISK = "device", "states on the host", "all on the host", "states on a disk"
_HOST = {"device": "cpu"}
_FOLDER = Path(tempfile.gettempdir()) / "shardengine-plan"
TIERS: Mapping[str, Mapping[str, Any]] = {
    DEVICE: {},
    STATES: {"offload_optimizer": _HOST},
    BOTH: {"offload_optimizer": _HOST, "offload_param": _HOST},
    DISK: {"offload_optimizer": {"device": "nvme", "nvme_path": str(_FOLDER)}},
}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {"SGD": {"lr": 1e-3, "momentum": 0.9}}


@dataclass(frozen=True)
class Case:
    """A run. micros: gradients of so many micro-batches make a step · checkpointed: activations are computed again ·
    bucket: elements."""

    model: str
    ranks: int
    stage: str
    precision: str = "fp32"
    tier: str = DEVICE
    optimizer: str = "AdamW"
    micros: int = 1
    checkpointed: bool = False
    bucket: int = BUCKET

    def __str__(self) -> str:
        words = [self.model, f"{self.ranks} ranks" if self.ranks > 1 else "1 rank", f"stage {self.stage}"]
        words += [self.precision, *([self.tier] if self.tier != DEVICE else [])]
        words += [self.optimizer] if self.optimizer != "AdamW" else []
        words += [f"{self.micros} micro-batches"] if self.micros > 1 else []
        return ", ".join([*words, "checkpointed"] if self.checkpointed else words)

    def config(self) -> dict[str, Any]:
        """As a user writes it."""
        zero: dict[str, Any] = {"stage": int(self.stage[0]), "reduce_bucket_size": self.bucket}
        zero |= {"stage3_prefetch_bucket_size": self.bucket}
        zero |= {"stage3_reshard_after_forward": False} if self.stage == "3k" else {}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.micros,
            "gradient_clipping": 1.0,
            "optimizer": {"type": self.optimizer, "params": dict(OPTIMIZERS.get(self.optimizer, {"lr": 1e-4}))},
            "zero_optimization": zero | dict(TIERS[self.tier]),
            **({"activation_checkpointing": {"enabled": True}} if self.checkpointed else {}),
            **PRECISIONS[self.precision],
        }


MATRIX = (
    Case("GPT-2", 1, "0"),
    Case("GPT-2", 2, "0", "bf16"),
    Case("GPT-2", 2, "1"),
    Case("GPT-2", 2, "2", "fp16"),
    Case("GPT-2", 4, "3", "bf16"),
    Case("GPT-2", 4, "3k"),
    Case("GPT-2", 2, "2", "bf16", STATES),
    Case("GPT-2", 2, "3", "bf16", micros=3, checkpointed=True),
    Case("GPT-2", 3, "3", "autocast"),
    Case("Llama", 1, "3"),
    Case("Llama", 1, "2", "bf16", STATES),
    Case("Llama", 2, "0"),
    Case("Llama", 2, "0", "bf16", micros=3),
    Case("Llama", 2, "1", "bf16"),
    Case("Llama", 2, "2", micros=3),
    Case("Llama", 3, "2", "bf16"),
    Case("Llama", 4, "2", "bf16", checkpointed=True),
    Case("Llama", 2, "3"),
    Case("Llama", 4, "3", "bf16"),
    Case("Llama", 4, "3", "bf16", micros=3),
    Case("Llama", 4, "3k", "bf16"),
    Case("Llama", 2, "3", "bf16", STATES),
    Case("Llama", 4, "3", "bf16", BOTH),
    Case("Llama", 2, "3", "fp32", BOTH, checkpointed=True),
    Case("Llama", 4, "3", "fp16"),
    Case("Llama", 2, "3", "bf16", DISK),
    Case("Llama", 2, "2", "autocast"),
    Case("Llama", 2, "2", optimizer="SGD"),
    Case("Llama", 2, "2", "bf16", optimizer="Muon"),
    Case("Llama", 2, "3", "bf16", optimizer="Adafactor"),
    Case("T5", 2, "0", "bf16"),
    Case("T5", 3, "2"),
    Case("T5", 4, "3", "bf16"),
    Case("T5", 2, "3", "bf16", STATES, checkpointed=True),
    Case("T5", 2, "2", "bf16", DISK),
    Case("ViT", 2, "0"),
    Case("ViT", 4, "2", micros=3),
    Case("ViT", 2, "3", "bf16"),
    Case("ViT", 4, "3", "autocast"),
    Case("Mixtral", 1, "0", "bf16"),
    Case("Mixtral", 2, "2"),
    Case("Mixtral", 4, "3", "bf16"),
    Case("Mixtral", 2, "3", "bf16", BOTH, micros=3),
    Case("LoRA Llama", 2, "0"),
    Case("LoRA Llama", 2, "2", "bf16", micros=3),
    Case("LoRA Llama", 4, "3", "bf16"),
    Case("LoRA Llama", 2, "3", "bf16", checkpointed=True),
)
HELD_OUT = (
    Case("Qwen3", 2, "2", "bf16"),
    Case("Qwen3", 4, "3", "bf16", STATES),
    Case("BERT", 2, "1"),
    Case("BERT", 4, "3", "bf16", checkpointed=True),
    Case("Whisper", 2, "3"),
    Case("Whisper", 2, "2", "bf16"),
    Case("Mamba", 2, "2"),
    Case("Mamba", 2, "3", "bf16"),
    Case("ResNet", 1, "1"),
    Case("ResNet", 2, "3"),
)
"""Architectures that were not looked at when the planner was written."""
