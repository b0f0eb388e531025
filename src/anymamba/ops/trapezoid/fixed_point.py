"""Where the Mamba-3 recurrence settles when it is fed the same token for ever."""

import torch
from torch import Tensor

from anymamba.errors import ConfigError, ShapeError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_one_precision, guard
from anymamba.ops.numerics import full_precision
from anymamba.ops.rotation import PAIRINGS, quaternion_multiply
from anymamba.ops.trapezoid.coefficients import TrapezoidCoefficients

__all__ = ["trapezoid_fixed_point"]


def trapezoid_fixed_point(
    v_bmhp: Tensor,
    b_bmhr: Tensor,
    c_bmhr: Tensor,
    coefficients: TrapezoidCoefficients,
    *,
    angle_bha: Tensor | None = None,
    pairing: str = "interleaved",
    quaternion_bhj4: Tensor | None = None,
) -> Tensor:
    """Return the limit of the output under a constant token.

        y[q] = sum_q' <c[q], F b[q']> v[q'],   F = (gamma + beta R) (1 - alpha R)^-1

    R is what one step's rotation does to an older key, seen from the newest. The denominators are
    formed without cancellation (README section 5), so alpha may come as close to 1 as the dtype
    allows.

    Args:
        v_bmhp: values of the token.
        b_bmhr: keys after norm and bias, not rotated.
        c_bmhr: queries after norm and bias, not rotated.
        coefficients: dt, da and lam of the token; each (b, h).
        angle_bha: one step's rotation angles; the first a pairs of the state rotate.
        pairing: "interleaved" or "half_split"; how the state pairs up.
        quaternion_bhj4: one step's unit quaternions; the first j blocks of the state rotate.
    """
    where = "trapezoid_fixed_point"
    if angle_bha is not None and quaternion_bhj4 is not None:
        raise ConfigError(f"{where}: give angles or quaternions, not both.")
    bind_dims(
        where,
        v_bmhp=v_bmhp,
        b_bmhr=b_bmhr,
        c_bmhr=c_bmhr,
        dt_bh=coefficients.dt,
        da_bh=coefficients.da,
        lam_bh=coefficients.lam,
        angle_bha=angle_bha,
        quaternion_bhj4=quaternion_bhj4,
    )
    compute = check_one_precision(
        where,
        v_bmhp=v_bmhp,
        b_bmhr=b_bmhr,
        c_bmhr=c_bmhr,
        angle_bha=angle_bha,
        quaternion_bhj4=quaternion_bhj4,
        **coefficients._asdict(),
    )
    if pairing not in PAIRINGS:
        raise ConfigError(f"{where}: pairing must be one of {PAIRINGS}; got {pairing!r}.")
    size = b_bmhr.shape[-1]
    if angle_bha is not None and (size % 2 or 2 * angle_bha.shape[-1] > size):
        raise ShapeError(
            f"{where}: {angle_bha.shape[-1]} angles turn twice as many entries of an even state; "
            f"got a state of {size}."
        )
    if quaternion_bhj4 is not None and 4 * quaternion_bhj4.shape[2] > size:
        raise ShapeError(
            f"{where}: {quaternion_bhj4.shape[2]} blocks turn four times as many entries; "
            f"got a state of {size}."
        )
    guard(where, v_bmhp=v_bmhp, b_bmhr=b_bmhr, c_bmhr=c_bmhr, **coefficients._asdict())
    coefficients = TrapezoidCoefficients(*(x.to(compute) for x in coefficients))
    key_bmhr = b_bmhr.to(compute)
    plain_bmhr = _plain_gain(coefficients)[:, None, :, None] * key_bmhr
    if angle_bha is not None:
        settled_bMhr = _settle_pairs(key_bmhr, plain_bmhr, coefficients, angle_bha, pairing)
    elif quaternion_bhj4 is not None:
        settled_bMhr = _settle_blocks(key_bmhr, plain_bmhr, coefficients, quaternion_bhj4)
    else:
        settled_bMhr = plain_bmhr
    with full_precision(v_bmhp):
        query_bmhr, value_bMhp = c_bmhr.to(compute), v_bmhp.to(compute)
        gram_bhmM = torch.einsum("bmhr,bMhr->bhmM", query_bmhr, settled_bMhr)
        return torch.einsum("bhmM,bMhp->bmhp", gram_bhmM, value_bMhp).to(v_bmhp.dtype)


def _gap(coefficients: TrapezoidCoefficients) -> Tensor:
    """Return 1 - alpha, kept where one can divide by it."""
    return (-torch.expm1(coefficients.da)).clamp(min=torch.finfo(coefficients.da.dtype).tiny)


