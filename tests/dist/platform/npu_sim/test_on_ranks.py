"""Training, clip and collectives on real ranks of the simulated NPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

SIZES = {
    "preset": "decoder-tiny",
    "vocab_size": 257,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "ffn_size": 32,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_embeddings": False,
    "freeze": [],
}
MOE = {"preset": "moe-tiny", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 32, "expert_ffn_size": 8}
NO_BACKEND = "No backend type associated with device type cpu"


def config(
    compute_dtype: str = "float32", micro_batch_size: int = 1, model: dict[str, Any] = SIZES, **fsdp: Any
) -> dict[str, Any]:
    training = {"global_batch_size": 8, "seq_length": 16, "micro_batch_size": micro_batch_size}
    return {"model": model, "training": training | {"compute_dtype": compute_dtype}, "fsdp_config": fsdp}


# -- offload ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "compute_dtype", "model"),
    [
        ({"dp_shard": 2}, "float32", SIZES),
        ({"dp_shard": 2}, "bfloat16", SIZES),
        ({"dp_shard": 4}, "float32", SIZES),
        ({"dp_replicate": 2, "dp_shard": 2}, "bfloat16", SIZES),
        ({"dp_shard": 8}, "bfloat16", SIZES),
        ({"dp_replicate": 2, "dp_shard": 4}, "float32", SIZES),
        ({"dp_shard": 2, "ep": 2, "tp": 2}, "float32", MOE),
        ({"dp_shard": 4, "ep": 2, "tp": 2}, "bfloat16", MOE),
        ({"pp": 2}, "float32", SIZES),
        ({"pp": 2, "dp_shard": 4}, "bfloat16", SIZES),
    ],
    ids=lambda value: "x".join(f"{axis}{size}" for axis, size in value.items()) if "dp_shard" in value or "pp" in value else None,
)
def test_offload_moves_everything_and_changes_no_bit(
    on_npu_ranks: Ranks, mesh: dict[str, int], compute_dtype: str, model: dict[str, Any]
) -> None:
    ranks = math.prod(size for axis, size in mesh.items() if axis != "ep")
    here = on_npu_ranks("npu_programs:train", ranks, config=config(compute_dtype, model=model), mesh=mesh)
    fsdp = {"enable_offload": True, "pin_memory": ranks != 2}
    away = on_npu_ranks("npu_programs:train", ranks, config=config(compute_dtype, model=model, **fsdp), mesh=mesh)
    for rank, (stayed, moved) in enumerate(zip(here, away, strict=True)):
        assert moved["losses"] == stayed["losses"] == here[0]["losses"] and len(set(moved["losses"])) == 2
        assert moved["norms"] == stayed["norms"] == here[0]["norms"]
        assert moved["weights"] == stayed["weights"], f"rank {rank}"
        assert stayed["computed on"] == moved["computed on"] == ["npu:0"]
        for what in ("parameters on", "gradients on", "optimizer state on"):
            assert (what, stayed[what], moved[what]) == (what, ["npu:0"], ["cpu"])
        assert moved["pinned"] == [fsdp["pin_memory"]]


def test_offload_copies_each_shard_to_the_device_per_micro_batch_and_each_gradient_back_per_step(on_npu_ranks: Ranks) -> None:
    mesh = {"dp_shard": 2}
    (stayed, _), (moved, _) = (
        on_npu_ranks("npu_programs:train", 2, config=config(micro_batch_size=2, enable_offload=offload), mesh=mesh)
        for offload in (False, True)
    )
    parameters, size = stayed["parameters"], stayed["shard bytes"]
    assert (parameters, moved["shard bytes"]) == (21, size)
    for here, away in zip(stayed["copies"], moved["copies"], strict=True):
        # 2 micro-batches of inputs and labels (2 x 16 int64 each), and the loss that was added up on the host
        assert here["to_device"] == 5 and here["bytes_to_device"] == 4 * 2 * 16 * 8 + 8
        assert away["to_device"] - here["to_device"] == 2 * parameters
        assert away["bytes_to_device"] - here["bytes_to_device"] == 2 * size
        assert here["to_host"] == 1 and away["to_host"] - here["to_host"] == parameters
        assert away["bytes_to_host"] - here["bytes_to_host"] == size


def test_offload_runs_in_strict_mode(on_npu_ranks: Ranks) -> None:
    arguments: dict[str, Any] = {"mesh": {"dp_shard": 2}, "config": config("bfloat16", enable_offload=True)}
    free, strict = (on_npu_ranks("npu_programs:train", 2, **arguments, strict_dtypes=s) for s in (False, True))
    assert strict[0]["norms"] == free[0]["norms"] and strict[0]["losses"] == free[0]["losses"]


# -- the clip ---------------------------------------------------------------------------------------------------------


def test_torchs_clip_meets_the_accelerator_only_group_under_offload_and_ours_does_not(on_npu_ranks: Ranks) -> None:
    for rank in on_npu_ranks("npu_programs:clip_with_torch_and_ours", 2, offload=True):
        assert rank["torch"] == NO_BACKEND
        assert rank["ours"] == pytest.approx(50**0.5, rel=1e-7)  # (3, 4) on each of 2 ranks
        assert rank["ours: gradient"][0] == pytest.approx([3 / 50**0.5, 4 / 50**0.5], rel=1e-6)
        assert rank["ours: gradient on"] == "cpu"


def test_without_offload_both_clips_agree(on_npu_ranks: Ranks) -> None:
    for rank in on_npu_ranks("npu_programs:clip_with_torch_and_ours", 2, offload=False):
        assert rank["torch"] == pytest.approx(50**0.5, rel=1e-6) and rank["ours"] == pytest.approx(50**0.5, rel=1e-7)
        assert rank["ours: gradient on"] == rank["torch: gradient on"] == "npu:0"


def test_strict_mode_refuses_torchs_clip_of_mixed_dtypes(on_npu_ranks: Ranks) -> None:
    (refused,) = on_npu_ranks("npu_programs:clip_mixed_dtypes", 1, clip="torch", strict_dtypes=True)
    assert refused == {"error": "result type Float can't be cast to the desired output type Half"}
    (accepted,) = on_npu_ranks("npu_programs:clip_mixed_dtypes", 1, clip="torch")
    assert accepted["norm"] == 5.0


def test_our_clip_of_mixed_dtypes_runs_in_strict_mode(on_npu_ranks: Ranks) -> None:
    (clipped,) = on_npu_ranks("npu_programs:clip_mixed_dtypes", 1, clip="ours", strict_dtypes=True)
    assert clipped["norm"] == 5.0
    assert clipped["wide"] == pytest.approx([0.6, 0.0], rel=1e-6) and clipped["half"] == pytest.approx([0.0, 0.8], rel=1e-3)


# -- the device -------------------------------------------------------------------------------------------------------


def test_a_host_tensor_meets_c10ds_own_error_in_every_collective(on_npu_ranks: Ranks) -> None:
    for rank in on_npu_ranks("npu_programs:refusals_of_host_tensors", 2):
        assert len(rank) == 6 and set(rank.values()) == {NO_BACKEND}


def test_collectives_compute_what_gloo_computes(on_npu_ranks: Ranks) -> None:
    told = on_npu_ranks("npu_programs:collectives", 3)
    for rank, found in enumerate(told):
        assert (found["sum"], found["max"], found["avg"], found["async"]) == ([6], [3], [2], [6])
        assert found["broadcast"] == [2] and found["device"] == "npu:0"
        assert found["all_gather"] == found["all_gather_single"] == [1, 2, 3]
        assert found["reduce_scatter"] == [3 * rank]
        assert found["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert found["objects"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found.get("pair") == ([3] if rank < 2 else None)
    assert told[1]["recv"] == [7]


def test_hccl_does_not_reduce_float64_in_strict_mode(on_npu_ranks: Ranks) -> None:
    for rank in on_npu_ranks("npu_programs:reduce_float64", 2, strict_dtypes=True):
        assert rank == {"gathered": [1, 2], "reduced": "hccl does not reduce float64 tensors (device_options.strict_dtypes)"}
    for rank in on_npu_ranks("npu_programs:reduce_float64", 2):
        assert rank == {"gathered": [1, 2], "reduced": [3]}


def test_a_parameter_that_fsdp_has_freed_reads_as_nan(on_npu_ranks: Ranks) -> None:
    for rank in on_npu_ranks("npu_programs:freed_parameter", 2):
        assert rank == {"while it runs": [True], "after": [True]}
