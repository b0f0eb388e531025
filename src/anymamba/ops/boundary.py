"""The operator boundary: how a scan becomes `anymamba::<name>_fwd` and `anymamba::<name>_bwd`.

An operator here has a forward body and a hand-written backward body in plain torch. `Operator`
registers both as opaque operators (a default body for every device, a fake for tracing), and puts
one `autograd.Function` around them that saves the inputs only.

    eager            Function -> bodies, called directly: portable, or the CPU kernel
    torch.compile    Function -> torch.ops.anymamba.*: one node for the compiler, at any length
    vmap             the mapped axis is merged into an axis the operator is batched over
    double backward  the differentiable `composite` is differentiated twice
    forward mode     refused: only references have it

Tensors that can carry a gradient come first in every signature and are always present; constants
(flags, sizes, borders) follow. The last constant of every registered operator is `kernel`, which
says who computes: "portable"; "native", the CPU kernel and nothing else; or "auto", the CPU kernel,
with second derivatives from the portable composite, which "native" refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from anymamba.errors import BackendError
from anymamba.ops.checks import guard
from anymamba.ops.native import Kernel, refusal_of
from anymamba.ops.numerics import full_precision

__all__ = ["LIBRARY", "Operator", "refuse_forward_mode"]

# The library object must stay alive for as long as the operators are registered.
LIBRARY = torch.library.Library("anymamba", "DEF")

Tensors = tuple[Tensor, ...]


class Operator:
    """One operator: bodies, fakes, dispatcher registration and the recompute Function.

    Args:
        name: becomes `anymamba::<name>_fwd` and `anymamba::<name>_bwd`.
        tensors: names of the differentiable tensors, in order.
        constants: schema of the rest, such as `bool strict, int chunk_len, Tensor? cu_seqlens`.
        outputs: number of results of the forward.
        forward: `(*tensors, *constants) -> outputs`.
        backward: `(*grad_outputs, *tensors, *constants) -> one gradient per tensor`.
        fake: shapes and dtypes of `forward`.
        composite: the same values as `forward`, from differentiable torch functions.
        merge_axes: `constants -> (axis per tensor, axis per output)` that vmap merges into.
        merge_constants: `(mapped size, tensors, constants) -> constants` of the merged call.
        native: the same bodies as a CPU kernel, if there is one.
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: Sequence[str],
        constants: str,
        outputs: int,
        forward: Callable[..., Tensors],
        backward: Callable[..., Tensors],
        fake: Callable[..., Tensors],
        composite: Callable[..., Tensors],
        merge_axes: Callable[..., tuple[Sequence[int], Sequence[int]]],
        merge_constants: Callable[..., tuple[Any, ...]],
        native: Kernel | None = None,
    ) -> None:
        """Register the pair and build the Function."""
        self.name = name
        self.width = len(tensors)
        self.outputs = outputs
        self.native = native
        bodies = [(f"{name}_fwd", forward, native and native.forward)]
        bodies += [(f"{name}_bwd", backward, native and native.backward)]
        self.forward, self.backward = (
            _named(named, _choosing(name, _in_full_precision(portable), kernel))
            for named, portable, kernel in bodies
        )
        self.composite = composite
        self.merge_axes = merge_axes
        self.merge_constants = merge_constants
        arguments = [*(f"Tensor {tensor}" for tensor in tensors), constants, "str kernel"]
        arguments = ", ".join(filter(None, arguments))
        gradients = ", ".join(f"Tensor grad_out_{place}" for place in range(outputs))
        LIBRARY.define(f"{name}_fwd({arguments}) -> ({_tensors(outputs)})")
        LIBRARY.define(f"{name}_bwd({gradients}, {arguments}) -> ({_tensors(self.width)})")
        LIBRARY.impl(f"{name}_fwd", _bare(self.forward, outputs), "CompositeExplicitAutograd")
        LIBRARY.impl(f"{name}_bwd", _bare(self.backward, self.width), "CompositeExplicitAutograd")
        fake_fwd = _bare(lambda *args: fake(*args[:-1]), outputs)
        torch.library.register_fake(f"anymamba::{name}_fwd", fake_fwd, lib=LIBRARY)
        fake_bwd = _bare(self._fake_backward, self.width)
        torch.library.register_fake(f"anymamba::{name}_bwd", fake_bwd, lib=LIBRARY)
        self.fwd_op = getattr(torch.ops.anymamba, f"{name}_fwd")
        self.bwd_op = getattr(torch.ops.anymamba, f"{name}_bwd")
        self.traced, self.function = _recompute_functions(self)

    def refusal(self, tensors: Sequence[Tensor]) -> str | None:
        """Say why the CPU kernel cannot serve these tensors; None when it can."""
        return refusal_of(self.native, tensors)

    def __call__(self, *args: Any, kernel: str = "portable") -> Tensors:
        """Run the operator: tensors, then constants; `kernel` as `select_impl` returned it."""
        args = (*args, kernel)
        tracks = torch.is_grad_enabled() and any(t.requires_grad for t in args[: self.width])
        if torch.compiler.is_compiling() and not tracks:
            # Without gradients Dynamo would hand the Function's forward one argument too many.
            return _as_tuple(self.fwd_op(*args))
        if torch.compiler.is_compiling():
            return self.traced.apply(*_distinct(args))
        return self.function.apply(*args) if _is_watched(tracks) else self.forward(*args)

    def _fake_backward(self, *args: Any) -> Tensors:
        tensors = args[self.outputs : self.outputs + self.width]
        return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)

    def differentiable_backward(self, *args: Any) -> Tensors:
        """Compute the backward from `composite`, so that it can be differentiated again."""
        grads, tensors, (*constants, kernel) = self.split(args)
        if kernel == "native":
            raise BackendError(
                f"{self.name}: impl='native' has no second derivative; the kernel's backward is "
                "not differentiable. Use impl='auto' or impl='portable', with "
                "path=SsdPath.serial() or SsdPath.minimal() where the operator has paths."
            )
        pull = torch.func.vjp(lambda *t: self.composite(*t, *constants), *tensors)[1]
        return pull(tuple(grads))

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Split a backward's arguments into output gradients, tensors and constants."""
        middle = self.outputs + self.width
        return args[: self.outputs], args[self.outputs : middle], args[middle:]


