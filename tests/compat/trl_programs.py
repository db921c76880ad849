"""Trainers of trl on a tiny model, each the same under DDP and with a DeepSpeed config that shardengine answers.

Owns: the cases, by name, and what of a run is compared. Importing this file takes seconds and changes the process
(``stand_in``): only processes that fork runs do.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.compat.trainers import how_sharded  # first: the name deepspeed is answered from here on
from tests.support.tiny_llama import Run as AnyRun
from tests.support.tiny_llama import Say, arguments_of

# isort: split
from datasets import Dataset, load_from_disk
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
)
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

TINY = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hf_tiny.py"))
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = list(range(1, 260, 6))
"""Tokens that end a generation, so that texts are not all of one length."""
STEPS = 3
_TIMES = ("runtime", "per_second", "preparation_time", "step_time")


@dataclass(frozen=True)
class Run(AnyRun):
    """One training. case: of ``CASES``."""

    case: str = ""


def make_model(say: Say, _rank: int, folder: str) -> None:
    """Save two with their tokenizer: ``untied``, and ``tied``, whose head is its embedding."""
    tokenizer = TINY["make_tokenizer"]()
    for name in ("untied", "tied"):
        torch.manual_seed(1)
        config = LlamaConfig(vocab_size=260, pad_token_id=0, eos_token_id=1, bos_token_id=None, **SHAPE)
        config.tie_word_embeddings = name == "tied"
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)  # what it says depends on what it has read
        model.generation_config.eos_token_id = ENDS
        model.save_pretrained(Path(folder) / name)
        tokenizer.save_pretrained(Path(folder) / name)
    say("made")


def rows(**columns: Callable[[int, dict[str, str]], Any]) -> Dataset:
    """A data set with these columns; each is a function of a row's number and its prompt and completion."""
    given = TINY["questions"]()[:16]
    return Dataset.from_dict({name: [of(n, row) for n, row in enumerate(given)] for name, of in columns.items()})


def prompt(_: int, row: dict[str, str]) -> str:
    """A column: what is asked."""
    return row["prompt"]


def completion(_: int, row: dict[str, str]) -> str:
    """A column: the answer."""
    return row["completion"]


def backwards(_: int, row: dict[str, str]) -> str:
    """A column: another answer of the same length."""
    return row["completion"][::-1]


def text(_: int, row: dict[str, str]) -> str:
    """A column: both."""
    return row["prompt"] + row["completion"]


PAIRS = rows(prompt=prompt, chosen=completion, rejected=backwards)


def adapters(**options: Any) -> LoraConfig:
    """Which change the model from the start."""
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)


class Generates(TrainerCallback):
    """In the middle of a training the ranks generate, greedily and by chance, texts of unequal lengths: the log has
    them all."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Before the last step."""
        if state.global_step != STEPS - 1:
            return
        rank, texts = args.process_index, []
        with torch.random.fork_rng():
            torch.manual_seed(7)
            for sampled in (False, True):
                begin = torch.arange(2 * 2 * (1 + rank)).reshape(2, -1) + 5
                made = model.generate(begin, max_new_tokens=4 + 5 * rank, do_sample=sampled, pad_token_id=0)
                texts.append(made.tolist())
        every: list[Any] = [None] * args.world_size
        torch.distributed.all_gather_object(every, texts)
        state.log_history.append({"step": state.global_step, "texts": every})
        model.train()


# The cases: functions from a run and the folder of models to a trainer


def configured(kind: Any, run: Run, **options: Any) -> Any:
    """Arguments of trl's class ``kind``. Activations are checkpointed, which is its default."""
    given = {
        "num_train_epochs": 1,
        "max_steps": STEPS,
        "warmup_steps": 0,
        "save_strategy": "no",
        "eval_strategy": "no",
        "bf16": False,
        "ddp_find_unused_parameters": False,
        **options,
    }
    return arguments_of(run, kind=kind, **how_sharded(run), **given)


def load(folder: str, name: str = "untied", kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """A model of ``make_model``, in fp32."""
    return kind.from_pretrained(Path(folder) / name, dtype=torch.float32, **options)


def tokenizer_of(folder: str) -> Any:
    """Theirs."""
    return AutoTokenizer.from_pretrained(Path(folder) / "untied")


def sft(run: Run, folder: str, model: Any, data: Dataset, peft: LoraConfig | None = None, **options: Any) -> Any:
    """On ``data``. model: a function, since transformers wants the arguments to be made first."""
    arguments = configured(SFTConfig, run, **{"max_length": 48, **options})
    return SFTTrainer(
        model=model(),
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(6)),
        processing_class=tokenizer_of(folder),
        peft_config=peft,
    )


def sft_completions(run: Run, folder: str) -> Any:
    """The prompts are not learnt."""
    data = rows(prompt=prompt, completion=completion)
    trainer = sft(run, folder, lambda: load(folder), data, eval_strategy="steps", eval_steps=2)
    trainer.add_callback(Generates())
    return trainer


def sft_packed(run: Run, folder: str) -> Any:
    """Rows of one length, each of several texts, and a head that is the embedding."""
    packing = {"packing": True, "packing_strategy": "wrapped", "max_length": 32, "gradient_checkpointing": False}
    return sft(run, folder, lambda: load(folder, "tied"), rows(text=text), **packing)


def sft_adapters(run: Run, folder: str) -> Any:
    """Of checkpointing trl wants the reentrant kind at stage 3, with adapters alone."""
    return sft(run, folder, lambda: load(folder), rows(prompt=prompt, completion=completion), adapters())


