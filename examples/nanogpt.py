# pip install .
"""nanoGPT's attention, with one line exchanged: the same weights, the same loss and gradients.

python examples/nanogpt.py [--device cuda]

`CausalSelfAttention` has nanoGPT's names and parameters, so that its checkpoints load. Its call of SDPA, which needs
(batch, heads, tokens, head dim), becomes flash_attn_func, which takes heads where the projection leaves them. The exit
status is 1 where losses or gradients differ by more than rounding.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import nn

from flash_attn import flash_attn_func


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, use_flash_attn):
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.heads, self.use_flash_attn = heads, use_flash_attn

    def forward(self, x):
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # (batch, tokens, heads, head dim) each
        if self.use_flash_attn:
            y = flash_attn_func(q, k, v, causal=True)
        else:
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            y = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
        return self.c_proj(y.flatten(2))


class Model(nn.Module):
    """An embedding, one attention layer with its residual, and a head."""

    def __init__(self, use_flash_attn, width=64, heads=4, vocabulary=65):
        super().__init__()
        self.wte, self.ln = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, use_flash_attn)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        logits = self.lm_head(x + self.attn(self.ln(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args(arguments).device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    models = [Model(use).to(device, dtype) for use in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    tokens = torch.randint(65, (4, 129), device=device)
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in models]
    for loss in losses:
        loss.backward()
    pairs = zip(*([x.grad for x in model.parameters()] for model in models))
    difference = max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)
    print(f"loss {losses[0].item():.4f} by SDPA, {losses[1].item():.4f} by flash_attn")
    good = difference < (1e-4 if device == "cpu" else 5e-2)
    print(f"largest difference of gradients {difference:.1e}: {'swap ok' if good else 'swap FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
