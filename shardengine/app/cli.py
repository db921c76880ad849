"""The command line: `shardengine init | train | run | plan | export | import | inspect | env | config`.

Owns: options, help, exit codes. Must not know: the commands themselves. Each is imported when it is used, so help and
wrong options are answered at once. Exit codes: 0 done · 1 failure, or a damaged checkpoint · 2 wrong usage or config,
with the message only · 141 the reader of the output is gone.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from shardengine import __version__
from shardengine.app import sources
from shardengine.config import json_schema, load_config, provisional
from shardengine.errors import CheckpointError, ConfigError, UsageError
from shardengine.uncaught import OTHERS_WAIT_S, is_first_of_machine

_MOST_EPOCHS = 1_000_000
_BROKEN_PIPE = 128 + 13
"""A shell's code for a program that SIGPIPE ended: `shardengine inspect … | head`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. ``arguments`` default to the process's."""
    options = _parser().parse_args(arguments)
    if options.command == "run":
        return _run(options)  # a script's exceptions are its own
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "train": _train, "export": _export, "inspect": _inspect, "env": _env, "import": _import, "config": _config,
        "plan": _plan, "init": _init,
    }  # fmt: skip
    try:
        code = commands[options.command](options)
        sys.stdout.flush()  # a broken pipe is handled here, not when the interpreter ends
        return code
    except (ConfigError, UsageError) as error:
        print(f"shardengine {options.command}: {error}", file=sys.stderr)
        return 2
    except CheckpointError as error:
        print(f"shardengine {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    except OSError as error:
        if options.command == "train":
            raise  # ranks and sockets: the traceback is needed
        if isinstance(error, BrokenPipeError):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
            return _BROKEN_PIPE
        print(f"shardengine {options.command}: {error}", file=sys.stderr)
        return 1


def _train(options: argparse.Namespace) -> int:
    if options.config is not None and not _is_fine(options, "train"):
        return 2
    from shardengine.app import command

    return command.run(options)


def _is_fine(options: argparse.Namespace, command: str) -> bool:
    """Whether the config can be read and has no errors; errors are printed.

    This happens before torch is imported. If a launcher has started several processes on this machine, one of them
    prints.
    """
    try:
        source = _source(options, options.config)
        load_config(source, provisional(source))
    except (ConfigError, UsageError) as error:
        if is_first_of_machine():
            print(f"shardengine {command}: {error}", file=sys.stderr)
        else:
            time.sleep(OTHERS_WAIT_S)
        return False
    return True


def _source(options: argparse.Namespace, config: str) -> sources.Source:
    return sources.changed(sources.find(config), sources.changes_of(options.set, getattr(options, "lr", None)))


def _run(options: argparse.Namespace) -> int:
    from shardengine.app import script

    command = options.module or options.script
    try:
        if not options.as_deepspeed or not command:
            raise UsageError(
                "expected --as-deepspeed, and then SCRIPT or -m MODULE with its own arguments",
                code="run-without-script",
            )
        file = None if options.module else script.find(command[0])
        script.prepare(children=options.children)
    except UsageError as error:
        print(f"shardengine run: {error}", file=sys.stderr)
        return 2
    script.run(command, file)
    return 0


def _plan(options: argparse.Namespace) -> int:
    from shardengine.app import planning

    return planning.run(options)


def _init(options: argparse.Namespace) -> int:
    from shardengine.app import init

    return init.run(options)


def _import(options: argparse.Namespace) -> int:
    from shardengine.app import convert

    return convert.run_import(options)


def _export(options: argparse.Namespace) -> int:
    from shardengine.app import export

    return export.run(options)


def _inspect(options: argparse.Namespace) -> int:
    from shardengine.app import inspect_checkpoint

    return inspect_checkpoint.run(options)


def _env(options: argparse.Namespace) -> int:
    from shardengine.app import environment

    print(environment.describe(options.ranks))
    return 0


def _config(options: argparse.Namespace) -> int:
    if options.schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    if options.file is None:
        raise UsageError("expected a config file, or --schema", code="config-missing")
    config = load_config(_source(options, options.file))
    if options.ranks is not None:
        config = config.resolve_batch(options.ranks)
    values = config.resolved() if options.resolved else [row for row in config.resolved() if row[2] != "default"]
    rows = [(key, json.dumps(value), source) for key, value, source in values]
    widest_key, widest_value = (max(len(row[column]) for row in rows) for column in (0, 1))
    for key, value, source in rows:
        print(f"{key:<{widest_key}}  {value:<{widest_value}}  {source}")
    for notice in config.notices:
        print(f"note: {notice}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardengine", description="Memory-sharded data-parallel training for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"shardengine {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    _add_init(commands)
    _add_train(commands)
    _add_run(commands)
    _add_plan(commands)
    _add_export(commands)
    _add_inspect(commands)
    env = commands.add_parser("env", help="print what a bug report needs")
    env.add_argument("--ranks", type=_positive, metavar="N", help="start N ranks here and measure how fast they talk")

    config = commands.add_parser("config", help="check a config file and show what it sets")
    config.add_argument("file", nargs="?", metavar="FILE|NAME", help="JSON config, or the name of a recipe")
    _add_changes(config)
    what = config.add_mutually_exclusive_group()
    what.add_argument("--resolved", action="store_true", help="every value with its source, defaults too")
    what.add_argument("--schema", action="store_true", help="JSON Schema of the config")
    config.add_argument("--ranks", metavar="N", type=_positive, help="also work out the batch sizes for N ranks")
    _add_import(commands)
    return parser


def _add_init(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "init",
        help="write a config that fits your GPUs, with the commands to run it",
        description="Choose by plan the fastest config that fits, and write it with remarks. What no option says is "
        "asked at the terminal. Exits with 0 where a config is written, 1 where nothing fits.",
    )
    command.add_argument("--model", metavar="DIR|NAME", help="a folder with a config.json, or a name on the Hub")
    command.add_argument("--gpus", metavar="NxSIZE", help="number and memory of each: 4x24GB (default: those here)")
    command.add_argument(
        "--method",
        choices=("full", "lora", "qlora"),
        help="train all weights, LoRA adapters, or LoRA adapters on a base of 4 bits (default: lora)",
    )
    command.add_argument("--length", metavar="N", type=_positive, help="tokens of a sample (default: 2048)")
    command.add_argument("--host-memory", metavar="SIZE", help="of the machine: 128GB; more may fit with it")
    command.add_argument("--nvme", metavar="SIZE", help="of a disk for states: 1TB; more may fit with it")
    command.add_argument("--output", metavar="FILE", help="a new file (default: my-METHOD-GPUS.json)")


def _add_import(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "import",
        help="import a checkpoint of DeepSpeed or torch.distributed.checkpoint",
        description="Write a checkpoint of another program as one of shardengine's, optimizer state included; any "
        "stage and number of ranks loads it. Pickles in it are read without running anything.",
    )
    command.add_argument("source", metavar="SOURCE", help="directory of the checkpoint, or of several with 'latest'")
    command.add_argument("out", metavar="OUT", help="directory of checkpoints to write to, for load_checkpoint(OUT)")
    command.add_argument(
        "--from", dest="form", choices=["deepspeed", "dcp"], help="what SOURCE is (default: its files tell)"
    )
    command.add_argument(
        "--tag",
        metavar="TAG",
        help="which directory in SOURCE (default: what its 'latest' names; for torch.distributed.checkpoint SOURCE "
        "itself)",
    )
    command.add_argument(
        "--buffer",
        metavar="NAME",
        action="append",
        default=[],
        help="dcp: a floating-point buffer of the model, which the format does not tell from a frozen parameter; may "
        "be repeated",
    )


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "run",
        help="run a script that was written for DeepSpeed, as it is",
        description="Run a script or a module in this process; `import deepspeed` finds shardengine in it. It starts "
        "no ranks: torchrun --nproc-per-node 2 -m shardengine.run --as-deepspeed SCRIPT ... does, or "
        "shardengine run --as-deepspeed --children accelerate launch --use_deepspeed ... SCRIPT ...",
    )
    command.add_argument("--as-deepspeed", action="store_true", help="`import deepspeed` finds shardengine (needed)")
    command.add_argument(
        "--children",
        action="store_true",
        help="so it does in Python processes that SCRIPT starts: for launchers (accelerate launch ..., torchrun ...)",
    )
    command.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, default=[], metavar="MODULE", help="a module and its arguments"
    )
    command.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT", help="a file and its arguments")


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "plan",
        help="say what a run will need of memory, whether it fits, and how long a step lasts",
        description="Runs some steps of the engine with the real model, without a GPU, weights or other ranks, and "
        "counts what is alive. Given --link, --tflops or another speed, it also says how long a step lasts. Exits with "
        "0 where it fits, 1 where it does not; with --choose 1 where no config does.",
    )
    command.add_argument(
        "--model",
        metavar="DIR|NAME",
        required=True,
        help="a folder with a config.json, that file, or a name on the Hub",
    )
    command.add_argument("--gpus", metavar="NxSIZE", required=True, help="ranks and the memory of each: 4x24GB")
    command.add_argument("--host-memory", metavar="SIZE", help="of a node: 128GB")
    command.add_argument("--nvme", metavar="SIZE", help="of a node's disk for the tier nvme: 1TB, or 1TB@6GB/s")
    command.add_argument(
        "--link", metavar="SPEED", help="of a GPU to those of other nodes, or all where there is one: 50GB/s@10us"
    )
    command.add_argument("--node-link", metavar="SPEED", help="of a GPU to the others of its node: 300GB/s@5us")
    command.add_argument("--tflops", metavar="N", help="of a GPU in bf16 and fp16: 312, or 312,fp32=19.5")
    command.add_argument("--gpu-memory-speed", metavar="SPEED", help="of a GPU: 2TB/s")
    command.add_argument("--node", metavar="N", type=_positive, help="ranks of a node (default: all)")
    command.add_argument("--config", metavar="FILE|NAME", required=True, help="JSON config, as for train")
    _add_changes(command, lr=True)
    command.add_argument("--length", metavar="N", type=_positive, help="tokens of a sample (default: 512)")
    command.add_argument(
        "--micro-batch", metavar="N", type=_positive, help="samples per rank, in place of the config's"
    )
    command.add_argument(
        "--choose",
        action="store_true",
        help="plan many configs, by stage, tier, activations computed again and micro-batch, and print the ten fastest "
        "that fit, or what would be needed; the optimizer, precision and global batch of --config stay",
    )
    command.add_argument("--write", metavar="FILE", help="choose, and write the fastest config that fits (JSON)")
    command.add_argument("--lora", metavar="KEYS", help="LoRA adapters, as for train")
    command.add_argument(
        "--script",
        action="store_true",
        help="plan a script that calls from_pretrained and initialize: the model is whole in the host's memory first, "
        "in the dtype of its files (default: what train does, which reads weights in slices and trains them in fp32, "
        "or in the config's bf16 or fp16)",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--plot", metavar="FILE", help="draw what is alive over a step (PNG, SVG)")


def _add_train(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    train = commands.add_parser(
        "train",
        help="train a Hugging Face causal LM",
        description="Train a Hugging Face causal LM, or LoRA adapters of one, on text, examples or chats. Starts its "
        "own ranks; under torchrun, accelerate launch or srun it uses those. "
        "Ctrl-C or SIGTERM: all ranks stop after the same step and the model is saved. Under torchrun --max-restarts, "
        "ranks that are started again resume from the last checkpoint of --save-every.",
    )
    train.add_argument(
        "--config",
        metavar="FILE|NAME",
        help="JSON config, or the name of a recipe, as demo or lora-4x24 (needed unless --resume is given); "
        "`shardengine init` writes one",
    )
    _add_changes(train, lr=True)
    train.add_argument(
        "--model", metavar="DIR_OR_ID", help="Hugging Face directory or name (default: a small GPT-2, random weights)"
    )
    _add_model(train)
    _add_data(train)
    train.add_argument("--ranks", metavar="N", type=_positive, help="processes (default: number of GPUs, else 2)")
    duration = train.add_mutually_exclusive_group()
    duration.add_argument("--steps", metavar="N", type=_positive, help="optimizer steps (default: 200)")
    duration.add_argument(
        "--epochs",
        metavar="N",
        type=_epochs,
        help="so often all of --data is read, in place of --steps: 3, or 0.5",
    )
    _add_checkpoints(train)
    train.add_argument(
        "--trace",
        metavar="FILE",
        help="write a Chrome trace of all ranks (chrome://tracing, Perfetto): compute, communication, waiting",
    )
    train.add_argument(
        "--log",
        metavar="NAMES",
        action="append",
        help="write the numbers of every step also to these: csv, jsonl, tensorboard (into OUTPUT/shardengine), wandb, "
        "mlflow, comet (through their packages, where these are logged in); what else they take is in the config, as "
        "--set monitor.wandb.project=NAME. Names with commas, or repeated",
    )
    plans = train.add_mutually_exclusive_group()
    plans.add_argument(
        "--dry-run",
        action="store_true",
        help="plan what this run needs of memory and print it; nothing is trained or written. Exits with 0 where it "
        "fits into this machine, 1 where it does not",
    )
    plans.add_argument(
        "--no-plan",
        action="store_true",
        help="begin at once, without a plan in the header and what was measured beside it at the end",
    )
    train.add_argument(
        "--model-cache", metavar="DIR", help="where the default model is kept (default: ~/.cache/shardengine)"
    )


def _add_changes(command: argparse.ArgumentParser, *, lr: bool = False) -> None:
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        help="a key of the config and its value, in place of the file's: --set zero_optimization.stage=3; a value is "
        "JSON, or a text; may be repeated",
    )
    if lr:
        command.add_argument(
            "--lr", metavar="RATE", type=_above_zero, help="learning rate, as --set optimizer.params.lr=RATE"
        )


def _add_model(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--init",
        choices=("from-weights", "from-config"),
        help="from-config: train from scratch, with random weights of the model's own initialisation, the same on "
        "every rank; only its config and tokenizer are read (default: from-weights)",
    )
    train.add_argument(
        "--seed",
        metavar="N",
        type=_at_least_zero,
        help="of random weights, of the order of the data and of dropout, in place of the config's",
    )
    train.add_argument(
        "--lora",
        metavar="KEYS",
        help="train LoRA adapters alone, by peft: KEYS is r=8,alpha=16,dropout=0.05,targets=q_proj+v_proj or a part of "
        "it (default: r=8, alpha=2r, dropout=0, the targets that peft has for the model); targets=all-linear is every "
        "linear module but the output layer; bits=4 packs the base to 4 bits (QLoRA, by bitsandbytes). Checkpoints and "
        "the model that is written hold the adapters alone",
    )


def _add_data(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data",
        metavar="FILE|NAME",
        help='UTF-8 text; or .jsonl, lines of {"text": …}; of {"prompt": …, "completion": …}, where only completions '
        'are learnt; of {"messages": [{"role": …, "content": …}, …]}, written by the tokenizer\'s chat template, where '
        "only the assistant's turns are learnt; or the name of a dataset on the Hub with such columns, as ORG/NAME or "
        "ORG/NAME:SPLIT, read by the package datasets; or builtin:pydoc, CPython's docs (default)",
    )
    train.add_argument(
        "--length",
        metavar="TOKENS",
        type=_at_least_two,
        help="tokens per row, at most the model's own limit (default: 128)",
    )
    train.add_argument(
        "--packing",
        choices=("joined", "apart", "none"),
        help="joined: texts run on from row to row, and their tokens attend to each other (default for text). apart: "
        "several to a row, each with positions of its own and no attention to the others, if the model can do that, "
        "which is tried. none: a row each, padded (default for examples and chats)",
    )
    train.add_argument(
        "--too-long",
        choices=("truncate", "drop"),
        help="examples and chats of more than --length tokens lose their end, or are left out; how many is printed "
        "(default: truncate)",
    )
    train.add_argument(
        "--eval",
        metavar="FILE",
        help="validate on all of this file, in any form of --data, and train on all of --data (default: the last 5%% "
        "of --data are kept for it, 128 rows at most)",
    )
    train.add_argument(
        "--eval-every",
        metavar="N",
        type=_positive,
        help="validate after every N optimizer steps, and at the end; it changes nothing in training (default: a "
        "tenth of the steps)",
    )


def _add_checkpoints(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--save-every",
        metavar="N",
        type=_positive,
        help="checkpoint after every N optimizer steps, at the end and when stopped, to OUTPUT/checkpoints; the last "
        "two are kept, or as many as the config's checkpoint.keep_last says (default: no checkpoints)",
    )
    train.add_argument(
        "--max-restarts",
        metavar="N",
        type=_at_least_zero,
        help="start the ranks again when one of them died, up to N times; they resume from the last checkpoint of "
        "--save-every. Ranks that die twice in a row without a new checkpoint, and wrong input, end the run (default: "
        "0; under torchrun use its own --max-restarts)",
    )
    place = train.add_mutually_exclusive_group()
    place.add_argument(
        "--output",
        metavar="DIR",
        help="new or empty directory (default: the next free one of runs/NAME, runs/NAME-2, …)",
    )
    place.add_argument(
        "--resume",
        metavar="DIR",
        help="continue in the output directory of an earlier run with --save-every, from its last good checkpoint (or "
        "from DIR/checkpoints/TAG; what came after it is dropped), as if it had never ended, bit for bit. Everything "
        "is taken from that run. --ranks may be changed (the global batch stays, gradient accumulation follows), "
        "--steps or --epochs, --save-every and --eval-every too (the built-in learning-rate schedule keeps its first "
        "length), --data and --eval may lie elsewhere if their content is the same; any other option is refused unless "
        "it says what the run was started with",
    )


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export",
        help="write a checkpoint for another program",
        description="Write a checkpoint as a Hugging Face directory, or for torch.distributed.checkpoint. One process, "
        "no GPU, no training script; no more than one tensor is in memory, for dcp two. Every byte that is read is "
        "verified.",
    )
    export.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a checkpoint; or a directory of them, or the output of `shardengine train`: then the latest; with "
        "--merge also the directory of an adapter",
    )
    export.add_argument("out", metavar="OUT", help="new or empty directory; it appears when all of it is written")
    export.add_argument(
        "--format",
        choices=("hf", "safetensors", "dcp"),
        default="hf",
        help="hf: what from_pretrained loads (default); of a peft model the adapters alone. safetensors: weights and "
        "buffers of any model under their own names. dcp: model and optimizer for torch.distributed.checkpoint",
    )
    export.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16", "as-trained"),
        help="of the parameters, rounded once from the master weights (default: as-trained; dcp: the master weights)",
    )
    export.add_argument(
        "--ema", action="store_true", help="the moving averages of the weights instead of the weights; not for dcp"
    )
    export.add_argument("--max-shard-size", metavar="SIZE", help="of one safetensors file: 5GB (default), 500MB, 2GiB")
    export.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="hf: copy the tokenizer from there (default: from the run that CKPT belongs to)",
    )
    export.add_argument(
        "--config",
        metavar="DIR",
        help="hf: take config.json from there, of a model of the same kind (default: the checkpoint's own; imported "
        "ones have none)",
    )
    export.add_argument("--adapter", metavar="NAME", help="of a peft model only this adapter (default: all)")
    export.add_argument(
        "--merge",
        action="store_true",
        help="hf: of a peft model the whole model, its adapters merged into the base model's weights by peft; takes "
        "the memory of the model in fp32. The base must be the one that was trained with, which is checked",
    )
    export.add_argument(
        "--base",
        metavar="DIR_OR_ID",
        help="with --merge: where the base model is (default: where it was when the adapters were made)",
    )


def _add_inspect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what is in a checkpoint and whether it is whole",
        description="Print what is in a checkpoint and verify every checksum. Exit code 0: whole, 1: damaged, with the "
        "files and the parameters in them. Of a directory of checkpoints: a line for each.",
    )
    inspect.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a directory of them")
    inspect.add_argument("--json", action="store_true", help="as JSON, with every parameter")


def _positive(text: str, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < least:
        raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
    return value


def _at_least_zero(text: str) -> int:
    return _positive(text, 0)


def _at_least_two(text: str) -> int:
    return _positive(text, 2)  # one token predicts nothing


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def _epochs(text: str) -> float:
    if (value := _above_zero(text)) > _MOST_EPOCHS:
        raise argparse.ArgumentTypeError(f"expected at most {_MOST_EPOCHS:,}, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
