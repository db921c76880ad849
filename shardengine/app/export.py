"""`shardengine export`: writes a checkpoint as a directory for another program. Owns: its options, the printed text.

Must not know: the formats that are written (interchange). Exit codes: 0 written · 1 the checkpoint is damaged or the
disk full · 2 wrong usage · 143 ended by SIGTERM. Unless the code is 0, nothing is left of the output.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path

import torch

from shardengine.app.settings import require
from shardengine.checkpoint import check_free, directory, new_directory
from shardengine.errors import CheckpointError, UsageError
from shardengine.interchange import hugging_face
from shardengine.interchange.stored import MODEL, RUN, Found, StoredCheckpoint, choose, find
from shardengine.planner import show_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "as-trained": None}
LARGEST_FILE = "5GB"
_OF_FORMATS = ("adapter", "config", "tokenizer", "max_shard_size", "merge", "base")
_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def run(options: argparse.Namespace) -> int:
    """Write the export that the command line asks for; return the exit code. Raises UsageError and CheckpointError."""
    out = Path(options.out)
    found = _find(options)
    check_free(out)
    _check_together(options)
    tokenizer = None if options.tokenizer is None else Path(options.tokenizer)
    if tokenizer is not None and not hugging_face.tokenizer_files(tokenizer):
        raise UsageError(
            f"--tokenizer {tokenizer}: expected a directory with a tokenizer's files, found none of them",
            code="export-tokenizer-not-found",
        )
    place, lost = (found, "") if isinstance(found, Path) else choose(found)
    try:
        if isinstance(found, Path):
            notes = _merge_saved(options, place, out, tokenizer)
        else:
            notes = [*([lost] if lost else []), *_write(options, place, out, tokenizer or _tokenizer_of(found))]
    except CheckpointError as error:
        folder = place.parent
        others = [tag for tag in directory.present(folder) if directory.place_of(folder, tag) != place]
        offer = f"; there are also: {', '.join(others[:8])}" if others else ""
        raise CheckpointError(f"{error}{offer}", code="export-checkpoint-unreadable") from error
    except OSError as error:  # of writing: errors of reading are CheckpointErrors
        text = f"{out}: could not be written: {error.strerror or error}; nothing is left there"
        raise CheckpointError(text, code="export-not-written") from error
    files = [path for path in sorted(out.rglob("*")) if path.is_file()]
    print(f"{place} → {out}: {len(files)} file(s), {show_bytes(sum(path.stat().st_size for path in files))}")
    for path in files:
        print(f"  {path.relative_to(out)!s:<40}  {show_bytes(path.stat().st_size):>9}")
    for note in notes:
        print(f"note: {note}")
    return 0


def _find(options: argparse.Namespace) -> Found | Path:
    """Return the checkpoint; with --merge and no checkpoint, the directory of an adapter.

    UsageError if there is neither.
    """
    place = Path(options.checkpoint)
    try:
        return find(place)
    except UsageError as error:
        if not options.merge:
            raise
        from shardengine.app import merging

        folder = merging.saved_in(place, options.adapter)
        if folder is None:
            within = "" if options.adapter in (None, "default") else f"{options.adapter}/"
            raise UsageError(
                f"{error}; and --merge found no adapter either: neither {within}{merging.CONFIG} nor "
                f"{MODEL}/{within}{merging.CONFIG} is in it",
                code="export-no-checkpoint-or-adapter",
            ) from None
        return folder


def _check_together(options: argparse.Namespace) -> None:
    """UsageError for an option that the format does not use."""
    if options.ema and options.format == "dcp":
        raise UsageError(
            "--ema goes with --format hf or safetensors, got --format dcp, which has the optimizer's state",
            code="export-option-not-for-format",
        )
    used = {"hf": set(_OF_FORMATS), "safetensors": {"max_shard_size"}, "dcp": set()}
    for name in _OF_FORMATS:
        if getattr(options, name) not in (None, False) and name not in used[options.format]:
            formats = " or ".join(form for form, names in used.items() if name in names)
            raise UsageError(
                f"--{name.replace('_', '-')} goes with --format {formats}, got --format {options.format}",
                code="export-option-not-for-format",
            )
    if options.base is not None and not options.merge:
        raise UsageError("--base goes with --merge: without it no base model is read", code="export-base-without-merge")
    if options.merge:
        require("transformers", "peft", extra="lora", what="--merge")
        if options.config is not None:
            raise UsageError(
                "--config: with --merge the config is the base model's own", code="export-config-with-merge"
            )


def _write(options: argparse.Namespace, place: Path, out: Path, tokenizer: Path | None) -> list[str]:
    dtype = DTYPES[options.dtype] if options.dtype is not None else None
    largest = parse_size("--max-shard-size", options.max_shard_size or LARGEST_FILE)
    model = None if options.config is None else hugging_face.read_model(Path(options.config))
    with StoredCheckpoint(place, averages=options.ema) as stored, new_directory(out) as work:
        if options.format == "dcp":
            from shardengine.interchange import dcp_export

            trained = options.dtype == "as-trained"
            return dcp_export.write(stored, work, dtype=dtype, as_trained=trained)
        if options.format == "safetensors":
            return hugging_face.write_plain(stored, work, dtype=dtype, largest=largest)
        if options.merge:
            notes = _merge(options, stored, work, dtype, largest)
        elif options.adapter is not None or hugging_face.has_adapters(stored):
            for name in ("--config", "--max-shard-size"):
                if getattr(options, name[2:].replace("-", "_")) is not None:
                    raise UsageError(
                        f"{name}: the output is one file of adapters, which has no use for it",
                        code="export-option-with-adapters",
                    )
            notes = hugging_face.write_adapters(stored, work, dtype=dtype, adapter=options.adapter)
        else:
            notes = hugging_face.write(stored, work, dtype=dtype, largest=largest, model=model)
        return [*notes, _copy_tokenizer(tokenizer, work, "the checkpoint")]


def _copy_tokenizer(tokenizer: Path | None, work: Path, source: str) -> str:
    if tokenizer is None:
        return f"no tokenizer is known to {source}: name one with --tokenizer DIR"
    hugging_face.copy_tokenizer(tokenizer, work)
    return f"the tokenizer's files are those of {tokenizer}"


def _merge_saved(options: argparse.Namespace, folder: Path, out: Path, tokenizer: Path | None) -> list[str]:
    """Write the base model with the adapter in ``folder`` merged into it."""
    from shardengine.app import merging

    if options.ema:
        raise UsageError(
            f"--ema: expected a checkpoint, an adapter's directory ({folder}) has no averages",
            code="export-ema-of-adapter",
        )
    dtype = DTYPES[options.dtype] if options.dtype is not None else None
    largest = parse_size("--max-shard-size", options.max_shard_size or LARGEST_FILE)
    with new_directory(out) as work:
        base, notes = merging.write_saved(folder, work, dtype=dtype, largest=largest, base=options.base)
        if tokenizer is None:
            places = [folder, folder.parent, Path(base)] if options.adapter else [folder, Path(base)]
            tokenizer = next((place for place in places if hugging_face.tokenizer_files(place)), None)
        return [*notes, _copy_tokenizer(tokenizer, work, "the adapter")]


def _merge(
    options: argparse.Namespace, stored: StoredCheckpoint, work: Path, dtype: torch.dtype | None, largest: int
) -> list[str]:
    from shardengine.app import merging

    if not hugging_face.has_adapters(stored):
        raise UsageError(
            f"--merge: expected a checkpoint of a peft model, {stored.place} has no adapters; leave it out",
            code="export-merge-without-adapters",
        )
    return merging.write(stored, work, dtype=dtype, largest=largest, adapter=options.adapter, base=options.base)


def _tokenizer_of(found: Found) -> Path | None:
    """Return the tokenizer's directory of the run that made the checkpoint: its model/, or the model it began with."""
    if found.run is None:
        return None
    places = [found.run / MODEL]
    try:
        model = json.loads((found.run / RUN).read_text(encoding="utf-8"))["model"]
        places += [Path(model)] if isinstance(model, str) else []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return next((place for place in places if hugging_face.tokenizer_files(place)), None)


def parse_size(option: str, text: str) -> int:
    """Convert ``5GB`` to bytes; UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or not 1 <= float(match[1]) * unit < math.inf:
        raise UsageError(f"{option} {text[:80]}: expected a size such as 5GB, 500MB or 2GiB", code="size-unreadable")
    return int(float(match[1]) * unit)
