"""MindSpore: sharded, tensor and pipeline parallelism of our own, since MindSpore has no FSDP2 and no pipeline runtime in PyNative mode.

Importing anything in here imports MindSpore, or says what is missing.
"""

from hyper_parallel.platform.mindspore.loading import load_mindspore

load_mindspore()
