"""Inputs of other people's programs, made on the spot: ``python -m tests.compat.external_inputs`` writes them here.

A tokenizer and a tiny model, rows for each program, a metric that needs no network, models and data sets under the
names of a hub, modules in place of what programs import.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        values = datasets.Value("int32")
        return evaluate.MetricInfo(
            description="share", citation="", features=datasets.Features({"predictions": values, "references": values})
        )

    def _compute(self, predictions, references):
        right = sum(a == b for a, b in zip(predictions, references))
        found = sum(a == b == 1 for a, b in zip(predictions, references))
        f1 = 2 * found / max(sum(predictions) + sum(references), 1)
        return {"accuracy": right / len(references), "f1": float(f1)}
"""

WIKITEXT = """---
configs:
- config_name: wikitext-2-v1
  data_files: train.jsonl
---
"""
MRPC = """---
configs:
- config_name: mrpc
  data_files:
  - {split: train, path: train.jsonl}
  - {split: validation, path: validation.jsonl}
  - {split: test, path: validation.jsonl}
---
"""
# what the program for cifar takes from torchvision; the program itself sets no seed
TORCHVISION = """
from types import SimpleNamespace

import torch

torch.manual_seed(0)


class CIFAR10(torch.utils.data.TensorDataset):
    def __init__(self, root, train, download, transform):
        made = torch.Generator().manual_seed(int(train))
        labels = torch.arange(160) % 10
        images = torch.rand(160, 3, 32, 32, generator=made) + labels.view(-1, 1, 1, 1) / 10
        super().__init__(images, labels)


def nothing(*arguments):
    pass


datasets = SimpleNamespace(CIFAR10=CIFAR10)
transforms = SimpleNamespace(Compose=nothing, ToTensor=nothing, Normalize=nothing)
"""
# HelloDeepSpeed's ranks each name their common folder by the second of their own clock: here that is one second
PYTZ = """
import datetime

__version__ = "0"  # too old for pandas to use


class timezone(datetime.tzinfo):
    def __init__(self, name):
        pass

    def fromutc(self, time):
        return time.replace(2026, 1, 1, 12, 0, 0)
"""


def make_models(tiny: dict[str, Any]) -> None:
    """Of each kind that a program loads, and those that accelerate's tests take from the hub."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaForSequenceClassification,
        MobileViTConfig,
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    llama, tokenizer = tiny["make_model"](), tiny["make_tokenizer"]()
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    one_label = type(llama.config)(**{**llama.config.to_dict(), "num_labels": 1})
    for name, model in {
        "llama": llama,
        "reward": LlamaForSequenceClassification(one_label),
        "bert": BertForSequenceClassification(BertConfig(vocab_size=260, max_position_embeddings=128, **small)),
        "t5": T5ForConditionalGeneration(T5Config(vocab_size=260, eos_token_id=1, **t5)),
    }.items():
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    tokenizer.add_special_tokens({"bos_token": "</s>", "mask_token": "<|user|>"})
    tokenizer.save_pretrained("roberta-base")
    varied = BertConfig(vocab_size=260, max_position_embeddings=128, initializer_range=0.5, **small)
    BertForSequenceClassification(varied).save_pretrained("bert-base-cased")
    tokenizer.save_pretrained("bert-base-cased")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=50257, n_embd=32, n_layer=2, n_head=2, n_positions=64))
    for name in ("gpt2", "sshleifer/tiny-gpt2", "hf-internal-testing/tiny-random-gpt2"):
        gpt2.save_pretrained(name)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 2}
    shared = {"shared_expert_intermediate_size": 16, "vocab_size": 64}
    moe = Qwen2MoeForCausalLM(Qwen2MoeConfig(**small, **experts, **shared))
    moe.save_pretrained("peft-internal-testing/tiny-random-qwen-1.5-MoE")
    MobileViTConfig().save_pretrained("apple/mobilevit-xx-small")


def make_rows(questions: list[dict[str, str]]) -> None:
    """Files and folders of data sets."""
    pairs = [(row["prompt"], row["completion"]) for row in questions * 4]
    kinds: dict[str, list[dict[str, Any]]] = {
        "sft": [{"prompt": prompt, "completion": said} for prompt, said in pairs],
        "preference": [{"prompt": p, "chosen": said, "rejected": said[::-1]} for p, said in pairs],
        "kto": [{"prompt": p, "completion": s, "label": n % 3 > 0} for n, (p, s) in enumerate(pairs)],
        "prompts": [{"prompt": prompt} for prompt, _ in pairs],
    }
    for kind, rows in kinds.items():
        Path(kind).mkdir()
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        Path(kind, "train.jsonl").write_text(lines, encoding="utf-8")
    Path("text.txt").write_text("".join(prompt + said + "\n" for prompt, said in pairs), encoding="utf-8")
    labels = "".join(json.dumps({"label": n % 2, "sentence": said}) + "\n" for n, (_, said) in enumerate(pairs))
    Path("labels.json").write_text(labels, encoding="utf-8")
    Path("nltk_data/tokenizers/punkt").mkdir(parents=True)  # looked for before training, used in evaluation alone
    summaries = "".join(json.dumps({"text": p.strip(), "summary": said}) + "\n" for p, said in pairs)
    Path("summaries.json").write_text(summaries, encoding="utf-8")
    Path("wikitext").mkdir()
    Path("wikitext/README.md").write_text(WIKITEXT, encoding="utf-8")
    Path("wikitext/train.jsonl").write_text("".join(json.dumps({"text": p + s}) + "\n" for p, s in pairs), "utf-8")
    Path("nyu-mll/glue").mkdir(parents=True)
    Path("nyu-mll/glue/README.md").write_text(MRPC, encoding="utf-8")
    for split, taken in {"train": pairs, "validation": pairs[::3]}.items():
        texts = [{"sentence1": p, "sentence2": s, "label": len(s) % 2, "idx": n} for n, (p, s) in enumerate(taken)]
        Path(f"nyu-mll/glue/{split}.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), "utf-8")
    for name, text in (("torchvision", TORCHVISION), ("pytz", PYTZ)):
        Path(f"with {name}").mkdir()
        Path(f"with {name}/{name}.py").write_text(text, encoding="utf-8")
    for name in ("accuracy", "glue", "rouge"):  # rouge is loaded before training, too
        Path(name).mkdir()
        Path(f"{name}/{name}.py").write_text(ACCURACY, encoding="utf-8")


if __name__ == "__main__":
    given = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hf_tiny.py"))
    make_models(given)
    make_rows(given["questions"]())