def qlora(
    run: Run, folder: str, *, storage: torch.dtype = torch.uint8, nested: bool = False, cast: bool = False
) -> Any:
    """On a base of 4 bits in tensors of dtype ``storage``. nested: its scales are quantised, too · cast: the adapters
    stay in bf16, to which trl casts them; otherwise they are cast back to fp32, as in the other cases."""
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_quant_storage=storage,
    )
    data = rows(prompt=prompt, completion=completion)
    trainer = sft(run, folder, lambda: load(folder, quantization_config=packing), data, adapters())
    packed = [each for each in trainer.model.parameters() if hasattr(each, "quant_state")]
    assert packed and all(each.dtype == storage and each.quant_state.nested == nested for each in packed)
    for parameter in trainer.model.parameters():
        if parameter.requires_grad and not cast:
            parameter.data = parameter.data.float()
    return trainer


def dpo(
    run: Run,
    folder: str,
    make: Callable[[], tuple[Any, Any]],
    data: Callable[[Any], Dataset] = lambda _: PAIRS,
    peft: LoraConfig | None = None,
    **options: Any,
) -> Any:
    """make: a function to the model and its reference."""
    arguments = configured(DPOConfig, run, max_length=48, beta=0.5, **options)
    model, reference = make()
    return DPOTrainer(
        model=model,
        ref_model=reference,
        args=arguments,
        train_dataset=data(arguments),
        processing_class=tokenizer_of(folder),
        peft_config=peft,
    )


def dpo_reference(run: Run, folder: str) -> Any:
    """The reference is another model, in an engine of its own; after each step it comes nearer."""
    near: dict[str, Any] = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    return dpo(run, folder, lambda: (load(folder), load(folder)), **near)


def dpo_adapters_off(run: Run, folder: str) -> Any:
    """The reference is the model without its adapters."""
    return dpo(run, folder, lambda: (load(folder), None), peft=adapters())


def dpo_reference_adapter(run: Run, folder: str) -> Any:
    """The reference is the model with a second adapter."""

    def make() -> tuple[Any, Any]:
        torch.manual_seed(2)
        return get_peft_model(load(folder), adapters()), None

    return dpo(run, folder, make)


def dpo_precomputed(run: Run, folder: str) -> Any:
    """The reference is the model before it trains, in an engine that ends then; trl keeps what it said beside the
    rows, where every rank reads it."""
    place = Path(run.output) / "rows"

    def saved(arguments: Any) -> Dataset:
        with arguments.main_process_first():
            if arguments.process_index == 0:
                PAIRS.save_to_disk(place)
        return load_from_disk(str(place))

    return dpo(run, folder, lambda: (load(folder), None), saved, precompute_ref_log_probs=True)


def count(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward: of the completions of a prompt some have more of these tokens than others."""
    return [sum(token % 3 == 0 for token in each) / 2 for each in completion_ids]


def judge_of(folder: str) -> Any:
    """A model that says one number of a text; its head is not in the files."""
    torch.manual_seed(2)
    return load(folder, kind=AutoModelForSequenceClassification, num_labels=1)


def grpo(run: Run, folder: str, *, peft: LoraConfig | None = None, judges: bool = False, gathers: bool = True) -> Any:
    """Each group of completions is learnt from twice; the reference is another engine, or adapters are off.

    judges: a model gives rewards, too, from a third engine · gathers: at stage 3 all weights while it generates.
    """
    arguments = configured(
        GRPOConfig,
        run,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        num_iterations=2,
        beta=0.1,
        ds3_gather_for_generation=gathers,
    )
    tokenizer = tokenizer_of(folder)
    return GRPOTrainer(
        model=load(folder),
        reward_funcs=[count, judge_of(folder)] if judges else count,
        reward_processing_classes=[None, tokenizer] if judges else None,
        args=arguments,
        train_dataset=rows(prompt=prompt),
        processing_class=tokenizer,
        peft_config=peft,
    )


def kto(run: Run, folder: str) -> Any:
    """With a reference model."""
    arguments = configured(KTOConfig, run, max_length=48)
    return KTOTrainer(
        model=load(folder),
        ref_model=load(folder, "tied"),
        args=arguments,
        train_dataset=rows(prompt=prompt, completion=completion, label=lambda number, _: number % 3 > 0),
        processing_class=tokenizer_of(folder),
    )


def reward(run: Run, folder: str) -> Any:
    """Of a chosen answer and another."""
    arguments = configured(RewardConfig, run, max_length=48)
    return RewardTrainer(
        model=judge_of(folder),
        args=arguments,
        train_dataset=PAIRS,
        processing_class=tokenizer_of(folder),
    )


CASES: dict[str, Callable[[Run, str], Any]] = {
    "sft completions": sft_completions,
    "sft packed": sft_packed,
    "sft adapters": sft_adapters,
    "qlora": qlora,
    "qlora nested": partial(qlora, nested=True),
    "qlora in bf16": partial(qlora, storage=torch.bfloat16),
    "qlora as trl casts": partial(qlora, cast=True),
    "dpo reference": dpo_reference,
    "dpo adapters off": dpo_adapters_off,
    "dpo reference adapter": dpo_reference_adapter,
    "dpo precomputed": dpo_precomputed,
    "grpo": partial(grpo, judges=True),
    "grpo adapters": partial(grpo, peft=adapters(), gathers=False),
    "kto": kto,
    "reward": reward,
}


def train(say: Say, _rank: int, folder: str, run: Run) -> None:
    """Train; says the whole log but for its times."""
    trainer = CASES[run.case](run, folder)
    trainer.train()
    trainer.save_model(str(Path(run.output) / "final"))
    history = trainer.state.log_history
    say([{key: value for key, value in row.items() if not key.endswith(_TIMES)} for row in history])
