"""The door to cross-entropy: checks, autocast, and the choice of who computes.

The mathematics is in `README.md`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.errors import BackendError, ConfigError, DeviceError, DtypeError, ShapeError
from anymamba.ops.checks import check_floats, guard
from anymamba.ops.half_linear import as_autocast, is_traced, product_dtype
from anymamba.ops.loss.head import HeadLoss, checkpointed_loss, sum_of_losses
from anymamba.ops.loss.reference import cross_entropy_reference
from anymamba.ops.loss.schema import CROSS_ENTROPY_ROWS
from anymamba.ops.loss.targets import IGNORE, check_entries
from anymamba.ops.select import select_impl

__all__ = ["IGNORE", "cross_entropy_rows", "head_cross_entropy"]


# Logits of a head that are alive at a time.
PIECE_BYTES = 64 * 2**20


def cross_entropy_rows(logits_sw: Tensor, targets_s: Tensor, *, impl: str = "auto") -> Tensor:
    """Return the cross-entropy of each row of logits with its target.

        loss[s] = log(sum over w of exp(logits[s, w])) - logits[s, targets[s]]

    Args:
        logits_sw: one row per prediction; sums are float32 for half types.
        targets_s: the right entry of each row; int64; -100 does not count.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        One loss per row, 0 where the target is -100; float32 for half types.

    Raises:
        ShapeError: the shapes disagree, or a target is no entry of a row.
        DtypeError: logits are not floating point, or targets not int64.
        DeviceError: targets are on another device.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> cross_entropy_rows(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor([1.3863, 0.0000])
    """
    where = "cross_entropy_rows"
    check_floats(where, {"logits": logits_sw})
    if logits_sw.dim() != 2:
        raise ShapeError(
            f"{where}: logits must have the axes (rows, entries); got {tuple(logits_sw.shape)}. "
            "Flatten what comes before the entries, targets likewise."
        )
    _check_targets(where, targets_s, logits_sw, logits_sw.shape[1])
    guard(where, logits=logits_sw)
    kernel = select_impl(where, impl, CROSS_ENTROPY_ROWS, (logits_sw,))
    if kernel == "reference":
        return cross_entropy_reference(logits_sw, targets_s)
    return CROSS_ENTROPY_ROWS(logits_sw, targets_s, kernel=kernel)[0]


def head_cross_entropy(
    hidden_sd: Tensor,
    weight_wd: Tensor,
    targets_s: Tensor,
    *,
    rows: int | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the summed cross-entropy of `hidden @ weight^T`, without ever holding all logits.

    With gradients on, they are computed in the same pass over each piece of logits, and the
    backward scales them. Under autocast the products run in its dtype, and in float32 where the
    CPU has no product for it.

    Args:
        hidden_sd: normalised hidden states.
        weight_wd: the head's weight, one row per token.
        targets_s: the token each row predicts; -100 does not count.
        rows: rows of logits that are alive at a time; positive. As many as 64 MB hold by default.
        impl: "auto", "portable", "native" or "reference".

    Returns:
        The sum over all rows that count; float32 for half types.

    Raises:
        ShapeError: the shapes disagree, or a target is no token.
        DtypeError: an argument has the wrong kind of dtype.
        DeviceError: the arguments are not on one device.
        ConfigError: `rows` is not positive.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> head_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([1, -100]))
        tensor(1.3863)
    """
    where = "head_cross_entropy"
    if hidden_sd.dim() != 2 or weight_wd.dim() != 2 or hidden_sd.shape[1] != weight_wd.shape[1]:
        raise ShapeError(
            f"{where}: hidden (s, d) and weight (w, d) must share their last axis; "
            f"got {tuple(hidden_sd.shape)} and {tuple(weight_wd.shape)}."
        )
    if rows is not None and rows < 1:
        raise ConfigError(f"{where}: rows must be positive; got {rows}.")
    hidden_sd, weight_wd = _for_head(where, hidden_sd, weight_wd, impl)
    if rows is None:
        row_bytes = max(1, weight_wd.shape[0]) * hidden_sd.element_size()
        rows = max(16, PIECE_BYTES // row_bytes)
    _check_targets(where, targets_s, hidden_sd, weight_wd.shape[0])
    guard(where, hidden=hidden_sd, weight=weight_wd)
    kernel = select_impl(where, impl, CROSS_ENTROPY_ROWS, (hidden_sd,))
    if kernel == "reference":
        return cross_entropy_reference(F.linear(hidden_sd, weight_wd), targets_s).sum()
    if is_traced() or type(weight_wd) not in (Tensor, torch.nn.Parameter):
        if kernel == "native":
            raise BackendError(
                f"{where}: impl='native' cannot serve this call: compilers, transforms and "
                "subclasses of tensors are given formulas. Use impl='auto' or impl='portable'."
            )
        return checkpointed_loss(hidden_sd, weight_wd, targets_s, rows)
    if torch.is_grad_enabled() and (hidden_sd.requires_grad or weight_wd.requires_grad):
        return HeadLoss.apply(  # pyright: ignore[reportReturnType]
            hidden_sd, weight_wd, targets_s, rows, kernel
        )
    return sum_of_losses(hidden_sd, weight_wd, targets_s, rows, kernel)


def _for_head(where: str, hidden_sd: Tensor, weight_wd: Tensor, impl: str) -> tuple[Tensor, Tensor]:
    """Return both as they are multiplied; a float32 weight is narrowed later, without a graph."""
    dtype = product_dtype(hidden_sd, weight_wd)
    if impl == "reference" or dtype is None:
        hidden_sd, weight_wd = as_autocast(hidden_sd, weight_wd)
        check_floats(where, {"hidden": hidden_sd, "weight": weight_wd})
        return hidden_sd, weight_wd
    hidden_sd = hidden_sd.to(dtype)
    if weight_wd.dtype != torch.float32:
        weight_wd = weight_wd.to(dtype)
    check_floats(where, {"hidden": hidden_sd}, {"weight": weight_wd})
    return hidden_sd, weight_wd


def _check_targets(where: str, targets_s: Tensor, like: Tensor, entries: int) -> None:
    rows = like.shape[0]
    if targets_s.dtype != torch.int64:
        raise DtypeError(f"{where}: targets must be int64; got {targets_s.dtype}.")
    if targets_s.device != like.device:
        raise DeviceError(
            f"{where}: targets must be on the device of what predicts them ({like.device}); "
            f"got {targets_s.device}. Move them with .to({str(like.device)!r})."
        )
    if targets_s.shape != (rows,):
        raise ShapeError(
            f"{where}: targets must have one entry per row ({rows},); got {tuple(targets_s.shape)}."
        )
    if not is_traced() and targets_s.device.type != "meta":
        check_entries(where, targets_s, entries)
