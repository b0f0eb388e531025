"""Where the weights of a model lie, and how a later call knows that they still lie there.

What is read in place needs no notice of new values. What the kernel reads in another form (A, the
weight of Mamba-1's step sizes, small parameters of half types) is copied, and a copy is tied to the
version of its parameter. The fused optimisers of torch do not count their writes: after any step of
any optimiser copies are made anew. Nobody counts writes through `.data`: they are found only by
comparing the bits that were copied, which is too slow for every token.
"""

import functools
import operator
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from anymamba.nn import QuantizedLinear, RMSNorm, is_plain
from anymamba.ops import decode

__all__ = ["NotServed", "Weights"]

_NOWHERE = object()
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_version = operator.attrgetter("_version")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


_optimiser_steps = [0]


@functools.cache
def _count_optimiser_steps() -> None:
    """Count the steps of all optimisers from now on."""

    def count(*_: object) -> None:
        _optimiser_steps[0] += 1

    register_optimizer_step_post_hook(count)


class NotServed(Exception):
    """The decoder cannot serve this model or this call; the message is the reason.

    Attributes:
        stands: whether the reason is there still, if that can be told sooner than by compiling the
            model again.
    """

    def __init__(self, reason: str, stands: Callable[[], bool] | None = None) -> None:
        """Keep the reason, and how to ask for it again."""
        super().__init__(reason)
        self.stands = stands


