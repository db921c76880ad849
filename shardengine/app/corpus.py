"""The built-in training text, and the small model made for it. Owns: their recipe and their cache.

Must not know: ranks, the engine, the training loop. transformers and tokenizers are imported when a model is made.

The model is built once: a GPT-2 of about 4.2M random weights (tied embeddings) and a byte-level BPE tokenizer trained
on the training part of CPython's documentation, saved as an ordinary Hugging Face directory. The directory's name holds
a digest of recipe and corpus, so a changed recipe or another Python makes a new one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from shardengine.app.settings import BUILTIN
from shardengine.errors import UsageError

END_OF_TEXT = "<|endoftext|>"
VALIDATION_FRACTION = 0.05
_RECIPE = {"vocab_size": 4096, "n_positions": 128, "n_embd": 256, "n_layer": 4, "n_head": 4}
_DROPOUT, _SEED = 0.0, 42


def read_text(data: str) -> str:
    """Return the corpus: CPython's own documentation for ``builtin:pydoc``, otherwise the UTF-8 file."""
    if data == BUILTIN:
        from pydoc_data import topics

        return "\n\n".join(topics.topics.values())
    return Path(data).read_text(encoding="utf-8")


def split(text: str) -> tuple[str, str]:
    """Split into (training, validation): the last 5%, cut at a line's end, validate.

    Each part is contiguous, so no sentence is in both.
    """
    cut = int(len(text) * (1 - VALIDATION_FRACTION))
    line_end = text.rfind("\n", cut // 2, cut) + 1
    cut = line_end or cut
    return text[:cut], text[cut:]


def default_model(cache: Path) -> Path:
    """Return the directory of the default model, and build it if it is missing. Several processes may do so at once.

    UsageError if ``cache`` cannot be written.
    """
    training, _ = split(read_text(BUILTIN))
    digest = hashlib.sha256(f"{_RECIPE} {_DROPOUT} {_SEED} {training}".encode()).hexdigest()[:12]
    directory = cache / f"gpt2-4m-{digest}"
    if directory.exists():
        return directory
    try:
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    except OSError as error:
        raise UsageError(
            f"cannot keep the default model in {cache}: {error.strerror}; choose --model-cache",
            code="train-model-cache-unwritable",
        ) from None
    try:
        _build(training, building)
        building.chmod(0o755)
        try:
            os.rename(building, directory)  # atomic: the directory is complete or does not exist
        except OSError:
            if not directory.exists():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return directory


def _build(text: str, directory: Path) -> None:
    """Train the tokenizer on ``text``, make the model, save both."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_RECIPE["vocab_size"],
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, model_max_length=_RECIPE["n_positions"]
    )
    config = GPT2Config(
        **_RECIPE,
        resid_pdrop=_DROPOUT,
        embd_pdrop=_DROPOUT,
        attn_pdrop=_DROPOUT,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
