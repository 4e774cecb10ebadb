# pip install .
"""A training loop in the style of torchtitan: meta init, checkpointed and compiled blocks, FSDP2, packed documents.

torchrun --nproc-per-node 8 examples/train_llama.py --device cuda --compile    (python: one process, small)

torchtitan's attention becomes `flash_attn_varlen_func`: documents of any lengths share a row, without a mask tensor.
The exit status is 1 where the loss does not fall.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flash_attn import flash_attn_varlen_func


class Block(nn.Module):
    def __init__(self, width, heads=4, heads_k=2):
        super().__init__()
        self.heads, self.head_dim = (heads, heads_k, heads_k), width // heads
        self.wqkv = nn.Linear(width, sum(self.heads) * self.head_dim)
        self.wo, self.w1, self.w2 = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, cu_seqlens, longest):
        y = self.wqkv(F.rms_norm(x, x.shape[-1:]))
        q, k, v = y.unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)  # (tokens, heads, head dim) each
        x = x + self.wo(
            flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True).flatten(1)
        )
        return x + self.w2(F.silu(self.w1(F.rms_norm(x, x.shape[-1:]))))


class Model(nn.Module):
    def __init__(self, width=128, layers=2):
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, ids, cu_seqlens, longest):
        x = self.embedding(ids)
        for block in self.blocks:
            x = checkpoint(block, x, cu_seqlens, longest, use_reentrant=False)
        return self.head(x)


def build(options, device):
    with torch.device("meta"):
        model = Model()
    for block in model.blocks if options.compile else ():
        block.compile()
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for part in (*model.blocks, model):
            fully_shard(part)
    for part in model.to_empty(device=device).modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    return model


def packed_batch(device):
    """Documents that count up from a random byte, without padding: (ids, cu_seqlens, longest)."""
    lengths = torch.randint(2, 60, (8,)).tolist()
    ids = torch.cat([(torch.randint(256, (1,)) + torch.arange(n)) % 256 for n in lengths])
    return ids.to(device), torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32), max(lengths)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(rank)
    model, losses = build(options, device), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        (ids, cu_seqlens, longest), start = packed_batch(device), time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(ids, cu_seqlens, longest)[:-1], ids[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}, {len(ids) / (time.perf_counter() - start):.0f} tokens/s")
    if dist.is_initialized():
        dist.destroy_process_group()
    print("train ok" if losses[-1] < losses[0] else "train FAILED")
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
