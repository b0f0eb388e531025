"""The Mamba-1 block."""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import BackendError, ConfigError
from anymamba.nn.block import Block
from anymamba.nn.cache import Mamba1Cache
from anymamba.nn.conv import convolve, convolve_token, short_convolution
from anymamba.nn.options import reject_unknown
from anymamba.nn.plain import is_plain, project
from anymamba.nn.step_bias import InverseSoftplus
from anymamba.ops import (
    SsdPath,
    accumulate_dtype,
    linear,
    rms_norm,
    selective_scan,
    selective_scan_step,
    softplus,
    step_size,
)

__all__ = ["Mamba"]


class Mamba(Block[Mamba1Cache]):
    """Selective state space block (Mamba-1): a drop-in for `mamba_ssm.Mamba`.

        [x, z] = in_proj(u);  x = silu(conv(x))
        [dt, B, C] = x_proj(x);  dt = softplus(dt_proj(dt))
        h[t] = exp(dt A) h[t-1] + dt B x;  y = C h + D x;  out = out_proj(y * silu(z))

    Args:
        d_model: width of inputs and outputs.
        d_state: state size per channel.
        d_conv: width of the convolution.
        expand: inner width is `expand * d_model`.
        dt_rank: rank of the step-size projection; "auto" is ceil(d_model / 16).
        dt_min: smallest initial step size.
        dt_max: largest initial step size.
        dt_init: "random" or "constant" initialisation of `dt_proj.weight`.
        dt_scale: scale of that initialisation.
        dt_init_floor: lower bound of initial step sizes.
        conv_bias: whether the convolution has a bias.
        bias: whether `in_proj` and `out_proj` have one.
        use_fast_path: accepted for compatibility; steers CUDA kernels only.
        layer_idx: place in a stack; needed with `inference_params`.
        device: of the parameters.
        dtype: of the parameters; `A_log` and `D` stay float32 beside half types.
        bcdt_rms_eps: divide the raw dt, B and C by their root mean square, with this inside the
            root, as FalconMamba does; no norm if None.

    Example:
        >>> block = Mamba(d_model=8, d_state=4)
        >>> block(torch.zeros(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    cache_types = (Mamba1Cache,)

    def __init__(
        self,
        d_model: int,
        d_state: int = 16,
        d_conv: int = 4,
        expand: float = 2,
        dt_rank: int | Literal["auto"] = "auto",
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init: str = "random",
        dt_scale: float = 1.0,
        dt_init_floor: float = 1e-4,
        conv_bias: bool = True,
        bias: bool = False,
        use_fast_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bcdt_rms_eps: float | None = None,
        **unknown: Any,
    ) -> None:
        """Create the parameters with the official names, shapes and initialisation."""
        super().__init__()
        where = type(self).__name__
        reject_unknown(where, unknown, Mamba.__init__.__annotations__)
        if min(d_model, d_state, d_conv) < 1:
            raise ConfigError(
                f"{where}: d_model, d_state and d_conv must be positive; "
                f"got {d_model}, {d_state}, {d_conv}."
            )
        if dt_init not in ("random", "constant"):
            raise ConfigError(f"{where}: dt_init must be 'random' or 'constant'; got {dt_init!r}.")
        if bcdt_rms_eps is not None and not bcdt_rms_eps > 0:
            raise ConfigError(
                f"{where}: bcdt_rms_eps must be positive, or None for no norm; got {bcdt_rms_eps}."
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sensitive = accumulate_dtype(dtype or torch.get_default_dtype())
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = int(expand * d_model)
        self.dt_rank = math.ceil(d_model / 16) if dt_rank == "auto" else dt_rank
        if min(self.dt_rank, self.d_inner) < 1:
            raise ConfigError(
                f"{where}: dt_rank and expand * d_model must be at least 1; "
                f"got {self.dt_rank} and {self.d_inner}."
            )
        self.layer_idx, self.bcdt_rms_eps = layer_idx, bcdt_rms_eps
        self.in_proj = nn.Linear(d_model, 2 * self.d_inner, bias=bias, **factory)
        self.conv1d = short_convolution(self.d_inner, d_conv, conv_bias, **factory)
        self.x_proj = nn.Linear(self.d_inner, self.dt_rank + 2 * d_state, bias=False, **factory)
        self.dt_proj = nn.Linear(self.dt_rank, self.d_inner, bias=True, **factory)
        rates_r = torch.arange(1, d_state + 1, device=device, dtype=sensitive)
        self.A_log = nn.Parameter(rates_r.log().repeat(self.d_inner, 1))
        self.D = nn.Parameter(torch.ones(self.d_inner, device=device, dtype=sensitive))
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **factory)
        bound = self.dt_rank**-0.5 * dt_scale
        with torch.no_grad():
            if dt_init == "constant":
                self.dt_proj.weight.fill_(bound)
            else:
                self.dt_proj.weight.uniform_(-bound, bound)
            init = InverseSoftplus(dt_min, dt_max, dt_init_floor)
            self.dt_proj.bias.copy_(init(self.d_inner, device, self.dt_proj.bias.dtype))
        # Tags that initialisers and optimisers of the field look for.
        self.dt_proj.bias._no_reinit = True  # pyright: ignore[reportAttributeAccessIssue]
        self.A_log._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
        self.D._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def projection_rows(self) -> dict[str, dict[str, int]]:
        """What the rows of each fused projection make, in their order."""
        return {
            "in_proj": {"x": self.d_inner, "z": self.d_inner},
            "x_proj": {"dt": self.dt_rank, "B": self.d_state, "C": self.d_state},
        }

    def extra_repr(self) -> str:
        """Name the sizes."""
        norm = "" if self.bcdt_rms_eps is None else f", bcdt_rms_eps={self.bcdt_rms_eps}"
        return (
            f"d_model={self.d_model}, d_inner={self.d_inner}, d_state={self.d_state}, "
            f"d_conv={self.d_conv}, dt_rank={self.dt_rank}{norm}"
        )

    def _fresh(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Mamba1Cache:
        state_dtype = accumulate_dtype(dtype)
        return Mamba1Cache(
            torch.zeros(batch_size, self.d_inner, self.d_conv, device=device, dtype=dtype),
            torch.zeros(batch_size, self.d_inner, self.d_state, device=device, dtype=state_dtype),
        )

    def _sequence(
        self,
        u_bsd: Tensor,
        cache: Mamba1Cache,
        path: SsdPath | None,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Mamba1Cache]:
        if path is not None:
            raise BackendError(
                f"Mamba: the selective scan has no SSD path; got {path}. Leave path out."
            )
        x_bsi, z_bsi = project(self.in_proj, u_bsd).chunk(2, dim=-1)
        x_bsi, conv_bik = convolve(self.conv1d, x_bsi, cache.conv_bik, cu_seqlens, impl=impl)
        dt_bsi, b_bsr, c_bsr = self._project(x_bsi, impl)
        y_bsi, ssm_bir = selective_scan(
            x_bsi,
            dt_bsi,
            -self.A_log.to(dt_bsi.dtype).exp(),
            b_bsr,
            c_bsr,
            self.D,
            cache.ssm_bir,
            z_bsi=z_bsi,
            impl=impl,
            cu_seqlens=cu_seqlens,
        )
        return project(self.out_proj, y_bsi), Mamba1Cache(conv_bik, ssm_bir)

    def _token(self, u_bd: Tensor, cache: Mamba1Cache) -> tuple[Tensor, Mamba1Cache]:
        x_bi, z_bi = project(self.in_proj, u_bd).chunk(2, dim=-1)
        x_bi, conv_bik = convolve_token(self.conv1d, x_bi, cache.conv_bik)
        dt_bi, b_br, c_br = self._project(x_bi, "portable")
        y_bi, ssm_bir = selective_scan_step(
            x_bi,
            dt_bi,
            -self.A_log.to(dt_bi.dtype).exp(),
            b_br.unsqueeze(1),
            c_br.unsqueeze(1),
            self.D,
            cache.ssm_bir,
        )
        return project(self.out_proj, y_bi * F.silu(z_bi)), Mamba1Cache(conv_bik, ssm_bir)

    def _project(self, x: Tensor, impl: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return dt in the accumulate dtype, B and C."""
        raw, b, c = project(self.x_proj, x).split(
            [self.dt_rank, self.d_state, self.d_state], dim=-1
        )
        if self.bcdt_rms_eps is not None:
            eps = self.bcdt_rms_eps
            raw, b, c = (rms_norm(y, y.new_ones(y.shape[-1]), eps=eps) for y in (raw, b, c))
        if is_plain(self.dt_proj, nn.Linear):
            # The bias is large beside the product: add it in full precision.
            raw_dt = linear(raw, self.dt_proj.weight)
            return step_size(raw_dt, self.dt_proj.bias, impl=impl), b, c
        return softplus(self.dt_proj(raw).to(accumulate_dtype(x.dtype))), b, c
