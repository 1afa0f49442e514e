"""Each pipeline stage clips with the norm of its own parameters."""

from __future__ import annotations

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="each pipeline stage clips with its own norm",
    source="torchtitan#596",
    rule="with a pipeline, the norm is that of all stages: mesh=, or the mesh of parallelize",
    layout="pp2-fsdp{half}",
    cause="stage-local-norm",
    wrong="two stages with norms 3 and 4, max_norm 1: each scaled by its own",
    right="5 on both, gradients 0.6 and 0.8",
    why="sqrt(9 + 16) = 5",
)


def patch() -> None:
    from hyper_parallel.platform.torch import clip_grad

    replace(clip_grad, "_mesh_of", lambda *given: None)
