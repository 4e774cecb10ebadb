"""A backward in one call, and in stages over chunks of its keys."""

from __future__ import annotations

import torch
from cp_kernel_harness import STATE, P, half

from flash_attn import backends

LENGTHS = ((70, 256), (1, 320), (200, 384))  # queries and keys
FEATURES = {
    "full": {},
    "causal": {"window": (-1, 0)},
    "window": {"window": (250, 20)},
    "softcap": {"softcap": 5.0, "window": (-1, 0)},
    "alibi, dropout": {"slopes": True, "dropout": P, "window": (-1, 0)},
}


class Chunks:
    """A batch, dense or packed, with its forward's results; chunks are numbered from the last key of each sequence."""

    def __init__(self, device, is_packed, heads, head_dims, features, lengths=LENGTHS):
        self.device, self.is_packed = device, is_packed
        self.lengths = lengths if is_packed else (lengths[-1],) * len(lengths)
        self.window = features.get("window", (-1, -1))
        self.dropout, self.softcap = features.get("dropout", 0.0), features.get("softcap", 0.0)
        rows, cols = (sum(x) for x in zip(*self.lengths))
        (heads_q, heads_k), (dim, dim_v) = heads, head_dims
        shapes = ((rows, heads_q, dim), (cols, heads_k, dim), (cols, heads_k, dim_v), (rows, heads_q, dim_v))
        self.q, self.k, self.v, self.dout = (torch.randn(s, dtype=half(device), device=device) for s in shapes)
        self.slopes = torch.rand(heads_q, device=device) * 0.02 if features.get("slopes") else None
        self.state = torch.tensor(STATE, dtype=torch.int64, device=device)
        self.dlse = None
        if not is_packed:
            self.q, self.k, self.v, self.dout = (
                x.unflatten(0, (len(lengths), -1)) for x in (self.q, self.k, self.v, self.dout)
            )
        self.out, self.lse = self._forward()
        self.dlse = torch.randn_like(self.lse)

    def reference(self) -> Chunks:
        """The same in float64 by the CPU backend."""
        other = object.__new__(Chunks)
        for name, x in self.__dict__.items():
            is_rows = name in ("q", "k", "v", "dout", "dlse")
            setattr(other, name, x.cpu().to(torch.float64 if is_rows else x.dtype) if torch.is_tensor(x) else x)
        other.device = "cpu"
        other.out, other.lse = other._forward()
        return other

    def _cu(self, counts):
        return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=self.device)

    def _origins(self, firsts):
        rows = [(i, 0, 5 + k - q, first) for i, ((q, k), first) in enumerate(zip(self.lengths, firsts))]
        return {"origins": torch.tensor(rows, dtype=torch.int64, device=self.device)}

    def _forward(self):
        named = {**self._origins([0] * len(self.lengths)), **({"rng_state": self.state} if self.dropout else {})}
        module, tensors = backends.of(self.q), (self.q, self.k, self.v, None)
        rest = (self.softcap, False, None)
        if not self.is_packed:
            return module.fwd(*tensors, self.slopes, self.dropout, 0.3, False, *self.window, *rest, **named)[:2]
        queries, keys = zip(*self.lengths)
        return module.varlen_fwd(
            *tensors, self._cu(queries), self._cu(keys), None, None, None, self.slopes, max(queries), max(keys),
            self.dropout, 0.3, False, False, *self.window, *rest, **named,
        )[:2]  # fmt: skip

    def keys(self, x, begin, end):
        """Rows of the keys from the `begin`-th last to the `end`-th last of each sequence."""
        if not self.is_packed:
            return x[:, x.shape[1] - begin : x.shape[1] - end]
        parts, first = [], 0
        for _, count in self.lengths:
            parts.append(x[first + count - min(begin, count) : first + count - end])
            first += count
        return torch.cat(parts)

    def backward(
        self, begin=None, end=0, function="bwd", results=None, grads=(None,) * 3, deterministic=False, **stage
    ):
        """With the keys from the `begin`-th last on, None for all. Three results, or those of a stage."""
        longest = max(k for _, k in self.lengths)
        begin = longest if begin is None else begin
        left, right = self.window
        window = (left - end if left >= 0 else -1, right + end if right >= 0 else -1)
        if left >= 0 and left < end:
            raise ValueError("expected a chunk that the last row sees")
        counts = [min(begin, k) - end for _, k in self.lengths]
        origins = self._origins([k - end - n for (_, k), n in zip(self.lengths, counts)])
        k, v = (self.keys(x, begin, end).contiguous() for x in (self.k, self.v))
        tensors = (self.dout, self.q, k, v, self.out, self.lse, *grads)
        module = backends.of(self.q)
        prefix = "" if function == "bwd" else "explain_"
        rest = (False, *window, self.softcap, deterministic, None, self.state if self.dropout else None, self.dlse)
        if self.is_packed:
            queries = [q for q, _ in self.lengths]
            found = getattr(module, prefix + "varlen_bwd")(
                *tensors, self._cu(queries), self._cu(counts), self.slopes, max(queries), max(counts), self.dropout,
                0.3, False, *rest, **origins, **stage,
            )  # fmt: skip
        else:
            found = getattr(module, prefix + "bwd")(*tensors, self.slopes, self.dropout, 0.3, *rest, **origins, **stage)
        if prefix:
            return found
        return found[: results or (4 if stage else 3)]

    @property
    def has_sum(self) -> bool:
        """Whether the kernels have a sum of dq."""
        return self.device == "cpu" or self.backward(function="explain", dq_stage="begin")["has_dq_sum"]

    def in_stages(self, ends, **options):
        """dq, dk and dv by chunks [ends[i + 1], ends[i]) from the last key; the last chunk ends at the first key."""
        dq_sum, _, _, softmax_d = self.backward(dq_stage="begin", **options)
        kept, parts = {"dq_sum": dq_sum, "softmax_d": softmax_d}, []
        bounds = [*ends, max(k for _, k in self.lengths)]
        for end, begin in zip(bounds, bounds[1:]):
            parts.append(self.backward(begin, end, dq_stage="add", **kept, **options)[1:3])
        dq = self.backward(dq_stage="end", dq_sum=dq_sum, **options)[0]
        return [dq, *(self._together([part[i] for part in parts], bounds) for i in range(2))]

    def _together(self, parts, bounds):
        """The rows of all chunks, in the order of keys."""
        if not self.is_packed:
            return torch.cat(parts[::-1], 1)
        rows, firsts = [], [0] * len(parts)
        for _, count in self.lengths:
            own = []
            for i, (end, begin) in enumerate(zip(bounds, bounds[1:])):
                n = min(begin, count) - end
                own.append(parts[i][firsts[i] : firsts[i] + n])
                firsts[i] += n
            rows += own[::-1]
        return torch.cat(rows)
