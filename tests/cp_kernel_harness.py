"""Backend calls of context parallelism: with origins, and with gradients of keys that are added to sums."""

from __future__ import annotations

import torch

from flash_attn import backends

P = 0.4
STATE = (12345, 6)
# documents, first heads, rows and columns; columns are multiples of MASK_COLUMNS
ORIGINS = ((5, 3, 1001, 16), (0, 0, 7, 1 << 20), (9, 1, 0, 48))
LENGTHS = ((70, 256), (1, 128), (200, 384))  # queries and keys of packed sequences
NO_WINDOW = (-1, -1)


def half(device):
    return torch.float64 if device == "cpu" else torch.bfloat16


class Call:
    """A batch with one origin per sequence: dense with the last of LENGTHS, or packed."""

    def __init__(self, device, is_packed, heads, head_dims, lengths=LENGTHS, extra_rows=0):
        self.device, self.is_packed, self.heads = device, is_packed, heads
        self.lengths = lengths if is_packed else (lengths[-1],) * len(lengths)
        self.origins = torch.tensor(ORIGINS[: len(lengths)], dtype=torch.int64, device=device)
        rows, cols = (sum(x) for x in zip(*self.lengths))
        self.cu = [
            torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device=device)
            for x in zip(*self.lengths)
        ]
        (heads_q, heads_k), (dim, dim_v) = heads, head_dims
        shapes = [(rows, heads_q, dim), (cols, heads_k, dim), (cols, heads_k, dim_v), (rows, heads_q, dim_v)]
        shapes = [(a + extra_rows, b, c) for a, b, c in shapes]
        self.q, self.k, self.v, self.dout = (
            self._batch(torch.randn(s, dtype=half(device), device=device)) for s in shapes
        )

    def _batch(self, x):
        return x if self.is_packed else x.unflatten(0, (len(self.lengths), -1))

    def sequences(self, x, is_query):
        """The rows of each sequence."""
        if not self.is_packed:
            return list(x)
        bounds = self.cu[not is_query].tolist()
        return [x[a:b] for a, b in zip(bounds, bounds[1:])]

    def forward(self, slopes=None, window=NO_WINDOW, dropout=0.0, scale=0.3, **named):
        module = backends.of(self.q)
        state = torch.tensor(STATE, dtype=torch.int64, device=self.q.device)
        named = (
            {"origins": self.origins, "rng_state": state, **named} if dropout else {"origins": self.origins, **named}
        )
        rest = (dropout, scale, *((False,) if self.is_packed else ()), False, *window, 0.0, False, None)
        if not self.is_packed:
            return module.fwd(self.q, self.k, self.v, None, slopes, *rest, **named)
        longest = [max(x) for x in zip(*self.lengths)]
        return module.varlen_fwd(
            self.q, self.k, self.v, None, *self.cu, None, None, None, slopes, *longest, *rest, **named
        )  # fmt: skip

    def backward(
        self, out, lse, slopes=None, window=NO_WINDOW, dropout=0.0, scale=0.3, grads=(None, None, None), **named
    ):
        module = backends.of(self.q)
        state = torch.tensor(STATE, dtype=torch.int64, device=self.q.device)
        named = {"origins": self.origins, **named}
        rest = (dropout, scale, *((False,) if self.is_packed else ()), False, *window, 0.0, False, None, state)
        tensors = (self.dout, self.q, self.k, self.v, out, lse, *grads)
        if not self.is_packed:
            return module.bwd(*tensors, slopes, *rest, **named)[:3]
        longest = [max(x) for x in zip(*self.lengths)]
        return module.varlen_bwd(*tensors, *self.cu, slopes, *longest, *rest, **named)[:3]

    def reference(self):
        """The same call in float64 by the CPU backend, whose origins test_cp_origins checks."""
        call = object.__new__(Call)
        call.__dict__ = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in self.__dict__.items()}
        call.cu = [x.cpu() for x in self.cu]
        for name in ("q", "k", "v", "dout"):
            setattr(call, name, getattr(call, name).double())
        return call


def close(ours, expected, name):
    limit = 1e-9 if ours.dtype == torch.float64 else 2e-2 * max(1.0, expected.abs().max().item())
    assert torch.equal(ours.cpu().isinf(), expected.isinf()), name
    difference = (ours.cpu().double() - expected).nan_to_num(nan=0.0).abs().max().item()
    assert difference <= limit, f"{name}: {difference} > {limit}"
