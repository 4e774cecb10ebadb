"""A batch as servers have it, packed queries over pages, and what attention over each sequence by itself gives."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from reference import attention

from flash_attn import flash_attn_func

HEADS, HEADS_K, HEAD_DIM, PAGE = 4, 2, 32, 16
LENGTHS_Q, LENGTHS_K = (1, 7, 0, 1, 20), (33, 7, 5, 0, 41)  # decoding, a prompt, padding, no keys, a chunk


class Batch(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    cu_q: torch.Tensor
    lengths: torch.Tensor

    def keys(self, x, i):
        """The keys or values of a sequence, (1, seqlen, heads, head_dim)."""
        n = LENGTHS_K[i]
        return x[self.table[i, : -(-n // PAGE)].long()].flatten(0, 1)[:n].unsqueeze(0)

    def by_sequence(self, sinks=None, **options):
        """(out, lse) with -inf where there are no keys; rows of no sequence have 0 and -inf."""
        out = self.q.new_zeros(*self.q.shape[:2], self.v.shape[-1])
        lse = torch.full((HEADS, self.q.shape[0]), -math.inf, device=self.q.device)
        bounds = self.cu_q.tolist()
        for i, (q0, q1) in enumerate(zip(bounds, bounds[1:])):
            if q1 > q0:
                one, one_lse, _ = flash_attn_func(
                    self.q[None, q0:q1], self.keys(self.k, i), self.keys(self.v, i), return_attn_probs=True,
                    sinks=sinks, **options,
                )  # fmt: skip
                out[q0:q1], lse[:, q0:q1] = one[0], one_lse[0]
        return out, lse.masked_fill(lse == math.inf, -math.inf)


def make_batch(device, head_dim_v=HEAD_DIM, unused=3, head_dim=HEAD_DIM):
    """Pages in random places, NaN wherever there is no key; `unused` rows of q at the end belong to no sequence."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    pages = [-(-n // PAGE) for n in LENGTHS_K]
    places = torch.randperm(sum(pages) + 4, device=device, dtype=torch.int32)
    table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32, device=device)
    k = torch.full((len(places), PAGE, HEADS_K, head_dim), math.nan, device=device, dtype=dtype)
    v = torch.full((len(places), PAGE, HEADS_K, head_dim_v), math.nan, device=device, dtype=dtype)
    for i, (count, n) in enumerate(zip(pages, LENGTHS_K)):
        table[i, :count], places = places[:count], places[count:]
        for j in range(n):
            page = table[i, j // PAGE].item()
            k[page, j % PAGE] = torch.randn(HEADS_K, head_dim, device=device)
            v[page, j % PAGE] = torch.randn(HEADS_K, head_dim_v, device=device)
    cu_q = torch.tensor([0, *LENGTHS_Q], device=device).cumsum(0).int()
    q = torch.randn(sum(LENGTHS_Q) + unused, HEADS, head_dim, device=device, dtype=dtype)
    return Batch(q, k, v, table, cu_q, torch.tensor(LENGTHS_K, dtype=torch.int32, device=device))


class LatentBatch(NamedTuple):
    """A batch of multi-head latent attention: q of the rotated part k and q_v of the latent part v of a cached row."""

    q: torch.Tensor
    q_v: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch: Batch

    def check(self, out, lse, sinks=None):
        """Against float64 attention of each sequence, causal: [q, q_v] over whole rows, whose latent part is V."""
        slack = {"atol": 1e-5, "rtol": 1e-5} if out.dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
        bounds = self.batch.cu_q.tolist()
        for i, (q0, q1) in enumerate(zip(bounds, bounds[1:])):
            k, v = self.batch.keys(self.k, i), self.batch.keys(self.v, i)
            queries = torch.cat([self.q, self.q_v], -1)[None, q0:q1]
            expected = attention(queries, torch.cat([k, v], -1), v, causal=True, sinks=sinks)
            expected_lse = expected.lse[0].masked_fill(expected.lse[0] == math.inf, -math.inf)
            torch.testing.assert_close(out[q0:q1].double(), expected.out[0], **slack)
            torch.testing.assert_close(lse[:, q0:q1].double(), expected_lse, **slack)
        assert (out[bounds[-1] :] == 0).all() and (lse[:, bounds[-1] :] == -math.inf).all()


def make_latent_batch(device):
    """make_batch() with the head dims of DeepSeek; NaN wherever there is no key, q_v in the strides of vLLM's."""
    batch = make_batch(device)
    dtype, total = batch.q.dtype, batch.q.shape[0]
    rows = torch.randn(*batch.k.shape[:2], 1, 576, device=device, dtype=dtype)
    rows.masked_fill_(batch.k[:, :, :1, :1].isnan(), math.nan)
    q_v = torch.randn(8, total, 512, device=device, dtype=dtype).transpose(0, 1)
    q = torch.randn(total, 8, 192, device=device, dtype=dtype)[..., 128:]
    return LatentBatch(q, q_v, rows[..., 512:], rows[..., :512], batch)


def make_8_bit_batch(device, wide_queries=False, v_descale=(0.0625, 0.5)):
    """(batch of e4m3 q, k and v, their descales by name, the batch of the values that these mean, float64 on the CPU).

    The descales are as servers have them: expanded from one of the tensor (q, k) or of each K/V head (v).
    """
    batch, each = make_batch(device), (len(LENGTHS_K), HEADS_K)
    descales = {
        "q_descale": torch.tensor(0.25, device=device).expand(each),
        "k_descale": torch.tensor(0.125, device=device).expand(each),
        "v_descale": torch.tensor(v_descale, device=device).expand(each),
    }
    by_head = {"q": 0.25, "k": 0.125, "v": descales["v_descale"][0].cpu().double().unsqueeze(-1)}
    quantized, values = {}, {}
    for name in by_head:
        x = getattr(batch, name)
        if name == "q" and wide_queries:
            values["q"] = x.cpu().double()
            continue
        quantized[name] = (x.cpu().double() / by_head[name]).to(torch.float8_e4m3fn).to(device)
        values[name] = quantized[name].cpu().double() * by_head[name]
    on_cpu = batch._replace(**values, table=batch.table.cpu(), cu_q=batch.cu_q.cpu(), lengths=batch.lengths.cpu())
    return batch._replace(**quantized), descales, on_cpu


def install_plugin(folder, group, function):
    """Put a distribution into a folder of sys.path that names a function of ours as its plugin."""
    info = folder / "my_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-plugin\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{group}]\nfa_native = {function}\n", encoding="utf-8")


def keywords(**arguments):
    """A call's arguments, written as in the call."""
    return arguments


def tolerance(device):
    return {"atol": 1e-5, "rtol": 1e-5} if device == "cpu" else {"atol": 2e-2, "rtol": 2e-2}
