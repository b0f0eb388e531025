"""The block `mamba_ssm.modules.mamba2_simple.Mamba2Simple`, with its parameter names."""

import math

import torch
from torch import Tensor, nn

from anymamba.compat.arguments import is_silu, require
from anymamba.compat.norm_gated import RMSNormGated
from anymamba.compat.split_conv import split_conv_scan
from anymamba.compat.ssd import NO_LIMIT
from anymamba.errors import ConfigError, ShapeError
from anymamba.ops import accumulate_dtype

__all__ = ["Mamba2Simple"]


class Mamba2Simple(nn.Module):
    """A Mamba-2 block without a cache: one tensor in, one tensor out.

    The parameters have the official names and shapes, so an official `state_dict` loads with
    `strict=True`: `in_proj`, `conv1d`, `dt_bias`, `A_log`, `D`, `norm`, `out_proj`, and
    `init_states` when they are learnable. For a cache, steps and packed prefill use
    `anymamba.Mamba2`.

    Args:
        d_model: width of the input.
        d_state: size of a head's state.
        d_conv: width of the convolution.
        conv_init: initialise the convolution uniformly in +-conv_init; None keeps torch's default.
        expand: inner width over d_model.
        headdim: width of a head; divides expand * d_model.
        ngroups: groups of B and C; divides the heads.
        A_init_range: |A| is drawn uniformly from it; positive.
        dt_min: softplus(dt_bias) is drawn log-uniformly from [dt_min, dt_max].
        dt_max: see dt_min.
        dt_init_floor: lower limit of that draw.
        dt_limit: (low, high) for the step sizes.
        learnable_init_states: own a state before the first token, zero at first.
        activation: of the convolution: None, "silu" or "swish".
        bias: of the two projections.
        conv_bias: of the convolution.
        chunk_size: accepted; the operator chooses its own chunks.
        use_mem_eff_path: as in the official block, True normalises groups of d_inner / ngroups and
            False the whole inner width; equal for ngroups=1, and read by the constructor only.
        layer_idx: kept as an attribute.
        device: of the parameters.
        dtype: of the parameters; D is float32 beside half types.

    Raises:
        ConfigError: sizes do not divide each other, or an option is out of range.

    Example:
        >>> block = Mamba2Simple(d_model=8, d_state=4, headdim=4)
        >>> block(torch.zeros(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        d_model: int,
        d_state: int = 64,
        d_conv: int = 4,
        conv_init: float | None = None,
        expand: int = 2,
        headdim: int = 128,
        ngroups: int = 1,
        A_init_range: tuple[float, float] = (1, 16),
        dt_min: float = 0.001,
        dt_max: float = 0.1,
        dt_init_floor: float = 1e-4,
        dt_limit: tuple[float, float] = NO_LIMIT,
        learnable_init_states: bool = False,
        activation: str | None = "swish",
        bias: bool = False,
        conv_bias: bool = True,
        chunk_size: int = 256,
        use_mem_eff_path: bool = True,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the parameters."""
        super().__init__()
        where = "Mamba2Simple"
        self.d_model, self.d_state, self.d_conv, self.expand = d_model, d_state, d_conv, expand
        self.d_inner = expand * d_model
        self.headdim, self.ngroups = headdim, ngroups
        if headdim < 1 or self.d_inner % headdim:
            raise ConfigError(
                f"{where}: headdim must divide the inner width expand * d_model = {self.d_inner}; "
                f"got headdim={headdim}."
            )
        self.nheads = self.d_inner // headdim
        if ngroups < 1 or self.nheads % ngroups:
            raise ConfigError(
                f"{where}: ngroups must divide the heads {self.nheads}; got ngroups={ngroups}."
            )
        if not 0 < A_init_range[0] <= A_init_range[1]:
            raise ConfigError(
                f"{where}: A_init_range must satisfy 0 < low <= high; got {A_init_range}."
            )
        if not 0 < dt_min <= dt_max:
            raise ConfigError(
                f"{where}: dt_min and dt_max must satisfy 0 < dt_min <= dt_max; "
                f"got {dt_min}, {dt_max}."
            )
        is_silu(where, activation)
        self.conv_init, self.activation = conv_init, activation
        self.dt_limit, self.chunk_size = dt_limit, chunk_size
        self.learnable_init_states = learnable_init_states
        self.use_mem_eff_path, self.layer_idx = use_mem_eff_path, layer_idx

        made = {"device": device, "dtype": dtype}
        channels = self.d_inner + 2 * ngroups * d_state
        self.in_proj = nn.Linear(d_model, self.d_inner + channels + self.nheads, bias=bias, **made)
        self.conv1d = nn.Conv1d(
            channels, channels, d_conv, groups=channels, padding=d_conv - 1, bias=conv_bias, **made
        )
        if conv_init is not None:
            nn.init.uniform_(self.conv1d.weight, -conv_init, conv_init)
        if learnable_init_states:
            self.init_states = _plain(torch.zeros(self.nheads, headdim, d_state, **made))
        low, high = math.log(dt_min), math.log(dt_max)
        dt = torch.empty(self.nheads, **made).uniform_(low, high).exp().clamp(min=dt_init_floor)
        # Inverse softplus: the block applies softplus to the bias.
        self.dt_bias = _plain(dt + torch.log(-torch.expm1(-dt)))
        wide = torch.empty(self.nheads, device=device, dtype=torch.float32)
        self.A_log = _plain(wide.uniform_(*A_init_range).log().to(dtype))
        skip = accumulate_dtype(self.dt_bias.dtype)
        self.D = _plain(torch.ones(self.nheads, device=device, dtype=skip))
        size = self.d_inner // ngroups if use_mem_eff_path else None
        self.norm = RMSNormGated(
            self.d_inner, eps=1e-5, group_size=size, norm_before_gate=False, **made
        )
        self.out_proj = nn.Linear(self.d_inner, d_model, bias=bias, **made)

    def forward(self, u: Tensor, seq_idx: Tensor | None = None) -> Tensor:
        """Run whole sequences from the initial state.

        Args:
            u: (batch, length, d_model).
            seq_idx: sequence of each token (batch, length), integers; state and convolution
                restart where the label changes. Learnable initial states seed every sequence.

        Returns:
            A tensor like u.

        Raises:
            ShapeError: the input has another width or rank.
            PackingError: `seq_idx` does not fit.
        """
        where = "Mamba2Simple.forward"
        require(where, u=u)
        if u.dim() != 3 or u.shape[-1] != self.d_model:
            raise ShapeError(
                f"{where}: u must have shape (batch, length, {self.d_model}); got {tuple(u.shape)}."
            )
        projected = self.in_proj(u)
        parts = split_conv_scan(
            where,
            projected,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.dt_bias,
            -torch.exp(self.A_log.to(accumulate_dtype(self.A_log.dtype))),
            self.D,
            self.chunk_size,
            None,
            seq_idx,
            self.dt_limit,
            self.activation,
            self.headdim,
            self.ngroups,
            self.init_states if self.learnable_init_states else None,
        )
        return self.out_proj(self.norm(parts.y_bsi, parts.z_bsi))


def _plain(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that optimisers are asked not to decay."""
    parameter = nn.Parameter(tensor)
    parameter._no_weight_decay = True  # pyright: ignore[reportAttributeAccessIssue]
    return parameter
