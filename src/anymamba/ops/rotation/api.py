"""The door to the quaternion scan: checks, choice of implementation, unit length."""

from torch import Tensor

from anymamba.errors import BackendError
from anymamba.notation import bind_dims
from anymamba.ops.checks import check_floats, check_impl, guard
from anymamba.ops.packing import packing
from anymamba.ops.rotation.angles import check_rows
from anymamba.ops.rotation.quaternion import QuaternionScan, quaternion_normalize
from anymamba.ops.rotation.quaternion_scan import quaternion_scan
from anymamba.ops.rotation.reference import cumulate_quaternions_reference

__all__ = ["cumulate_quaternions"]


def cumulate_quaternions(
    increment_bshj4: Tensor,
    initial_bhj4: Tensor,
    *,
    impl: str = "auto",
    cu_seqlens: Tensor | None = None,
) -> QuaternionScan:
    """Multiply rotation increments over time, from a given rotation to a returned one.

        cum[t] = q[t] (x) ... (x) q[1] (x) initial, scaled to unit length

    Args:
        increment_bshj4: the rotation each token adds; unit quaternions.
        initial_bhj4: the rotation before the first token; one row per sequence when packed.
        impl: "auto" and "portable" run the operator, "reference" a loop over tokens.
        cu_seqlens: borders of packed sequences; batch must then be 1.

    Returns:
        `QuaternionScan`; an empty sequence ends at its initial rotation, scaled to unit length.

    Raises:
        ShapeError: the sizes disagree.
        DtypeError: the dtypes are not those of activations and their accumulators.
        PackingError: the borders do not describe the row.
        BackendError: `impl="native"`; there is no such kernel.

    Example:
        >>> import torch
        >>> quarter = torch.tensor([0.5, 0.5, 0.5, 0.5]).expand(1, 3, 1, 1, 4)
        >>> unit = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4)
        >>> cumulate_quaternions(quarter, unit).final_bhj4.flatten()
        tensor([-1.,  0.,  0.,  0.])
    """
    where = "cumulate_quaternions"
    check_impl(where, impl)
    if cu_seqlens is None:
        bind_dims(where, increment_bshj4=increment_bshj4, initial_bhj4=initial_bhj4)
    else:
        dims = bind_dims(where, increment_bshj4=increment_bshj4, initial_qhj4=initial_bhj4)
        pack = packing(where, cu_seqlens, dims["b"], dims["s"], increment_bshj4.device)
        check_rows(where, pack, dims["q"])
    compute = check_floats(where, {"increment": increment_bshj4}, {"initial": initial_bhj4})
    guard(where, increment=increment_bshj4, initial=initial_bhj4)
    increment_bshj4, initial_bhj4 = increment_bshj4.to(compute), initial_bhj4.to(compute)
    if impl == "native":
        raise BackendError(
            f"{where}: impl='native' cannot run: no native kernel exists for this operator. "
            "Use impl='auto'."
        )
    if impl == "reference":
        return cumulate_quaternions_reference(increment_bshj4, initial_bhj4, cu_seqlens=cu_seqlens)
    cum_bshj4, final_bhj4 = quaternion_scan(increment_bshj4, initial_bhj4, cu_seqlens)
    return QuaternionScan(quaternion_normalize(cum_bshj4), quaternion_normalize(final_bhj4))
