# pip install .
"""Decodes over a KV cache in FP8, half the memory of a 16-bit one, and compares each step with float32.

python examples/fp8_cache.py [--device cuda] [--steps 24]

The cache is e4m3 with a float32 scale for each token and head. The call appends: new keys and values come in 16 bits,
are quantised by their own largest value, and their scales are stored with the quantised values. The exit status is 1 if
a step is further from float32 than FP8 allows.
"""

from __future__ import annotations

import argparse
import sys

import torch

from flash_attn import flash_attn_func, flash_attn_with_kvcache

BATCH, HEADS, HEADS_K, HEAD_DIM, CAPACITY = 2, 8, 2, 64, 128
ALLOWED = 0.05  # of the root mean square error: e4m3 has 3 bits of mantissa


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args(arguments)
    device = options.device

    shape = (BATCH, CAPACITY, HEADS_K, HEAD_DIM)
    k_cache, v_cache = (torch.zeros(shape, device=device).to(torch.float8_e4m3fn) for _ in "kv")
    # Heads first in memory, so that a kernel reads the scales of a head as one run.
    scales = [torch.ones(BATCH, HEADS_K, CAPACITY, device=device).transpose(1, 2) for _ in "kv"]
    lengths = torch.zeros(BATCH, dtype=torch.int32, device=device)
    keys, values, errors = [], [], []
    for _ in range(options.steps):
        q, k, v = (
            torch.randn(BATCH, 1, h, HEAD_DIM, device=device, dtype=torch.bfloat16) for h in (HEADS, HEADS_K, HEADS_K)
        )
        out = flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, k_descale=scales[0], v_descale=scales[1]
        )
        lengths += 1
        keys.append(k)
        values.append(v)
        exact = [x.float().cpu() for x in (q, torch.cat(keys, 1), torch.cat(values, 1))]
        expected = flash_attn_func(*exact, causal=True)
        errors.append(((out.float().cpu() - expected).square().mean() / expected.square().mean()).sqrt().item())
    megabytes = (k_cache.nbytes + v_cache.nbytes + sum(x.nbytes for x in scales)) / 2**20
    print(f"cache of {megabytes:.2f} MiB, {2 * 2 * k_cache.numel() / 2**20:.2f} MiB in 16 bits")
    good = max(errors) < ALLOWED
    print(f"largest relative error of {options.steps} steps {max(errors):.3f}: {'fp8 ok' if good else 'fp8 FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
