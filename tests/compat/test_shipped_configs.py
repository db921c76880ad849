"""Config files that frameworks ship: each is filled as its framework does, and trains as plain torch, or is refused.

``tests/data/shipped_configs.json`` has their keys and values: JSON for DeepSpeed, and the ``deepspeed_config`` of
accelerate's own files ("mixed_precision" is beside it there); "made_with": a dict that a program builds of arguments.
Remarks are replaced by a word.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from shardengine.config import ZeroConfig
from tests.support.forks import Forks

_MISSING = [name for name in ("transformers", "accelerate") if find_spec(name) is None]  # not imported here
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are not installed")
FILE = Path(__file__).parents[1] / "data" / "shipped_configs.json"
PAGE = Path(__file__).parents[2] / "docs" / "migrating.md"
SHIPPED = {
    f"{origin['repository']}/{file['path']}"
    + ("" if origin["repository"] != "huggingface/transformers" else f"@{origin['commit'][:4]}")
    + (f"({file['made_with']})" if "made_with" in file else ""): file
    for origin in json.loads(FILE.read_text(encoding="utf-8"))
    for file in origin["files"]
}

_CHAT = "microsoft/DeepSpeedExamples/applications/DeepSpeed-Chat/dschat/utils/ds_utils.py"
_BING = "microsoft/DeepSpeedExamples/training"
_BIAS = "optimizer.params.bias_correction: expected true, got false"
_LAMB = "optimizer.type: LAMB is not elementwise"
REFUSED = {
    "hiyouga/LLaMA-Factory/examples/deepspeed/ds_z2_autotp_config.json": ["tensor_parallel.autotp_size: cannot be"],
    "huggingface/transformers/tests/deepspeed/ds_config_zero3.json@61c7": [
        'zero_optimization.reduce_bucket_size: expected an integer >= 1, or "auto", got the number 0',
        "the batch size is missing",
    ],
    **{
        f"huggingface/transformers/tests/deepspeed/ds_config_zero{stage}_bf16.json@a9c1": [
            'bfloat16.enabled: "auto", which no framework has replaced'
        ]
        for stage in (2, 3)
    },
    f"{_BING}/BingBertSquad/deepspeed_bsz24_config.json": [_BIAS],
    f"{_BING}/bing_bert/glue_bert_base.json": [_BIAS],
    f"{_BING}/bing_bert/glue_bert_large.json": [_BIAS],
    f"{_BING}/bing_bert/deepspeed_bsz32k_lamb_config_seq512.json": [_LAMB],
    f"{_BING}/bing_bert/deepspeed_bsz64k_lamb_config_seq128.json": [_LAMB, "sparse_attention: cannot be switched on"],
    f"{_BING}/bing_bert/deepspeed_bsz4k_progressive_layer_drop_config_seq128.json": [
        "progressive_layer_drop: cannot be switched on",
        _BIAS,
    ],
    f"{_CHAT}(offload=False, dtype=fp16, stage=3, enable_hybrid_engine=True)": ["hybrid_engine: cannot be switched on"],
}
"""File -> every problem that is named."""


def _import() -> None:
    import tests.compat.shipped  # noqa: F401


def _train(say: Any, rank: int, *args: Any) -> None:
    from tests.compat import shipped

    shipped.train(say, rank, *args)


@pytest.fixture(scope="module")
def lives() -> Iterator[Forks]:
    """A process in which deepspeed is ours and the frameworks are imported."""
    forks = Forks(_import)
    yield forks
    forks.end()


@pytest.mark.parametrize("name", [name for name in SHIPPED if name not in REFUSED])
def test_a_file_trains_as_plain_torch(name: str, lives: Forks, tmp_path: Path) -> None:
    ((seen,),) = lives.live(_train, SHIPPED[name], str(tmp_path))
    assert "losses" in seen, seen
    ours, expected = seen["losses"]
    assert ours == pytest.approx(expected, rel=1e-6)
    for moved, apart in zip(seen["moved"], seen["apart"], strict=True):
        assert moved > 0 and apart <= 1e-4 * moved
    written = json.dumps(SHIPPED[name]["config"])
    assert seen["buckets"][0] > 1000, "as large as in the file, or our default: not the square of the hidden size"
    assert len(seen["told"]) <= 1 and "zero_allow_untested" not in str(seen["told"])
    for key in ("compile", "comms_config", "seq_parallel_communication_data_type"):
        assert (key in written) == (key in str(seen["told"])), key
    if "mixed_precision" in SHIPPED[name]:
        assert seen["told"] == [], "nothing that accelerate has written by itself"


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_refused_says_why(name: str, lives: Forks, tmp_path: Path) -> None:
    ((seen,),) = lives.live(_train, SHIPPED[name], str(tmp_path))
    for sentence in REFUSED[name]:
        assert sentence in seen["refused"]
    assert seen["refused"].count("\n  - ") == len(REFUSED[name])


def test_what_is_told_of_a_config_is_one_readable_message(lives: Forks, tmp_path: Path) -> None:
    name = "hiyouga/LLaMA-Factory/examples/deepspeed/ds_z3_fp8_config.json"
    ((seen,),) = lives.live(_train, SHIPPED[name], str(tmp_path))
    (text,) = seen["told"]
    assert text.split("\n") == [
        "of the DeepSpeed config:",
        "- comms_config has no effect: `engine.traffic()` counts the bytes of every collective, and "
        "`engine.trace(path)` draws them",
        "- monitor_config has no effect: monitors are sections of their own: `csv_monitor`, `tensorboard`, "
        "`monitor.jsonl`",
        "- without effect, because it is done in another way (docs/config.md): zero_optimization.contiguous_gradients, "
        "zero_optimization.sub_group_size, zero_optimization.stage3_param_persistence_threshold, "
        "zero_optimization.stage3_max_live_parameters, zero_optimization.stage3_max_reuse_distance",
    ]


def test_sizes_that_trainer_writes_for_auto_are_told(lives: Forks, tmp_path: Path) -> None:
    name = "hiyouga/LLaMA-Factory/examples/deepspeed/ds_z3_config.json"
    ((seen,),) = lives.live(_train, SHIPPED[name], str(tmp_path))
    (text,) = seen["told"]
    assert '- zero_optimization.reduce_bucket_size: 64 is what frameworks write for "auto"; our default of 1' in text
    assert "stage3_prefetch_bucket_size" not in text
    assert seen["buckets"] == (ZeroConfig.reduce_bucket_size, 57), "what is gathered ahead is as the config has it"


def test_the_files_of_every_origin_are_there() -> None:
    """As many as docs/migrating.md says."""
    counts = Counter(name.split("/")[0] + "/" + name.split("/")[1] for name in SHIPPED)
    refused = Counter(name.split("/")[0] + "/" + name.split("/")[1] for name in REFUSED)
    rows = re.findall(r"^\| ([\w-]+/[\w-]+) \| (\d+) \| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert {origin: (int(files), int(train)) for origin, files, train in rows} == {
        origin: (count, count - refused[origin]) for origin, count in counts.items()
    }
