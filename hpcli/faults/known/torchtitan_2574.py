"""Heads that the tensor-parallel degree does not divide."""

from __future__ import annotations

from hpcli.faults.entry import Entry, Raises, Says

ENTRY = Entry(
    id="torchtitan-2574",
    title="heads that do not divide end in a view error",
    kind="config",
    source="torchtitan#2574",
    condition="3 key and value heads of 8 on tensor_parallel 2",
    shown_by="stock",
    wrong=Raises("invalid for input of size"),
    right=Says("num_kv_heads"),
    how_we_know="3 heads cannot be given to 2 ranks in whole heads",
    why="The projection's 24 columns divide by 2 and are cut without complaint. The rank's 12 columns then "
    "do not make whole heads, and a view deep in the attention says that a shape is invalid. The rule is "
    "known beforehand, with the key and the values that would do.",
    ranks=(1,),
)


def right() -> str:
    from hpcli.faults.yaml_text import problems_of

    text = "model: {preset: decoder-tiny, hidden_size: 48, num_heads: 6, num_kv_heads: 3}\nparallelism: {tensor_parallel: 2}\n"
    return problems_of(text, ranks=2)


def wrong() -> list[int]:
    import torch

    heads, head_size, tp = 3, 8, 2
    projected = torch.zeros(1, 5, heads * head_size // tp)  # batch, sequence, this rank's columns
    return list(projected.view(1, 5, heads // tp, head_size).shape)
