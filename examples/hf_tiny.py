"""What the examples for Hugging Face share, so that they need no network: a tokenizer, a model, data, a config.

In a script of your own, ``from_pretrained`` and ``load_dataset`` stand in their place; ``ds_config`` is worth a copy.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

DATA = Path(__file__).parent / "data"
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def parse() -> argparse.Namespace:
    """--stage, --steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], help="of ZeRO; without it DistributedDataParallel")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


def ds_config(stage: int | None) -> dict[str, Any] | None:
    """A DeepSpeed config; what is "auto" transformers fills in from the training arguments."""
    if stage is None:
        return None
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
    }


def questions() -> list[dict[str, str]]:
    """Prompts with their completions."""
    return [json.loads(line) for line in (DATA / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Of bytes, with a chat template."""
    special = ["<pad>", "</s>", "<|user|>", "<|assistant|>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", chat_template=CHAT, model_max_length=128
    )


SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_model() -> LlamaForCausalLM:
    """A Llama of two layers, the same on every rank."""
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, pad_token_id=0, eos_token_id=1, bos_token_id=None, **SHAPE))


def show(log: list[dict[str, float]]) -> None:
    """Print the losses of ``trainer.state.log_history``, on rank 0."""
    if int(os.environ.get("RANK", "0")) == 0:
        for row in log:
            losses = {key: value for key, value in row.items() if key.endswith(("loss", "accuracy", "exact"))}
            print(f"step {row['step']}:", ", ".join(f"{key} {value:.7f}" for key, value in losses.items()), flush=True)
