"""Attention on real text: a small character-level transformer, every attention layer of it checked.

python examples/demo.py [--device cpu|cuda] [--seqlen N] [--steps N]

Trains the model for some steps, runs it on a long passage, and compares every layer's output and log-sum-exp with
attention computed in float64; the yardstick is the error that plain attention makes in the same dtype. Prints errors,
speed and peak memory next to plain attention. The exit status is 1 when a check fails.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import sys
import time
from pathlib import Path

# Threads that spin while they wait slow a busy machine down tenfold; the OpenMP runtime reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
import torch.nn.functional as F

import flash_attn
from flash_attn.layers.rotary import apply_rotary_emb

TEXT = Path(__file__).resolve().parent / "data" / "alice.txt"
WINDOW = 256
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 4
MAX_LSE_ERROR = 1e-4


class Block(nn.Module):
    """Attention (grouped queries, rotary positions, causal, optionally within a sliding window) and an MLP."""

    def __init__(self, width, window):
        super().__init__()
        self.window = window
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in = nn.Linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.project_out = nn.Linear(HEADS * HEAD_DIM, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def qkv(self, x, cos, sin):
        """x (b, s, width) -> q (b, s, HEADS, d), k and v (b, s, KV_HEADS, d), q and k rotated."""
        heads = self.project_in(self.norm_attention(x)).unflatten(-1, (HEADS + 2 * KV_HEADS, HEAD_DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=2)
        cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
        return apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v

    def forward(self, x, cos, sin):
        q, k, v = self.qkv(x, cos, sin)
        attended = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(self.window, 0))
        x = x + self.project_out(attended.flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class CharacterTransformer(nn.Module):
    """Predicts the next character; every second layer sees the last WINDOW characters only."""

    def __init__(self, vocabulary):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, WINDOW if i % 2 else -1) for i in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def rotary_tables(self, seqlen):
        """cos and sin (seqlen, HEAD_DIM / 2) in the model's dtype."""
        weight = self.embedding.weight
        frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2, device=weight.device) / HEAD_DIM)
        angles = torch.arange(seqlen, device=weight.device)[:, None] * frequencies
        return angles.cos().to(weight.dtype), angles.sin().to(weight.dtype)

    def forward(self, ids, observe=lambda block, qkv: None):
        """ids (b, s) -> logits (b, s, vocabulary); `observe` sees every block's q, k, v."""
        x = self.embedding(ids)
        cos, sin = self.rotary_tables(ids.shape[1])
        for block in self.blocks:
            observe(block, (x, cos, sin))
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def plain_scores(q, k, window, first_query=0):
    """Masked scores (b, h, sq, sk) in the dtype of q; q (b, sq, h, d) holds the queries from `first_query` on."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    query = torch.arange(first_query, first_query + q.shape[1], device=q.device)[:, None]
    key = torch.arange(k.shape[1], device=q.device)[None, :]
    hidden = key > query
    if window >= 0:
        hidden |= key < query - window
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(hidden, float("-inf"))


def weighted_values(scores, v):
    """softmax(scores) v: (b, h, sq, sk) and (b, sk, h_k, d) -> (b, sq, h, d)."""
    v = v.repeat_interleave(scores.shape[1] // v.shape[2], dim=2)
    return (torch.softmax(scores, dim=-1) @ v.transpose(1, 2)).transpose(1, 2)


def plain_attention(q, k, v, window):
    """softmax(q k^T) v with the score matrix in memory, in the dtype of q."""
    return weighted_values(plain_scores(q, k, window), v)


def reference_attention(q, k, v, window, rows=512):
    """Output (b, s, h, d) and log-sum-exp (b, h, s) in float64, `rows` queries at a time."""
    q, k, v = q.double(), k.double(), v.double()
    outs, sums = [], []
    for first in range(0, q.shape[1], rows):
        scores = plain_scores(q[:, first : first + rows], k, window, first)
        outs.append(weighted_values(scores, v))
        sums.append(torch.logsumexp(scores, dim=-1))
    return torch.cat(outs, dim=1), torch.cat(sums, dim=2)


def largest(difference):
    return difference.abs().max().item()


def batches(ids, seqlen, batch, steps, device):
    """`steps` random batches (inputs, next characters) of the training text, the same on every run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - seqlen - 1, (batch,), generator=generator).tolist()
        rows = torch.stack([ids[s : s + seqlen + 1] for s in starts]).to(device)
        yield rows[:, :-1], rows[:, 1:]


