"""CpPlan: which tokens of a batch each rank of a group holds, agreed upon by all of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flash_attn._types import WindowSize
from flash_attn.context_parallel import schedule
from flash_attn.context_parallel.agreement import Agreement, agreed_communicator
from flash_attn.context_parallel.handles import handle_of
from flash_attn.context_parallel.layouts import (
    LAYOUTS,
    Span,
    Window,
    begin_at_multiples,
    divided,
    imbalance,
    joined,
    layout_spans,
    segments,
    tokens_of_rows,
)
from flash_attn.context_parallel.passes import HeadRanks, Passes, WholePasses
from flash_attn.context_parallel.schedule import METHODS, Layout
from flash_attn.context_parallel.transport import MeshTransport
from flash_attn.context_parallel.unshard import unshard
from flash_attn.dropout import MASK_COLUMNS
from flash_attn.ops import arguments

if TYPE_CHECKING:
    from flash_attn.context_parallel.call import Call


def normal_window(causal: bool, window_size, tokens: int) -> Window:
    """(left, right) with the causal mask in it and None for a side that hides nothing."""
    left, right = arguments.normal_window(causal, window_size)
    return tuple(None if side < 0 or side >= tokens else side for side in (left, right))


class CpPlan:
    """The tokens of one batch, shared out to the ranks of a group; made once per batch, used by all layers.

    Every rank makes it from the same lengths, on the host; a hash is compared across ranks. Made by `CpPlan.dense` or
    `CpPlan.varlen`, and used by the thread that made it. Any lengths, any number of ranks; ranks may have different
    numbers of tokens, or none.

    Attributes:
        rank, size: of the group.
        cu_seqlens: bounds of the documents, a tuple; (0, seqlen) for a dense plan, one entry of the batch.
        spans: for each rank its tokens, ascending (start, stop).
        num_tokens: of this rank; of a dense plan in each entry of the batch.
        is_packed: whether made by `varlen`.
        method: "all_gather", "ring", "ulysses" or "auto".
        has_two_dimensions: whether made of such a mesh; rank i of row r of it is then rank r * (ranks of a row) + i.
    """

    def __init__(self, cu_seqlens, is_packed, mesh, group, layout, method, causal, window_size, tile, check, copies):
        """Use `dense` or `varlen`."""
        self.transport = agreed_communicator("CpPlan", check, mesh, group, copies, (1, 2))
        self.rank, self.size = self.transport.rank, self.transport.size
        self.has_two_dimensions = isinstance(self.transport, MeshTransport)
        self.is_packed, self.method = is_packed, method
        text, error = "", None
        try:
            self._make(cu_seqlens, layout, causal, window_size, tile)
            text = repr((is_packed, method, copies, self.cu_seqlens, self.passes.layout.ranks, self.spans))
        except Exception as raised:  # of any kind: the other ranks wait to be told
            error = raised
        self._agreement = Agreement(self.transport, "CpPlan", "plan", check, text, error)
        self._positions: dict = {}  # by devices
        self.known_calls: dict[tuple, Call] = {}  # of `flash_attn_cp_func`, checked once
        self.handle = handle_of(self)  # by which compiled code names it

    @classmethod
    def dense(
        cls,
        seqlen: int,
        *,
        mesh=None,
        group=None,
        layout: str | Sequence[Sequence[Span]] = "zigzag",
        method: str = "auto",
        causal: bool = True,
        window_size: WindowSize = (-1, -1),
        tile: int = 128,
        check: str | None = None,
        copies: bool = False,
    ) -> CpPlan:
        """A batch of sequences of one length: a rank's tensors are (batch, num_tokens, ...).

        Arguments:
            seqlen: tokens of each sequence, over all ranks.
            mesh: a DeviceMesh of one dimension, or of two, whose ranks ascend along both: heads move along the second,
                K and V along the first. group: instead of it, a ProcessGroup or a rank of a LocalGroup. Default: all
                ranks of torch.distributed.
            layout: "zigzag" (even work under a causal mask), "contiguous" (the fewest keys to send under a window) or
                "balanced" (the first of these, of whole documents, or of chunks shared out by their work that is even);
                or any other, given as ascending (start, stop) for each rank, or for each row of two dimensions.
            method: how K and V, or heads, move; see docs/context_parallel.md. "auto" chooses by bytes and memory. Of a
                mesh of two dimensions "all_gather", "ring" or "auto": along the first.
            causal, window_size: the mask by which "balanced" counts work. Calls may have any.
            tile: chunks end at multiples of it, where they are long.
            check: the same on every rank. "calls" compares across ranks what every call is asked for, and of which call
                every backward is (the default where the group has a CPU backend); "plan" the plan, the first call and
                the first backward of each kind (the default elsewhere: comparing waits for the GPU); "none" nothing.
            copies: whether all_gather's keys are copied between the GPUs of one host, where messages would wait for
                multiprocessors; of a group with NCCL, whose calls then follow each other in one stream.

        Raises RuntimeError, TypeError or NotImplementedError on every rank if one has bad arguments or another plan.
        """
        return cls(seqlen, False, mesh, group, layout, method, causal, window_size, tile, check, copies)

    @classmethod
    def varlen(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        *,
        mesh=None,
        group=None,
        layout: str | Sequence[Sequence[Span]] = "balanced",
        method: str = "auto",
        causal: bool = True,
        window_size: WindowSize = (-1, -1),
        tile: int = 128,
        check: str | None = None,
        copies: bool = False,
    ) -> CpPlan:
        """Packed documents of any lengths: a rank's tensors are (num_tokens, ...).

        Arguments:
            cu_seqlens: (documents + 1,) ascending ints from 0, over all ranks: a sequence or a CPU tensor.
            The others as in `dense`.
        """
        return cls(cu_seqlens, True, mesh, group, layout, method, causal, window_size, tile, check, copies)

    def _make(self, cu_seqlens, layout, causal, window_size, tile):
        methods = ("auto", *(name for name in METHODS if name != "ulysses" or not self.has_two_dimensions))
        for name, value, known in (("layout", layout, LAYOUTS), ("method", self.method, methods)):
            if value not in known and (name == "method" or isinstance(value, str)):
                raise RuntimeError(f"{name}: expected one of {', '.join(known)}, got {arguments.shown(value)}")
        tile = arguments.integer("tile", tile, least=1)
        self.cu_seqlens = _document_bounds(cu_seqlens) if self.is_packed else (0, arguments.integer(
            "seqlen", cu_seqlens, least=0
        ))  # fmt: skip
        self.window = normal_window(arguments.flag("causal", causal), window_size, self.cu_seqlens[-1])
        if self.has_two_dimensions:
            self._make_rows(layout, tile)
        else:
            self.spans = self._spans_of(layout, self.size, tile)
            own = Layout(self.spans, self.cu_seqlens)
            self.passes = Passes(own, self.transport)
            self.head_ranks = HeadRanks(self.transport, own, WholePasses(self.cu_seqlens))
            self._stages = ((own, self.transport),)
        self.num_tokens = sum(stop - start for start, stop in self.spans[self.rank])

    def _make_rows(self, layout, tile: int):
        """A row of the mesh has what a rank of one dimension would have, so that rows are even; its ranks share it."""
        outer, inner = self.transport.outer, self.transport.inner
        of_rows = Layout(self._spans_of(layout, outer.size, tile), self.cu_seqlens)
        parts = [divided(of_rows.tokens_of(row), inner.size, tile) for row in range(outer.size)]
        self.spans = tuple(tokens_of_rows(spans, own) for spans, ranks in zip(of_rows.spans, parts) for own in ranks)
        in_row = Layout(parts[outer.rank], (0, of_rows.tokens_of(outer.rank)))
        self.passes = Passes(of_rows, outer)
        self.head_ranks = HeadRanks(inner, in_row, self.passes)
        self._stages = ((in_row, inner), (of_rows, outer))

    def _spans_of(self, layout, ranks: int, tile: int) -> tuple[tuple[Span, ...], ...]:
        if isinstance(layout, str):
            return layout_spans(layout, self.cu_seqlens, ranks, tile, self.window)
        return _given_spans(layout, self.cu_seqlens[-1], ranks)

    def __repr__(self) -> str:
        kind = f"{len(self.cu_seqlens) - 1} documents" if self.is_packed else "dense"
        return f"CpPlan({kind}, {self.cu_seqlens[-1]} tokens, rank {self.rank} of {self.size}: {self.num_tokens})"

    # ---- tensors of the batch ----

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor whose `dim` has all tokens; a copy, differentiable."""
        _check_axis("x", x, dim, self.cu_seqlens[-1])
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.spans[self.rank]]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()

    def unshard(self, y: Tensor, dim: int) -> Tensor:
        """The whole of a tensor of which every rank has its part along `dim`; all ranks call it and get it.

        Differentiable: the gradient of a rank's part is the sum of those that all ranks have for it. Raises
        RuntimeError or TypeError; as far as the plan checks calls, on every rank if on one.
        """
        request, error = "", None
        try:
            _check_axis("y", y, dim, self.num_tokens)
            dim %= y.dim()
            sizes = [size for axis, size in enumerate(y.shape) if axis != dim]
            request = repr(("unshard", dim, sizes, y.dtype, y.device.type, y.requires_grad, torch.is_grad_enabled()))
        except Exception as raised:
            error = raised
        number, _ = self.compare("unshard", request, error)
        self.transport.connect(y.device)
        return unshard(y, dim, self._stages, partial(self.compare_backward, "unshard", request, number, None))

    def positions(self, device=None) -> Tensor:
        """int64 (num_tokens,): the position of each token of this rank in its document, for rotary embedding."""
        if device not in self._positions:  # a copy from the host, which every layer may ask for
            own = segments(self.spans[self.rank], self.cu_seqlens)
            spans = [(s.start - self.cu_seqlens[s.document], s.stop - self.cu_seqlens[s.document]) for s in own]
            with torch.inference_mode(False):  # later calls may save it for a backward
                self._positions[device] = _indices(spans, device)
        return self._positions[device].clone()

    def token_indices(self, device=None) -> Tensor:
        """int64 (num_tokens,): the index of each token of this rank among all tokens."""
        return _indices(self.spans[self.rank], device)

    # ---- what there is to do ----

    def imbalance(self, causal: bool = True, window_size: WindowSize = (-1, -1)) -> float:
        """The work of the busiest rank over the mean, counted in visible (query, key) pairs. Of a mesh of two
        dimensions that of its rows: a row's ranks have the same pairs, of other heads."""
        window = normal_window(causal, window_size, self.cu_seqlens[-1])
        return imbalance(self.passes.layout.spans, self.cu_seqlens, window)

    def received_tokens(self, causal: bool = True, window_size: WindowSize = (-1, -1)) -> int:
        """How many tokens' K and V this rank receives in a forward of all_gather or ring; of a mesh of two dimensions
        along the first, of a rank's own heads."""
        window = normal_window(causal, window_size, self.cu_seqlens[-1])
        steps = schedule.steps(self.passes.layout, self.passes.rank, "all_gather", window, False)
        return sum(m.stop - m.start for step in steps for m in step.receives)

    @property
    def begins_at_mask_columns(self) -> bool:
        """Whether every chunk begins at a multiple of MASK_COLUMNS in its document, as CUDA kernels need it for the
        dropout mask of its keys."""
        return begin_at_multiples(self.passes.layout.spans, self.cu_seqlens, MASK_COLUMNS)

    def compare(self, what: str, request: str, error: BaseException | None, seed: int | None = None):
        """Agree with all ranks on a call: see `Agreement.compare`."""
        return self._agreement.compare(what, request, error, seed)

    def compare_backward(self, what: str, request: str, number: int, error: BaseException | None) -> None:
        """Agree with all ranks on the backward of a call: see `Agreement.compare_backward`."""
        self._agreement.compare_backward(what, request, number, error)


