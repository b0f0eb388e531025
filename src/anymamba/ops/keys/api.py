"""The door to keys and queries: checks, and who computes. The mathematics is in `README.md`."""

from typing import NamedTuple

import torch
from torch import Tensor

from anymamba.errors import BackendError, ConfigError, DtypeError, ShapeError
from anymamba.notation import Dims, bind_dims
from anymamba.ops.boundary import Operator
from anymamba.ops.checks import check_device, check_floats, check_groups, guard
from anymamba.ops.keys.reference import by_angle_reference, by_quaternion_reference
from anymamba.ops.keys.schema import KEYS_BY_ANGLE, KEYS_BY_QUATERNION
from anymamba.ops.packing import packing
from anymamba.ops.rotation import PAIRINGS
from anymamba.ops.select import select_impl

__all__ = ["Keys", "keys_by_angle", "keys_by_quaternion"]


class Keys(NamedTuple):
    """Rotated keys and queries of every head, and the rotation after the last token."""

    b_bsmhr: Tensor
    c_bsmhr: Tensor
    final: Tensor  # angles (b, h, a) in [-pi, pi], or unit quaternions (b, h, j, 4)


def keys_by_angle(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    rate_bsa: Tensor,
    dt_bsh: Tensor,
    initial_bha: Tensor,
    *,
    eps: tuple[float, float] = (1e-5, 1e-5),
    pairing: str = "interleaved",
    turns: bool = True,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> Keys:
    """Norm keys and queries, give each head its bias, and turn pairs by the cumulative angle.

        angle[t] = angle[t-1] + dt[t] * rate[t]                   pair -> pair * exp(i angle)
        b[t] = turn(rms_norm(b_raw[t]) * weight + bias)           c likewise, by the same angle

    Args:
        b_bsmgr: raw keys, one row per rank and group.
        c_bsmgr: raw queries.
        b_weight_r: scales the normed keys; any floating dtype.
        c_weight_r: scales the normed queries.
        b_bias_hmr: added to the keys of each head and rank.
        c_bias_hmr: added to the queries.
        rate_bsa: angle per unit of dt, shared by the heads; a <= r / 2 when it turns.
        dt_bsh: step sizes.
        initial_bha: angles before the first token; one row per sequence when packed.
        eps: inside the roots of the norms of keys and queries; positive.
        pairing: "interleaved" pairs entries (2j, 2j + 1), "half_split" (j, j + r / 2).
        turns: False leaves keys and queries unturned and only accumulates the angle.
        impl: `auto` takes the compiled kernel where it can; `native` insists on it; `portable` is
            plain torch; `reference` goes token by token.
        cu_seqlens: borders of packed sequences; batch must then be 1.

    Returns:
        Keys, queries and the last angles; an empty sequence ends at its initial angle, wrapped.

    Raises:
        ShapeError: sizes disagree.
        DtypeError: the dtypes are not those of activations and their accumulators.
        DeviceError: arguments live on different devices.
        ConfigError: groups do not divide heads, or a choice is unknown.
        PackingError: the borders do not describe the row.
        BackendError: `impl` cannot serve the call.

    Example:
        >>> ones, bias = torch.ones(1, 1, 1, 1, 2), torch.zeros(1, 1, 2)
        >>> quarter, dt = torch.full((1, 1, 1), torch.pi / 2), torch.ones(1, 1, 1)
        >>> weight, zero = torch.ones(2), torch.zeros(1, 1, 1)
        >>> keys = keys_by_angle(ones, ones, weight, weight, bias, bias, quarter, dt, zero)
        >>> keys.b_bsmhr.flatten().round(decimals=3).tolist()
        [-1.0, 1.0]
    """
    where = "keys_by_angle"
    if pairing not in PAIRINGS:
        raise ConfigError(f"{where}: pairing must be one of {PAIRINGS}; got {pairing!r}.")
    rows = "initial_bha" if cu_seqlens is None else "initial_qha"
    dims = bind_dims(
        where,
        **_named(b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr),
        rate_bsa=rate_bsa,
        dt_bsh=dt_bsh,
        **{rows: initial_bha},
    )
    _check_width(where, dims, 2, dims["a"], turns)
    compute = check_floats(
        where,
        {"b": b_bsmgr, "c": c_bsmgr},
        {
            "b_bias": b_bias_hmr,
            "c_bias": c_bias_hmr,
            "rate": rate_bsa,
            "dt": dt_bsh,
            "initial": initial_bha,
        },
    )
    _check_weights(where, b_bsmgr, b_weight_r, c_weight_r, eps, compute)
    borders = _borders(where, cu_seqlens, dims, b_bsmgr)
    rate_bsa, dt_bsh = rate_bsa.to(compute), dt_bsh.to(compute)
    initial_bha = initial_bha.to(compute)
    guard(where, b=b_bsmgr, c=c_bsmgr, rate=rate_bsa, dt=dt_bsh, initial=initial_bha)
    if impl == "reference":
        _check_reference(where, borders)
        return Keys(
            *by_angle_reference(
                (b_bsmgr, c_bsmgr),
                (b_weight_r, c_weight_r),
                (b_bias_hmr, c_bias_hmr),
                *(rate_bsa, dt_bsh, initial_bha, eps, pairing, turns, borders),
            )
        )
    groups = dims["g"]
    tensors = (
        *(b_bsmgr, c_bsmgr, b_weight_r.expand(groups, -1), c_weight_r.expand(groups, -1)),
        *(b_bias_hmr, c_bias_hmr, rate_bsa.unsqueeze(2).expand(-1, -1, groups, -1)),
        *(dt_bsh, initial_bha),
    )
    return _run(where, impl, KEYS_BY_ANGLE, tensors, (borders, *eps, pairing, turns))


def keys_by_quaternion(
    b_bsmgr: Tensor,
    c_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    b_bias_hmr: Tensor,
    c_bias_hmr: Tensor,
    raw_bshj3: Tensor,
    dt_bsh: Tensor,
    initial_bhj4: Tensor,
    *,
    eps: tuple[float, float] = (1e-5, 1e-5),
    rotation_range: float = 1.0,
    turns: bool = True,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> Keys:
    """Norm keys and queries, give each head its bias, and turn blocks by cumulative quaternions.

        cum[t] = q(raw[t], dt[t]) (x) cum[t-1], scaled to length 1      block -> conj(cum) (x) block
        b[t] = turn(rms_norm(b_raw[t]) * weight + bias)                 c likewise

    Args:
        b_bsmgr: raw keys, one row per rank and group.
        c_bsmgr: raw queries.
        b_weight_r: scales the normed keys; any floating dtype.
        c_weight_r: scales the normed queries.
        b_bias_hmr: added to the keys of each head and rank.
        c_bias_hmr: added to the queries.
        raw_bshj3: projected rotation vectors (see `quaternion_increment`); 4 j <= r when it turns.
        dt_bsh: step sizes.
        initial_bhj4: rotations before the first token; one row per sequence when packed.
        eps: inside the roots of the norms of keys and queries; positive.
        rotation_range: largest angle per unit of dt, in half turns.
        turns: False leaves keys and queries unturned and only accumulates the rotation.
        impl: `auto` takes the compiled kernel where it can; `native` insists on it; `portable` is
            plain torch; `reference` goes token by token.
        cu_seqlens: borders of packed sequences; batch must then be 1.

    Returns:
        Keys, queries and the last rotations; an empty sequence ends at its initial one, scaled to
        unit length.

    Raises:
        ShapeError: sizes disagree.
        DtypeError: the dtypes are not those of activations and their accumulators.
        DeviceError: arguments live on different devices.
        ConfigError: groups do not divide heads, or a choice is unknown.
        PackingError: the borders do not describe the row.
        BackendError: `impl` cannot serve the call.
    """
    where = "keys_by_quaternion"
    rows = "initial_bhj4" if cu_seqlens is None else "initial_qhj4"
    dims = bind_dims(
        where,
        **_named(b_bsmgr, c_bsmgr, b_weight_r, c_weight_r, b_bias_hmr, c_bias_hmr),
        raw_bshj3=raw_bshj3,
        dt_bsh=dt_bsh,
        **{rows: initial_bhj4},
    )
    _check_width(where, dims, 4, dims["j"], turns)
    compute = check_floats(
        where,
        {"b": b_bsmgr, "c": c_bsmgr, "raw": raw_bshj3},
        {"b_bias": b_bias_hmr, "c_bias": c_bias_hmr, "dt": dt_bsh, "initial": initial_bhj4},
    )
    _check_weights(where, b_bsmgr, b_weight_r, c_weight_r, eps, compute)
    borders = _borders(where, cu_seqlens, dims, b_bsmgr)
    dt_bsh, initial_bhj4 = dt_bsh.to(compute), initial_bhj4.to(compute)
    guard(where, b=b_bsmgr, c=c_bsmgr, raw=raw_bshj3, dt=dt_bsh, initial=initial_bhj4)
    if impl == "reference":
        _check_reference(where, borders)
        return Keys(
            *by_quaternion_reference(
                (b_bsmgr, c_bsmgr),
                (b_weight_r, c_weight_r),
                (b_bias_hmr, c_bias_hmr),
                *(raw_bshj3, dt_bsh, initial_bhj4, eps, rotation_range, turns, borders),
            )
        )
    groups = dims["g"]
    tensors = (
        *(b_bsmgr, c_bsmgr, b_weight_r.expand(groups, -1), c_weight_r.expand(groups, -1)),
        *(b_bias_hmr, c_bias_hmr, raw_bshj3, dt_bsh, initial_bhj4),
    )
    return _run(where, impl, KEYS_BY_QUATERNION, tensors, (borders, *eps, rotation_range, turns))


def _named(*tensors: Tensor) -> dict[str, Tensor]:
    names = ("b_bsmgr", "c_bsmgr", "b_weight_r", "c_weight_r", "b_bias_hmr", "c_bias_hmr")
    return dict(zip(names, tensors, strict=True))


def _run(
    where: str, impl: str, operator: Operator, tensors: tuple[Tensor, ...], constants: tuple
) -> Keys:
    kernel = select_impl(where, impl, operator, tensors)
    if kernel == "portable":
        # Not through the operator: each part saves what its own backward needs, and a compiler
        # sees all of them.
        return Keys(*operator.composite(*tensors, *constants))
    return Keys(*operator(*tensors, *constants, kernel=kernel))


def _check_width(where: str, dims: Dims, parts: int, count: int, turns: bool) -> None:
    check_groups(where, dims["h"], dims["g"])
    if turns and (dims["r"] % parts or parts * count > dims["r"]):
        raise ShapeError(
            f"{where}: the state must hold the turning part, {count} units of {parts} entries, and "
            f"be a multiple of {parts}; got state size {dims['r']}."
        )


def _check_weights(
    where: str,
    b_bsmgr: Tensor,
    b_weight_r: Tensor,
    c_weight_r: Tensor,
    eps: tuple[float, float],
    compute: torch.dtype,
) -> None:
    for name, weight_r in (("b_weight", b_weight_r), ("c_weight", c_weight_r)):
        if not weight_r.is_floating_point():
            raise DtypeError(f"{where}: {name} must be floating point; got {weight_r.dtype}.")
        check_device(where, name, weight_r, "b", b_bsmgr)
    for small in eps:
        if not small >= torch.finfo(compute).tiny:
            raise ConfigError(
                f"{where}: eps must be positive and not vanish in {compute}; got {small}. "
                "The official value is 1e-5."
            )


def _borders(where: str, cu_seqlens: Tensor | None, dims: Dims, like: Tensor) -> Tensor | None:
    if cu_seqlens is None:
        return None
    pack = packing(where, cu_seqlens, dims["b"], dims["s"], like.device)
    if dims["q"] != pack.count:
        raise ShapeError(
            f"{where}: initial needs one row per packed sequence ({pack.count}); "
            f"got {dims['q']} rows."
        )
    return pack.cu_seqlens


def _check_reference(where: str, borders: Tensor | None) -> None:
    if borders is not None and torch.compiler.is_compiling():
        raise BackendError(
            f"{where}: impl='reference' reads the borders of packed sequences, which a traced call "
            "does not have. Use impl='portable'."
        )