def _both(coefficients: TrapezoidCoefficients) -> Tensor:
    """Return (gamma + beta) / dt, in which lam is not lost where alpha is near 1."""
    return 1 - (1 - coefficients.lam) * _gap(coefficients)


def _plain_gain(coefficients: TrapezoidCoefficients) -> Tensor:
    return coefficients.dt / _gap(coefficients) * _both(coefficients)


def _unit(gap_bh1: Tensor, turn_bhx: Tensor) -> Tensor:
    """Return what gap and turn are measured in: the larger one, a constant for gradients."""
    return torch.maximum(gap_bh1, turn_bhx.abs()).detach()


def _gains(
    coefficients: TrapezoidCoefficients, unit: Tensor, versine: Tensor
) -> tuple[Tensor, Tensor]:
    """Return F's real part, and the factor that makes its imaginary part out of a scaled sine.

    `versine` is 1 - cos of the angle over the square of `unit`, and a scaled sine is one over
    `unit`; all (b, h, x). With g = (1 - alpha) / unit and D = g^2 + 2 alpha versine:

        Re F = ((gamma + beta) / unit g + dt alpha (2 lam - 1) versine) / D
        Im F = -dt alpha / unit sin / D
    """
    alpha, gap = coefficients.da.exp().unsqueeze(-1), _gap(coefficients).unsqueeze(-1) / unit
    dt, lam = coefficients.dt.unsqueeze(-1), coefficients.lam.unsqueeze(-1)
    both = _both(coefficients).unsqueeze(-1)
    size = gap.square() + 2 * alpha * versine
    real = (dt / unit * gap * both + dt * alpha * (2 * lam - 1) * versine) / size
    return real, dt / unit * alpha / size


def _settle_pairs(
    key_bmhr: Tensor,
    plain_bmhr: Tensor,
    coefficients: TrapezoidCoefficients,
    angle_bha: Tensor,
    pairing: str,
) -> Tensor:
    size, angles = key_bmhr.shape[-1], angle_bha.shape[-1]
    half_angle_bha = angle_bha / 2
    sine_bha = half_angle_bha.sin()
    unit_bha = _unit(_gap(coefficients).unsqueeze(-1), sine_bha)
    scaled_bha = sine_bha / unit_bha
    real_bha, factor_bha = _gains(coefficients, unit_bha, 2 * scaled_bha.square())
    real = real_bha.unsqueeze(1)
    imaginary = (-factor_bha * (2 * scaled_bha * half_angle_bha.cos())).unsqueeze(1)
    if pairing == "interleaved":
        first, second = key_bmhr[..., 0 : 2 * angles : 2], key_bmhr[..., 1 : 2 * angles : 2]
    else:
        half = size // 2
        first, second = key_bmhr[..., :angles], key_bmhr[..., half : half + angles]
    settled = real * first - imaginary * second, imaginary * first + real * second
    if pairing == "interleaved":
        rotated = torch.stack(settled, -1).flatten(-2)
        return torch.cat([rotated, plain_bmhr[..., 2 * angles :]], -1)
    half = size // 2
    parts = settled[0], plain_bmhr[..., angles:half], settled[1], plain_bmhr[..., half + angles :]
    return torch.cat(parts, -1)


def _settle_blocks(
    key_bmhr: Tensor,
    plain_bmhr: Tensor,
    coefficients: TrapezoidCoefficients,
    quaternion_bhj4: Tensor,
) -> Tensor:
    real_part, vector = quaternion_bhj4[..., 0], quaternion_bhj4[..., 1:]
    is_short = real_part > 0
    turn_bhj = torch.where(is_short, vector.abs().amax(-1), 1)
    unit_bhj = _unit(_gap(coefficients).unsqueeze(-1), turn_bhj)
    scaled_bhj3 = vector / unit_bhj.unsqueeze(-1)
    # 1 - w from the vector part where w is near 1: the difference itself would cancel. Elsewhere
    # the unit is 1.
    small = scaled_bhj3.square().sum(-1) / (1 + real_part.clamp(min=0))
    versine_bhj = torch.where(is_short, small, 1 - real_part)
    real_bhj, factor_bhj = _gains(coefficients, unit_bhj, versine_bhj)
    gain_bhj4 = torch.cat([real_bhj.unsqueeze(-1), factor_bhj.unsqueeze(-1) * scaled_bhj3], -1)
    width = 4 * quaternion_bhj4.shape[2]
    blocks = key_bmhr[..., :width].unflatten(-1, (-1, 4))
    settled = quaternion_multiply(gain_bhj4.unsqueeze(1), blocks).flatten(-2)
    return torch.cat([settled, plain_bmhr[..., width:]], -1)
