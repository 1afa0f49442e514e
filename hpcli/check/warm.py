"""What the rank server does before check-norm's ranks are forked: import all that any layout uses, and train a step."""

from __future__ import annotations

import importlib

from hpcli.launch.warm import warm as warm_for_training

_MODULES = (
    "hpcli.check.rank_program",
    "hpcli.check.reference",
    "hyper_parallel.platform.torch.pipeline",
    "hyper_parallel.platform.torch.expert_parallel",
    "hyper_parallel.platform.torch.tensor_parallel",
    "torch.distributed.tensor.parallel",
)


def warm() -> None:
    """As for training, and the modules that only some layouts need."""
    for name in _MODULES:
        importlib.import_module(name)
    warm_for_training()
