"""MindSpore: sharded, tensor and pipeline parallelism of our own, since MindSpore has no FSDP2 and no pipeline runtime in PyNative mode."""
