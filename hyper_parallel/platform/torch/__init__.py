"""PyTorch: a thin layer over torch.distributed (FSDP2, DTensor, device meshes)."""
