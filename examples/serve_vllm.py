# pip install vllm==0.33.0, then pip install --no-deps . examples/vllm_plugin    (the dry run: pip install .)
"""Serves a model by vLLM with these kernels, through the plugin in examples/vllm_plugin.

python examples/serve_vllm.py MODEL [more options of `vllm serve`]
python examples/serve_vllm.py --dry

The dry run needs neither vLLM nor a GPU. It makes the call of vLLM's attention backend, a prompt, a chunk of a prompt
and a decoded token over pages of 16 tokens, and compares it with attention over each sequence. The exit status is 1
where they differ by more than rounding.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import torch

from flash_attn import flash_attn_func
from flash_attn.integrations.vllm import flash_attn_varlen_func

HEADS, HEADS_K, HEAD_DIM, PAGE = 8, 2, 64, 16
REQUESTS = ((40, 40), (10, 50), (1, 33))  # (new tokens, keys with them)


def command(model, *options):
    return ["vllm", "serve", model, "--attention-backend", "FLASH_ATTN", *options]


def dry_run(device):
    """The largest difference of the outputs of all requests in one call from those of each alone."""
    like = {"device": device, "dtype": torch.bfloat16}
    pages_of = [-(-keys // PAGE) for _, keys in REQUESTS]
    k_cache, v_cache = (torch.randn(sum(pages_of), PAGE, HEADS_K, HEAD_DIM, **like) for _ in "kv")
    pages = torch.randperm(sum(pages_of)).to(device, torch.int32).split(pages_of)
    block_table = torch.nn.utils.rnn.pad_sequence(pages, batch_first=True)
    lengths_q, lengths_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in zip(*REQUESTS))
    cu_seqlens_q = torch.nn.functional.pad(lengths_q.cumsum(0, dtype=torch.int32), (1, 0))
    q = torch.randn(sum(new for new, _ in REQUESTS), HEADS, HEAD_DIM, **like)
    out = torch.empty_like(q)
    flash_attn_varlen_func(
        q=q, k=k_cache, v=v_cache, out=out, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=40, seqused_k=lengths_k,
        max_seqlen_k=50, softmax_scale=HEAD_DIM**-0.5, causal=True, window_size=[-1, -1], block_table=block_table,
    )  # fmt: skip
    alone = []
    for queries, own, (_, keys) in zip(q.split([new for new, _ in REQUESTS]), pages, REQUESTS):
        k, v = (cache[own.long()].flatten(0, 1)[None, :keys] for cache in (k_cache, v_cache))
        alone.append(flash_attn_func(queries[None], k, v, causal=True)[0])
    return (out - torch.cat(alone)).abs().max().item()


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    is_dry = not arguments or arguments[0] == "--dry"
    if not is_dry and importlib.util.find_spec("vllm") is not None and torch.cuda.is_available():
        return subprocess.run(command(*arguments), env={**os.environ, "VLLM_PLUGINS": "fa_native"}).returncode
    error = dry_run("cuda" if torch.cuda.is_available() else "cpu")
    print("VLLM_PLUGINS=fa_native", *command(*(["MODEL"] if is_dry else arguments)))
    print(f"largest difference {error:.4f}: {'dry ok' if error < 0.02 else 'dry FAILED'}")
    return 0 if error < 0.02 else 1


if __name__ == "__main__":
    sys.exit(main())
