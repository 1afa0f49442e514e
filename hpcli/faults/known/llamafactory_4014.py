"""YAML reads 1e-5 as text."""

from __future__ import annotations

from typing import Any

from hpcli.faults.entry import Entry

ENTRY = Entry(
    id="llamafactory-4014",
    title="a learning rate of 1e-5 is text",
    kind="config",
    source="LLaMA-Factory#4014",
    condition='a YAML file with "lr: 1e-5": the value and its type',
    shown_by="stock",
    wrong=["1e-5", "str"],
    right=[1e-5, "float"],
    how_we_know="1e-5 is 0.00001 in every language that has numbers",
    why="YAML 1.1 wants a point in a number with an exponent, so PyYAML reads 1e-5 as text and 1.0e-5 as a "
    "number. The optimizer is handed a string and fails minutes later, or compares it with one. A key that "
    "takes a number knows what to make of this text.",
    ranks=(1,),
)


def right() -> list[Any]:
    from hpcli.faults.yaml_text import read

    lr = read("optimizer: {lr: 1e-5}").optimizer.lr
    return [lr, type(lr).__name__]


def wrong() -> list[Any]:
    import yaml

    lr = yaml.safe_load("optimizer: {lr: 1e-5}")["optimizer"]["lr"]
    return [lr, type(lr).__name__]
