# pip install . tqdm
"""Trains the character model of train_char_lm.py with each sequence divided among several processes, and with one.

python examples/train_context_parallel.py [--ranks N] [--device cpu|cuda] [--method ring] [--layout zigzag] [--steps N]

Every process has the whole model and some tokens of every sequence. `CpPlan.shard` selects these from the inputs and
targets, `flash_attn_cp_func` attends to the keys of all processes, and the gradients of parameters are summed over the
processes. Lengths are arbitrary: the context has 131 characters. On the CPU (gloo, float64) the losses equal those of
one process within 1e-9, on GPUs (NCCL, one GPU per process, bfloat16) within 0.05; otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import train_char_lm as lm
from torch import nn

from flash_attn.context_parallel import CpPlan, flash_attn_cp_func
from flash_attn.context_parallel.plan.steps import METHODS

ALLOWED = {"cpu": 1e-9, "cuda": 0.05}


class Rotary(nn.Module):
    """Rotary embedding of q and k for tokens at given positions, in the dtype of q and k."""

    def __init__(self, head_dim, positions):
        super().__init__()
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
        angles = positions[:, None] * 10000.0 ** (-pairs / head_dim)
        self.cos, self.sin = angles.cos()[:, None], angles.sin()[:, None]

    def forward(self, packed, num_heads_q):
        heads = (packed.shape[2] + num_heads_q) // 2  # of q and k
        rotated, v = packed.split((heads, packed.shape[2] - heads), dim=2)
        a, b = rotated.chunk(2, dim=-1)
        cos, sin = self.cos.to(packed.dtype), self.sin.to(packed.dtype)
        return torch.cat((torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1), v), dim=2)


def make_model(vocabulary, config, attention, positions):
    """The same model for the same seed, with any positions; float64 on the CPU."""
    torch.manual_seed(config.seed)
    model = lm.CharacterGPT(vocabulary, config, attention)
    for block in model.blocks:
        block.rotary = Rotary(config.head_dim, positions)
    return model.to(positions.device, torch.float64 if positions.is_cpu else torch.float32)


def train(model, config, device, ids, shard, sum_over_ranks):
    """The losses of all steps. shard: selects this process's tokens. sum_over_ranks: sums a tensor in place."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    losses = []
    for inputs, targets in lm.batches(ids, config, config.steps, config.seed, device):
        own, own_targets = shard(inputs), shard(targets)
        loss = lm.loss_of(model, own, own_targets, config, device) * (own.numel() / inputs.numel())
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            sum_over_ranks(parameter.grad)
        optimizer.step()
        total = loss.detach().clone()
        sum_over_ranks(total)
        losses.append(total.item())
    return losses


def run_rank(rank, options, config, store, results):
    device = torch.device(options.device, rank if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    ids, vocabulary = lm.read_text()
    plan = CpPlan.dense(config.context, layout=options.layout, method=options.method)

    def attention(q, k, v, window):
        return flash_attn_cp_func(q, k, v, causal=True, window_size=(window, 0), deterministic=True, plan=plan)

    model = make_model(vocabulary, config, attention, plan.positions(device))
    losses = train(model, config, device, ids, lambda x: plan.shard(x, 1), dist.all_reduce)
    if rank == 0:
        positions = torch.arange(config.context, device=device)
        model = make_model(vocabulary, config, lm.flash_attention, positions)
        results.put((losses, train(model, config, device, ids, lambda x: x, lambda x: None)))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--method", choices=("auto", *METHODS), default="auto")
    parser.add_argument("--layout", choices=("zigzag", "contiguous", "balanced"), default="zigzag")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--context", type=int, default=131)
    options = parser.parse_args(arguments)
    config = dataclasses.replace(
        lm.Config(), steps=options.steps, context=options.context,
        dtype="bfloat16" if options.device == "cuda" else "float32",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run_rank, (options, config, f"{folder}/store", results), nprocs=options.ranks)
        together, alone = results.get()
    gap = max(abs(a - b) for a, b in zip(together, alone))
    is_equal, has_learned = gap <= ALLOWED[options.device], together[-1] < together[0]
    print(f"{options.steps} steps of {config.batch} x {config.context} characters, {options.ranks} processes")
    print(f"loss {together[0]:.6f} to {together[-1]:.6f}, of one process {alone[0]:.6f} to {alone[-1]:.6f}")
    print(f"largest difference {gap:.1e}, allowed {ALLOWED[options.device]:.0e}  {'ok' if is_equal else 'FAILED'}")
    return 0 if is_equal and has_learned else 1


if __name__ == "__main__":
    sys.exit(main())
