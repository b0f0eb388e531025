"""The Mamba-2 block."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import BackendError, ConfigError
from anymamba.nn.block import Block
from anymamba.nn.cache import Mamba2Cache
from anymamba.nn.conv import convolve, convolve_token, short_convolution
from anymamba.nn.norm import RMSNormGated
from anymamba.nn.options import check_scan_options, reject_unknown
from anymamba.nn.plain import is_plain, project
from anymamba.nn.step_bias import InverseSoftplus
from anymamba.ops import (
    SsdPath,
    accumulate_dtype,
    clamp_dt,
    gated_product,
    gated_tail,
    softplus,
    ssd,
    ssd_step,
)

__all__ = ["Mamba2"]


class Mamba2(Block[Mamba2Cache]):
    """State space duality block (Mamba-2): a drop-in for `mamba_ssm.Mamba2`.

        [z0, x0, z, xBC, dt] = in_proj(u);  [x, B, C] = silu(conv(xBC));  dt = softplus(dt + bias)
        H[t] = exp(dt A) H[t-1] + dt x B^T;  y = H C + D x
        out = out_proj([silu(z0) x0, norm(y, z)])

    Args:
        d_model: width of inputs and outputs.
        d_state: state size.
        d_conv: width of the convolution.
        conv_init: bound of a uniform initialisation of the convolution; torch's default if None.
        expand: inner width is `expand * d_model`.
        headdim: width of a head.
        d_ssm: width that goes through the scan; the rest is a gated MLP. All of it by default.
        ngroups: groups of B and C.
        A_init_range: range of the initial |A|.
        D_has_hdim: one skip weight per channel instead of per head.
        rmsnorm: gated RMS norm before the output; else a plain gate.
        norm_before_gate: order of that norm.
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        dt_init_floor: lower bound of initial step sizes.
        dt_limit: clamp of the step size, in every verb.
        bias: whether the projections have a bias.
        conv_bias: whether the convolution has a bias.
        chunk_size: chunk length of the scan; chosen by the sizes if None.
        use_mem_eff_path: accepted for compatibility; steers CUDA kernels only.
        layer_idx: place in a stack; needed with `inference_params`.
        process_group: must be None; tensor parallelism is not part of the block.
        sequence_parallel: accepted for compatibility; has a meaning only with a process group.
        device: of the parameters.
        dtype: of the parameters; `D` stays float32 beside half types.
        learnable_init_state: train the state before the first token (`init_states`).
        norm_eps: inside the norm's root.

    Example:
        >>> block = Mamba2(d_model=8, d_state=4, headdim=4)
        >>> block(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    cache_types = (Mamba2Cache,)

    def __init__(
        self,
        d_model: int,
        d_state: int = 128,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: float = 2,
        headdim: int = 64,
        d_ssm: int | None = None,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        D_has_hdim: bool = False,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = (0.0, math.inf),
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int | None = None,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        process_group: Any = None,
        sequence_parallel: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        learnable_init_state: bool = False,
        norm_eps: float = 1e-5,
        **unknown: Any,
    ) -> None:
        """Create the parameters with the official names, shapes and initialisation."""
        super().__init__()
        where = type(self).__name__
        reject_unknown(where, unknown, Mamba2.__init__.__annotations__)
        if process_group is not None:
            raise BackendError(
                f"{where}: process_group must be None; the block itself is not parallel."
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sensitive = accumulate_dtype(dtype or torch.get_default_dtype())
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        self.headdim, self.ngroups = headdim, ngroups
        self.d_ssm = self.d_inner if d_ssm is None else d_ssm
        self._check_sizes(where, A_init_range)
        check_scan_options(where, chunk_size, dt_limit)
        self.nheads = self.d_ssm // headdim
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = D_has_hdim, rmsnorm, norm_before_gate
        self.dt_limit = (float(dt_limit[0]), float(dt_limit[1]))
        self.chunk_size, self.layer_idx = chunk_size, layer_idx
        self.d_mlp = self.d_inner - self.d_ssm
        self.conv_dim = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = nn.Linear(
            d_model, 2 * self.d_mlp + self.d_ssm + self.conv_dim + self.nheads, bias=bias, **factory
        )
        self.conv1d = short_convolution(self.conv_dim, d_conv, conv_bias, **factory)
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        init = InverseSoftplus(dt_min, dt_max, dt_init_floor)
        self.dt_bias = nn.Parameter(init(self.nheads, device, dtype))
        rates_h = torch.empty(self.nheads, device=device, dtype=torch.float32)
        self.A_log = nn.Parameter(rates_h.uniform_(*A_init_range).log().to(dtype))
        skip_size = self.d_ssm if D_has_hdim else self.nheads
        self.D = nn.Parameter(torch.ones(skip_size, device=device, dtype=sensitive))
        if rmsnorm:
            self.norm = RMSNormGated(
                self.d_ssm, norm_eps, self.d_ssm // ngroups, norm_before_gate, **factory
            )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)
        self.init_states = None
        if learnable_init_state:
            shape = (self.nheads, headdim, d_state)
            self.init_states = nn.Parameter(torch.zeros(shape, device=device, dtype=sensitive))
            self.init_states._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in (self.dt_bias, self.A_log, self.D):
            parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    def _check_sizes(self, where: str, a_init_range: tuple[float, float]) -> None:
        if min(self.d_model, self.d_state, self.d_conv, self.headdim, self.ngroups) < 1:
            raise ConfigError(
                f"{where}: d_model, d_state, d_conv, headdim and ngroups must be positive; got "
                f"{self.d_model}, {self.d_state}, {self.d_conv}, {self.headdim}, {self.ngroups}."
            )
        if not 0 < self.d_ssm <= self.d_inner:
            raise ConfigError(
                f"{where}: d_ssm must lie in 1..d_inner={self.d_inner}; got {self.d_ssm}."
            )
        if self.d_ssm % self.headdim:
            raise ConfigError(
                f"{where}: headdim must divide {self.d_ssm} (d_ssm, by default expand * d_model); "
                f"got {self.headdim}."
            )
        heads = self.d_ssm // self.headdim
        if heads % self.ngroups:
            raise ConfigError(
                f"{where}: ngroups must divide the number of heads {heads}; got {self.ngroups}."
            )
        if not 0 < a_init_range[0] <= a_init_range[1]:
            raise ConfigError(
                f"{where}: A_init_range must be 0 < low <= high; got {tuple(a_init_range)}."
            )

    @property
    def projection_rows(self) -> dict[str, dict[str, int]]:
        """What the rows of each fused projection make, in their order."""
        group = self.ngroups * self.d_state
        rows = {"z0": self.d_mlp, "x0": self.d_mlp, "z": self.d_ssm, "x": self.d_ssm}
        return {"in_proj": {**rows, "B": group, "C": group, "dt": self.nheads}}

    def extra_repr(self) -> str:
        """Name the sizes."""
        return (
            f"d_model={self.d_model}, d_inner={self.d_inner}, nheads={self.nheads}, "
            f"headdim={self.headdim}, d_state={self.d_state}, ngroups={self.ngroups}, "
            f"d_conv={self.d_conv}"
        )

    def _fresh(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Mamba2Cache:
        shape = (batch_size, self.nheads, self.headdim, self.d_state)
        state_dtype = accumulate_dtype(dtype)
        if self.init_states is None:
            ssm_bhpr = torch.zeros(shape, device=device, dtype=state_dtype)
        else:
            ssm_bhpr = self.init_states.to(device=device, dtype=state_dtype).expand(shape).clone()
        conv_bvk = torch.zeros(batch_size, self.conv_dim, self.d_conv, device=device, dtype=dtype)
        return Mamba2Cache(conv_bvk, ssm_bhpr)

    def _sequence(
        self,
        u_bsd: Tensor,
        cache: Mamba2Cache,
        path: SsdPath | None,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Mamba2Cache]:
        z0, x0, z_bsi, x_bsv, dt_bsh = self._project(u_bsd)
        x_bsv, conv_bvk = convolve(self.conv1d, x_bsv, cache.conv_bvk, cu_seqlens, impl=impl)
        x_bshp, b_bsgr, c_bsgr = self._split(x_bsv)
        # The skip belongs to the tail, unless the norm must be called as a module.
        fused = not self.rmsnorm or is_plain(self.norm, RMSNormGated)
        y_bshp, ssm_bhpr = ssd(
            x_bshp,
            dt_bsh,
            -self.A_log.to(dt_bsh.dtype).exp(),
            b_bsgr,
            c_bsgr,
            None if fused else self._skip(),
            cache.ssm_bhpr,
            path=with_chunk_size(path, impl, self.chunk_size),
            impl=impl,
            cu_seqlens=cu_seqlens,
        )
        if fused:
            y_bsi = self._tail(y_bshp, x_bshp, z_bsi, impl)
        else:
            y_bsi = self.norm(y_bshp.flatten(-2), z_bsi)
        return self._join(y_bsi, z0, x0, impl), Mamba2Cache(conv_bvk, ssm_bhpr)

    def _token(self, u_bd: Tensor, cache: Mamba2Cache) -> tuple[Tensor, Mamba2Cache]:
        z0, x0, z_bi, x_bv, dt_bh = self._project(u_bd)
        x_bv, conv_bvk = convolve_token(self.conv1d, x_bv, cache.conv_bvk)
        x_bhp, b_bgr, c_bgr = self._split(x_bv)
        a_h = -self.A_log.to(dt_bh.dtype).exp()
        y_bhp, ssm_bhpr = ssd_step(x_bhp, dt_bh, a_h, b_bgr, c_bgr, self._skip(), cache.ssm_bhpr)
        y_bi = y_bhp.flatten(-2)
        y_bi = self.norm(y_bi, z_bi) if self.rmsnorm else y_bi * F.silu(z_bi)
        return self._join(y_bi, z0, x0, "portable"), Mamba2Cache(conv_bvk, ssm_bhpr)

    def _project(self, u: Tensor) -> tuple[Tensor, ...]:
        """Split the projection; dt comes out as a step size in the accumulate dtype."""
        sizes = [self.d_mlp, self.d_mlp, self.d_ssm, self.conv_dim, self.nheads]
        z0, x0, z, x, raw_dt = project(self.in_proj, u).split(sizes, dim=-1)
        compute = accumulate_dtype(raw_dt.dtype)
        dt = softplus(raw_dt.to(compute) + self.dt_bias.to(compute))
        return z0, x0, z, x, clamp_dt(dt, self.dt_limit)

    def _split(self, x_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group = self.ngroups * self.d_state
        x, b, c = x_v.split([self.d_ssm, group, group], dim=-1)
        return (
            x.unflatten(-1, (self.nheads, self.headdim)),
            b.unflatten(-1, (self.ngroups, self.d_state)),
            c.unflatten(-1, (self.ngroups, self.d_state)),
        )

    def _skip(self) -> Tensor:
        return self.D.view(self.nheads, self.headdim) if self.D_has_hdim else self.D

    def _tail(self, y_bshp: Tensor, x_bshp: Tensor, z_bsi: Tensor, impl: str) -> Tensor:
        """Skip, gate and norm in one operator."""
        norm: dict[str, Any] = {}
        if self.rmsnorm:
            norm = {
                "weight_i": self.norm.weight,
                "eps": self.norm.eps,
                "group_size": self.norm.group_size,
                "norm_before_gate": self.norm.norm_before_gate,
            }
        z_bshp = z_bsi.unflatten(-1, (self.nheads, self.headdim))
        return gated_tail(
            y_bshp.unsqueeze(-3), x_bshp.unsqueeze(-3), z_bshp, self._skip(), impl=impl, **norm
        )

    def _join(self, y_i: Tensor, z0: Tensor, x0: Tensor, impl: str) -> Tensor:
        """Join the MLP part and project."""
        if self.d_mlp:
            y_i = torch.cat([gated_product(x0, z0, impl=impl), y_i], dim=-1)
        return project(self.out_proj, y_i)


def with_chunk_size(path: SsdPath | None, impl: str, chunk_size: int | None) -> SsdPath | None:
    """Put the constructor's chunk length into a path that has none; reference has no chunks."""
    if chunk_size is None or impl == "reference":
        return path
    path = path or SsdPath()
    return path if path.chunk_len is not None else SsdPath(path.kind, chunk_size)