def _is_watched(tracks: bool) -> bool:
    """Say whether a derivative or a map may ask for the Function behind a call.

    Nobody else needs one, and it costs: torch inspects the signature of its forward in every call,
    with caches that the kernel before has filled with other things.
    """
    return (
        tracks
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def refuse_forward_mode(name: str) -> NoReturn:
    """Raise the `BackendError` of a Function that has no `jvp`."""
    raise BackendError(
        f"{name}: there is no forward-mode derivative (torch.func.jvp, jacfwd, hessian, dual "
        "numbers) of this implementation. Use impl='reference', or reverse mode "
        "(torch.func.vjp, jacrev)."
    )


def _distinct(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give a tensor that fills two arguments a second identity: Dynamo asks for distinct ones."""
    seen: list[Any] = []
    for arg in args:
        repeated = isinstance(arg, Tensor) and any(arg is other for other in seen)
        seen.append(arg.view_as(arg) if repeated else arg)
    return tuple(seen)


def _bare(body: Callable[..., Tensors], outputs: int) -> Callable[..., Any]:
    """Return a body as the dispatcher wants it: a single result is not a tuple."""
    return body if outputs > 1 else lambda *args: body(*args)[0]


def _as_tuple(result: Any) -> Tensors:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _in_full_precision(body: Callable[..., Tensors]) -> Callable[..., Tensors]:
    def run(*args: Any) -> Tensors:
        with full_precision(args[0]):
            return body(*args)

    return run


def _choosing(
    name: str, portable: Callable[..., Tensors], native: Callable[..., Tensors] | None
) -> Callable[..., Tensors]:
    """Return the body that obeys the last constant, `kernel`."""

    def run(*args: Any) -> Tensors:
        *arguments, kernel = args
        if kernel == "portable":
            return portable(*arguments)
        if native is None or kernel not in ("native", "auto"):
            raise BackendError(f"{name}: there is no kernel {kernel!r}; use kernel='portable'.")
        return native(*arguments)

    return run


def _named(name: str, body: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Return the body under the operator's name in torch's profiler, which sees no plain call."""

    def run(*args: Any) -> Tensors:
        if not _profiler_enabled():
            return body(*args)
        with torch.profiler.record_function(f"anymamba::{name}"):
            return body(*args)

    return run


def _recompute_functions(operator: Operator) -> tuple[type[torch.autograd.Function], ...]:
    width, outputs = operator.width, operator.outputs
    # Plain captures: a tracer follows functions and numbers, not an object of ours.
    fwd_op, bwd_op = operator.fwd_op, operator.bwd_op
    eager_forward, eager_backward = operator.forward, operator.backward
    name = operator.name

    def save(ctx: Any, inputs: Sequence[Any], tensors: int) -> None:
        # Borders are tensors too: save_for_backward is the only legal place for them.
        constants = inputs[tensors:]
        ctx.is_tensor = [isinstance(constant, Tensor) for constant in constants]
        ctx.plain = [None if isinstance(c, Tensor) else c for c in constants]
        ctx.save_for_backward(*inputs[:tensors], *(c for c in constants if isinstance(c, Tensor)))

    def load(ctx: Any, tensors: int) -> list[Any]:
        saved = list(ctx.saved_tensors)
        borders = iter(saved[tensors:])
        constants = [
            next(borders) if is_tensor else plain
            for is_tensor, plain in zip(ctx.is_tensor, ctx.plain, strict=True)
        ]
        return [*saved[:tensors], *constants]

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Tensors:
            return operator.backward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, outputs + width)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            args = load(ctx, outputs + width)
            constants = args[outputs + width :]
            with full_precision(args[0]):
                pull = torch.func.vjp(
                    lambda *tensors: operator.differentiable_backward(*tensors, *constants),
                    *args[: outputs + width],
                )[1]
                return (*pull(tuple(grads)), *[None] * len(constants))

        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            refuse_forward_mode(name)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return _merged_call(operator, Backward, info.batch_size, in_dims, args, True)

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> Tensors:
            if torch.compiler.is_compiling():
                return _as_tuple(fwd_op(*args))
            return eager_forward(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, width)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            args = load(ctx, width)
            guard(name, **{f"grad_out_{place}": grad for place, grad in enumerate(grads)})
            if torch.compiler.is_compiling():
                # Dynamo cannot trace a Function inside a backward; the bare operator is enough.
                body = bwd_op
            else:
                # Gradients are enabled here when this backward will be differentiated.
                watched = _is_watched(torch.is_grad_enabled())
                body = Backward.apply if watched else eager_backward
            result = _as_tuple(body(*(grad.contiguous() for grad in grads), *args))
            guard(name, **{f"grad_in_{place}": grad for place, grad in enumerate(result)})
            # Of one length: the compiler of torch 2.6 refuses to zip others.
            wanted = ctx.needs_input_grad[: len(result)]
            needed = [
                grad if is_wanted else None for grad, is_wanted in zip(result, wanted, strict=True)
            ]
            return (*needed, *[None] * (len(args) - width))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
            return _merged_call(operator, Eager, info.batch_size, in_dims, args, False)

    class Eager(Recompute):
        # Dynamo does not trace a Function that defines `jvp`, not even one that refuses.
        @staticmethod
        def jvp(ctx: Any, *tangents: Any) -> NoReturn:
            refuse_forward_mode(name)

    return Recompute, Eager


def _merged_call(
    operator: Operator,
    function: type[torch.autograd.Function],
    size: int,
    in_dims: tuple[Any, ...],
    args: tuple[Any, ...],
    backward: bool,
) -> Any:
    """Merge a mapped axis into the axes the operator names, call once, take it apart again."""
    lead = operator.width + (operator.outputs if backward else 0)
    *constants, kernel = args[lead:]
    if any(dim is not None for dim in in_dims[lead:]):
        raise BackendError(
            f"{operator.name}: vmap over cu_seqlens is not possible; map over the tensors only."
        )
    if size == 0:
        # Nothing is mapped, but shapes and graphs are wanted: those of one row, taken away again.
        one = [_with_a_row(arg, dim) for arg, dim in zip(args, in_dims, strict=True)]
        results, dims = _merged_call(operator, function, 1, in_dims, tuple(one), backward)
        return tuple(result[:0] for result in results), dims
    tensor_axes, output_axes = operator.merge_axes(*constants)
    axes_in = [*output_axes, *tensor_axes] if backward else list(tensor_axes)
    axes_out = list(tensor_axes) if backward else list(output_axes)
    unmapped = []
    merged = []
    for tensor, dim, axis in zip(args[:lead], in_dims[:lead], axes_in, strict=True):
        full = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        unmapped.append(full[0])
        merged.append(full.movedim(0, axis).flatten(axis, axis + 1))
    inputs = unmapped[operator.outputs :] if backward else unmapped
    constants = operator.merge_constants(size, inputs, tuple(constants))
    results = function.apply(*merged, *constants, kernel)
    split = [
        result.unflatten(axis, (size, -1)).movedim(axis, 0)
        for result, axis in zip(results, axes_out, strict=True)
    ]
    return tuple(split), (0,) * len(split)


def _with_a_row(arg: Any, dim: int | None) -> Any:
    """Return an argument whose mapped axis is empty with one row of zeros on it."""
    if dim is None:
        return arg
    row = arg.new_zeros([1 if axis == dim else size for axis, size in enumerate(arg.shape)])
    return torch.cat([arg, row], dim)
