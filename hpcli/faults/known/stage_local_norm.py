"""Each pipeline stage clips with the norm of its own parameters."""

from __future__ import annotations

from hpcli.faults.entry import ByRank, Entry
from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="each pipeline stage clips with its own norm",
    source="torchtitan#596",
    rule="with a pipeline, the norm is that of all stages: mesh=, or the mesh of parallelize",
    layout="pp2-fsdp{half}",
    cause="stage-local-norm",
)
ENTRY = Entry(
    id="torchtitan-596",
    title=FAULT.title,
    kind="pipeline",
    source=FAULT.source,
    condition="2 pipeline stages with gradients 3 and 4, max_norm 1: the norm, and the clipped gradient",
    shown_by="planted",
    wrong=ByRank(([3.0, 1.0], [4.0, 1.0])),
    right=ByRank(([5.0, 0.6], [5.0, 0.8])),
    how_we_know="sqrt(9 + 16) = 5; 3/5 and 4/5; each stage alone gives 3/3 and 4/4",
    why="The parameters of a stage do not show that there are other stages. A norm over what they show is "
    "that of the stage, and stages are clipped by different factors. The mesh has to tell, so it is given, "
    "or remembered by parallelize.",
)


def right() -> list[float]:
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import plain

    weight = plain([3.0 + dist.get_rank()])
    norm = hyper_parallel.clip_grad_norm_([weight], 1.0, mesh=hyper_parallel.ParallelMesh(pp=2))
    return [norm.item(), *weight.grad.tolist()]  # type: ignore[union-attr]


def patch() -> None:
    from hyper_parallel.platform.torch import clip_grad

    replace(clip_grad, "_mesh_of", lambda *given: None)
