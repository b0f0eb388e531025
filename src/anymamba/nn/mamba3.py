"""The Mamba-3 block: SISO and MIMO, complex and quaternion rotation, one and two passes."""

from typing import Any

import torch
from torch import Tensor, nn

from anymamba.errors import ConfigError
from anymamba.nn.block import Block
from anymamba.nn.cache import (
    Mamba3Cache,
    Mamba3DoubleSsdCache,
    Mamba3SingleSsdCache,
    RotationState,
)
from anymamba.nn.mamba2 import with_chunk_size
from anymamba.nn.norm import RMSNorm, RMSNormGated
from anymamba.nn.options import check_scan_options, reject_unknown
from anymamba.nn.plain import is_plain, project
from anymamba.nn.rotation import Rotation
from anymamba.nn.step_bias import InverseSoftplus
from anymamba.ops import (
    A_ACTIVATIONS,
    PATHWAYS,
    SsdPath,
    TrapezoidCoefficients,
    TrapezoidState,
    accumulate_dtype,
    gated_tail,
    rank_values,
    trapezoid_coefficients,
    trapezoid_fixed_point,
    trapezoid_scan,
    trapezoid_step,
)

__all__ = ["Mamba3"]


class Mamba3(Block[Mamba3Cache]):
    """Rotating, trapezoidal state space block (Mamba-3): a drop-in for `mamba_ssm.Mamba3`.

        [z, x, B, C, dt, A, lam, rotation] = in_proj(u)
        B, C = rotate(norm(B) + bias), rotate(norm(C) + bias)
        H[t] = alpha H[t-1] + beta x[t-1] B[t-1]^T + gamma x[t] B[t]^T;  y = H C + D x
        out = out_proj(y * silu(z))               MIMO: ranks are spread and merged by mimo_*

    Args:
        d_model: width of inputs and outputs.
        d_state: state size; even (a multiple of 4 for quaternions).
        expand: inner width is `expand * d_model`.
        headdim: width of a head.
        ngroups: groups of B and C.
        rope_fraction: share of the state that rotates: 0, 0.5 or 1.
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        dt_init_floor: lower bound of initial step sizes.
        A_floor: smallest |A|.
        is_outproj_norm: gated RMS norm per head instead of the plain gate.
        is_mimo: several ranks per head, with `mimo_x`, `mimo_z` and `mimo_o`.
        mimo_rank: number of ranks; 1 unless `is_mimo`.
        fuse_pregate_headwise_norm: accepted for compatibility; steers CUDA kernels only.
        chunk_size: chunk length of the scan; chosen by the sizes if None.
        dropout: accepted for compatibility; has no effect upstream either.
        layer_idx: place in a stack; needed with `inference_params`.
        n_layer: accepted for compatibility; has no effect upstream either.
        device: of the parameters.
        dtype: of the parameters; biases, `mimo_*` and `D` stay float32 beside half types.
        rotation: "complex" (pairs turned by angles) or "quaternion" (blocks of four).
        rotation_range: largest rotation per unit step, in half turns.
        a_activation: "heavy_tail" (official since June 2026) or "softplus" (before).
        dt_limit: clamp of the step size, in every verb; none by default.
        pathway: "single" or "double": how many passes a scan takes; a cache of the other kind
            chooses its own pathway.
        learnable_init_state: train the state before the first token (`init_states`).
        bias: whether the projections have a bias.
        norm_eps: inside the roots of all norms.

    Example:
        >>> block = Mamba3(d_model=8, d_state=4, headdim=4, is_mimo=True, mimo_rank=2)
        >>> block(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    cache_types = (Mamba3SingleSsdCache, Mamba3DoubleSsdCache)

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        expand: float = 2,
        headdim: int = 64,
        ngroups: int = 1,
        rope_fraction: float = 0.5,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        A_floor: float = 1e-4,
        is_outproj_norm: bool = False,
        is_mimo: bool = False,
        mimo_rank: int = 4,
        fuse_pregate_headwise_norm: bool = True,
        chunk_size: int | None = None,
        dropout: float = 0.0,
        layer_idx: int | None = None,
        n_layer: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rotation: str = "complex",
        rotation_range: float = 1.0,
        a_activation: str = "heavy_tail",
        dt_limit: tuple[float, float] | None = None,
        pathway: str = "single",
        learnable_init_state: bool = False,
        bias: bool = False,
        norm_eps: float = 1e-5,
        **unknown: Any,
    ) -> None:
        """Create the parameters with the official names, shapes, order and initialisation."""
        super().__init__()
        where = type(self).__name__
        reject_unknown(where, unknown, Mamba3.__init__.__annotations__)
        self.d_model, self.d_state, self.expand, self.headdim = d_model, d_state, expand, headdim
        self.ngroups, self.is_mimo, self.mimo_rank = ngroups, is_mimo, mimo_rank if is_mimo else 1
        self.A_floor, self.a_activation, self.dt_limit = A_floor, a_activation, dt_limit
        self.is_outproj_norm, self.pathway = is_outproj_norm, pathway
        self.chunk_size, self.layer_idx = chunk_size, layer_idx
        self.d_inner = int(expand * d_model)
        self._check_sizes(where)
        check_scan_options(where, chunk_size, dt_limit)
        self.nheads = self.d_inner // headdim
        self.rotation = Rotation(
            rotation, self.nheads, d_state, rope_fraction, rotation_range, is_mimo
        )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sensitive: dict[str, Any] = {
            "device": device,
            "dtype": accumulate_dtype(dtype or torch.get_default_dtype()),
        }
        rank = self.mimo_rank
        init = InverseSoftplus(dt_min, dt_max, dt_init_floor)
        self.dt_bias = nn.Parameter(init(self.nheads, device, sensitive["dtype"]))
        self.B_bias = nn.Parameter(torch.ones(self.nheads, rank, d_state, **sensitive))
        self.C_bias = nn.Parameter(torch.ones(self.nheads, rank, d_state, **sensitive))
        if is_mimo:
            shape = (self.nheads, rank, headdim)
            self.mimo_x = nn.Parameter(torch.full(shape, 1 / rank, **sensitive))
            self.mimo_z = nn.Parameter(torch.ones(shape, **sensitive))
            self.mimo_o = nn.Parameter(torch.full(shape, 1 / rank, **sensitive))
        self.D = nn.Parameter(torch.ones(self.nheads, **sensitive))
        self.split_sizes = [
            self.d_inner,
            self.d_inner,
            rank * ngroups * d_state,
            rank * ngroups * d_state,
            self.nheads,
            self.nheads,
            self.nheads,
            self.rotation.channels,
        ]
        self.in_proj = nn.Linear(d_model, sum(self.split_sizes), bias=bias, **factory)
        self.B_norm = RMSNorm(d_state, norm_eps, **factory)
        self.C_norm = RMSNorm(d_state, norm_eps, **factory)
        if is_outproj_norm:
            self.norm = RMSNormGated(self.d_inner, norm_eps, headdim, True, **factory)
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)
        self.init_states = None
        if learnable_init_state:
            self.init_states = nn.Parameter(torch.zeros(self.nheads, headdim, d_state, **sensitive))
            self.init_states._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in (self.dt_bias, self.B_bias, self.C_bias, self.D):
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    def _check_sizes(self, where: str) -> None:
        if min(self.d_model, self.d_state, self.headdim, self.ngroups, self.mimo_rank) < 1:
            raise ConfigError(
                f"{where}: d_model, d_state, headdim, ngroups and mimo_rank must be positive; got "
                f"{self.d_model}, {self.d_state}, {self.headdim}, {self.ngroups}, {self.mimo_rank}."
            )
        if self.d_inner % self.headdim:
            raise ConfigError(
                f"{where}: headdim must divide d_inner = expand * d_model = {self.d_inner}; "
                f"got {self.headdim}."
            )
        heads = self.d_inner // self.headdim
        if heads % self.ngroups:
            raise ConfigError(
                f"{where}: ngroups must divide the number of heads {heads}; got {self.ngroups}."
            )
        if self.A_floor <= 0:
            raise ConfigError(f"{where}: A_floor must be positive; got {self.A_floor}.")
        if self.a_activation not in A_ACTIVATIONS:
            raise ConfigError(
                f"{where}: a_activation must be one of {A_ACTIVATIONS}; got {self.a_activation!r}."
            )
        if self.pathway not in PATHWAYS:
            raise ConfigError(f"{where}: pathway must be one of {PATHWAYS}; got {self.pathway!r}.")

    @property
    def projection_rows(self) -> dict[str, dict[str, int]]:
        """What the rows of each fused projection make, in their order."""
        names = ("z", "x", "B", "C", "dt", "A", "lambda", "rotation")
        return {"in_proj": dict(zip(names, self.split_sizes, strict=True))}

    def extra_repr(self) -> str:
        """Name the sizes and choices."""
        rank = f", mimo_rank={self.mimo_rank}" if self.is_mimo else ""
        return (
            f"d_model={self.d_model}, d_inner={self.d_inner}, nheads={self.nheads}, "
            f"headdim={self.headdim}, d_state={self.d_state}, ngroups={self.ngroups}{rank}, "
            f"rotation={self.rotation}, a_activation={self.a_activation}, pathway={self.pathway}"
        )

    def step_infinite(self, u_bd: Tensor) -> Tensor:
        """Return the limit of the outputs when the same token is fed for ever; differentiable."""
        where = f"{type(self).__name__}.step_infinite"
        self._check_input(where, u_bd, ("batch", "d_model"))
        z, x_bhp, b_bmgr, c_bmgr, coefficients, turn = self._project(u_bd)
        b_bmhr, c_bmhr = self._prepare(b_bmgr, c_bmgr)
        v_bmhp = self._values(x_bhp, "portable")
        increment = self.rotation.increment(turn, coefficients.dt)
        y_bmhp = trapezoid_fixed_point(
            v_bmhp, b_bmhr, c_bmhr, coefficients, **self.rotation.fixed_point_arguments(increment)
        )
        return self._finish(y_bmhp, v_bmhp, z)

    def _fresh(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Mamba3Cache:
        state_dtype = accumulate_dtype(dtype)
        shape = (batch_size, self.nheads, self.headdim, self.d_state)
        if self.init_states is None:
            ssm_bhpr = torch.zeros(shape, device=device, dtype=state_dtype)
        else:
            ssm_bhpr = self.init_states.to(device=device, dtype=state_dtype).expand(shape).clone()
        kind = Mamba3SingleSsdCache if self.pathway == "single" else Mamba3DoubleSsdCache
        return kind(
            ssm_bhpr,
            torch.zeros(
                batch_size, self.mimo_rank, self.nheads, self.d_state, device=device, dtype=dtype
            ),
            torch.zeros(batch_size, self.nheads, self.headdim, device=device, dtype=dtype),
            self.rotation.fresh(batch_size, device, state_dtype),
        )

    def _sequence(
        self,
        u_bsd: Tensor,
        cache: Mamba3Cache,
        path: SsdPath | None,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Mamba3Cache]:
        z, x_bshp, b_bsmgr, c_bsmgr, coefficients, turn = self._project(u_bsd)
        b_bsmhr, c_bsmhr, rotation = self._keys(
            b_bsmgr, c_bsmgr, turn, coefficients.dt, cache.rotation, impl, cu_seqlens
        )
        v_bsmhp = self._values(x_bshp, impl)
        y_bsmhp, state = trapezoid_scan(
            v_bsmhp,
            b_bsmhr,
            c_bsmhr,
            coefficients,
            self._scan_state(cache),
            pathway="double" if isinstance(cache, Mamba3DoubleSsdCache) else "single",
            path=with_chunk_size(path, impl, self.chunk_size),
            impl=impl,
            cu_seqlens=cu_seqlens,
        )
        x_last_bhp = self._last(x_bshp, cache.v_state_bhp, cu_seqlens)
        new = type(cache)(
            state.ssm_bhpr,
            _own(state.k_bmgr, cache.k_state_bmhr.dtype),
            _own(x_last_bhp, cache.v_state_bhp.dtype),
            rotation,
        )
        return self._finish(y_bsmhp, v_bsmhp, z, impl), new

    def _token(self, u_bd: Tensor, cache: Mamba3Cache) -> tuple[Tensor, Mamba3Cache]:
        z, x_bhp, b_bmgr, c_bmgr, coefficients, turn = self._project(u_bd)
        b_bmhr, c_bmhr = self._prepare(b_bmgr, c_bmgr)
        increment = self.rotation.increment(turn, coefficients.dt)
        b_bmhr, c_bmhr, rotation = self.rotation.rotate_token(
            b_bmhr, c_bmhr, increment, cache.rotation
        )
        v_bmhp = self._values(x_bhp, "portable")
        y_bmhp, state = trapezoid_step(
            v_bmhp, b_bmhr, c_bmhr, coefficients, self._scan_state(cache)
        )
        new = type(cache)(
            state.ssm_bhpr,
            _own(state.k_bmgr, cache.k_state_bmhr.dtype),
            _own(x_bhp, cache.v_state_bhp.dtype),
            rotation,
        )
        return self._finish(y_bmhp, v_bmhp, z), new

    def _project(
        self, u: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, TrapezoidCoefficients, Tensor]:
        """Return z, x, raw B and C (..., m, g, r), coefficients and the raw rotation."""
        z, x, b, c, raw_dt, raw_a, raw_lam, turn = project(self.in_proj, u).split(
            self.split_sizes, dim=-1
        )
        coefficients = trapezoid_coefficients(
            raw_dt,
            raw_a,
            raw_lam,
            self.dt_bias,
            a_activation=self.a_activation,
            a_floor=self.A_floor,
            dt_limit=self.dt_limit,
        )
        heads = (self.nheads, self.headdim)
        keys = (self.mimo_rank, self.ngroups, self.d_state)
        return (
            z.unflatten(-1, heads),
            x.unflatten(-1, heads),
            b.unflatten(-1, keys),
            c.unflatten(-1, keys),
            coefficients,
            turn,
        )

    def _keys(
        self,
        b_bsmgr: Tensor,
        c_bsmgr: Tensor,
        turn: Tensor,
        dt_bsh: Tensor,
        state: RotationState,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, RotationState]:
        """Norm, spread, bias and rotate B and C of a sequence, from a rotation to a rotation."""
        norms = (self.B_norm, self.C_norm)
        if all(is_plain(norm, RMSNorm) for norm in norms):
            return self.rotation.keys(
                (b_bsmgr, c_bsmgr),
                (self.B_norm.weight, self.C_norm.weight),
                (self.B_norm.eps, self.C_norm.eps),
                (self.B_bias, self.C_bias),
                *(turn, dt_bsh, state, impl, cu_seqlens),
            )
        b_bsmhr, c_bsmhr = self._prepare(b_bsmgr, c_bsmgr)
        increment = self.rotation.increment(turn, dt_bsh)
        return self.rotation.rotate(b_bsmhr, c_bsmhr, increment, state, impl, cu_seqlens)

    def _prepare(self, b_mgr: Tensor, c_mgr: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, spread groups over their heads, add the bias: (..., m, h, r)."""
        return (
            self._spread(b_mgr, self.B_norm, self.B_bias),
            self._spread(c_mgr, self.C_norm, self.C_bias),
        )

    def _spread(self, x_mgr: Tensor, norm: nn.Module, bias_hmr: Tensor) -> Tensor:
        x_mg1r = norm(x_mgr).unsqueeze(-2)
        bias_mger = bias_hmr.transpose(0, 1).unflatten(1, (self.ngroups, -1))
        return (x_mg1r + bias_mger).to(x_mgr.dtype).flatten(-3, -2)

    def _values(self, x_hp: Tensor, impl: str) -> Tensor:
        """Spread the values over the ranks: (..., m, h, p); one token is not worth a kernel."""
        if not self.is_mimo:
            return x_hp.unsqueeze(-3)
        return rank_values(x_hp, self.mimo_x.transpose(0, 1), impl=impl)

    def _scan_state(self, cache: Mamba3Cache) -> TrapezoidState:
        v_bmhp = self._values(cache.v_state_bhp, "portable")
        return TrapezoidState(cache.ssm_bhpr, cache.k_state_bmhr, v_bmhp)

    @staticmethod
    def _last(x_bshp: Tensor, before_bhp: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """Return the last token of each row or sequence; an empty sequence keeps its old one."""
        if cu_seqlens is None:
            return x_bshp[:, -1]
        borders = cu_seqlens.to(device=x_bshp.device, dtype=torch.int64)
        last_qhp = x_bshp[0].index_select(0, (borders[1:] - 1).clamp(min=0))
        has_tokens = (borders.diff() > 0)[:, None, None]
        return torch.where(has_tokens, last_qhp, before_bhp.to(last_qhp.dtype))

    def _finish(
        self, y_mhp: Tensor, v_mhp: Tensor, z_hp: Tensor, impl: str | None = None
    ) -> Tensor:
        """Skip, gate (or norm), merge the ranks, project; one token has no `impl`."""
        fused = impl is not None and self.is_outproj_norm and is_plain(self.norm, RMSNormGated)
        if self.is_outproj_norm and not fused:
            return project(self.out_proj, self._tail_around_norm(y_mhp, v_mhp, z_hp))
        tail: dict[str, Any] = {}
        if self.is_mimo:
            tail["spread_mhp"] = self.mimo_z.transpose(0, 1)
            tail["merge_mhp"] = self.mimo_o.transpose(0, 1)
        if self.is_outproj_norm:
            tail |= {
                "weight_i": self.norm.weight,
                "eps": self.norm.eps,
                "group_size": self.norm.group_size,
                "norm_before_gate": self.norm.norm_before_gate,
            }
        dtype = z_hp.dtype
        y_i = gated_tail(
            y_mhp.to(dtype), v_mhp.to(dtype), z_hp, self.D, impl=impl or "portable", **tail
        )
        return project(self.out_proj, y_i)

    def _tail_around_norm(self, y_mhp: Tensor, v_mhp: Tensor, z_hp: Tensor) -> Tensor:
        """Do the same with the norm called as a module: for one token, or if it is not our own."""
        dtype = z_hp.dtype
        y_mhp = y_mhp + self.D.to(y_mhp.dtype).unsqueeze(-1) * v_mhp
        gate_mhp = z_hp.unsqueeze(-3)
        if self.is_mimo:
            gate_mhp = (gate_mhp * self.mimo_z.transpose(0, 1)).to(dtype)
        y_mi = self.norm(y_mhp.to(dtype).flatten(-2), gate_mhp.flatten(-2))
        if not self.is_mimo:
            return y_mi.squeeze(-2)
        merge_mi = self.mimo_o.transpose(0, 1).flatten(-2)
        return (y_mi * merge_mi).sum(-2).to(dtype)


def _own(view: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a slice out of the projection, which a cache would otherwise keep alive as a whole."""
    return view.to(dtype, copy=True, memory_format=torch.contiguous_format)
