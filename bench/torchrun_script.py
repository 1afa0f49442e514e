"""The script that a user of FSDP2 would write: the same decoder as hpcli's, trained under torchrun.

    torchrun --nproc-per-node 8 torchrun_script.py STEPS

It prints a line after each step. What it is measured against trains the same model on as many tokens.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, FFN = 256, 64, 4, 4, 2, 192
SEQUENCES, TOKENS = 8, 64


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KV_HEADS * size, bias=False)
        self.value = nn.Linear(WIDTH, KV_HEADS * size, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, FFN, bias=False)
        self.up = nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        y = self.attention_norm(x)
        q, k, v = (
            part(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.output(y.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens):
        size = WIDTH // HEADS
        angle = torch.arange(tokens.shape[1])[:, None] * 10_000.0 ** (-torch.arange(0, size, 2) / size)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angle.cos(), angle.sin())
        return self.head(self.norm(x))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Decoder()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + rank)
    for step in range(1, int(sys.argv[1]) + 1):
        text = torch.randint(VOCAB, (SEQUENCES // world, TOKENS + 1))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} parameters {parameters} process {os.getpid()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
