"""The selective scan of Mamba-1: arguments are checked here, the mathematics is elsewhere."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import ConfigError, DtypeError, ShapeError
from anymamba.notation import Dims, bind_dims, spell
from anymamba.ops.checks import check_floats, guard
from anymamba.ops.packing import packing
from anymamba.ops.select import select_impl
from anymamba.ops.selective_scan.reference import selective_scan_reference
from anymamba.ops.selective_scan.schema import SELECTIVE_SCAN

__all__ = ["ScanOutput", "selective_scan"]

_FORMS = {2: "ir", 3: "bsr", 4: "bsgr"}


class ScanOutput(NamedTuple):
    """What a scan returns."""

    y_bsi: Tensor  # outputs, in the dtype of the inputs
    final_bir: (
        Tensor  # state after the last token (packed: one row per sequence), accumulated dtype
    )


def selective_scan(
    u_bsi: Tensor,
    dt_bsi: Tensor,
    a_ir: Tensor,
    b: Tensor,
    c: Tensor,
    skip_i: Tensor | None = None,
    initial_bir: Tensor | None = None,
    *,
    z_bsi: Tensor | None = None,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> ScanOutput:
    """Run the Mamba-1 scan over a sequence, from a given state to a returned state.

        h[t] = exp(dt[t] A) h[t-1] + (dt[t] u[t]) B[t]
        y[t] = (sum over r of C[t] h[t] + skip u[t]) silu(z[t])

    Args:
        u_bsi: inputs.
        dt_bsi: step sizes after softplus; positive; the dtype of `u_bsi` or the accumulated one.
        a_ir: decay rates; negative for a stable state.
        b: input coefficients: constant `(i, r)`, per token `(b, s, r)` or grouped `(b, s, g, r)`,
            where g divides i and channel k reads group k // (i / g).
        c: output coefficients, in any of the same three forms.
        skip_i: weight of the direct path from u to y; none when omitted.
        initial_bir: state before the first token; zeros when omitted; receives a gradient when
            given; one row per sequence when packed.
        z_bsi: the gate, in the dtype of `u_bsi`; none when omitted.
        impl: `auto` takes the compiled kernel where it can; `native` insists on it; `portable` is
            plain torch; all recompute chunk by chunk in the backward; `reference` is the plain loop
            over time.
        cu_seqlens: borders of sequences packed into one row of batch 1.

    Returns:
        Outputs and final states; both carry gradients.

    Raises:
        ShapeError: a rank is wrong or sizes disagree.
        DtypeError: an argument is no tensor, not floating point, or of a mixed dtype.
        DeviceError: arguments live on different devices.
        ConfigError: groups do not divide the channels, or `impl` is unknown.
        PackingError: `cu_seqlens` does not describe the row.
        BackendError: `impl="native"` cannot serve the call.

    Example:
        >>> u = dt = torch.ones(1, 3, 1)
        >>> one = torch.ones(1, 1)
        >>> selective_scan(u, dt, torch.zeros(1, 1), one, one).y_bsi.flatten()
        tensor([1., 2., 3.])
    """
    where = "selective_scan"
    dims = bind_dims(where, u_bsi=u_bsi, dt_bsi=dt_bsi, a_ir=a_ir, skip_i=skip_i, z_bsi=z_bsi)
    groups = math.lcm(_bind(where, "b", b, dims), _bind(where, "c", c, dims))
    pack = None
    if cu_seqlens is not None:
        pack = packing(where, cu_seqlens, dims["b"], dims["s"], u_bsi.device)
    rows = dims["b"] if pack is None else pack.count
    _check_initial(where, initial_bir, rows, dims, packed=pack is not None)
    varying, constant = _split_by_form(b=b, c=c)
    compute = check_floats(
        where,
        {"u_bsi": u_bsi, "z_bsi": z_bsi, **varying},
        {"dt_bsi": dt_bsi, "a_ir": a_ir, "skip_i": skip_i, "initial_bir": initial_bir, **constant},
    )
    guard(
        where,
        u_bsi=u_bsi,
        dt_bsi=dt_bsi,
        a_ir=a_ir,
        b=b,
        c=c,
        skip_i=skip_i,
        initial_bir=initial_bir,
        z_bsi=z_bsi,
    )
    if initial_bir is None:
        initial_bir = torch.zeros(rows, *a_ir.shape, dtype=compute, device=u_bsi.device)
    tensors = (
        *(u_bsi, dt_bsi, a_ir, _regroup(b, groups), _regroup(c, groups), initial_bir),
        a_ir.new_empty(0) if skip_i is None else skip_i,
        u_bsi.new_empty(*u_bsi.shape[:2], 0) if z_bsi is None else z_bsi,
    )
    kernel = select_impl(where, impl, SELECTIVE_SCAN, tensors)
    if kernel == "reference":
        borders = None if pack is None else pack.cu_seqlens
        y_bsi, final_bir = selective_scan_reference(
            u_bsi, dt_bsi, a_ir, b, c, skip_i, initial_bir, z_bsi=z_bsi, cu_seqlens=borders
        )
    else:
        y_bsi, final_bir = SELECTIVE_SCAN(
            *tensors,
            *("b" in constant, "c" in constant),
            None,
            *((None, None, None) if pack is None else pack[:3]),
            kernel=kernel,
        )
    guard(where, y_bsi=y_bsi, final_bir=final_bir)
    return ScanOutput(y_bsi, final_bir)


def _bind(where: str, name: str, coefficient: Tensor, dims: Dims) -> int:
    """Check the shape of B or C against the sizes that are known, and return its groups."""
    if not isinstance(coefficient, Tensor):
        given = type(coefficient).__name__
        raise DtypeError(f"{where}: {name} must be a tensor; got {given}.")
    if coefficient.dim() not in _FORMS:
        forms = " or ".join(f"({spell(layout)})" for layout in _FORMS.values())
        raise ShapeError(
            f"{where}: {name} must have the axes {forms}; got shape {tuple(coefficient.shape)}."
        )
    layout = _FORMS[coefficient.dim()]
    found = bind_dims(where, **{f"{name}_{layout}": coefficient})
    for letter, size in found.items():
        if size != dims.get(letter, size):
            raise ShapeError(
                f"{where}: {name} must have {spell(letter)} {dims[letter]} on axis "
                f"{layout.index(letter)}; got shape {tuple(coefficient.shape)}."
            )
    groups = found.get("g", 1)
    if dims["i"] % groups:
        raise ConfigError(
            f"{where}: the groups of {name} must divide the inner width {dims['i']}; got {groups}."
        )
    return groups


def _check_initial(
    where: str, initial_bir: Tensor | None, rows: int, dims: Dims, *, packed: bool
) -> None:
    if initial_bir is None:
        return
    found = bind_dims(where, initial_bir=initial_bir)
    expected = {"b": rows, "i": dims["i"], "r": dims["r"]}
    if found != expected:
        meaning = "one row per packed sequence" if packed else "one row per batch row"
        raise ShapeError(
            f"{where}: initial_bir must have shape {tuple(expected.values())} ({meaning}); "
            f"got {tuple(found.values())}."
        )


def _split_by_form(**coefficients: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Part B and C into those that vary with time (activations) and constants (parameters)."""
    varying = {name: x for name, x in coefficients.items() if x.dim() > 2}
    return varying, {name: x for name, x in coefficients.items() if x.dim() == 2}


def _regroup(coefficient: Tensor, groups: int) -> Tensor:
    """Leave a constant alone; write the other forms as (b, s, groups, r)."""
    if coefficient.dim() == 2:
        return coefficient
    if coefficient.dim() == 3:
        coefficient = coefficient.unsqueeze(2)
    own = coefficient.shape[2]
    if own == groups:
        return coefficient
    return coefficient.unsqueeze(3).expand(-1, -1, -1, groups // own, -1).flatten(2, 3)
