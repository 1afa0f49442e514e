"""Gradients that sequence parallelism leaves in parts are taken as whole."""

from __future__ import annotations

from typing import Any

from hpcli.faults.fault import Fault, replace

FAULT = Fault(
    title="partial gradients labelled as replicated",
    source="LLaMA-Factory#10640",
    rule="parameters with a part of their gradient on each tensor-parallel rank are added up by finish_gradients",
    layout="tp2+sp-fsdp{half}",
    cause="false-replicate",
    wrong="each of 2 ranks saw half of the tokens: each takes its half for the gradient",
    right="the sum of the two",
    why="the gradient of a sum over tokens is the sum over all of them",
)


def patch() -> None:
    from hyper_parallel.platform.torch import tensor_parallel

    def forgotten(parameter: Any, group: Any) -> None:
        """The parameter is left as it is labelled: replicated."""

    replace(tensor_parallel, "mark_shared", forgotten)
