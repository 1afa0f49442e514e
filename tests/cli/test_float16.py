"""Training in float16: the loss is scaled, the norm that is shown is not, and an overflow anywhere skips the step everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SIZES = "{preset: decoder-tiny, hidden_size: 16, ffn_size: 32, num_heads: 2, num_kv_heads: 2, num_layers: 2}"
MOE = "{preset: moe-tiny, hidden_size: 16, ffn_size: 32, num_heads: 2, num_kv_heads: 2, num_layers: 2}"


def trained(hpcli: Any, tmp_path: Path, ranks: int, dtype: str, parallelism: str = "{}", model: str = SIZES, **env: str) -> list[Any]:
    (tmp_path / "half.yaml").write_text(
        f"model: {model}\ntraining: {{steps: 4, global_batch_size: 8, micro_batch_size: 1, seq_length: 16, compute_dtype: {dtype}}}\n"
        f"parallelism: {parallelism}\nlogging: {{norm_table_every: 1}}\ndevice: cpu\n"
    )
    done = hpcli("train", "half.yaml", "--ranks", str(ranks), "--json", env=env)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_norm_is_that_of_float32_whatever_the_scale(hpcli: Any, tmp_path: Path) -> None:
    wide, half = (trained(hpcli, tmp_path, 2, dtype) for dtype in ("float32", "float16"))
    for a, b in zip(wide, half, strict=True):
        if a["event"] == "step":
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2) and b["loss"] == pytest.approx(a["loss"], rel=1e-2)
            assert b["loss_scale"] == 65536.0 and "loss_scale" not in a
        if a["event"] == "norm_table":
            for row, other in zip(a["rows"], b["rows"], strict=True):
                assert other["local_norm"] == pytest.approx(row["local_norm"], rel=1e-2)


@pytest.mark.parametrize(
    ("ranks", "parallelism", "model"),
    [
        (2, "{}", SIZES),
        (4, "{pipeline_parallel: 2}", SIZES),
        (4, "{tensor_parallel: 2, expert_parallel: 2}", MOE),
    ],
    ids=["fsdp2", "pp2 x fsdp2", "tp2 x ep2"],
)
def test_an_overflow_on_one_rank_skips_that_step_on_all(
    hpcli: Any, tmp_path: Path, ranks: int, parallelism: str, model: str
) -> None:
    calm = trained(hpcli, tmp_path, ranks, "float16", parallelism, model)
    events = trained(hpcli, tmp_path, ranks, "float16", parallelism, model, HPCLI_PLANT=f"overflow:rank={ranks - 1},step=2")
    steps = [event for event in events if event["event"] == "step"]
    assert [step["skipped"] for step in steps] == [False, True, False, False]
    assert [step["loss_scale"] for step in steps] == [65536.0, 65536.0, 32768.0, 32768.0]
    assert steps[1]["skip_reason"] == "the gradient norm is inf at loss scale 65536; it goes on at 32768"
    table = next(event for event in events if event["event"] == "norm_table" and event["step"] == 2)
    assert all(row["global_norm"] is None for row in table["rows"])  # infinite on every rank
    # the weights are those of step 1: another batch, and the loss of a run whose second step never was
    first = next(event for event in calm if event["event"] == "step")
    assert steps[0]["grad_norm"] == first["grad_norm"] and steps[2]["loss"] != steps[1]["loss"]
