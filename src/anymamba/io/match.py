"""Whether stored tensors are the parameters of a model, told in one table."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from anymamba.errors import AnyMambaError, CheckpointError
from anymamba.io.config_file import WRONG_VALUES
from anymamba.models import MambaConfig, MambaLM
from anymamba.ops import copy_to_large_pages

__all__ = ["check_match", "check_names", "filled", "outline", "own_copy", "skeleton"]

ModelT = TypeVar("ModelT", bound=nn.Module)
EMBEDDING, HEAD = "backbone.embedding.weight", "lm_head.weight"
# Enough to see the pattern; a foreign checkpoint differs in hundreds of names.
_ROWS = 8


class _Outline(TorchFunctionMode):
    """Build a model without the memory and the time that its values would take.

    Large tensors are made on the meta device, and nothing is initialised. The whole model is not,
    because there the first sum or product loads torch's compiler: seconds instead of milliseconds.
    """

    writes = frozenset(("copy_", "div_", "fill_", "normal_", "uniform_", "zero_"))
    large = 2**16

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run every function but initialisers."""
        kwargs = kwargs or {}
        module, name = getattr(func, "__module__", ""), getattr(func, "__name__", "")
        if module == "torch.nn.init" or name in self.writes:
            return args[0] if args else kwargs["tensor"]
        if func is torch.empty:
            outline = func(*args, **{**kwargs, "device": "meta"})
            if outline.numel() > self.large:
                return outline
        return func(*args, **kwargs)


def skeleton(
    where: str, directory: Path, config: MambaConfig, stored: int, dtype: torch.dtype | None
) -> MambaLM:
    """Return the model with names, shapes and dtypes, but without values.

    Args:
        where: the function that asks; opens every message.
        directory: the checkpoint, for the message.
        config: of the model.
        stored: how many tensors the checkpoint has.
        dtype: of the parameters.

    Raises:
        CheckpointError: the config describes no model, or one that cannot have so few tensors.
    """
    file = str(directory / "config.json")
    if config.n_layer > stored:
        raise CheckpointError(
            f"{where}: {file!r} must describe the weights beside it; it says {config.n_layer} "
            f"layers, and there are {stored} tensors in all. One of the two is of another model."
        )
    return outline(where, directory, lambda: MambaLM(config, device="cpu", dtype=dtype))


def outline(where: str, directory: Path, build: Callable[[], ModelT]) -> ModelT:
    """Return what `build` builds with names, shapes and dtypes, but without values.

    Args:
        where: the function that asks; opens every message.
        directory: the checkpoint, for the message.
        build: creates the model on the CPU.

    Raises:
        CheckpointError: the model cannot be built.
    """
    file = str(directory / "config.json")
    try:
        # Small tensors are drawn at random; the caller's next draw must not notice.
        with torch.random.fork_rng(devices=[]), _Outline():
            return build()
    # Values of a wrong type fail anywhere in the constructors.
    except (AnyMambaError, RuntimeError, *WRONG_VALUES) as error:
        raise CheckpointError(
            f"{where}: {file!r} must describe a model; {error} Correct it, or use a copy."
        ) from error


def check_match(
    where: str,
    directory: Path,
    config: MambaConfig,
    expected: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
) -> None:
    """Raise, with one table, unless the stored tensors are exactly the model's.

    A tied head may be stored or not; if it is, it must be the embedding.

    Args:
        where: the function that asks; opens every message.
        directory: the checkpoint, for the message.
        config: of the model.
        expected: the model's own tensors, of any device.
        stored: what the file holds, under official names.

    Raises:
        CheckpointError: names or shapes differ, or a tied head differs from the embedding.
    """
    # A quantised file has no weight of that name, and never a tied head.
    tied = config.tie_embeddings and HEAD in expected
    needed = {name: x for name, x in expected.items() if not (tied and name == HEAD)}
    optional = {HEAD: expected[HEAD]} if tied else {}
    kind = f"{config.layer} model with this config"
    check_names(where, directory, kind, needed, stored, optional)
    if tied and HEAD in stored and not _same(stored[EMBEDDING], stored[HEAD]):
        raise CheckpointError(
            f"{where}: {HEAD} in {str(directory)!r} must equal {EMBEDDING}, because config.json "
            "ties them; their values differ. Set tie_embeddings to false in config.json."
        )


def check_names(
    where: str,
    directory: Path,
    kind: str,
    needed: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    optional: Mapping[str, Tensor],
) -> None:
    """Raise, with one table, unless names and shapes are those of the model.

    Args:
        where: the function that asks; opens every message.
        directory: the checkpoint, for the message.
        kind: what the model is, in words.
        needed: tensors that must be stored, of any device.
        stored: what the file holds.
        optional: tensors that may be stored.

    Raises:
        CheckpointError: a name is missing or unexpected, or a shape differs.
    """
    expected = {**needed, **optional}
    missing = [(name, _shape(tensor), "") for name, tensor in needed.items() if name not in stored]
    unexpected = [
        (name, "", _shape(tensor)) for name, tensor in stored.items() if name not in expected
    ]
    misshapen = [
        (name, _shape(tensor), _shape(stored[name]))
        for name, tensor in expected.items()
        if name in stored and stored[name].shape != tensor.shape
    ]
    if missing or unexpected or misshapen:
        kinds = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
        counts = ", ".join(f"{len(rows)} {kind}" for kind, rows in kinds.items())
        raise CheckpointError(
            f"{where}: the weights in {str(directory)!r} must be those of a {kind}; {counts}.\n"
            f"{_table(kinds)}\nCheck that config.json and the weights belong together."
        )


def filled(
    model: nn.Module, stored: Mapping[str, Tensor], device: torch.device
) -> dict[str, nn.Parameter]:
    """Return a model's parameters with copies of the stored values, one tensor at a time."""
    parameters: dict[str, nn.Parameter] = {}
    for name, empty in model.named_parameters():
        value = own_copy(stored[name], device, empty.dtype)
        parameter = nn.Parameter(value, requires_grad=empty.requires_grad)
        # Assigning replaces the parameter, and with it the tags that optimisers look for.
        vars(parameter).update(vars(empty))
        parameters[name] = parameter
    return parameters


def own_copy(stored: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy on a device; on the CPU in memory that is quick to read."""
    if device.type == "cpu":
        return copy_to_large_pages(stored, dtype)
    return stored.to(device=device, dtype=dtype, copy=True).contiguous()


def _same(embedding: Tensor, head: Tensor) -> bool:
    return embedding.data_ptr() == head.data_ptr() or torch.equal(embedding, head)


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _table(kinds: Mapping[str, list[tuple[str, str, str]]]) -> str:
    lines = [("", "name", "expected", "stored")]
    for kind, rows in kinds.items():
        lines += [(kind, *row) for row in rows[:_ROWS]]
        if len(rows) > _ROWS:
            lines.append((kind, f"... and {len(rows) - _ROWS} more", "", ""))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  "
        + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
