"""Initial weights depend on how they are sharded."""

from __future__ import annotations

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="torchtitan-514",
    title="another layout starts from other weights",
    kind="resume",
    source="torchtitan#514",
    condition="a matrix on 2 tensor-parallel ranks, drawn with the seed of the run: is it the matrix that "
    "one rank draws",
    shown_by="formula",
    wrong=False,
    right=True,
    how_we_know="both matrices are compared element by element",
    why="Each rank seeds its generator and draws its own shard, so all shards begin with the same numbers, "
    "which are others than those of one rank. Losses of two layouts then cannot be compared from the first "
    "step. Here a parameter's values follow from the seed and its name, and each rank takes its part of "
    "them.",
    seconds=1.0,
)


def right() -> bool:
    import torch

    from hpcli.faults.training import Trained
    from hpcli.models.description import describe_model, initial_value

    trained = Trained(model={"preset": "decoder-tiny", "num_layers": 1}, parallelism={"tensor_parallel": 2})
    described = describe_model(trained.config.model)
    seed = trained.config.training.seed
    return all(
        torch.equal(parameter.full_tensor(), torch.from_numpy(initial_value(name, described[name], seed)))
        for name, parameter in trained.engine.parameters.items()
    )


def wrong() -> bool:
    import torch
    import torch.distributed as dist

    torch.manual_seed(1)
    whole = torch.randn(4, 4)
    torch.manual_seed(1)
    shards: list[torch.Tensor] = [torch.empty(2, 4) for _ in range(2)]
    dist.all_gather(shards, torch.randn(2, 4))
    return torch.equal(torch.cat(shards), whole)
