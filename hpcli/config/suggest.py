"""The key that was probably meant by one that does not exist."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache

from hpcli.config import describe
from hpcli.config.errors import dotted

# What other trainers call the same thing.
ALIASES = {
    "learning_rate": "optimizer.lr",
    "base_lr": "optimizer.lr",
    "beta1": "optimizer.betas",
    "beta2": "optimizer.betas",
    "optimizer_type": "optimizer.name",
    "batch_size": "training.global_batch_size",
    "local_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.micro_batch_size",
    "max_steps": "training.steps",
    "train_steps": "training.steps",
    "num_steps": "training.steps",
    "iterations": "training.steps",
    "sequence_length": "training.seq_length",
    "seq_len": "training.seq_length",
    "max_grad_norm": "training.max_norm",
    "grad_clip": "training.max_norm",
    "clip_grad": "training.max_norm",
    "gradient_clipping": "training.max_norm",
    "dtype": "training.compute_dtype",
    "param_dtype": "training.params_dtype",
    "reduce_dtype": "training.accumulate_allreduce_grads_in_fp32",
    "recompute": "training.activation_checkpointing",
    "gradient_checkpointing": "training.activation_checkpointing",
    "dp": "parallelism.data_parallel_shard",
    "fsdp": "parallelism.data_parallel_shard",
    "dp_shard": "parallelism.data_parallel_shard",
    "dp_replicate": "parallelism.data_parallel_replicate",
    "hsdp": "parallelism.data_parallel_replicate",
    "tp": "parallelism.tensor_parallel",
    "sp": "parallelism.sequence_parallel",
    "pp": "parallelism.pipeline_parallel",
    "ep": "parallelism.expert_parallel",
    "cpu_offload": "fsdp_config.enable_offload",
    "offload": "fsdp_config.enable_offload",
    "world_size": "launch.ranks",
    "nproc_per_node": "launch.ranks",
    "timeout": "launch.timeout_seconds",
    "num_attention_heads": "model.num_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "intermediate_size": "model.ffn_size",
    "num_hidden_layers": "model.num_layers",
    "tie_word_embeddings": "model.tie_embeddings",
}
SPELLINGS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "float": "float32",
    "gpu": "cuda",
    "ascend": "npu",
    "pytorch": "torch",
    "adam": "adamw",
    "ms": "mindspore",
    "1f1b_interleaved": "interleaved_1f1b",
    "interleaved": "interleaved_1f1b",
    "off": "none",
    "no": "none",
    "false": "none",
    "null": "none",
}


@cache
def known_keys() -> dict[str, str]:
    """Every dotted key, by its spelling without case, dashes and underscores."""
    keys = list(describe.root()["properties"])
    for name, fragment in describe.sections():
        keys += [f"{name}.{key}" for key in describe.properties(fragment)]
    return {_plain(key): key for key in keys}


def _plain(key: str) -> str:
    return key.lower().replace("-", "").replace("_", "")


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The entry of `known` that `word` most resembles, None if it resembles none."""
    if len(word) > 60:
        return None
    spelled = SPELLINGS.get(word.lower())
    found = [k for k in known if _plain(k) == _plain(word)] or [k for k in known if k == spelled]
    if not found and len(word) >= 4:
        found = [k for k in known if k.lower().startswith(word.lower())]
    if not found:
        close = get_close_matches(word.lower(), [k.lower() for k in known], n=1, cutoff=0.6)
        found = [k for k in known if k.lower() in close]
    return found[0] if found else None


def unknown_key(path: Sequence[str | int]) -> str:
    """The message about a key that does not exist where it stands."""
    leaf, section = str(path[-1]), path[:-1]
    here = list(describe.properties(describe.at(section) or {}))
    keys = known_keys()
    if len(leaf) > 60:
        return f"unknown key; known here: {', '.join(here)}"
    elsewhere = [key for key in keys.values() if key.rpartition(".")[2] == leaf]
    if elsewhere:
        homes = [
            f"under {home}" if (home := key.rpartition(".")[0]) else "at the top level" for key in elsewhere
        ]
        return f"unknown key; it belongs {describe.join(homes)}"
    alias = ALIASES.get(leaf.lower().replace("-", "_"))
    dotted_form = keys.get(_plain(leaf)) if "." in leaf else None
    near = nearest(leaf, here)
    if near and _plain(near) == _plain(leaf):
        return f"unknown key; did you mean '{near}'?"
    if dotted_form:
        return f"unknown key; sections are nested: write {dotted_form.replace('.', ': {', 1)}: ...}}"
    if alias:
        home, _, name = alias.rpartition(".")
        return f"unknown key; did you mean '{name if home == dotted(section) else alias}'?"
    if near:
        return f"unknown key; did you mean '{near}'?"
    names = {key.rpartition(".")[2]: key for key in keys.values()}
    far = nearest(leaf, list(names)) if len(leaf) > 3 else None
    if far:
        return f"unknown key; did you mean '{names[far]}'?"
    return f"unknown key; known here: {', '.join(here)}"
