"""Transformer blocks: a mixer and an MLP, each with dropout, a residual sum and a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn.modules.mha import MHA, Index
from flash_attn.modules.mlp import Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn

ModuleClass = Callable[..., nn.Module]


class StochasticDepth(nn.Module):
    """In training, zero whole samples with probability p and divide the others by 1 - p (Huang et al., 2016).

    A sample is an index of the first dimension. arXiv:1603.09382
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p <= 1.0:
            raise RuntimeError(f"p: expected a value in [0, 1], got {p}")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        kept = torch.rand((x.shape[0],) + (1,) * (x.dim() - 1), dtype=torch.float32, device=x.device) >= self.p
        return x * (kept / max(1.0 - self.p, torch.finfo(torch.float32).tiny)).to(x.dtype)


class _BlockBase(nn.Module):
    """What both blocks do with their norms."""

    fused_dropout_add_ln: bool
    residual_in_fp32: bool
    mixer: Any

    def _check_fused(self, *norms: nn.Module) -> None:
        for norm in norms if self.fused_dropout_add_ln else ():
            if not isinstance(norm, (nn.LayerNorm, RMSNorm)):
                expected = "a norm_cls of nn.LayerNorm or RMSNorm"
                raise RuntimeError(f"fused_dropout_add_ln: expected {expected}, got {type(norm).__name__}")

    @staticmethod
    def _mark(parts: Iterable[nn.Module], sequence_parallel: bool, shared: bool) -> None:
        """Mark parameters for `flash_attn.utils.distributed`."""
        for p in (p for part in parts for p in part.parameters()):
            if sequence_parallel:
                p._sequence_parallel = True  # type: ignore[attr-defined]
            if shared:
                p._shared_params = True  # type: ignore[attr-defined]

    def _fused(self, norm: Any, dropout: Any, x: Tensor, **options: Any) -> Any:
        return layer_norm_fn(
            x,
            norm.weight,
            norm.bias,
            eps=norm.eps,
            dropout_p=dropout.p if self.training else 0.0,
            is_rms_norm=isinstance(norm, RMSNorm),
            **options,
        )

    def _widened(self, residual: Tensor) -> Tensor:
        return residual.to(torch.float32) if self.residual_in_fp32 else residual

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: object
    ) -> Tensor:
        """The mixer's cache."""
        cache: Tensor = self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)
        return cache


def _plain_norm(norm: Any, x: Tensor) -> Tensor:
    normed: Tensor = norm(x.to(norm.weight.dtype))
    return normed


class Block(_BlockBase):
    """A mixer, then an MLP.

    With prenorm the order is: dropout, sum with the residual, norm, mixer; the same before the MLP. The block returns
    (hidden_states, residual), of which the next block takes the sum. Otherwise: mixer, dropout, sum, norm; MLP,
    dropout, sum, norm.

    Arguments:
        dim: int, features.
        mixer_cls: of dim, the mixer. Default: `MHA` with heads of 64 features.
        mlp_cls: of dim, the MLP; `nn.Identity` leaves it out. Default: `Mlp`.
        norm_cls: of dim. dropout_cls: of a probability.
        prenorm: bool.
        resid_dropout1, resid_dropout2: float, dropout before the first and the second sum.
        drop_path1, drop_path2: float, the probability that a sample leaves out that summand.
        fused_dropout_add_ln: bool. One kernel for dropout, sum and norm; LayerNorm and RMSNorm alone.
        return_residual: bool, without prenorm: mixer and MLP return (out, input).
        residual_in_fp32: bool, with prenorm: keep the sum in float32.
        sequence_parallel, mark_shared_params: bool. Mark the norms' parameters, for `flash_attn.utils.distributed`.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: ModuleClass | None = None,
        mlp_cls: ModuleClass | None = None,
        norm_cls: ModuleClass = nn.LayerNorm,
        dropout_cls: ModuleClass = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise RuntimeError("residual_in_fp32: expected False without prenorm, got True")
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = (mixer_cls or partial(MHA, num_heads=max(dim // 64, 1)))(dim)
        self.dropout1, self.drop_path1 = dropout_cls(resid_dropout1), StochasticDepth(drop_path1)
        self.norm1 = norm_cls(dim)
        self.mlp = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        norms = [self.norm1]
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2, self.drop_path2 = dropout_cls(resid_dropout2), StochasticDepth(drop_path2)
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        self._check_fused(*norms)
        self._mark(norms, sequence_parallel, mark_shared_params)

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Index | None = None,
        mixer_kwargs: dict[str, object] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Arguments:
            hidden_states: (batch, seqlen, dim).
            residual: like hidden_states or None; with prenorm alone.
            mixer_subset: index or slice of the positions kept from the mixer's queries on.
            mixer_kwargs: for the mixer.

        Returns (hidden_states, residual) with prenorm, else hidden_states.
        """
        kwargs = dict(mixer_kwargs or {})
        if mixer_subset is not None:
            kwargs["mixer_subset"] = mixer_subset
        has_mlp = not isinstance(self.mlp, nn.Identity)
        first = (self.dropout1, self.drop_path1, self.norm1)
        second = (self.dropout2, self.drop_path2, self.norm2) if has_mlp else ()
        if not self.prenorm:
            if residual is not None:
                raise RuntimeError("residual: expected None without prenorm, got a tensor")
            for part, arguments, options in ((self.mixer, kwargs, first), (self.mlp, {}, second)):
                if options:
                    out = part(hidden_states, **arguments)
                    out, hidden_states = out if self.return_residual else (out, hidden_states)
                    hidden_states, _ = self._sum_and_norm(out, hidden_states, *options)
            return hidden_states
        normed, residual = self._sum_and_norm(hidden_states, residual, *first)
        hidden_states = self.mixer(normed, **kwargs)
        if mixer_subset is not None:
            residual = residual[:, mixer_subset]
        if has_mlp:
            normed, residual = self._sum_and_norm(hidden_states, residual, *second)
            hidden_states = self.mlp(normed)
        return hidden_states, residual

    def _sum_and_norm(
        self, x: Tensor, residual: Tensor | None, dropout: Any, drop_path: Any, norm: Any
    ) -> tuple[Tensor, Any]:
        """-> (the norm of the sum, the sum, which is None where no one reads it)."""
        if self.fused_dropout_add_ln:
            rowscale = None
            if drop_path.p > 0.0 and self.training:
                rowscale = drop_path(x.new_ones(x.shape[:-1]))
            results = self._fused(
                norm,
                dropout,
                x,
                residual=residual,
                rowscale=rowscale,
                prenorm=self.prenorm,
                residual_in_fp32=self.residual_in_fp32,
            )
            return results if self.prenorm else (results, None)
        x = drop_path(dropout(x))
        total = x if residual is None else x + residual
        return _plain_norm(norm, total), self._widened(total)


