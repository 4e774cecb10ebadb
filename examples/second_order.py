# pip install .
"""Second derivatives through attention: a gradient penalty, and products with a Hessian.

A critic learns to have gradients of norm 1 for its input, as in a WGAN: the loss contains gradients. Then the Hessian
of an energy is applied to directions, by forward over reverse mode. `--device cuda` runs it on a GPU. The exit status
is 1 where the penalty does not fall or the Hessian is not symmetric.
"""

import argparse
import sys

import torch
from torch import nn

from flash_attn import flash_attn_func


class Critic(nn.Module):
    def __init__(self, width=32, heads=2):
        super().__init__()
        self.qkv, self.score, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, 1), heads

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        if x.is_cuda:  # the kernels are for half precision
            q, k, v = q.half(), k.half(), v.half()
        out = flash_attn_func(q, k, v, causal=True).flatten(2).to(x.dtype)
        return self.score(out.tanh()).mean((1, 2))


def penalty(critic, x):
    (grad,) = torch.autograd.grad(critic(x.requires_grad_()).sum(), x, create_graph=True)
    return (grad.flatten(1).norm(dim=1) - 1).square().mean()


def main(arguments=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args(arguments).device
    torch.manual_seed(0)
    critic = Critic().to(device)
    optimizer, losses = torch.optim.Adam(critic.parameters(), lr=1e-2), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = penalty(critic, torch.randn(4, 12, 32, device=device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    x, u, v = torch.randn(3, 1, 12, 32, device=device)
    gradient = torch.func.grad(lambda x: critic(x[None]).exp().sum())
    hu, hv = (torch.func.jvp(gradient, (x[0],), (direction[0],))[1] for direction in (u, v))
    uhv, vhu = (u[0] * hv).sum().item(), (v[0] * hu).sum().item()
    good = losses[-1] < 0.5 * losses[0] and abs(uhv - vhu) < 0.05 * (abs(uhv) + abs(vhu)) + 1e-3
    print(f"penalty {losses[0]:.3f} to {losses[-1]:.3f}; uHv {uhv:.5f}, vHu {vhu:.5f}", "ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
