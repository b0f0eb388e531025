"""Linear layers of half types on a CPU that has no matrix product for them.

Without bfloat16 instructions torch multiplies half types ten to thirty times more slowly than
float32. There the operands are widened: products and sums are those of float32, and the result is
rounded once. Weights are widened panel by panel, so that no second copy of them is ever held. Under
autocast weights are float32 already: they are multiplied as they are, and so are their gradients
left, because rounding them would take time and buy nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anymamba.ops.numerics import full_precision

__all__ = ["as_autocast", "is_traced", "linear", "product_dtype"]

# Below this many rows torch's product of a half matrix and a vector reads fewer bytes.
_ROWS = 4
# Of a widened panel: as much as stays in the caches beside what it is multiplied with.
_PANEL_BYTES = 8 * 2**20


def _half_products() -> dict[torch.dtype, bool]:
    if not torch.backends.mkldnn.is_available():
        return {torch.bfloat16: False, torch.float16: False}
    return {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }


# Asked once: a traced function cannot ask.
_HAS_PRODUCT = _half_products()


def linear(x: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None) -> Tensor:
    """Return `x @ weight^T + bias`, as `torch.nn.functional.linear` does, and autocast with it.

    Args:
        x: any leading axes; the last one is the weight's last.
        weight_oi: one row per output.
        bias_o: is added; nothing by default.

    Example:
        >>> linear(torch.ones(4, 2).bfloat16(), torch.ones(1, 2).bfloat16())[0]
        tensor([2.], dtype=torch.bfloat16)
    """
    if x.numel() < _ROWS * x.shape[-1] or not _widens(x, weight_oi):
        return F.linear(x, weight_oi, bias_o)
    narrow = _autocast_dtype(x, weight_oi) or x.dtype
    x = x.to(narrow)
    with full_precision(x):
        if is_traced():
            wide_bias_o = None if bias_o is None else bias_o.float()
            return F.linear(x.float(), weight_oi.float(), wide_bias_o).to(narrow)
        return _Widened.apply(x, weight_oi, bias_o, narrow)  # pyright: ignore[reportReturnType]


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as autocast gives them to a matrix product; unchanged where it is off."""
    dtype = _autocast_dtype(*tensors)
    return tensors if dtype is None else tuple(t.to(dtype) for t in tensors)


def product_dtype(*tensors: Tensor) -> torch.dtype | None:
    """Return the dtype in which the tensors are multiplied: what autocast wants, or their own.

    Float32 where the device has no product for that: nothing is rounded first. None where autocast
    is off and the dtypes differ, which is for the caller to refuse.

    Example:
        >>> product_dtype(torch.ones(2))
        torch.float32
    """
    narrow = _autocast_dtype(*tensors)
    if narrow is None and len({t.dtype for t in tensors}) == 1:
        narrow = tensors[0].dtype
    if narrow is not None and lacks_product(tensors[0].device, narrow):
        return torch.float32
    return narrow


def is_traced() -> bool:
    """Return whether a compiler or a function transform looks on, which wants to see formulas."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def lacks_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has only a slow matrix product for this device and dtype."""
    return device.type == "cpu" and not _HAS_PRODUCT.get(dtype, True)


def _autocast_dtype(*tensors: Tensor) -> torch.dtype | None:
    device = tensors[0].device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return None
    # As in torch, autocast leaves float64 alone.
    if any(t.dtype == torch.float64 for t in tensors):
        return None
    return torch.get_autocast_dtype(device)


def _widens(x: Tensor, weight_oi: Tensor) -> bool:
    # A distributed tensor knows how to multiply itself, and an empty weight has no panels.
    plain = (Tensor, torch.nn.Parameter)
    if type(x) not in plain or type(weight_oi) not in plain or weight_oi.numel() == 0:
        return False
    # Nothing is cast to find out: where torch multiplies, it casts, and keeps what it cast.
    dtype = _autocast_dtype(x, weight_oi)
    if dtype is None and x.dtype != weight_oi.dtype:
        return False
    return lacks_product(x.device, dtype or x.dtype)


class _Widened(torch.autograd.Function):
    """`x @ weight^T + bias` in float32, rounded once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_oi: Tensor, bias_o: Tensor | None, result: torch.dtype
    ) -> Tensor:
        """Multiply by one panel of the weight after the other.

        Args:
            ctx: keeps what the gradients need, in the dtypes in which it was given.
            x: float32 or a half type, as the weight and the bias.
            weight_oi: one row per output.
            bias_o: is added to the float32 product.
            result: dtype of what is returned.
        """
        for_x, for_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if for_weight else None, weight_oi if for_x else None)
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight_oi.dtype
        ctx.bias_dtype = None if bias_o is None else bias_o.dtype
        x_si = x.flatten(0, -2).float()
        out, inner = weight_oi.shape
        is_wide = result == torch.float32
        panel = out
        if weight_oi.dtype != torch.float32:
            panel = -(-out // -(-4 * inner * out // _PANEL_BYTES))
        # The result itself is no view: one made in here could not be changed in place.
        y = x.new_empty(*x.shape[:-1], out, dtype=result)
        y_so = y.view(-1, out)
        buffer = x_si.new_empty(0 if is_wide else x_si.shape[0] * panel)
        for start in range(0, out, panel):
            panel_oi = weight_oi[start : start + panel].float()
            width = panel_oi.shape[0]
            target_so = y_so[:, start : start + width]
            piece_so = target_so if is_wide else buffer[: x_si.shape[0] * width].view(-1, width)
            torch.mm(x_si, panel_oi.T, out=piece_so)
            if bias_o is not None:
                piece_so += bias_o[start : start + width]
            if not is_wide:
                target_so.copy_(piece_so)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients are products of the same kind, so they can be differentiated again."""
        x, weight_oi = ctx.saved_tensors
        grad_so = grad.flatten(0, -2)
        grad_x = grad_weight_oi = grad_bias_o = None
        if ctx.needs_input_grad[0]:
            grad_x = _Widened.apply(grad, weight_oi.T, None, ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            x_is = x.flatten(0, -2).T
            grad_weight_oi = _Widened.apply(grad_so.T, x_is, None, ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias_o = grad_so.sum(0, dtype=ctx.bias_dtype)
        return grad_x, grad_weight_oi, grad_bias_o, None
