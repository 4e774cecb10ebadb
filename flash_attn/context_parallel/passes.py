"""The passes of one rank: index tensors of its forwards and backwards, made once, and whom it exchanges rows with."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flash_attn.context_parallel import schedule
from flash_attn.context_parallel.layouts import Window
from flash_attn.context_parallel.schedule import Layout
from flash_attn.context_parallel.tables import PassTables, pass_tables, pushes_of, whole_pass


class Passes:
    """Over the tokens of several ranks, whose K and V come by all_gather or ring."""

    def __init__(self, layout: Layout, transport):
        self.layout, self.transport, self.rank = layout, transport, transport.rank
        self._tables: dict[tuple, PassTables] = {}

    def tables(
        self, method: str, window: Window, exact_positions: bool, batch: int, device: torch.device, backward=False,
        keeps_dq=False,
    ) -> PassTables:  # fmt: skip
        """A forward or backward of all_gather or ring with the index tensors of its kernels."""
        key = (method, window, exact_positions, batch, device, backward, keeps_dq)
        found = self._tables.get(key)
        if found is None:
            kind = method, window, exact_positions, backward, batch == 1
            own_rows = self.layout.tokens_of(self.rank)
            steps, pushes = schedule.steps(self.layout, self.rank, *kind), None
            if method == "all_gather" and hasattr(self.transport, "push"):
                all_steps = [schedule.steps(self.layout, rank, *kind) for rank in range(self.layout.ranks)]
                pushes = pushes_of(self.rank, all_steps, own_rows, batch, batch * self.layout.cu[-1])
            found = pass_tables(steps, backward, own_rows, batch, device, keeps_dq, pushes)
            self._tables[key] = found
        return found


class WholePasses:
    """Over all tokens on one rank, where nothing moves: as one GPU computes them."""

    transport = None

    def __init__(self, cu_seqlens: tuple[int, ...]):
        self._cu = cu_seqlens
        self._tables: dict[tuple, PassTables] = {}

    def tables(self, method, window, exact_positions, batch, device, backward=False, keeps_dq=False) -> PassTables:
        """A forward or backward, the same for every method."""
        key = (window, batch, device)
        if key not in self._tables:
            self._tables[key] = whole_pass(self._cu, batch, window, device)
        return self._tables[key]


class HeadRanks(NamedTuple):
    """Ranks that exchange heads. layout: which rows of all their tokens each has. passes: over these rows."""

    transport: object
    layout: Layout
    passes: Passes | WholePasses
