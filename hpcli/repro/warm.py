"""What the rank server does before it forks ranks of MindSpore: import, and execute nothing.

After one executed operation MindSpore's threads are there, and a forked child would hang in its first one.
"""

from __future__ import annotations

import importlib
import os

_MODULES = ("clip_grad", "cross_entropy", "fully_shard", "parallelize", "pipeline")


def import_mindspore() -> None:
    """MindSpore and what the entries use of this library.

    Raises:
        MindSporeMissingError: it cannot be used here.
    """
    os.environ.setdefault("GLOG_v", "3")  # MindSpore logs errors only
    from hyper_parallel.platform.mindspore.loading import load_mindspore

    load_mindspore()
    import torch

    torch.set_num_threads(1)
    for name in _MODULES:
        importlib.import_module(f"hyper_parallel.platform.mindspore.{name}")
    importlib.import_module("hpcli.faults.latent_attention")
