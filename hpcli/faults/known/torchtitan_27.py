"""Degrees that do not multiply to the number of ranks."""

from __future__ import annotations

from hpcli.faults.entry import Entry, Raises, Says

ENTRY = Entry(
    id="torchtitan-27",
    title="degrees that do not fit the number of ranks",
    kind="config",
    source="torchtitan#27",
    condition="8 ranks, data_parallel_shard 1, tensor_parallel 2, pipeline_parallel 3",
    shown_by="formula",
    wrong=Raises("Invalid parallel dims: dp(1) * tp(2) * pp(3) != WORLD_SIZE(8)", "AssertionError"),
    right=Says("my.yaml:1: parallelism"),
    how_we_know="1 x 2 x 3 = 6, and 8 ranks were asked for",
    why="Every rank has started, has imported everything and met the others when each of them raises this. "
    "It says that a product is wrong, and neither where the degrees come from nor which would fit. One "
    "validator looks before any process starts, and names file and line.",
    ranks=(1,),
)


def right() -> str:
    from hpcli.faults.yaml_text import problems_of

    return problems_of("parallelism: {data_parallel_shard: 1, tensor_parallel: 2, pipeline_parallel: 3}\n", ranks=8)


def wrong() -> None:
    dp, tp, pp, world_size = 1, 2, 3, 8
    assert dp * tp * pp == world_size, f"Invalid parallel dims: dp({dp}) * tp({tp}) * pp({pp}) != WORLD_SIZE({world_size})"