class ParallelBlock(_BlockBase):
    """A mixer and an MLP of the same sum (GPT-J, GPT-NeoX): dropout of both inputs, sum, norms, mixer and MLP.

    Arguments:
        dim: int, features.
        mixer_cls: of dim, the mixer. Default: `MHA` with heads of 64 features.
        mlp_cls: of dim, the MLP. Default: `Mlp`.
        norm_cls: of dim. dropout_cls: of a probability.
        resid_dropout1, resid_dropout2: float, dropout of the mixer's output and of the MLP's before the sum.
        tied_norm: bool. The MLP and the mixer share one norm.
        fused_dropout_add_ln: bool. One kernel for dropout, sum and norm; LayerNorm and RMSNorm alone.
        residual_in_fp32: bool. Keep the sum in float32.
        sequence_parallel, mark_shared_params: bool. Mark the norms' parameters, for `flash_attn.utils.distributed`.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: ModuleClass | None = None,
        mlp_cls: ModuleClass | None = None,
        norm_cls: ModuleClass = nn.LayerNorm,
        dropout_cls: ModuleClass = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
        sequence_parallel: bool = False,
        mark_shared_params: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        self.mixer = (mixer_cls or partial(MHA, num_heads=max(dim // 64, 1)))(dim)
        self.dropout1, self.norm1 = dropout_cls(resid_dropout1), norm_cls(dim)
        self.mlp = (mlp_cls or partial(Mlp, hidden_features=4 * dim))(dim)
        self.dropout2 = dropout_cls(resid_dropout2)
        norms = [self.norm1]
        if not tied_norm:
            self.norm2 = norm_cls(dim)
            norms.append(self.norm2)
        self._check_fused(*norms)
        self._mark(norms, sequence_parallel, mark_shared_params)

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, object] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """
        Arguments:
            hidden_states1, hidden_states2: (batch, seqlen, dim), outputs of the mixer and the MLP of the previous
                block; the second may be None.
            residual: like them, or None.
            mixer_kwargs: for the mixer.

        Returns (the mixer's result, the MLP's, residual).
        """
        sum_and_norms = self._fused_norms if self.fused_dropout_add_ln else self._plain_norms
        normed1, normed2, residual = sum_and_norms(hidden_states1, hidden_states2, residual)
        return self.mixer(normed1, **(mixer_kwargs or {})), self.mlp(normed2), residual

    def _plain_norms(self, x1: Tensor, x2: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        total = self.dropout1(x1)
        if x2 is not None:
            total = total + self.dropout2(x2)
        if residual is not None:
            total = total + residual
        normed = _plain_norm(self.norm1, total)
        return normed, normed if self.tied_norm else _plain_norm(self.norm2, total), self._widened(total)

    def _fused_norms(self, x1: Tensor, x2: Tensor | None, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if x2 is not None and self.training and self.dropout1.p != self.dropout2.p:
            raise RuntimeError(
                f"fused_dropout_add_ln: expected resid_dropout2 to be resid_dropout1 ({self.dropout1.p}), "
                f"got {self.dropout2.p}"
            )
        other = {} if self.tied_norm else {"weight1": self.norm2.weight, "bias1": self.norm2.bias}
        normed, *normed2, total = self._fused(
            self.norm1,
            self.dropout1,
            x1,
            residual=residual,
            x1=x2,
            prenorm=True,
            residual_in_fp32=self.residual_in_fp32,
            **other,
        )
        return normed, normed2[0] if normed2 else normed, total
