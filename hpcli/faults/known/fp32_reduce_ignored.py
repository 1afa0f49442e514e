"""Gradients are reduced in the compute dtype although float32 was asked for."""

from __future__ import annotations

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="float32 reduction asked for and not made",
    source="Megatron-LM (ISEEKYAN)#149",
    rule="reduce_dtype reaches accumulation and reduction",
    layout="fsdp{ranks}-bf16-fp32-reduce",
    cause="accumulated-too-narrow",
    wrong="256 + 1 + 1 over micro-batches: 256",
    right="258",
    why="bfloat16 has 8 significant bits: 257 rounds to 256, twice",
)


def patch() -> None:
    from hyper_parallel.core import precision

    replace(precision, "resolve_reduce_dtype", lambda reduce, native: precision.dtype_name(native))
