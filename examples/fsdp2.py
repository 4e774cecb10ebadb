# pip install .
"""Trains a model that FSDP2 shards from the meta device: no process ever has all of its parameters.

torchrun --nproc-per-node 2 examples/fsdp2.py [--device cuda] [--steps 4]    (python starts 2 processes itself)

The blocks of `flash_attn.modules` are built on meta, sharded, given memory by to_empty and values by reset_parameters.
Slopes of ALiBi, which no checkpoint has, come with the memory. The exit status is 1 where the loss does not fall.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flash_attn.modules.block import Block
from flash_attn.modules.mha import MHA


def build(width=64, layers=2, vocabulary=32):
    mixer = partial(MHA, num_heads=4, causal=True, use_alibi=True, use_flash_attn=True)
    blocks = (Block(width, mixer, prenorm=False) for _ in range(layers))
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary))


def train(rank, options, store):
    backend, device = "gloo", torch.device("cpu")
    if options.device == "cuda":
        backend, device = "nccl", torch.device("cuda", rank)
        torch.cuda.set_device(device)
    known = {"init_method": f"file://{store}", "rank": rank, "world_size": options.ranks} if store else {}
    dist.init_process_group(backend, **known)  # else torchrun has set the environment
    mesh = init_device_mesh(options.device, (dist.get_world_size(),))
    with torch.device("meta"):
        model = build()
    for part in (*model[1:-1], model):
        fully_shard(part, mesh=mesh)
    torch.manual_seed(0)
    for part in model.to_empty(device=device).modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(32, (4, 33), device=device, generator=torch.Generator(device).manual_seed(rank))
    losses = []
    for _ in range(options.steps):
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.destroy_process_group()
    print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if losses[-1] >= losses[0]:
        sys.exit(1)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, default in {"steps": 4, "ranks": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), options, None)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (options, f"{folder}/store"), nprocs=options.ranks)
    print("fsdp2 ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
