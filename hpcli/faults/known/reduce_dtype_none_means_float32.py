"""reduce_dtype None is read as an allocator reads a missing dtype: float32."""

from __future__ import annotations

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="reduce_dtype None read as float32",
    source="hyper-parallel issue-217",
    rule="None resolves to the gradient's native dtype, once, for all who ask",
    layout="fsdp{ranks}-bf16-native-reduce",
    cause="reduce-dtype-too-wide",
    wrong="1 + 2^-10 over two ranks: 1.0009765625, a float32 sum",
    right="1.0, the bfloat16 sum that was asked for",
    why="bfloat16 has 8 significant bits: 1 + 2^-10 rounds to 1",
)


def patch() -> None:
    from hyper_parallel.core import precision

    right = precision.resolve_reduce_dtype
    replace(precision, "resolve_reduce_dtype", lambda reduce, native: right(reduce or "float32", native))
