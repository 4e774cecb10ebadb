# pip install .    (--llama: '.[examples]')
"""A model that calls scaled_dot_product_attention, by these kernels: in a scope, or for the whole process.

    python examples/sdpa.py [--device cuda]
    python examples/sdpa.py --device cuda --llama --layers 8 --dim 2048 --heads 16 --heads-k 4 --seqlen 8192 --batch 1

Trains a small decoder whose attention is torch's SDPA (--llama: transformers' Llama), with torch's own attention and in
`flash_attn.sdpa.use`. On CUDA also with torch's flash attention alone, without its cuDNN, and with the provider
(torch.nn.attention.activate_flash_attention_impl), where this torch has it. Prints the losses, which agree but for
rounding, and the median time of a step.
"""

from __future__ import annotations

import argparse
import statistics
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


def make_model(options):
    """A function tokens -> logits, the same for every call with equal options."""
    torch.manual_seed(0)
    dim, heads, heads_k = options.dim, options.heads, options.heads_k
    if not options.llama:
        blocks = [Block(dim, heads, heads_k) for _ in range(options.layers)]
        return nn.Sequential(nn.Embedding(VOCABULARY, dim), *blocks, nn.Linear(dim, VOCABULARY)).to(options.device)

    import transformers

    class Llama(transformers.LlamaForCausalLM):
        def forward(self, tokens):
            return super().forward(input_ids=tokens, use_cache=False).logits

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=dim, intermediate_size=4 * dim, num_hidden_layers=options.layers,
        num_attention_heads=heads, num_key_value_heads=heads_k, max_position_embeddings=options.seqlen,
        attn_implementation="sdpa",
    )  # fmt: skip
    return Llama(config).to(options.device)


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
    if device == "cuda":
        found["flash"] = lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
        if hasattr(torch.nn.attention, "register_flash_attention_impl"):
            found["provider"] = provider
    return found


def train_step(model, optimizer, tokens):
    """The loss, under autocast to bfloat16, of predicting each row's next token."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def train(options):
    """Losses, and the median seconds of a step, of predicting a repeated sequence."""
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    tokens = torch.arange(options.seqlen + 1, device=options.device).remainder(7).expand(options.batch, -1)
    losses, seconds = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        losses.append(train_step(model, optimizer, tokens).item())
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--llama", action="store_true", help="train transformers' Llama")
    sizes = {"steps": 10, "seqlen": 128, "batch": 4, "layers": 2, "dim": 128, "heads": 4, "heads-k": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(arguments)
    results = {}
    for name, context in ways(options.device).items():
        with context():
            results[name], seconds = train(options)
        print(f"{name:9} loss {results[name][0]:.4f} -> {results[name][-1]:.4f}, {seconds * 1e3:.1f} ms a step")
    difference = max(abs(a - b) for losses in results.values() for a, b in zip(losses, results["torch"]))
    agrees = difference < 0.05
    print(f"largest difference of losses {difference:.4f}: {'ok' if agrees else 'too large'}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