def _indices(spans, device) -> Tensor:
    """int64: the indices in all spans, made on the host."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([none, *(torch.arange(start, stop, device="cpu") for start, stop in spans)]).to(device)


def _check_axis(name: str, x: Tensor, dim: int, size: int):
    arguments.check_tensors((name,), (x,))
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != size:
        raise RuntimeError(f"{name}: expected {size} tokens along axis {dim}, got shape {list(x.shape)}")


def _document_bounds(cu_seqlens) -> tuple[int, ...]:
    expected = "ascending ints from 0 on the host, one more than documents"
    if isinstance(cu_seqlens, Tensor):
        if not cu_seqlens.is_cpu or cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point():
            raise RuntimeError(f"cu_seqlens: expected {expected}, got {arguments.shown(cu_seqlens)}")
        cu_seqlens = cu_seqlens.tolist()
    try:
        bounds = tuple(operator.index(value) for value in cu_seqlens)
    except TypeError:
        raise TypeError(f"cu_seqlens: expected {expected}, got {arguments.shown(cu_seqlens)}") from None
    if not bounds or bounds[0] != 0 or any(b < a for a, b in zip(bounds, bounds[1:])):
        raise RuntimeError(f"cu_seqlens: expected {expected}, got {arguments.shown(bounds)}")
    return bounds


def _given_spans(layout, tokens: int, ranks: int) -> tuple[tuple[Span, ...], ...]:
    expected = (
        f"one of {', '.join(LAYOUTS)} or, for each of {ranks} ranks, ascending (start, stop), which together are the "
        f"tokens 0 to {tokens}"
    )
    try:
        spans = [[(operator.index(start), operator.index(stop)) for start, stop in own] for own in layout]
    except (TypeError, ValueError):
        raise TypeError(f"layout: expected {expected}, got {arguments.shown(layout)}") from None
    every = sorted((start, stop) for own in spans for start, stop in own if start != stop)
    follow_each_other = [0, *(stop for _, stop in every)] == [*(start for start, _ in every), tokens]
    if len(spans) != ranks or not follow_each_other or any(own != sorted(own) for own in spans):
        raise RuntimeError(f"layout: expected {expected}, got {arguments.shown(spans)}")
    return tuple(joined(own) for own in spans)
