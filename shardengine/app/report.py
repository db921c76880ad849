"""Rank 0's output. Owns: header, progress, metrics.jsonl, loss.png, shardengine.json, summary, sample.

Must not know: how training works. Other ranks hold a report that is not enabled and does nothing. So a report may ask
the engine for its local numbers, but must not make collective calls.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from shardengine import stages
from shardengine.app import adapters, flops, sources
from shardengine.app.data import TokenBlocks
from shardengine.app.settings import DROP, FROM_CONFIG, Settings
from shardengine.checkpoint import write_text
from shardengine.engine import Engine
from shardengine.planner import show_bytes
from shardengine.sharding import inner


@dataclass
class Progress:
    """The loop's facts after a step. ``loss``: mean over the global batch's valid tokens; ``tokens``: its size.

    ``waited``: the part of ``seconds`` that this rank stood still for communication.
    """

    step: int = 0
    loss: float = math.nan
    lr: float = 0.0
    seconds: float = 0.0
    stopped: bool = False
    tokens: int = 0
    waited: float = 0.0


class RunReport:
    """One run's output: lines for people on stdout, and files in ``settings.output``."""

    def __init__(self, settings: Settings, *, steps: int, every: int, enabled: bool) -> None:
        """steps: of the whole run · every: steps between two plain lines · enabled: whether this is rank 0."""
        self._settings, self._steps, self._every, self._enabled = settings, steps, every, enabled
        self._losses: list[tuple[int, float]] = []
        self._validations: list[tuple[int, float]] = []
        self._tokens, self._seconds, self._waited, self._first = 0, 0.0, 0.0, 0
        self._started = time.monotonic()
        self._made, self._first_ended = 0, 0.0
        self._flops_per_token = 0.0
        self._bar: Any = None

    def header(self, engine: Engine, blocks: TokenBlocks, notices: Iterable[str], plan: str) -> None:
        """Print the facts of the run; write the resolved config, or continue a resumed run's metrics.

        notices: of the config, as it was read · plan: of the run's memory; "" if none was asked for.
        """
        if not self._enabled:
            return
        config, settings = engine.config, self._settings
        self._first = engine.global_steps
        stored = sources.out_of_folder(config, settings.output)
        write_text(settings.output / "shardengine.json", json.dumps(stored.to_dict(), indent=2) + "\n")
        if settings.resume is not None or settings.again:
            self._continue(-1 if settings.resume is None else self._first)
        unique = list(engine.module.parameters())
        self._flops_per_token = flops.per_token(engine.module, blocks.length)
        device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else "CPU"
        groups = ", ".join(
            f"{key} {value}" for key, value in (config.optimizer.params if config.optimizer else {}).items()
        )
        zero = config.zero_optimization
        rows = {
            "model": _model(settings, config.seed),
            "parameters": f"{sum(map(inner.weights_in, unique)):,}",
            **_adapters(engine),
            "data": f"{settings.data}, {blocks.training.tokens:,} tokens to train, "
            f"{blocks.validation.tokens:,} to validate{_of(settings.held_out)}, {_rows(blocks)}",
            "stage": _stage(engine),
            "ranks": f"{engine.world_size} on {device}, {torch.get_num_threads()} thread(s) each",
            "batch": f"{engine.train_batch_size()} = {engine.train_micro_batch_size_per_gpu()} per rank x "
            f"{engine.gradient_accumulation_steps()} micro-batch(es) x {engine.world_size} rank(s)",
            "dtypes": _dtypes(engine),
            "optimizer": f"{config.optimizer.type if config.optimizer else ''} ({groups})",
            "model state": f"{_by_tier(engine.memory(), 'predicted')} per rank, predicted",
            "output": str(settings.output),
        }
        if plan:
            rows["plan"] = plan
        if (memory := engine.memory())["units"]:
            rows["units"] = _units(memory)
        if sentences := engine.tuning():
            rows["buckets"] = "; ".join(sentences)
        if zero.offload_optimizer.ratio == "auto":
            rows["offload"] = f"ratio auto: {engine.memory()['offload_ratio']:.1%} of the optimizer is offloaded"
        if settings.save_every:
            kept = config.checkpoint.keep_last
            rows["checkpoints"] = f"every {settings.save_every} step(s), the last {kept} are kept"
        if settings.resume is not None:
            rows["resumed"] = f"from step {self._first}"
        for name, value in rows.items():
            print(f"{name + ':':<13}{value}")
        self._notes(blocks, [*notices, *slow_on_a_cpu(engine)])
        print(flush=True)
        if sys.stdout.isatty() and find_spec("tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(
                total=self._steps, initial=self._first, file=sys.stdout, unit="step", dynamic_ncols=True, leave=False
            )

    def _notes(self, blocks: TokenBlocks, notices: Iterable[str]) -> None:
        for notice in notices:
            print(f"note: {notice}")
        if blocks.truncated:
            print(
                f"note: {blocks.truncated} example(s) longer than {blocks.length} tokens lost the end of the completion"
            )
        if self._settings.too_long == DROP:
            print(f"note: {blocks.dropped} example(s) longer than {blocks.length} tokens were left out")
        if find_spec("matplotlib") is None:
            print("note: there will be no loss.png: pip install 'shardengine[plot]'")

    def step(self, engine: Engine, progress: Progress) -> None:
        """Record one optimizer step."""
        if not self._enabled:
            return
        tokens = progress.tokens
        if not self._made:
            self._first_ended = time.monotonic()
        self._made += 1
        self._tokens += tokens
        self._seconds += progress.seconds
        self._waited += progress.waited
        self._losses.append((progress.step, progress.loss))
        speed, norm, rate = tokens / progress.seconds, engine.get_global_grad_norm(), progress.lr
        overflowed = norm is not None and not math.isfinite(norm)  # JSON has no such number
        scaling = {} if engine.get_loss_scale() == 1 and not engine.skipped_steps else {"skipped": engine.skipped_steps}
        self._record(
            step=progress.step,
            loss=progress.loss,
            lr=rate,
            grad_norm=None if overflowed else norm,
            tokens_per_s=speed,
            peak_bytes=peak_bytes(engine),
            **({"loss_scale": engine.get_loss_scale(), **scaling} if scaling else {}),
        )
        words = {
            "loss": f"{progress.loss:.3f}",
            "lr": f"{rate:.1e}",
            "grad norm": "-" if norm is None else f"{norm:.2f}",
            "tokens/s": f"{self._tokens / self._seconds:,.0f}",
            _peak_name(engine): show_bytes(peak_bytes(engine)),
        }
        if scaling:
            skipped = f"{engine.skipped_steps} steps skipped"
            if engine.config.fp16.enabled or engine.get_loss_scale() != 1:
                words["loss scale"] = f"{engine.get_loss_scale():g}, {skipped}"
            else:
                words["not finite"] = skipped
        if self._bar is not None:
            self._bar.set_postfix(words, refresh=False)
            self._bar.update()
        elif (self._every and progress.step % self._every == 0) or progress.step in (self._first + 1, self._steps):
            left = duration((self._steps - progress.step) * self._seconds_per_step())
            text = "  ".join(f"{name} {value}" for name, value in words.items())
            print(f"step {progress.step:>5}/{self._steps}  {text}  eta {left}", flush=True)

    def _seconds_per_step(self) -> float:
        """Return the seconds per step, with the validations and checkpoints between steps, without the start.

        The first step is slower than others, so it counts only while there is no other.
        """
        later = self._made - 1
        return (time.monotonic() - self._first_ended) / later if later else self._seconds

    def validation(self, step: int, loss: float) -> None:
        """Record the validation loss after ``step`` steps."""
        if not self._enabled:
            return
        self._validations.append((step, loss))
        self._record(step=step, validation_loss=loss)
        self._say(f"step {step:>5}/{self._steps}  validation loss {loss:.3f}")

    def saved(self, tokenizer: Any) -> None:
        """Put the tokenizer beside the model in ``model/``, and draw the losses."""
        if not self._enabled:
            return
        tokenizer.save_pretrained(self._settings.output / "model")
        if find_spec("matplotlib") is not None:
            self._draw()

    def summary(self, engine: Engine, progress: Progress, planned: str, exceeded: str) -> None:
        """Print the results, measured beside predicted.

        planned: memory beside the plan; "" without a plan · exceeded: a note on the excess; "" if there is none.
        """
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        memory, traffic = engine.memory(), engine.traffic()
        made = progress.step - self._first
        how = "stopped at" if progress.stopped else "finished at"
        losses = [loss for _, loss in self._validations]
        output = self._settings.output
        rows = {
            how: f"step {progress.step} of {self._steps}, after {duration(time.monotonic() - self._started)}",
            "validation": f"loss {losses[0]:.3f} → {losses[-1]:.3f}" if losses else "none in metrics.jsonl",
            "speed": self._speed(engine) if made else "no step was made",
            "model state": f"{_by_tier(memory, 'measured')} per rank measured, "
            f"{_by_tier(memory, 'predicted')} predicted",
            "sent": f"{show_bytes(traffic['measured_bytes_last_step'])} per rank and step, "
            f"lower bound {show_bytes(traffic['formula_bytes_per_step'])}",
            "waiting": f"{1e3 * self._waited / made:.1f} ms of a step ({self._waited / self._seconds:.1%}) "
            "for communication, on rank 0"
            if made
            else "-",
            _peak_name(engine): f"{show_bytes(peak_bytes(engine))} at most on rank 0{_peak_note(engine)}",
            **({"plan": planned} if planned else {}),
            "model": f"{output / 'model'} ({_loader(engine)} loads it)",
            "also in": f"{output}: " + ", ".join(sorted(path.name for path in output.iterdir() if path.is_file())),
        }
        if self._settings.save_every:
            further = "" if progress.stopped else " --steps N"
            rows["checkpoints"] = f"{output / 'checkpoints'} (continue with --resume {output}{further})"
        print()
        for name, value in rows.items():
            print(f"{name + ':':<13}{value}")
        if exceeded:
            print(f"note: {exceeded}")
        sys.stdout.flush()

    def _speed(self, engine: Engine) -> str:
        """Return tokens/s and the model's FLOP/s per rank; on a known GPU, also its share of the data sheet's peak."""
        tokens = self._tokens / self._seconds
        per_rank = tokens * self._flops_per_token / engine.world_size
        name = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else ""
        peak = flops.peak_of(name, next(engine.module.parameters()).dtype)
        used = f", MFU {per_rank / peak:.1%} of {peak / 1e12:g} TFLOP/s ({name})" if peak else ""
        return f"{tokens:,.0f} tokens/s over all ranks, {per_rank / 1e12:.3g} TFLOP/s of the model per rank{used}"

    def sample(self, tokenizer: Any, prompt: torch.Tensor, new: torch.Tensor) -> None:
        """Print generated text after its prompt; both are token ids [tokens]."""
        if self._enabled:
            print(
                f"\nsample after the prompt {tokenizer.decode(prompt)!r}:\n{tokenizer.decode(new).rstrip()}", flush=True
            )

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=sys.stdout)
        else:
            print(line, flush=True)

    def _record(self, **values: float | int | None) -> None:
        with (self._settings.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _continue(self, step: int) -> None:
        """Keep the rows of metrics.jsonl up to ``step``.

        The run writes later rows again, and a row that a kill cut off.
        """
        path = self._settings.output / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        kept = []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["step"] > step or not line.endswith("\n"):
                continue
            kept.append(line)
            for name, points in (("loss", self._losses), ("validation_loss", self._validations)):
                if name in row:
                    points.append((row["step"], row[name]))
        write_text(path, "".join(kept))  # atomic: the run may be killed at any moment

    def _draw(self) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for points, style, label in ((self._losses, "-", "training"), (self._validations, "o-", "validation")):
            axes.plot([step for step, _ in points], [loss for _, loss in points], style, label=label)
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.legend()
        figure.savefig(self._settings.output / "loss.png", dpi=120)


def _stage(engine: Engine) -> str:
    """Return the name of the stage's record, with the shard groups if there are several."""
    size = int(engine.memory()["shard_group_ranks"])
    replicas = engine.world_size // size
    name = stages.select(engine.config, replicas).name
    return name if replicas == 1 else f"{name}, {replicas} shard groups of {size} rank(s)"


def _by_tier(memory: Mapping[str, float], kind: str) -> str:
    """Return the bytes of model state, "measured" or "predicted": on the device, in host memory and on disk."""
    text = show_bytes(memory[f"{kind}_model_state_bytes"])
    elsewhere = {"in host memory": memory[f"{kind}_host_bytes"], "on disk": memory[f"{kind}_disk_bytes"]}
    return text + "".join(f" + {show_bytes(count)} {where}" for where, count in elsewhere.items() if count)


def _units(memory: Mapping[str, float]) -> str:
    """Return the sizes of the units that are gathered as one, and the most weight bytes that are whole at once."""
    smallest, largest = show_bytes(memory["smallest_unit_bytes"]), show_bytes(memory["largest_unit_bytes"])
    sizes = largest if smallest == largest else f"{smallest} to {largest}"
    return (
        f"{memory['units']:.0f} of {sizes} and a root of {show_bytes(memory['root_bytes'])}; "
        f"live window at most {show_bytes(memory['live_window_bytes'])}"
    )


def slow_on_a_cpu(engine: Engine) -> list[str]:
    """Return a note for each 16-bit dtype of the weights that this CPU computes in software."""
    if engine.device.type != "cpu":
        return []
    ops, built = torch.ops.mkldnn, torch.backends.mkldnn.is_available()
    fast = {
        torch.bfloat16: built and ops._is_mkldnn_bf16_supported(),
        torch.float16: built and ops._is_mkldnn_fp16_supported(),
    }
    used = {parameter.dtype for parameter in engine.module.parameters()}
    return [
        f"this CPU has no instructions for {_SHORT[dtype]}, so its matrix products are many times slower than in fp32; "
        f"--set {_SHORT[dtype]}.enabled=false trains in fp32"
        for dtype, is_fast in fast.items()
        if dtype in used and not is_fast
    ]


_SHORT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def _dtypes(engine: Engine) -> str:
    """Return, for example, ``weights bf16, fp32 master, gradients sent as bf16, loss scale 65536 (dynamic)``."""
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    names = sorted({_SHORT.get(parameter.dtype, str(parameter.dtype)) for parameter in trained})
    bf16, fixed = engine.config.bf16, engine.config.fp16.loss_scale
    master = "" if names == ["fp32"] else ", fp32 master"
    if bf16.enabled and not bf16.master_weights:
        master = ", no master, rounded stochastically" if bf16.stochastic_rounding else ", no master"
    scale = f", loss scale {engine.get_loss_scale():g} ({'fixed' if fixed else 'dynamic'})"
    sent = engine.config.communication_data_type or " and ".join(names)
    return f"weights {' and '.join(names)}{master}, gradients sent as {sent}" + (
        scale if engine.get_loss_scale() != 1 else ""
    )


def _rows(blocks: TokenBlocks) -> str:
    if blocks.training.position_ids is not None:
        rows, filled = blocks.training, blocks.training.tokens / blocks.training.input_ids.numel()
        documents = int((rows.position_ids == 1).sum()) if rows.position_ids is not None else 0
        return f"{documents:,} documents apart in {len(rows):,} rows of {blocks.length}, {filled:.0%} full"
    if blocks.training.attention_mask is None:
        return f"blocks of {blocks.length}"
    return f"{len(blocks.training):,} + {len(blocks.validation):,} examples of up to {blocks.length}"


def _model(settings: Settings, seed: int) -> str:
    if settings.init == FROM_CONFIG:
        return f"{settings.model or 'small GPT-2'}, random weights of seed {seed}"
    return settings.model or "small GPT-2, from random weights"


def _adapters(engine: Engine) -> dict[str, str]:
    """Return a row on the trained part of the model, if it has adapters."""
    if not adapters.has_adapters(engine.module):
        return {}
    trained = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    return {"adapters": f"{adapters.describe(engine.module)}: {trained:,} parameters are trained"}


def _loader(engine: Engine) -> str:
    name = "peft.AutoPeftModelForCausalLM" if adapters.has_adapters(engine.module) else "AutoModelForCausalLM"
    return f"{name}.from_pretrained"


def _of(held_out: str | None) -> str:
    return "" if held_out is None else f" of {held_out}"


def _peak_name(engine: Engine) -> str:
    """Return the name of the peak: a plan counts a GPU's tensors, but a CPU's process holds more than a plan counts."""
    return "GPU peak" if engine.device.type == "cuda" else "process"


def _peak_note(engine: Engine) -> str:
    return "" if engine.device.type == "cuda" else ", with libraries and what was freed and kept; no plan has these"


def peak_bytes(engine: Engine) -> int:
    """Return the peak memory of this rank: allocated on its GPU, or the process's resident memory."""
    if engine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(engine.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def duration(seconds: float) -> str:
    """Format as ``1:52`` or ``2:01:30``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
