"""The gated norms of `mamba_ssm.ops.triton.layernorm_gated`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.compat.arguments import gate, precision, require
from anymamba.errors import ConfigError, ShapeError
from anymamba.ops import add_layer_norm, gated_rms_norm, rms_norm

__all__ = ["RMSNormGated", "layernorm_fn", "normalise", "rmsnorm_fn"]


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Normalise groups of the last axis and gate them, in one of the two orders.

        y = (norm(x) weight + bias) silu(z)         norm_before_gate=True
        y = norm(x silu(z)) weight + bias           norm_before_gate=False

    Args:
        x: any number of leading axes; statistics are float32 for half types.
        weight: (width,).
        bias: (width,), or None.
        z: the gate, like x; None means no gate.
        eps: inside the root; positive.
        group_size: width of a group; must divide the last axis; None means one group.
        norm_before_gate: the order.
        is_rms_norm: normalise by the root mean square instead of mean and variance.

    Returns:
        A tensor like x.

    Raises:
        ShapeError: z, weight or bias do not fit x.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: `eps` is not positive, or `group_size` does not divide the last axis.

    Example:
        >>> layernorm_fn(torch.tensor([1.0, 3.0, 5.0, 9.0]), torch.ones(4), None, group_size=2)
        tensor([-1.0000,  1.0000, -1.0000,  1.0000])
    """
    where = "rmsnorm_fn" if is_rms_norm else "layernorm_fn"
    require(where, x=x, weight=weight)
    compute = precision(where, x=x, weight=weight, bias=bias, z=z)
    if z is not None and z.shape != x.shape:
        raise ShapeError(
            f"{where}: z must have the shape of x {tuple(x.shape)}; got {tuple(z.shape)}."
        )
    if is_rms_norm and z is not None and bias is None and z.dtype == x.dtype:
        return gated_rms_norm(
            x, z, weight, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate
        )
    wide = x.to(compute)
    before, after = (None, z) if norm_before_gate else (z, None)
    wide = gate(wide, before, compute)
    wide = normalise(where, wide, weight, bias, eps, is_rms_norm, group_size)
    return gate(wide, after, x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """Normalise groups by their root mean square and gate them; see `layernorm_fn`.

    Example:
        >>> rmsnorm_fn(torch.tensor([3.0, 4.0]), torch.ones(2), None, z=torch.zeros(2))
        tensor([0., 0.])
    """
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


class RMSNormGated(nn.Module):
    """The norm of `layernorm_gated`, there called `RMSNorm`; parameter `weight`, no bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, ones."""
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        # Official code reads the attribute; as None it is in no state_dict.
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Call `rmsnorm_fn` with the weight."""
        return rmsnorm_fn(
            x,
            self.weight,
            None,
            z=z,
            eps=self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )


def normalise(
    where: str,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    is_rms_norm: bool,
    group_size: int | None = None,
) -> Tensor:
    """Normalise a tensor that is already in the dtype to compute in."""
    width = total.shape[-1]
    size = width if group_size is None else group_size
    if size < 1 or width % size:
        raise ConfigError(
            f"{where}: group_size must divide the last axis; got group_size={group_size} "
            f"for shape {tuple(total.shape)}."
        )
    if is_rms_norm:
        y = rms_norm(total, weight, eps=eps, group_size=size)
        return y if bias is None else y + bias.to(y.dtype)
    if size == width:
        return add_layer_norm(total, None, weight, bias, eps=eps).y
    y = F.layer_norm(total.unflatten(-1, (-1, size)), (size,), eps=eps).flatten(-2)
    y = y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)
