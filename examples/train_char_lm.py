# pip install . tqdm
"""Trains a character-level GPT with flash_attn and with plain attention, and compares the loss curves.

python examples/train_char_lm.py [--device cpu|cuda] [--dtype float32|bfloat16] [--steps N] [--out DIR]

Every run starts from one seed and sees the same batches; only the attention differs:
  flash_attn   this package
  plain        softmax(q k^T) v with the scores in memory, in the dtype of q, k and v
  reversed     plain, the keys from last to first: equal in exact arithmetic, sums in another order
  rotated      plain, the keys from the middle on, then the first half: likewise
  float64      plain on q, k and v in float64: attention without rounding, the rest of the model as it is

Training amplifies rounding, so curves of correct attention drift apart. How far is the noise of the dtype, measured in
the same run: of the loss differences between any two of the four plain runs, the largest root mean square over the
steps. The curves agree when that of flash_attn and plain is at most twice the noise; otherwise the exit status is 1.
Writes train_char_lm.json, and train_char_lm.png where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Threads that spin while they wait slow a busy machine down tenfold; the OpenMP runtime reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import flash_attn
from flash_attn.layers.rotary import RotaryEmbedding

TEXT = ROOT / "examples" / "data" / "alice.txt"
ALLOWED = 2.0  # times the noise, as for outputs of single calls
VALIDATION_BATCHES = 4


@dataclass
class Config:
    """The model and its training; `window` is what every second layer sees."""

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 64
    context: int = 128
    batch: int = 4
    steps: int = 60
    warmup: int = 10
    learning_rate: float = 1e-3
    dtype: str = "float32"
    seed: int = 0

    @classmethod
    def for_device(cls, device):
        """What a run on the device can afford; the GPU's kernels are for half precision."""
        if device.type == "cuda":
            return cls(layers=6, head_dim=64, context=512, batch=16, window=128, steps=300, warmup=30, dtype="bfloat16")
        return cls()


def flash_attention(q, k, v, window):
    return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(window, 0), deterministic=True)


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


def reversed_attention(q, k, v, window):
    """plain_attention with the sums over the keys taken from last to first."""
    return weighted_values(plain_scores(q, k, window).flip(-1), v.flip(1))


def rotated_attention(q, k, v, window):
    """plain_attention with the sums over the keys begun in the middle."""
    half = k.shape[1] // 2
    return weighted_values(plain_scores(q, k, window).roll(half, -1), v.roll(half, 1))


def float64_attention(q, k, v, window):
    return plain_attention(q.double(), k.double(), v.double(), window).to(q.dtype)


ATTENTIONS = {
    "flash_attn": flash_attention,
    "plain": plain_attention,
    "reversed": reversed_attention,
    "rotated": rotated_attention,
    "float64": float64_attention,
}


class Block(nn.Module):
    """Attention (grouped queries, rotary positions, causal, optionally within a sliding window) and an MLP."""

    def __init__(self, config, window, attention):
        super().__init__()
        width = config.heads * config.head_dim
        self.window, self.attention, self.heads, self.kv_heads = window, attention, config.heads, config.kv_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project_in = nn.Linear(width, (config.heads + 2 * config.kv_heads) * config.head_dim)
        self.rotary = RotaryEmbedding(config.head_dim)
        self.project_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def qkv(self, x):
        """x (b, s, width) -> q (b, s, heads, d), k and v (b, s, kv_heads, d), q and k rotated; views of one tensor."""
        packed = self.project_in(self.norm_attention(x)).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))
        return self.rotary(packed, num_heads_q=self.heads).split((self.heads, self.kv_heads, self.kv_heads), dim=2)

    def forward(self, x):
        x = x + self.project_out(self.attention(*self.qkv(x), self.window).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class CharacterGPT(nn.Module):
    """Predicts the next character; every second layer sees a sliding window only."""

    def __init__(self, vocabulary, config, attention=flash_attention):
        super().__init__()
        width = config.heads * config.head_dim
        self.embedding = nn.Embedding(vocabulary, width)
        windows = [config.window if i % 2 else -1 for i in range(config.layers)]
        self.blocks = nn.ModuleList(Block(config, window, attention) for window in windows)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids, observe=lambda block, x: None):
        """ids (b, s) -> logits (b, s, vocabulary); `observe` sees every block and its input."""
        x = self.embedding(ids)
        for block in self.blocks:
            observe(block, x)
            x = block(x)
        return self.head(self.norm(x))


def read_text():
    """The text as character numbers, and how many characters there are."""
    text = TEXT.read_text(encoding="ascii")
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


def batches(ids, config, count, seed, device):
    """`count` random batches (inputs, next characters), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(ids) - config.context - 1, (config.batch,), generator=generator).tolist()
        rows = torch.stack([ids[s : s + config.context + 1] for s in starts]).to(device)
        yield rows[:, :-1], rows[:, 1:]


def loss_of(model, inputs, targets, config, device):
    """Nats per character, in float64, for float32 would round the differences away. The matrix products are in
    config.dtype, the parameters in float32."""
    half = config.dtype != "float32"
    with torch.autocast(device.type, getattr(torch, config.dtype) if half else None, enabled=half):
        logits = model(inputs)
    return F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())


def train(model, ids, config, device, report=lambda step, loss: None):
    """Trains the model in place. Returns the loss of every step; `report` sees each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    losses = []
    for step, (inputs, targets) in enumerate(batches(ids, config, config.steps, config.seed, device)):
        optimizer.param_groups[0]["lr"] = config.learning_rate * min(1.0, (step + 1) / config.warmup)
        loss = loss_of(model, inputs, targets, config, device)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        report(step, losses[-1])
    return losses


