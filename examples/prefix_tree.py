# pip install .
"""A step of reinforcement learning on a tree of samples: the prompt and shared beginnings are computed once.

Samples of one prompt share it, and some of them their first tokens too. As one row in depth-first order, where each
token sees its node and the ancestors, the tree has fewer tokens than the samples side by side. The policy gradient is
the same: the exit status is 1 if it is not. `--device cuda` runs it on a GPU.
"""

import argparse
import sys

import torch
from torch import nn

from flash_attn import AttentionMask, flash_attn_func

VOCABULARY, WIDTH, HEADS = 32, 64, 2
# Nodes in depth-first order: (tokens, parent). Leaves end samples.
TREE = ((24, None), (6, 0), (9, 1), (5, 1), (12, 0), (7, 4), (8, 4), (3, 4), (10, 0))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, positions, **options):
        x = self.tokens(tokens) + self.places(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if x.is_cuda:  # the kernels are for half precision
            q, k, v = q.half(), k.half(), v.half()
        return self.head(x + flash_attn_func(q, k, v, **options).flatten(2).to(x.dtype)).log_softmax(-1)


def layout():
    """The tree in one row: (tin and tout of its tokens, positions in their sample, samples as lists of tokens)."""
    begins, ends, counts = [0], [], []
    for count, _ in TREE:
        begins.append(begins[-1] + count)
    paths, last = [], list(range(len(TREE)))
    for node, (_, parent) in enumerate(TREE):
        paths.append([*([] if parent is None else paths[parent]), *range(begins[node], begins[node + 1])])
        counts.append(len(paths[-1]))
    for node, (_, parent) in reversed(list(enumerate(TREE))):
        if parent is not None:
            last[parent] = max(last[parent], last[node])
    ends = [last[node] + 1 for node in range(len(TREE))]
    sizes = torch.tensor([count for count, _ in TREE])
    tin, tout = (torch.tensor(x).repeat_interleave(sizes) for x in (range(len(TREE)), ends))
    first = torch.tensor([counts[node] - TREE[node][0] for node in range(len(TREE))]).repeat_interleave(sizes)
    within = torch.arange(begins[-1]) - torch.tensor(begins[:-1]).repeat_interleave(sizes)
    parents = {parent for _, parent in TREE}
    samples = [path for node, path in enumerate(paths) if node not in parents]
    return tin, tout, first + within, samples


def gradient(policy, loss):
    policy.zero_grad()
    loss.backward()
    return torch.cat([x.grad.flatten() for x in policy.parameters()])


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    torch.manual_seed(0)
    policy, (tin, tout, positions, samples) = Policy().to(device), layout()
    tokens = torch.randint(VOCABULARY, tin.shape).to(device)
    prompt, advantages = TREE[0][0], torch.randn(len(samples), device=device)

    # one row: the log-probability of a token of a sample is at the token before it
    mask = AttentionMask.prefix_tree(tin[None].to(device), tout[None].to(device))
    tree = policy(tokens[None], positions[None].to(device), mask=mask)[0]
    rows = [torch.tensor(path, device=device) for path in samples]
    chosen = [tree[row[prompt - 1 : -1], tokens[row[prompt:]]].sum() for row in rows]
    of_tree = gradient(policy, -(torch.stack(chosen) * advantages).mean())

    # the samples one by one
    alone = [policy(tokens[row][None], torch.arange(len(row), device=device)[None], causal=True)[0] for row in rows]
    chosen = [x[torch.arange(prompt - 1, len(row) - 1), tokens[row[prompt:]]].sum() for x, row in zip(alone, rows)]
    expected = gradient(policy, -(torch.stack(chosen) * advantages).mean())

    error = ((of_tree - expected).norm() / expected.norm()).item()
    good = error < (1e-2 if device == "cuda" else 1e-4)
    side_by_side = sum(map(len, samples))
    print(f"{len(tin)} tokens instead of {side_by_side}; gradient error {error:.1e}", "ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
