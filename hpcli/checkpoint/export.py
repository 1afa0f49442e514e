"""The weights of a checkpoint as one safetensors file that plain PyTorch loads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcli.checkpoint.errors import CheckpointError
from hpcli.checkpoint.folder import cannot, find, read_state

_MODEL = "model."
_SHARDING = "DCP_SHARDING_INFO"  # where torch.distributed.checkpoint notes the place of a shard in its tensor
_OFFSETS = "saved_offsets"


def export_weights(path: Path, output: Path) -> dict[str, tuple[int, ...]]:
    """Put the shards of the checkpoint that ``path`` means together and write them to ``output``, whole or not at all.

    The tensors are float32, the master weights (where parameters are stored in bfloat16, their bfloat16 values), named as in the
    model. A tied output projection is written too, as a copy, so that ``load_state_dict`` finds every name.

    Returns:
        Name and shape of every tensor.

    Raises:
        CheckpointError: the checkpoint is damaged, or the file cannot be written.
    """
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    checkpoint = find(path)
    state = read_state(checkpoint)
    weights = {name: np.empty(tuple(shape), np.float32) for name, shape in state["model"].items()}
    filled = dict.fromkeys(weights, 0)
    try:
        for name, offsets, shard in _shards(checkpoint, state["files"]):
            if name not in weights:
                raise CheckpointError(f"{checkpoint} is damaged: {name} is not in its list of parameters")
            place = tuple(slice(start, start + size) for start, size in zip(offsets, shard.shape, strict=True))
            weights[name].reshape(_stored_shape(weights[name].shape))[place] = shard
            filled[name] += shard.size
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{checkpoint} is damaged: {error}") from error
    for name, array in weights.items():
        if filled[name] != array.size:
            raise CheckpointError(f"{checkpoint} is damaged: {filled[name]} of {array.size} elements of {name} are there")
    if state["config"]["model"].get("tie_embeddings"):
        weights["head.weight"] = weights["embedding.weight"].copy()
    temporary = output.with_name(f".{output.name}.writing")
    try:
        save_file(weights, str(temporary), metadata={"format": "pt"})
        os.replace(temporary, output)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot("write", output, error) from error
        raise CheckpointError(f"cannot write {output}: {error}") from error
    return {name: array.shape for name, array in weights.items()}


def _shards(checkpoint: Path, files: dict[str, int]) -> Iterator[tuple[str, list[int], Any]]:
    """Every shard of every parameter: its name, where it begins in each dimension, its values."""
    from safetensors import safe_open

    for file in files:
        if not file.endswith(".safetensors"):
            continue
        with safe_open(checkpoint / file, framework="np") as shards:
            places = json.loads((shards.metadata() or {}).get(_SHARDING, "{}"))
            for key in shards.keys():  # noqa: SIM118 (it is no mapping)
                if key.startswith(_MODEL):
                    shard = shards.get_tensor(key)
                    offsets = places.get(key, {}).get(_OFFSETS, [0] * shard.ndim)
                    yield key.removeprefix(_MODEL), offsets, shard


def _stored_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape or (1,)  # a 0-dim parameter is stored as one element
