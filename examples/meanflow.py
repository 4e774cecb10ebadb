# pip install .
"""MeanFlow: a network learns the average velocity of a flow, whose loss has its derivative along the flow.

u(z, r, t) is to be v - (t - r) du/dt with v = noise - x at z = (1 - t) x + t noise; one step z - u(z, 0, 1)
then turns noise into a sample. `torch.func.jvp` computes u and du/dt together, through attention, and the gradient of
the loss flows through u alone. `--device cuda` runs it on a GPU. The exit status is 1 where samples do not improve.
"""

import argparse
import sys

import torch
from torch import nn

from flash_attn import flash_attn_func

TOKENS, WIDTH, HEADS = 8, 32, 2


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.times, self.qkv = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Sequential(nn.Linear(WIDTH, 128), nn.SiLU(), nn.Linear(128, WIDTH))

    def forward(self, z, r, t):
        x = z + self.times(torch.stack((r, t), -1)).unsqueeze(1)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
        if x.is_cuda:  # the kernels are for half precision
            q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        return z + self.out(x + self.mix(flash_attn_func(q, k, v).flatten(2).to(x.dtype)))


def loss(model, x):
    noise = torch.randn_like(x)
    r, t = torch.rand(2, len(x), device=x.device).sort(0).values
    z, v = torch.lerp(x, noise, t[:, None, None]), noise - x
    u, du_dt = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * du_dt
    return (u - target.detach()).square().mean()


@torch.no_grad()
def distance(model, pattern):
    """Mean square distance of one-step samples from the data: sequences whose tokens are all the pattern."""
    z = torch.randn(64, TOKENS, WIDTH, device=pattern.device)
    zero, one = z.new_zeros(64), z.new_ones(64)
    return (z - model(z, zero, one) - pattern).square().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, pattern = Velocity().to(options.device), torch.randn(WIDTH, device=options.device)
    optimizer, before = torch.optim.Adam(model.parameters(), lr=1e-2), distance(model, pattern)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss(model, pattern.expand(16, TOKENS, -1)).backward()
        optimizer.step()
    after = distance(model, pattern)
    good = after < 0.25 * before
    print(f"distance of samples from the data {before:.3f}, after training {after:.3f}", "ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