@torch.no_grad()
def validate(model, ids, config, device):
    """Mean loss of fixed batches of text that was not trained on."""
    losses = [loss_of(model, *b, config, device) for b in batches(ids, config, VALIDATION_BATCHES, 1, device)]
    return torch.stack(losses).mean().item()


def compare(config, device, attentions=ATTENTIONS):
    """Trains one model with each attention. Returns (result for JSON, the model of the first attention)."""
    ids, vocabulary = read_text()
    held_out = max(len(ids) // 10, config.context + 2)
    runs, first = {}, None
    for name, attention in attentions.items():
        times = []
        bar = tqdm(total=config.steps, desc=name, disable=None)

        def report(step, loss, bar=bar, times=times):
            times.append(time.perf_counter())
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()

        torch.manual_seed(config.seed)
        model = CharacterGPT(vocabulary, config, attention).to(device)
        with bar:
            losses = train(model, ids[:-held_out], config, device, report)
        validation = validate(model, ids[-held_out:], config, device)
        seconds = times[-1] - times[0]  # without the first step, which loads and compiles
        runs[name] = {"losses": losses, "validation": validation, "seconds": round(seconds, 3)}
        first = model if first is None else first
    result = {"device": describe(device), "flash_attn": flash_attn.__build__, "config": dataclasses.asdict(config)}
    return {**result, "runs": runs, **judge(runs)}, first


def difference(a, b):
    """(root mean square, maximum) over the steps of the difference of two loss curves."""
    gaps = [abs(x - y) for x, y in zip(a["losses"], b["losses"])]
    return math.sqrt(sum(gap * gap for gap in gaps) / len(gaps)), max(gaps)


def judge(runs):
    """The differences of every run to plain attention, the noise, and whether flash_attn is within twice of it."""
    differences = {name: difference(run, runs["plain"]) for name, run in runs.items() if name != "plain"}
    plain_runs = [run for name, run in runs.items() if name != "flash_attn"]
    noise = max(difference(a, b)[0] for a, b in itertools.combinations(plain_runs, 2))
    curve = runs["flash_attn"]["losses"]
    tail = max(1, len(curve) // 10)
    learned = sum(curve[-tail:]) / tail < curve[0]
    agrees = differences["flash_attn"][0] <= ALLOWED * noise
    return {"difference_to_plain": differences, "noise": noise, "agrees": agrees, "learned": learned}


def show(result):
    config, runs = result["config"], result["runs"]
    model = (
        f"{config['layers']} layers, {config['heads']} query and {config['kv_heads']} key heads of {config['head_dim']}"
    )
    print(f"training: {config['steps']} steps of {config['batch']} x {config['context']} characters, {model}")
    print(f"matrix products in {config['dtype']}; losses in nats per character; differences to plain, over the steps")
    print(f"{'attention':<12}{'first':>8}{'last':>8}{'held out':>10}{'rms diff':>10}{'max diff':>10}{'seconds':>9}")
    for name, run in runs.items():
        gaps = "".join(f"{gap:>10.1e}" for gap in result["difference_to_plain"].get(name, ())) or " " * 20
        first, last = run["losses"][0], run["losses"][-1]
        print(f"{name:<12}{first:>8.3f}{last:>8.3f}{run['validation']:>10.3f}{gaps}{run['seconds']:>9.1f}")
    gap, noise = result["difference_to_plain"]["flash_attn"][0], result["noise"]
    verdict = "ok" if result["agrees"] and result["learned"] else "FAILED"
    allowed = f"noise of {config['dtype']} {noise:.1e}, allowed {ALLOWED * noise:.1e}"
    print(f"flash_attn - plain: {gap:.1e}, {allowed}  {verdict}")


def write_plot(result, path):
    """Loss curves above, differences to plain attention below; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True)
    plain = result["runs"]["plain"]["losses"]
    for index, (name, run) in enumerate(result["runs"].items()):
        style = {"color": f"C{index}", "label": name, "linewidth": 2.4 if name == "flash_attn" else 1.2}
        upper.plot(run["losses"], **style)
        if name != "plain":
            gaps = [abs(a - b) or math.nan for a, b in zip(run["losses"], plain)]  # no zeros on a logarithmic axis
            lower.plot(gaps, **{**style, "linewidth": 0.8})
    lower.axhline(result["noise"], color="black", linewidth=0.8, linestyle="--", label="noise (rms)")
    upper.set_ylabel("loss, nats per character")
    lower.set_ylabel("|loss - loss of plain|")
    lower.set_xlabel("step")
    lower.set_yscale("log")
    for axes, place in ((upper, "upper right"), (lower, "upper left")):
        axes.grid(alpha=0.3)
        axes.legend(loc=place, fontsize=8, ncols=2)
    figure.suptitle(f"character-level GPT, {result['config']['dtype']}, {result['device']}", fontsize=9)
    figure.savefig(path, dpi=110)


def save(result, folder):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train_char_lm.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    try:
        write_plot(result, path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")
    except ImportError:
        print("no plot: matplotlib is not installed")


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
    parser.add_argument("--device", help="cpu or cuda (default: the GPU if the install has kernels for it)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "train_char_lm", help="folder of JSON and plot")
    for field in dataclasses.fields(Config):
        if field.name == "dtype":
            parser.add_argument("--dtype", choices=("float32", "bfloat16"))
        else:
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default))
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    given = {k: v for k, v in vars(options).items() if k not in ("device", "out") and v is not None}
    config = dataclasses.replace(Config.for_device(device), **given)
    if device.type == "cuda" and config.dtype == "float32":
        parser.error("--dtype: expected bfloat16 on a GPU, got float32")
    print(f"running on: {describe(device)}")
    result, _ = compare(config, device)
    show(result)
    save(result, options.out)
    return 0 if result["agrees"] and result["learned"] else 1


if __name__ == "__main__":
    sys.exit(main())
