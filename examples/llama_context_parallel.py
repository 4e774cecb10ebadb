# pip install '.[examples]'
"""A training step of transformers' Llama with the tokens of each sequence on several ranks.

torchrun --nproc-per-node 2 examples/llama_context_parallel.py [--device cuda]    (python: 2 threads of one process)

The model is transformers' own, with its attention exchanged by name. Each rank has the whole model and its part of the
tokens; the sums of losses and gradients over the ranks are those of one process, which rank 0 computes too. The exit
status is 1 where they differ by more than rounding.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import transformers

from flash_attn.context_parallel import CpPlan, LocalGroup
from flash_attn.integrations.transformers import register
from flash_attn.integrations.transformers_cp import context_parallel_inputs, register_context_parallel

CONFIG = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip


def build(attention, device):
    torch.manual_seed(0)  # the same weights on every rank
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = transformers.LlamaConfig(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
    return model.to(device).train()


def step(model, inputs):
    """[the loss, the gradient of each parameter]"""
    loss = model(**inputs).loss
    loss.backward()
    return [loss.detach().float(), *(p.grad.float() for p in model.parameters())]


def part_of_step(model, tokens, group=None):
    plan = CpPlan.dense(tokens.shape[1], group=group)
    print(plan)
    return step(model, context_parallel_inputs(plan, tokens, tokens))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    rank, is_distributed = int(os.environ.get("LOCAL_RANK", 0)), "LOCAL_RANK" in os.environ
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    register_context_parallel()
    tokens = torch.randint(96, (2, 101), generator=torch.Generator().manual_seed(1)).to(device)
    if is_distributed:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        sums = part_of_step(build("fa_cp", device), tokens)
        for x in sums:
            dist.all_reduce(x)
        dist.destroy_process_group()
    else:
        models = [build("fa_cp", device) for _ in range(2)]
        parts = LocalGroup(2).run(lambda group: part_of_step(models[group.rank], tokens, group))
        sums = [a + b for a, b in zip(*parts)]
    if rank != 0:
        return 0
    register()
    exact = step(build("fa_native", device), {"input_ids": tokens, "labels": tokens})
    error = max(((x - y).norm() / y.norm()).item() for x, y in zip(sums, exact))
    good = error < (1e-4 if options.device == "cpu" else 0.05)
    print(
        f"loss {sums[0].item():.4f}; largest relative difference {error:.1e}: {'llama ok' if good else 'llama FAILED'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
