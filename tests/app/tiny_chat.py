"""A tiny Llama with a tokenizer of bytes that has a chat template, and conversations for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
STRICT = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
    "{{ raise_exception('Only the roles user and assistant are supported') }}{% endif %}{% endfor %}"
) + PLAIN
# what some templates of models that think do: an answer that is the last one is written differently
REWRITING = PLAIN.replace("{{ message.content }}</s>", "{% if loop.last %}hm {% endif %}{{ message.content }}</s>")


def make_tokenizer(template: str | None, *, merges: tuple[tuple[str, str], ...] = (), trim: bool = False) -> Any:
    """A token per byte, but for ``merges``; trim: a token's place in the text does not count the space before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "</s>", "<|user|>", "<|assistant|>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if trim:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", chat_template=template
    )


def make_model(*, words: int = 260) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=words, max_position_embeddings=96, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.2, **shape,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def save(folder: Path, template: str | None = MARKED) -> Path:
    """The directory of model and tokenizer."""
    make_model().save_pretrained(folder)
    make_tokenizer(template).save_pretrained(folder)
    return folder


def turns(*texts: str) -> list[dict[str, str]]:
    """A conversation that the user begins."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def write(path: Path, *conversations: list[dict[str, Any]]) -> Path:
    """A file of them."""
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in conversations), encoding="utf-8")
    return path


def many(count: int) -> list[list[dict[str, str]]]:
    """Conversations of one and two answers, of many lengths."""
    texts = [f"How many is {row}?" for row in range(count)]
    return [
        turns(text, "x" * (1 + row % 9), *(["Sure?", "yes " * (1 + row % 5)] if row % 3 else []))
        for row, text in enumerate(texts)
    ]