class Weights:
    """Everything that a program was compiled from."""

    def __init__(self) -> None:
        """Begin with nothing."""
        # The three lists belong together: this dictionary must have this value under this name.
        self._homes: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._parts: list[Any] = []
        self._paths: dict[nn.Module, str] = {}
        self._hooks: list[Any] = [getattr(nn.modules.module, f"_global{name}") for name in _HOOKS]
        self._attributes: list[dict[str, Any]] = []
        self._read: list[Tensor] = []
        self._pointers: list[int] = []
        self._shapes: list[torch.Size] = []
        self._strides: list[tuple[int, ...]] = []
        self._copied: list[Tensor] = []
        self._versions: list[int] = []
        self._copies: list[Tensor] = []
        # What is copied, in place and as it was, as whole numbers.
        self._bits: list[Tensor] = []
        self._known_bits: list[Tensor] = []
        _count_optimiser_steps()
        self._steps = _optimiser_steps[0]

    def are_current(self) -> bool:
        """Say whether nothing has been replaced, moved, hooked, or written to behind a copy.

        Asked at every token, of some five hundred things: the loops are those of builtins.
        """
        return (
            all(map(operator.is_, map(dict.get, self._homes, self._names), self._parts))
            and not any(self._hooks)
            and not any(map(dict.__contains__, self._attributes, repeat("forward")))
            and list(map(Tensor.data_ptr, self._read)) == self._pointers
            and list(map(Tensor.size, self._read)) == self._shapes
            and list(map(Tensor.stride, self._read)) == self._strides
            and list(map(_version, self._copied)) == self._versions
            and self._steps == _optimiser_steps[0]
        )

    def copies_are_true(self) -> bool:
        """Say whether what was copied has the same bits still; ask `are_current` first.

        A millisecond for a 130M model: for the first of many tokens.
        """
        return all(map(torch.equal, self._bits, self._known_bits))

    def aliases(self) -> list[Tensor]:
        """Return tensors that keep everything alive that is read in place."""
        return [tensor.detach() for tensor in self._read]

    def module(self, parent: nn.Module, name: str, *kinds: type[nn.Module]) -> Any:
        """Return a submodule that may be replaced by a function of its parameters."""
        # Not the parent itself: who keeps a refusal must not keep the model.
        home = parent._modules
        found = home.get(name)

        def is_other() -> bool:
            return found is None or not any(is_plain(found, kind) for kind in kinds)

        if is_other():
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise NotServed(
                f"{self._path(parent, name)} must be a {wanted} without hooks, "
                f"and is {_described(found)}",
                lambda: home.get(name) is found and is_other(),
            )
        self._watch_module(parent, name, found)
        self._hooks += [getattr(found, hooks) for hooks in _HOOKS]
        self._attributes.append(vars(found))
        return found

    def part(self, parent: nn.Module, name: str) -> Any:
        """Return a submodule that holds others and is not called itself."""
        found = parent._modules[name]
        self._watch_module(parent, name, found)
        return found

    def option(self, owner: object, name: str) -> Any:
        """Return a plain attribute, of a module or its rotation, that the program depends on."""
        value = vars(owner).get(name, _NOWHERE)
        if value is _NOWHERE or isinstance(value, Tensor):
            # A tensor may change and be the same, and a parameter is kept elsewhere.
            raise NotServed(f"{name} of {type(owner).__name__} must be a plain value, no tensor")
        self._watch(vars(owner), name, value)
        return value

    def matrix(self, parent: nn.Module, name: str, rows: int | None, columns: int) -> decode.Matrix:
        """Return a projection in its stored format; `rows` is None where any number will do."""
        linear = self.module(parent, name, nn.Linear, QuantizedLinear)
        matrix = self.table(linear)
        given: tuple[int, int] = matrix.rows, matrix.columns
        wanted = given[0] if rows is None else rows, columns
        _check_shape(self._path(parent, name), given, wanted)
        matrix.bias = self.vector(linear, "bias", wanted[:1], is_optional=True)
        return matrix

    def table(self, module: Any) -> decode.Matrix:
        """Return the weight of a linear layer or of an embedding, read in place."""
        scheme = getattr(module, "scheme", None)
        if scheme is not None:
            values, scales = self._found(module, "values"), self._found(module, "scales")
            return decode.Matrix(
                data=self._in_place(values, values.dtype),
                scales=self._in_place(scales, torch.bfloat16),
                format=decode.FORMATS[scheme],
                rows=module.rows,
                columns=module.columns,
            )
        weight = self._found(module, "weight")
        if weight.dtype not in _FLOATS:
            raise NotServed(
                f"weights must be float32, bfloat16 or float16, and one is {weight.dtype}"
            )
        return decode.Matrix(
            data=self._in_place(weight, weight.dtype),
            format=decode.FORMATS[str(weight.dtype).removeprefix("torch.")],
            rows=weight.shape[0],
            columns=weight.shape[1],
        )

    def norm(self, parent: nn.Module, name: str, width: int) -> decode.Norm:
        """Return an RMS norm or a layer norm."""
        module = self.module(parent, name, RMSNorm, nn.LayerNorm)
        is_rms = type(module) is RMSNorm
        return decode.Norm(
            weight=self.vector(module, "weight", (width,)),
            bias=None if is_rms else self.vector(module, "bias", (width,), is_optional=True),
            eps=self.option(module, "eps"),
            kind=decode.NormKind.RMS if is_rms else decode.NormKind.LAYER,
        )

    def vector(
        self,
        module: nn.Module,
        name: str,
        shape: tuple[int, ...],
        form: Callable[[Tensor], Tensor] | None = None,
        *,
        is_optional: bool = False,
    ) -> int | None:
        """Return where a small parameter lies as float32; None where there is none.

        In place if it is float32 and read as it is, else a copy.

        Args:
            module: has the parameter.
            name: of the parameter.
            shape: that it must have: the kernel reads so many numbers, whatever is there.
            form: what the kernel reads instead of the parameter itself.
            is_optional: whether the kernel does without.
        """
        if module._parameters.get(name) is None:
            if not is_optional:
                raise NotServed(f"there is no {self._path(module, name)}")
            self._watch(module._parameters, name, None)
            return None
        parameter = self._found(module, name)
        _check_shape(self._path(module, name), tuple(parameter.shape), shape)
        if form is None and parameter.dtype == torch.float32 and parameter.is_contiguous():
            return self._in_place(parameter, torch.float32)
        if parameter.is_inference():
            raise NotServed(
                f"{self._path(module, name)} was made in inference mode, where changes are not "
                "counted. Make or load the model outside of torch.inference_mode(), and generate "
                "inside if you like"
            )
        if parameter.dtype not in _FLOATS:
            raise NotServed(
                f"{self._path(module, name)} must be float32, bfloat16 or float16, and is "
                f"{parameter.dtype}"
            )
        self._copied.append(parameter)
        self._versions.append(parameter._version)
        self._read_at(parameter)
        self._bits.append(_bits_of(parameter))
        self._known_bits.append(self._bits[-1].clone())
        wide = parameter.detach().float()
        return self.constant((wide if form is None else form(wide)).contiguous().clone())

    def constant(self, tensor: Tensor) -> int:
        """Keep a tensor for the program; return where it lies."""
        self._copies.append(tensor)
        return tensor.data_ptr()

    def _found(self, module: nn.Module, name: str) -> Tensor:
        home = module._parameters if name in module._parameters else module._buffers
        tensor = home.get(name)
        if tensor is None or type(tensor) not in (Tensor, nn.Parameter):
            raise NotServed(f"{self._path(module, name)} must be a plain tensor")
        if tensor.device.type != "cpu":
            raise NotServed(f"the decoder runs on the CPU, and the model is on {tensor.device}")
        self._watch(home, name, tensor)
        return tensor

    def _in_place(self, tensor: Tensor, dtype: torch.dtype) -> int:
        if not tensor.is_contiguous() or tensor.dtype != dtype:
            raise NotServed("matrices must lie row after row, and one does not")
        self._read_at(tensor)
        return tensor.data_ptr()

    def _read_at(self, tensor: Tensor) -> None:
        self._read.append(tensor)
        self._pointers.append(tensor.data_ptr())
        self._shapes.append(tensor.size())
        self._strides.append(tensor.stride())

    def _watch_module(self, parent: nn.Module, name: str, found: Any) -> None:
        self._watch(parent._modules, name, found)
        self._paths[found] = self._path(parent, name)

    def _path(self, module: nn.Module, name: str) -> str:
        """Return the dotted name of a part; the model itself has no name."""
        return f"{self._paths[module]}.{name}" if module in self._paths else name

    def _watch(self, home: dict[str, Any], name: str, part: Any) -> None:
        self._homes.append(home)
        self._names.append(name)
        self._parts.append(part)


def _check_shape(what: str, given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if given != wanted:
        raise NotServed(f"{what} must have the shape {wanted}, and has {given}")


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the same memory as whole numbers, of which what is not a number equals itself.

    Of eight bytes where that comes out even: halves are compared several times slower.
    """
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)
    start = tensor.storage_offset() * tensor.element_size()
    is_even = start % 8 == 0 and tensor.nbytes % 8 == 0
    return tensor.view(-1).view(torch.int64 if is_even else torch.int16)


def _described(module: nn.Module | None) -> str:
    return "missing" if module is None else f"a {type(module).__name__}, swapped or hooked"
