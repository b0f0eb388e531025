"""The add-and-norm functions of `mamba_ssm.ops.triton.layer_norm`."""

import torch
from torch import Tensor, nn

from anymamba.compat.arguments import precision, require
from anymamba.compat.norm_gated import normalise
from anymamba.errors import ConfigError, ShapeError

__all__ = ["RMSNorm", "layer_norm_fn", "rms_norm_fn"]


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """Add branches to the residual stream and normalise the sum.

        total = dropout(x rowscale) + dropout(x1) + residual        y = norm(total) weight + bias

    Sum and statistics are float32 for half types.

    Args:
        x: the branch; any number of leading axes.
        weight: (width,).
        bias: (width,), or None.
        residual: the stream, like x; None means x opens it.
        x1: a second branch, like x.
        weight1: a second norm of the same sum.
        bias1: beside weight1.
        eps: inside the root; positive.
        dropout_p: probability of dropping an entry of a branch; torch's generator draws.
        rowscale: one factor per row of x (its leading axes, flattened or not); not beside x1.
        prenorm: return the sum too, in the dtype of `residual`, else as `residual_in_fp32` says.
        residual_in_fp32: open the stream in float32 beside half types.
        is_rms_norm: normalise by the root mean square instead of mean and variance.
        return_dropout_mask: return the kept entries of x and of x1 too; None without dropout.

    Returns:
        y, then in this order what was asked for: y1, the sum, the two masks.

    Raises:
        ShapeError: a size is wrong.
        DtypeError: an argument is no tensor, or float64 meets another precision.
        ConfigError: options contradict each other or are out of range.

    Example:
        >>> layer_norm_fn(torch.tensor([1.0, 3.0]), torch.ones(2), None)
        tensor([-1.0000,  1.0000])
    """
    where = "rms_norm_fn" if is_rms_norm else "layer_norm_fn"
    require(where, x=x, weight=weight)
    compute = precision(
        where, x=x, weight=weight, bias=bias, residual=residual, x1=x1, rowscale=rowscale
    )
    _check_options(where, x, residual, x1, weight1, bias1, dropout_p, rowscale)
    total = x.to(compute)
    if rowscale is not None:
        total = total * rowscale.to(compute).reshape(x.shape[:-1]).unsqueeze(-1)
    total, mask = _dropout(total, dropout_p)
    mask1 = None
    if x1 is not None:
        second, mask1 = _dropout(x1.to(compute), dropout_p)
        total = total + second
    if residual is not None:
        total = total + residual.to(compute)
    results: list[Tensor | None] = [
        normalise(where, total, weight, bias, eps, is_rms_norm).to(x.dtype)
    ]
    if weight1 is not None:
        results.append(normalise(where, total, weight1, bias1, eps, is_rms_norm).to(x.dtype))
    if prenorm:
        opened = compute if residual_in_fp32 else x.dtype
        results.append(total.to(opened if residual is None else residual.dtype))
    if return_dropout_mask:
        results += [mask, mask1]
    if len(results) > 1:
        return tuple(results)
    assert results[0] is not None
    return results[0]


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple[Tensor | None, ...]:
    """Add branches to the residual stream and normalise the sum by its root mean square.

    The arguments and results are those of `layer_norm_fn`.

    Example:
        >>> rms_norm_fn(torch.tensor([3.0, 4.0]), torch.ones(2), None)
        tensor([0.8485, 1.1314])
    """
    return layer_norm_fn(
        *(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale),
        *(prenorm, residual_in_fp32, True, return_dropout_mask),
    )


class RMSNorm(nn.Module):
    """The norm of `layer_norm`: adds a residual on the way; parameter `weight`, no bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create the weight, ones."""
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        # Official code reads the attribute; as None it is in no state_dict.
        self.register_parameter("bias", None)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor | None, ...]:
        """Call `rms_norm_fn` with the weight; dropout acts in training only."""
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
        )


def _dropout(branch: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """Drop entries with probability p and scale the others; return the kept ones too."""
    if p == 0.0:
        return branch, None
    kept = torch.rand_like(branch) > p
    return torch.where(kept, branch / (1 - p), branch.new_zeros(())), kept


def _check_options(
    where: str,
    x: Tensor,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    rowscale: Tensor | None,
) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ConfigError(f"{where}: dropout_p must satisfy 0 <= p < 1; got {dropout_p}.")
    if x1 is not None and rowscale is not None:
        raise ConfigError(f"{where}: rowscale and x1 exclude each other. Leave one of them out.")
    if bias1 is not None and weight1 is None:
        raise ConfigError(f"{where}: bias1 needs weight1; got none. Give both or neither.")
    for name, tensor in (("residual", residual), ("x1", x1)):
        if tensor is not None and tensor.shape != x.shape:
            raise ShapeError(
                f"{where}: {name} must have the shape of x {tuple(x.shape)}; "
                f"got {tuple(tensor.shape)}."
            )
    if rowscale is not None and rowscale.numel() != x.shape[:-1].numel():
        raise ShapeError(
            f"{where}: rowscale must have one factor per row of x {tuple(x.shape)}; "
            f"got shape {tuple(rowscale.shape)}."
        )
