"""Rank programs: training steps whose weights can be looked at."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpcli.config.schema import Config
from hpcli.data.batches import make_batches
from hpcli.data.text import IGNORED
from hpcli.train import torch_loss
from hpcli.train.torch_engine import TorchEngine
from hyper_parallel import ParallelMesh

TOKEN_LOSS = torch_loss.token_loss


def nan_loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    return TOKEN_LOSS(logits_BTV, labels_BT) * float("nan")


def train(
    config: dict[str, Any], mesh: dict[str, int], steps: int, spoiled_rank: int | None = None
) -> dict[str, Any]:
    """``steps`` optimizer steps: losses, norms, this rank's valid tokens and norm table row, and a look at the weights.

    On ``spoiled_rank`` the loss of step 1 is NaN.
    """
    settings, layout = Config.model_validate(config), ParallelMesh(**mesh)
    engine = TorchEngine(settings, layout, "cpu")
    training = settings.training
    batches = make_batches(settings)
    before = {name: _whole(p) for name, p in engine.parts[0].named_parameters()}
    told: dict[str, Any] = {"losses": [], "norms": [], "valid": [], "rows": [], "skipped": []}
    for step in range(1, steps + 1):
        share = batches.share(step, layout.data_parallel_rank(dist.get_rank()), layout.data_parallel_size)
        micro_batches = share.split(training.micro_batch_size or len(share.inputs))
        spoiled = step == 1 and spoiled_rank == dist.get_rank()
        torch_loss.token_loss = nan_loss if spoiled else TOKEN_LOSS
        result = engine.step(micro_batches, batches.valid_tokens(step), settings.optimizer.lr, lambda phase: None)
        told["losses"].append(result.loss)
        told["norms"].append(result.grad_norm)
        told["skipped"].append(result.skip_reason)
        told["valid"].append([int((batch.labels != IGNORED).sum()) for batch in micro_batches])
        told["rows"].append(engine.rank_row())
    after = {name: _whole(p) for name, p in engine.parts[0].named_parameters()}
    told["mesh_coordinates"] = [p.device_mesh.get_coordinate() for p in engine.parameters.values()]
    told["parameter_count"] = engine.parameter_count
    told["changed"] = {name: not torch.equal(before[name], after[name]) for name in before}
    told["bfloat16"] = all(torch.equal(value, value.bfloat16().float()) for value in after.values())
    told["dtypes"] = sorted({str(p.dtype) for p in engine.parts[0].parameters()})
    told["weights"] = hashlib.sha256(b"".join(after[name].numpy().tobytes() for name in sorted(after))).hexdigest()
    told["units"] = sum("FSDP" in type(module).__name__ for module in engine.parts[0].modules())
    masters = [p.to_local() if isinstance(p, DTensor) else p for p in engine.optimizer.masters]
    told["masters are rounded"] = all(torch.equal(p, p.bfloat16().float()) for p in masters)
    return told


def _whole(parameter: Any) -> torch.Tensor:
    return parameter.detach().full_tensor().clone()
