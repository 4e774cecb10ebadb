"""CpPlan: which tokens of a batch each rank of a group holds, compared across the ranks."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_attn._docstrings import documented
from flash_attn._types import WindowSize
from flash_attn.context_parallel.compute.key_exchange import KeyRanks
from flash_attn.context_parallel.compute.ulysses import HeadRanks
from flash_attn.context_parallel.exchange.collectives import Stages, unshard
from flash_attn.context_parallel.exchange.consistency import Comparison, checked_communicator
from flash_attn.context_parallel.exchange.groups import Group, Mesh, MeshCommunicator
from flash_attn.context_parallel.plan import layouts
from flash_attn.context_parallel.plan.layouts import LAYOUTS, GivenLayout, Layout, Span, Spans, Window
from flash_attn.context_parallel.plan.steps import KEY_METHODS, METHODS, Kind, make_steps
from flash_attn.dropout import MASK_COLUMNS
from flash_attn.ops import arguments

_plans: weakref.WeakValueDictionary[int, CpPlan] = weakref.WeakValueDictionary()  # by the numbers in their handles
_numbers = itertools.count()


def plan_of(handle: Tensor) -> CpPlan:
    """The plan with this handle."""
    plan = _plans.get(int(handle.item()))
    if plan is None:
        raise RuntimeError("plan: expected one that lasts until the backward of compiled code, got one that is gone")
    return plan


def normal_window(causal: bool, window_size: WindowSize, tokens: int) -> Window:
    """(left, right) of window_size and the causal mask, None for a side that hides nothing."""
    left, right = (
        None if side < 0 or side >= tokens else side for side in arguments.normal_window(causal, window_size)
    )
    return left, right


class CpPlan:
    """The tokens of one batch, divided among the ranks of a group; made once per batch, used by all layers.

    Every rank makes it from the same lengths on the host, and the ranks compare a hash. Made by `CpPlan.dense` or
    `CpPlan.varlen`, used by the thread that made it. Lengths and the number of ranks are arbitrary; ranks may hold
    different numbers of tokens, or none.

    Attributes:
        rank, size: of the group.
        cu_seqlens: bounds of the documents, a tuple; (0, seqlen) for one entry of a dense batch.
        spans: for each rank its tokens, ascending (start, stop).
        num_tokens: of this rank; with a dense plan in each entry of the batch.
        is_packed: whether made by `varlen`.
        method: "all_gather", "ring", "ulysses" or "auto".
        has_two_dimensions: whether made for such a mesh; rank i of its row r is then rank r * (ranks per row) + i.
    """

    cu_seqlens: tuple[int, ...]
    spans: tuple[Spans, ...]
    key_ranks: KeyRanks

    def __init__(
        self,
        cu_seqlens: object,
        is_packed: bool,
        mesh: Mesh | None,
        group: Group | None,
        layout: GivenLayout,
        method: str,
        causal: bool,
        window_size: WindowSize,
        tile: int,
        check: str | None,
        copies: bool,
    ):
        """Use `dense` or `varlen`."""
        self.communicator = checked_communicator("CpPlan", check, mesh, group, copies, (1, 2))
        self.rank, self.size = self.communicator.rank, self.communicator.size
        self.has_two_dimensions = isinstance(self.communicator, MeshCommunicator)
        self.is_packed, self.method = is_packed, method
        text, error = "", None
        try:
            self._make(cu_seqlens, layout, causal, window_size, tile)
            text = repr((is_packed, method, copies, self.cu_seqlens, self.key_ranks.layout.ranks, self.spans))
        except Exception as raised:  # of any type: the other ranks wait for this one
            error = raised
        self._comparison = Comparison(self.communicator, "CpPlan", "plan", check, text, error)
        self._positions: dict[torch.device | str | None, Tensor] = {}  # by devices
        self.known_calls: dict[Hashable, Any] = {}  # checked calls of `flash_attn_cp_func`
        number = next(_numbers)
        _plans[number] = self
        self.handle = torch.tensor([number], device="cpu")  # names the plan in compiled code

    @classmethod
    @documented()
    def dense(
        cls,
        seqlen: int,
        *,
        mesh: Mesh | None = None,
        group: Group | None = None,
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
            <cp_plan>

        Raises RuntimeError, TypeError or NotImplementedError on every rank if one has bad arguments or another plan.
        """
        return cls(seqlen, False, mesh, group, layout, method, causal, window_size, tile, check, copies)

    @classmethod
    @documented()
    def varlen(
        cls,
        cu_seqlens: Sequence[int] | Tensor,
        *,
        mesh: Mesh | None = None,
        group: Group | None = None,
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
            <cp_plan>

        Raises RuntimeError, TypeError or NotImplementedError on every rank if one has bad arguments or another plan.
        """
        return cls(cu_seqlens, True, mesh, group, layout, method, causal, window_size, tile, check, copies)

    def _make(
        self,
        cu_seqlens: Any,
        layout: GivenLayout,
        causal: bool,
        window_size: WindowSize,
        tile: int,
    ) -> None:
        methods = ("auto", *(KEY_METHODS if self.has_two_dimensions else METHODS))
        for name, value, known in (("layout", layout, LAYOUTS), ("method", self.method, methods)):
            if value not in known and (name == "method" or isinstance(value, str)):
                raise RuntimeError(f"{name}: expected one of {', '.join(known)}, got {arguments.shown(value)}")
        tile = arguments.integer("tile", tile, least=1)
        if self.is_packed:
            self.cu_seqlens = _document_bounds(cu_seqlens)
        else:
            self.cu_seqlens = (0, arguments.integer("seqlen", cu_seqlens, least=0))
        window = normal_window(arguments.flag("causal", causal), window_size, self.cu_seqlens[-1])
        if isinstance(self.communicator, MeshCommunicator):
            self._make_mesh(self.communicator, layout, tile, window)
        else:
            self.spans = self._spans_of(layout, self.size, tile, window)
            own = Layout(self.spans, self.cu_seqlens)
            self.key_ranks = KeyRanks(own, self.communicator)
            self.head_ranks = HeadRanks(self.communicator, own, self.key_ranks)
            self._stages: Stages = ((own, self.communicator),)
        self.num_tokens = sum(stop - start for start, stop in self.spans[self.rank])

    def _make_mesh(self, mesh: MeshCommunicator, layout: GivenLayout, tile: int, window: Window) -> None:
        """Divide the tokens among the mesh's rows as among ranks of one dimension, then each row's among its ranks."""
        outer, inner = mesh.outer, mesh.inner
        of_rows = Layout(self._spans_of(layout, outer.size, tile, window), self.cu_seqlens)
        parts = [layouts.divided(of_rows.tokens_of(row), inner.size, tile) for row in range(outer.size)]
        self.spans = tuple(
            layouts.tokens_of_rows(spans, own) for spans, ranks in zip(of_rows.spans, parts) for own in ranks
        )
        in_row = Layout(parts[outer.rank], (0, of_rows.tokens_of(outer.rank)))
        self.key_ranks = KeyRanks(of_rows, outer)
        self.head_ranks = HeadRanks(inner, in_row, self.key_ranks)
        self._stages = ((in_row, inner), (of_rows, outer))

    def _spans_of(self, layout: GivenLayout, ranks: int, tile: int, window: Window) -> tuple[Spans, ...]:
        if isinstance(layout, str):
            return layouts.layout_spans(layout, self.cu_seqlens, ranks, tile, window)
        return _given_spans(layout, self.cu_seqlens[-1], ranks)

    def __repr__(self) -> str:
        kind = f"{len(self.cu_seqlens) - 1} documents" if self.is_packed else "dense"
        return f"CpPlan({kind}, {self.cu_seqlens[-1]} tokens, rank {self.rank} of {self.size}: {self.num_tokens})"

    # ---- tensors of the batch ----

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that has all tokens along `dim`; a copy, differentiable."""
        _check_axis("x", x, dim, self.cu_seqlens[-1])
        parts = [x.narrow(dim, start, stop - start) for start, stop in self.spans[self.rank]]
        return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()

    def unshard(self, y: Tensor, dim: int) -> Tensor:
        """The whole of a tensor whose parts along `dim` are on the ranks; all ranks call it and get the whole.

        Differentiable: the gradient of a rank's part is the sum of all ranks' gradients of it. Raises RuntimeError or
        TypeError, on every rank as far as the plan checks calls.
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
        self.communicator.connect(y.device)
        return unshard(y, dim, self._stages, partial(self.compare_backward, "unshard", request, number, None))

    def positions(self, device: torch.device | str | None = None) -> Tensor:
        """int64 (num_tokens,): the position of each token of this rank in its document, for rotary embedding."""
        if device not in self._positions:  # kept: a copy from the host that every layer may ask for
            own = layouts.segments(self.spans[self.rank], self.cu_seqlens)
            spans = [(s.start - self.cu_seqlens[s.document], s.stop - self.cu_seqlens[s.document]) for s in own]
            with torch.inference_mode(False):  # later calls may save it for a backward
                self._positions[device] = _indices(spans, device)
        return self._positions[device].clone()

    def token_indices(self, device: torch.device | str | None = None) -> Tensor:
        """int64 (num_tokens,): the index of each token of this rank among all tokens."""
        return _indices(self.spans[self.rank], device)

    # ---- the work of a call ----

    def imbalance(self, causal: bool = True, window_size: WindowSize = (-1, -1)) -> float:
        """The work of the busiest rank over the mean, counted in visible (query, key) pairs. In a mesh of two
        dimensions that of its rows: the ranks of a row have the same pairs, for different heads."""
        window = normal_window(causal, window_size, self.cu_seqlens[-1])
        return layouts.imbalance(self.key_ranks.layout.spans, self.cu_seqlens, window)

    def received_tokens(self, causal: bool = True, window_size: WindowSize = (-1, -1)) -> int:
        """How many tokens' K and V this rank receives in a forward by all_gather or ring; in a mesh of two dimensions
        along the first, of the rank's own heads."""
        window = normal_window(causal, window_size, self.cu_seqlens[-1])
        steps = make_steps(self.key_ranks.layout, self.key_ranks.transport.rank, Kind("all_gather", window))
        return sum(count for step in steps for _, ranges in step.receives for _, count in ranges)

    @property
    def begins_at_mask_columns(self) -> bool:
        """Whether every chunk begins at a multiple of MASK_COLUMNS in its document, as CUDA kernels need it for the
        dropout mask of its keys."""
        return layouts.begin_at_multiples(self.key_ranks.layout.spans, self.cu_seqlens, MASK_COLUMNS)

    def compare(
        self, what: str, request: str, error: BaseException | None, seed: int | None = None
    ) -> tuple[int, int | None]:
        """Compare a call across ranks: see `Comparison.call`."""
        return self._comparison.call(what, request, error, seed)

    def compare_backward(self, what: str, request: str, number: int, error: BaseException | None) -> None:
        """Compare the backward of a call across ranks: see `Comparison.backward`."""
        self._comparison.backward(what, request, number, error)


def _indices(spans: Sequence[Span], device: torch.device | str | None) -> Tensor:
    """int64: the indices in all spans, made on the host."""
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.cat([none, *(torch.arange(start, stop, device="cpu") for start, stop in spans)]).to(device)


def _check_axis(name: str, x: Tensor, dim: int, size: int) -> None:
    arguments.check_tensors((name,), (x,))
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != size:
        raise RuntimeError(f"{name}: expected {size} tokens along axis {dim}, got shape {list(x.shape)}")


def _document_bounds(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
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


def _given_spans(layout: Sequence[Sequence[Span]], tokens: int, ranks: int) -> tuple[Spans, ...]:
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
    return tuple(layouts.joined(own) for own in spans)
