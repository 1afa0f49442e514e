"""With offload, every collective on host tensors has to be routed, not the norm's alone."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry, Raises

_ERROR = Raises("No backend type associated with device type cpu")

ENTRY = Entry(
    id="automodel-3461",
    title="five collectives need the accelerator, not one",
    kind="offload",
    source="Automodel#3461",
    condition="host tensors on 2 ranks whose group has the accelerator's backend alone: each collective, "
    "and a host gradient that is scaled by a number on the accelerator",
    shown_by="stock",
    wrong={
        "all_reduce": _ERROR,
        "all_gather": _ERROR,
        "reduce_scatter": _ERROR,
        "broadcast": _ERROR,
        "all_to_all": _ERROR,
        "scaled by an accelerator tensor": Raises("Expected all tensors to be on the same device"),
    },
    right={"sum of tied gradients": 7.0, "norm": 7.0, "clipped": 1.0, "gradient on": "cpu"},
    how_we_know="3 + 4 = 7, and 7 / 7 = 1",
    why="Norm, tied gradients, token counts, experts and checkpoints each reduce something that offload put "
    "on the host. Moving the number to the accelerator for good is no way out, for it cannot scale a host "
    "gradient. Here every exchange goes through the group's device and its result comes back.",
    device="accelerator",
)


def right() -> dict[str, Any]:
    import torch.distributed as dist

    import hyper_parallel
    from hpcli.faults.parameters import plain

    weight = plain([3.0 + dist.get_rank()])
    hyper_parallel.mark_shared(weight, dist.group.WORLD)
    hyper_parallel.finish_gradients([weight])
    assert weight.grad is not None
    total = weight.grad.item()
    mesh = hyper_parallel.ParallelMesh(dp_replicate=2)
    norm = hyper_parallel.clip_grad_norm_([weight], 1.0, mesh=mesh).item()
    return {
        "sum of tied gradients": total,
        "norm": norm,
        "clipped": weight.grad.item(),
        "gradient on": weight.grad.device.type,
    }


def wrong() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    from hpcli.faults.attempt import attempt
    from hyper_parallel.platform.torch.mesh import communication_device

    assert dist.group.WORLD is not None
    device = communication_device(dist.group.WORLD)
    one, two = torch.ones(1), torch.ones(2)
    return {
        "all_reduce": attempt(lambda: dist.all_reduce(one)),
        "all_gather": attempt(lambda: dist.all_gather_single(two, one)),
        "reduce_scatter": attempt(lambda: dist.reduce_scatter_single(one, two)),
        "broadcast": attempt(lambda: dist.broadcast(one, 0)),
        "all_to_all": attempt(lambda: dist.all_to_all_single(torch.ones(2), two)),
        "scaled by an accelerator tensor": attempt(lambda: two.mul_(torch.ones(2, device=device))),
    }
