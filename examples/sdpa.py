"""A model that calls scaled_dot_product_attention, by these kernels: in a scope, or for the whole process.

    python examples/sdpa.py [--device cuda]

Trains a small decoder whose attention is torch's SDPA, with torch's own attention and in `flash_attn.sdpa.use`. On CUDA
also with the provider (torch.nn.attention.activate_flash_attention_impl), where this torch has it. Prints the losses,
which agree but for rounding, and the time of a step.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn

import flash_attn.sdpa

VOCABULARY = 32


class Block(nn.Module):
    """Grouped-query attention by SDPA, then an MLP."""

    def __init__(self, dim, heads, heads_k):
        super().__init__()
        self.heads, self.heads_k, self.head_dim = heads, heads_k, dim // heads
        self.qkv = nn.Linear(dim, (heads + 2 * heads_k) * self.head_dim)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.heads_k, self.heads_k), dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def make_model(device, layers=2, dim=128, heads=4, heads_k=2):
    torch.manual_seed(0)
    blocks = [Block(dim, heads, heads_k) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(VOCABULARY, dim), *blocks, nn.Linear(dim, VOCABULARY)).to(device)


@contextmanager
def provider():
    """Torch's flash attention replaced for the whole process."""
    flash_attn.sdpa.register()
    torch.nn.attention.activate_flash_attention_impl("flash_attn")
    try:
        yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def ways(device):
    """Name -> context in which to train."""
    found = {"torch": nullcontext, "scope": lambda: flash_attn.sdpa.use((device,))}
    if device == "cuda" and hasattr(torch.nn.attention, "register_flash_attention_impl"):
        found["provider"] = provider
    return found


def train(device, steps, seqlen):
    """Losses, and the seconds of the last step, of predicting a repeated sequence under autocast to bfloat16."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(seqlen + 1, device=device).remainder(7).expand(4, -1)
    losses = []
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds = time.perf_counter() - start
    return losses, seconds


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seqlen", type=int, default=128)
    options = parser.parse_args(arguments)
    results = {}
    for name, context in ways(options.device).items():
        with context():
            results[name], seconds = train(options.device, options.steps, options.seqlen)
        print(f"{name:9} loss {results[name][0]:.4f} -> {results[name][-1]:.4f}, {seconds * 1e3:.1f} ms a step")
    difference = max(abs(a - b) for losses in results.values() for a, b in zip(losses, results["torch"]))
    agrees = difference < 0.05
    print(f"largest difference of losses {difference:.4f}: {'ok' if agrees else 'too large'}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