def train(model, ids, steps, device):
    """A few steps in float32 (bfloat16 autocast on a GPU). Returns the loss (nats per character) of every step."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for inputs, targets in batches(ids, 128, 4, steps, device):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_where_possible(model, ids, steps, device):
    """Trains on `device`, or on the CPU as long as the backward is not built there."""
    start = time.perf_counter()
    try:
        losses, place = train(model, ids, steps, device), device
    except NotImplementedError:
        losses, place = train(model, ids, steps, torch.device("cpu")), torch.device("cpu")
    if losses:
        seconds = time.perf_counter() - start
        print(
            f"training: {steps} steps on {place.type} in {seconds:.1f} s, "
            f"loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per character"
        )
    return bool(losses) and not losses[-1] < losses[0]


def gradients(attention, qkv):
    """Gradients of the sum of squares of attention(q, k, v) with respect to q, k and v."""
    leaves = [t.detach().requires_grad_() for t in qkv]
    return torch.autograd.grad(attention(*leaves).square().sum(), leaves)


def check_gradients(model, ids):
    """Gradients of one attention layer (CPU, float32) against float64. Returns True on failure."""
    window = model.blocks[1].window
    with torch.no_grad():
        qkv = model.blocks[1].qkv(model.embedding(ids[None]), *model.rotary_tables(len(ids)))
    ours = gradients(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(window, 0)), qkv)
    plain = gradients(lambda q, k, v: plain_attention(q, k, v, window), qkv)
    exact = gradients(lambda q, k, v: plain_attention(q, k, v, window), [t.double() for t in qkv])
    failed, texts = False, []
    for name, mine, theirs, truth in zip(("dq", "dk", "dv"), ours, plain, exact):
        error, yardstick = largest(mine - truth), largest(theirs - truth)
        texts.append(f"{name} {error:.1e} (plain {yardstick:.1e})")
        failed |= not error <= 3 * yardstick + 1e-4
    print(f"gradients of layer 2 (CPU, float32), error against float64: {', '.join(texts)}  {verdict(failed)}")
    return failed


def verdict(failed):
    return "FAILED" if failed else "ok"


def check_layers(model, ids):
    """Runs the model on the passage and checks every attention layer. Returns (failed, [(window, q, k, v)])."""
    layers = []

    def observe(block, arguments):
        layers.append((block.window, *block.qkv(*arguments)))

    with torch.no_grad():
        logits = model(ids[None], observe)
    loss = F.cross_entropy(logits[0, :-1].float(), ids[1:]).item()
    print(
        f"model: {len(ids)} characters, {LAYERS} layers, {HEADS} query and {KV_HEADS} key heads, "
        f"loss {loss:.2f} nats per character"
    )
    print(f"{'layer':<7}{'mask':<20}{'error':>10}{'plain':>10}{'allowed':>10}{'LSE error':>11}")
    failed = not math.isfinite(loss)
    for index, (window, q, k, v) in enumerate(layers, 1):
        out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(window, 0), return_attn_probs=True)
        exact, exact_lse = reference_attention(q, k, v, window)
        error, lse_error = largest(out - exact), largest(lse - exact_lse)
        yardstick = largest(plain_attention(q, k, v, window) - exact)
        allowed = 2 * yardstick + 1e-5
        bad = not (error <= allowed and lse_error <= MAX_LSE_ERROR)
        failed |= bad
        mask = "causal" if window < 0 else f"causal, window {window}"
        print(f"{index:<7}{mask:<20}{error:>10.1e}{yardstick:>10.1e}{allowed:>10.1e}{lse_error:>11.1e}  {verdict(bad)}")
    return failed, layers


def milliseconds(call, device, rounds=5):
    """Median time of one call after a warm-up."""
    samples = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) * 1e3)
    return statistics.median(samples[1:])


def resident_kib(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak_mib(call, device):
    """Memory that one call adds at its peak, output included; None where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed before counts again when the call takes it
        before = resident_kib("VmRSS")
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # resets the kernel's record of the peak (VmHWM) to the current size
        call()
        return (resident_kib("VmHWM") - before) / 2**10
    except (OSError, StopIteration, AttributeError):
        return None


def compare_cost(layers, device):
    """Speed and memory of the first layer's attention, ours and plain."""
    window, q, k, v = layers[0]
    calls = {
        "flash_attn": lambda: flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(window, 0)),
        "plain attention": lambda: plain_attention(q, k, v, window),
    }
    times = {name: milliseconds(call, device) for name, call in calls.items()}
    for name, call in calls.items():
        memory = peak_mib(call, device)
        text = "not measured" if memory is None else f"{memory:.1f} MiB"
        print(f"{name:<16} {times[name]:9.3f} ms   peak memory added {text}")
    print(f"speed against plain attention: {times['plain attention'] / times['flash_attn']:.1f}x")


def describe(device):
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return f"{name}, backend cuda, torch {torch.__version__}, CUDA {torch.version.cuda}"
    return f"CPU with {torch.get_num_threads()} threads, backend cpu, torch {torch.__version__}"


def pick_device(requested):
    if requested:
        return torch.device(requested)
    return torch.device("cuda" if torch.cuda.is_available() and "cuda" in flash_attn.__build__["backends"] else "cpu")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", help="cpu or cuda (default: the GPU if there is one and the install has kernels for it)"
    )
    parser.add_argument(
        "--seqlen", type=int, help="characters the model is run on (default: 16384 on a GPU, 2048 on a CPU)"
    )
    parser.add_argument("--steps", type=int, default=20, help="training steps before the check")
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    seqlen = options.seqlen or (16384 if device.type == "cuda" else 2048)
    print(f"running on: {describe(device)}")
    print(f"flash_attn {flash_attn.__version__}: {flash_attn.__build__}")
    torch.manual_seed(0)
    text = TEXT.read_text(encoding="ascii")
    characters = sorted(set(text))
    index = {character: i for i, character in enumerate(characters)}
    ids = torch.tensor([index[character] for character in text])
    model = CharacterTransformer(len(characters))
    failed = train_where_possible(model, ids[:-seqlen], options.steps, device)
    model.cpu()
    failed |= check_gradients(model, ids[-512:])
    # The passage at the end of the book was not trained on.
    model.to(device, torch.bfloat16)
    layers_failed, layers = check_layers(model, ids[-seqlen:].to(device))
    compare_cost(layers, device)
    failed |= layers_failed
    print(
        "demo FAILED: see the lines marked FAILED" if failed else "demo ok: every layer agrees with float64 attention"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
