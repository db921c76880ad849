"""What the examples for Hugging Face's libraries share, so that they need no network: a tokenizer, a model, data.

In a script of your own ``AutoTokenizer.from_pretrained``, ``AutoModelForCausalLM.from_pretrained`` and ``load_dataset``
stand in their place.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

DATA = Path(__file__).parent / "data"
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def questions() -> list[dict[str, str]]:
    """Each with a prompt and its completion."""
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


def make_model() -> LlamaForCausalLM:
    """A Llama of two layers, the same on every rank."""
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=260, pad_token_id=0, eos_token_id=1, bos_token_id=None, **SHAPE))
