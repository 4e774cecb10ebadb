# pip install .
"""Decoding as a CUDA graph with a plan: a step of all layers is recorded once and replayed as the cache grows.

python examples/graph_decode.py [--device cuda] [--steps 16]

The plan holds how the keys are split; `update` renews it in place from the lengths on the device, inside the graph, so
that a replay follows them. Every buffer has a fixed place. On the CPU the same step runs without a graph. The exit
status is 1 where the last step differs from attention over the whole sequence by more than rounding.
"""

from __future__ import annotations

import argparse
import sys

import torch

from flash_attn import KvCachePlan, flash_attn_func, flash_attn_with_kvcache

LAYERS, BATCH, HEADS, HEADS_K, HEAD_DIM, CAPACITY = 3, 2, 8, 2, 64, 256


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args(arguments)
    like = {"device": options.device, "dtype": torch.bfloat16}

    caches = [[torch.zeros(BATCH, CAPACITY, HEADS_K, HEAD_DIM, **like) for _ in "kv"] for _ in range(LAYERS)]
    q, out = (torch.zeros(LAYERS, BATCH, 1, HEADS, HEAD_DIM, **like) for _ in range(2))
    k, v = (torch.zeros(LAYERS, BATCH, 1, HEADS_K, HEAD_DIM, **like) for _ in "kv")
    lengths = torch.zeros(BATCH, dtype=torch.int32, device=options.device)
    plan = KvCachePlan(lengths, 1, HEADS, HEADS_K, HEAD_DIM, CAPACITY, seqlen_new=1, causal=True)

    def step():
        plan.update(lengths)
        for i, (k_cache, v_cache) in enumerate(caches):
            flash_attn_with_kvcache(
                q[i], k_cache, v_cache, k[i], v[i], cache_seqlens=lengths, causal=True, plan=plan, out=out[i]
            )
        lengths.add_(1)

    run = step
    if options.device == "cuda":
        step()  # loads the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        lengths.zero_()
        run = graph.replay
    tokens = []
    for _ in range(options.steps):
        for x in (q, k, v):
            x.normal_()
        run()
        tokens.append((k.clone(), v.clone()))
    keys, values = (torch.cat(rows, dim=2) for rows in zip(*tokens))
    expected = torch.stack([flash_attn_func(q[i], keys[i], values[i], causal=True) for i in range(LAYERS)])
    error = (out - expected).abs().max().item()
    good = error < 0.05 and lengths.tolist() == [options.steps] * BATCH
    print(f"{options.steps} steps, largest difference {error:.1e}: {'decoding ok' if good else 'decoding FAILED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
