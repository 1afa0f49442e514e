"""A key that nobody knows is ignored."""

from __future__ import annotations

from hpcli.faults.entry import Entry, Says

ENTRY = Entry(
    id="megatron-deepspeed-452",
    title="a misspelt key is ignored without a word",
    kind="config",
    source="Megatron-DeepSpeed#452",
    condition='a file with "redcue_dtype: float32", read as a dictionary with defaults',
    shown_by="formula",
    wrong="bfloat16",
    right=Says("unknown key; did you mean"),
    how_we_know="the file asks for float32, and the run reduces in the default",
    why="A dictionary is asked for the keys that it should have, and nobody asks which keys it has. The run "
    "starts with the default, and its result differs in the third digit. Every key of a file must be one "
    "that something reads.",
    ranks=(1,),
)


def right() -> str:
    from hpcli.faults.yaml_text import problems_of

    return problems_of("training:\n  redcue_dtype: float32\n")


def wrong() -> str:
    import yaml

    training = yaml.safe_load("training:\n  redcue_dtype: float32\n")["training"]
    return training.get("reduce_dtype", "bfloat16")
