"""A sequence that the tensor-parallel degree does not divide ends the process."""

from __future__ import annotations

from hpcli.faults.entry import ByRank, Entry, Lost, OneOf, Raises, Says

_ABORTED = Lost("rank 1 was killed by signal 6 (SIGABRT)")

ENTRY = Entry(
    id="torchtitan-4311",
    title="a sequence that does not divide ends a rank by an abort",
    kind="config",
    source="torchtitan#4311",
    condition="sequence parallelism over 2 ranks with 15 tokens: 8 and 7 of them are gathered",
    shown_by="stock",
    wrong=ByRank((OneOf((Raises("Connection"), _ABORTED)), _ABORTED)),
    right=Says("training.seq_length"),
    how_we_know="15 is odd",
    why="Chunks of 8 and 7 tokens meet in an all-gather that takes equal ones, and gloo ends the process "
    "where it notices. No exception can be caught there, and the other rank is told of a lost connection. "
    "Whether a length divides is known from the file, before any process starts.",
    alone=True,
    timeout_seconds=6.0,
    seconds=0.5,
)


def right() -> str:
    from hpcli.faults.yaml_text import problems_of

    text = "training: {seq_length: 15}\nparallelism: {tensor_parallel: 2, sequence_parallel: true}\n"
    return problems_of(text, ranks=2)


def wrong() -> list[int]:
    import torch
    import torch.distributed as dist

    tokens = torch.zeros(15, 256).chunk(2)[dist.get_rank()]
    gathered = torch.zeros(2 * len(tokens), tokens.shape[1])
    dist.all_gather_single(gathered, tokens)
    dist.barrier()  # the rank whose part was too long may have got by with rubbish
    return list(gathered.shape)
