# pip install . tqdm
"""Attention on real text: a small character-level transformer, every attention layer of it checked.

python examples/demo.py [--device cpu|cuda] [--seqlen N] [--steps N]

Trains the model of train_char_lm.py for some steps with this package and with plain attention, runs it on a long
passage, and compares every layer's output and log-sum-exp with attention computed in float64; the yardstick is the
error that plain attention makes in the same dtype. Prints errors, speed and peak memory next to plain attention. The
exit status is 1 when a check fails.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import math
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # absent under PYTHONSAFEPATH

# Threads that spin while they wait slow a busy machine down tenfold; the OpenMP runtime reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
import train_char_lm
from train_char_lm import Config, describe, pick_device, plain_attention, plain_scores, weighted_values

import flash_attn

CONFIG = Config(layers=4, heads=4, kv_heads=2, head_dim=64, window=256, context=128, batch=4)
MAX_LSE_ERROR = 1e-4


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


def check_training(steps, device):
    """Trains briefly with our and with plain attention. Returns (failed, the model trained with ours)."""
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    result, model = train_char_lm.compare(dataclasses.replace(CONFIG, steps=steps, dtype=dtype), device)
    train_char_lm.show(result)
    return not (result["agrees"] and result["learned"]), model


def gradients(attention, qkv):
    """Gradients of the sum of squares of attention(q, k, v) with respect to q, k and v."""
    leaves = [t.detach().requires_grad_() for t in qkv]
    return torch.autograd.grad(attention(*leaves).square().sum(), leaves)


def check_gradients(model, ids):
    """Gradients of one attention layer (CPU, float32) against float64. Returns True on failure."""
    window = model.blocks[1].window
    with torch.no_grad():
        qkv = model.blocks[1].qkv(model.embedding(ids[None]))
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

    def observe(block, x):
        layers.append((block.window, *block.qkv(x)))

    with torch.no_grad():
        logits = model(ids[None], observe)
    loss = F.cross_entropy(logits[0, :-1].float(), ids[1:]).item()
    print(
        f"model: {len(ids)} characters, {CONFIG.layers} layers, {CONFIG.heads} query and {CONFIG.kv_heads} key heads, "
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
    failed, model = check_training(options.steps, device)
    ids, _ = train_char_lm.read_text()
    failed |= check_gradients(model.cpu(), ids[-512:])
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
