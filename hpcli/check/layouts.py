"""The layouts that check-norm goes through, for any number of ranks, and the sizes of a model that each of them divides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from hpcli.config.errors import ConfigError
from hpcli.config.load import LoadedConfig
from hpcli.config.schema import Config
from hpcli.config.validate import ResolvedConfig, resolve_config

BFLOAT16 = {"params_dtype": "bfloat16", "compute_dtype": "bfloat16"}
NATIVE = BFLOAT16 | {"accumulate_allreduce_grads_in_fp32": False}
KEEP = {"reshard_after_forward": False, "unit": "layer"}


class Layout(NamedTuple):
    """One line of the table.

    Attributes:
        name: as ``--layout`` takes it.
        resolved: the configuration that runs.
    """

    name: str
    resolved: ResolvedConfig

    @property
    def offload(self) -> bool:
        """Whether it is run without offload too, which must agree bit for bit."""
        return self.resolved.config.fsdp_config.enable_offload

    @property
    def low_precision(self) -> bool:
        """Whether exact values are sent through the reducer too, since a tolerance cannot see its dtype."""
        return self.resolved.config.training.compute_dtype != "float32"


def matrix(ranks: int, device: str = "cpu") -> list[Layout]:
    """Every layout that suits ``ranks``, the plain ones first."""
    found: dict[str, Layout] = {}
    for name, sections in _candidates(ranks):
        layout = _layout(name, sections, ranks, device)
        if layout is not None and name not in found:
            found[name] = layout
    return list(found.values())


def from_config(resolved: ResolvedConfig) -> Layout:
    """The one layout of a configuration file, called as the file."""
    return Layout(Path(resolved.file).stem, resolved)


def _layout(name: str, sections: dict[str, dict[str, Any]], ranks: int, device: str) -> Layout | None:
    """None where this layout cannot be, or cannot be yet."""
    config = Config.model_validate({**_complete(sections, ranks), "device": device})
    try:
        return Layout(name, resolve_config(LoadedConfig(config, "check-norm", {}), ranks=ranks))
    except ConfigError:
        return None


def _complete(sections: dict[str, dict[str, Any]], ranks: int) -> dict[str, Any]:
    heads = ranks * ceil(4 / ranks)
    experts = ranks * ceil(8 / ranks)
    hidden = heads * 8
    kind = sections.get("model", {}).get("preset", "decoder-tiny").partition("-")[0]
    sizes: dict[str, Any] = {
        "num_heads": heads,
        "hidden_size": hidden,
        "ffn_size": heads * 12,
        "num_layers": 2,
        "preset": "decoder-tiny",
    }
    if kind != "mla":
        sizes["num_kv_heads"] = heads
    if kind == "moe":
        sizes |= {"num_experts": experts, "expert_ffn_size": heads * 2, "experts_per_token": 2}
    if kind == "vlm":
        side = ranks * ceil(2 / ranks)
        sizes |= {
            "image_width": 8 * side,
            "vision_hidden_size": hidden,
            "vision_heads": heads,
            "vision_ffn_size": hidden,
            "vision_layers": 1,
        }
    training = {
        "seq_length": ranks * ceil(16 / ranks),
        "global_batch_size": max(2 * ranks, 4),
        "max_norm": 0.5,
        "steps": 1,
        "seed": 1,
    }
    chosen = {"model": sizes, "training": training}
    result: dict[str, Any] = {
        name: {**chosen.get(name, {}), **sections.get(name, {})} for name in {*chosen, *sections}
    }
    parallelism = result.get("parallelism", {})
    pp = parallelism.get("pipeline_parallel", 1)
    if pp > 1:
        result["model"]["num_layers"] = 2 * pp
        share = result["training"]["global_batch_size"] * pp * parallelism.get("tensor_parallel", 1) // ranks
        result["training"]["micro_batch_size"] = max(1, share // (2 * pp))  # enough micro-batches for every schedule
    return result


def _candidates(ranks: int) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Names and what each changes, whether or not it fits."""
    micro = {"micro_batch_size": 1}
    yield _named(f"fsdp{ranks}")
    if ranks > 2 and ranks % 2 == 0:
        yield _named(f"hsdp2x{ranks // 2}", parallelism={"data_parallel_replicate": 2})
    if ranks > 2 and _is_prime(ranks):
        yield _named(f"ddp{ranks}", parallelism={"data_parallel_replicate": ranks, "data_parallel_shard": 1})
    yield _named(f"fsdp{ranks} offload", fsdp_config={"enable_offload": True})
    yield _named(f"fsdp{ranks} bf16, fp32 reduce", training=BFLOAT16 | micro)
    yield _named(f"fsdp{ranks} bf16, native reduce", training=NATIVE | micro)
    yield _named(f"fsdp{ranks} fp16", training={"compute_dtype": "float16"} | micro)
    yield _named(f"fsdp{ranks} accumulation", training=micro)
    yield _named(f"fsdp{ranks} frozen", model={"freeze": ["layers.0.*", "embedding.*"]})
    yield _named(f"fsdp{ranks} tied", model={"tie_embeddings": True})
    for tp in _degrees(ranks):
        rest = _times("fsdp", ranks // tp)
        yield _named(f"tp{tp}{rest}", parallelism={"tensor_parallel": tp})
        if tp != ranks or tp == 2:
            yield _named(f"tp{tp}+sp{rest}", parallelism={"tensor_parallel": tp, "sequence_parallel": True})
    if ranks > 1:
        yield _named(f"tp{ranks}", parallelism={"tensor_parallel": ranks})
    if ranks > 1 and _is_prime(ranks):
        yield _named(f"tp{ranks}+sp", parallelism={"tensor_parallel": ranks, "sequence_parallel": True})
    for pp in _degrees(ranks):
        rest = _times("fsdp", ranks // pp)
        yield _named(f"pp{pp}{rest}", parallelism={"pipeline_parallel": pp})
        yield _named(
            f"pp{pp}{rest} tied", parallelism={"pipeline_parallel": pp}, model={"tie_embeddings": True}
        )
    for pp in (4, 3, 2, 5, 7):
        if ranks % pp == 0 and (pp == 4 or ranks % 4):
            rest = _times("fsdp", ranks // pp)
            schedule = {"pipeline_parallel": pp, "pipeline_parallel_schedule": "interleaved_1f1b"}
            yield _named(f"pp{pp} interleaved{rest}", parallelism=schedule)
            break
    for pp in _degrees(ranks):
        schedule = {"pipeline_parallel": pp, "pipeline_parallel_schedule": "zbv"}
        rest = _times("fsdp", ranks // pp)
        yield _named(f"pp{pp} zero-bubble{rest}", parallelism=schedule, fsdp_config=KEEP)
    if ranks % 4 == 0 and ranks > 4:
        parallelism = {"tensor_parallel": 2, "pipeline_parallel": 2, "sequence_parallel": True}
        rest = _times("fsdp", ranks // 4)
        yield _named(f"tp2+sp x pp2{rest} mla", parallelism=parallelism, model={"preset": "mla-tiny"})
    yield from _experts(ranks)
    yield _named(f"vlm fsdp{ranks}", model={"preset": "vlm-tiny"})


def _experts(ranks: int) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    moe = {"preset": "moe-tiny"}
    for ep in (4, 3, 2, 5, 7):
        if ranks % ep == 0:
            yield _named(f"ep{ep} in fsdp{ranks}", model=moe, parallelism={"expert_parallel": ep})
            break
    if ranks % 4 == 0:
        yield _named(
            f"ep2 x tp2 in {ranks} ranks", model=moe, parallelism={"expert_parallel": 2, "tensor_parallel": 2}
        )
        yield _named(
            f"moe hsdp2x{ranks // 2}, ep2", model=moe, parallelism={"data_parallel_replicate": 2, "expert_parallel": 2}
        )
    elif ranks == 1:
        yield _named("moe", model=moe)


def _named(name: str, **sections: dict[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    return re.sub(r",? (x |in )?", "-", name), sections


def _degrees(ranks: int) -> list[int]:
    """The smallest degree of more than one rank that divides them."""
    return [next(degree for degree in range(2, ranks + 1) if ranks % degree == 0)] if ranks > 1 else []


def _is_prime(ranks: int) -> bool:
    return ranks > 1 and all(ranks % n for n in range(2, ranks))


def _times(name: str, ranks: int) -> str:
    return f" x {name}{ranks}" if ranks > 1 else ""
