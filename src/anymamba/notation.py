"""The letters of tensor names, and the check that sizes agree with them.

A tensor's name ends in its layout: `v_bsmhp` has the axes batch, sequence, rank, head, head
width. One legend serves the whole library. Gradients are `grad_v_bsmhp`. A capital letter is a
size derived from the small one (`v_bSmhp`: padded sequence). A digit is that size itself
(`quaternion_bhj4`).
"""

from torch import Tensor

from anymamba.errors import DtypeError, ShapeError

__all__ = ["LEGEND", "Dims", "bind_dims", "layout_of"]

LEGEND: dict[str, str] = {
    "a": "rotation angles per head",
    "b": "batch",
    "d": "model width (d_model)",
    "e": "heads per group (h = g * e)",
    "f": "fused position in a chunk (time * rank + rank index)",
    "g": "groups of B and C",
    "h": "heads",
    "i": "inner width (d_inner)",
    "j": "quaternion blocks per head",
    "k": "convolution width",
    "l": "chunk length",
    "m": "MIMO rank",
    "n": "number of chunks",
    "p": "head width (headdim)",
    "q": "packed sequences",
    "r": "state size (d_state)",
    "s": "sequence length",
    "t": "rank of the dt projection",
    "v": "convolution channels",
    "w": "vocabulary",
}

Dims = dict[str, int]


def layout_of(name: str) -> str:
    """Return the layout part of a tensor name, such as `bshp` for `x_bshp`."""
    return name.rpartition("_")[2]


def bind_dims(where: str, **tensors: Tensor | None) -> Dims:
    """Check that every tensor has the layout its name promises, one size per letter.

    Args:
        where: the function that asks; opens every message.
        **tensors: tensors by layout name; None is passed over.

    Returns:
        The size of each letter.

    Raises:
        DtypeError: an argument is not a tensor.
        ShapeError: a rank differs from the layout, an axis is empty, or two sizes disagree.

    Example:
        >>> import torch
        >>> bind_dims("demo", x_bsh=torch.zeros(2, 5, 3), a_h=torch.zeros(3))
        {'b': 2, 's': 5, 'h': 3}
    """
    dims: Dims = {}
    owner: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{where}: {name} must be a tensor; got {type(tensor).__name__}.")
        layout = layout_of(name)
        if tensor.dim() != len(layout):
            raise ShapeError(
                f"{where}: {name} must have {len(layout)} axes ({spell(layout)}); "
                f"got shape {tuple(tensor.shape)}."
            )
        for letter, size in zip(layout, tensor.shape, strict=True):
            _bind(where, name, tensor, letter, size, dims, owner)
    return dims


def spell(layout: str) -> str:
    """Write a layout out in words, such as `batch, sequence length` for `bs`."""
    return ", ".join(LEGEND.get(letter, LEGEND.get(letter.lower(), letter)) for letter in layout)


def _bind(
    where: str,
    name: str,
    tensor: Tensor,
    letter: str,
    size: int,
    dims: Dims,
    owner: dict[str, str],
) -> None:
    if letter.isdigit():
        if size != int(letter):
            raise ShapeError(
                f"{where}: axis '{letter}' of {name} must have size {letter}; "
                f"got shape {tuple(tensor.shape)}."
            )
        return
    if size == 0:
        raise ShapeError(
            f"{where}: the {spell(letter)} axis of {name} is empty; got shape "
            f"{tuple(tensor.shape)}. Every axis needs at least one entry."
        )
    if letter not in dims:
        dims[letter] = size
        owner[letter] = f"{name} {tuple(tensor.shape)}"
    elif dims[letter] != size:
        raise ShapeError(
            f"{where}: {spell(letter)} is {dims[letter]} in {owner[letter]} but {size} in "
            f"{name} {tuple(tensor.shape)}. Axis '{letter}' must have one size in all arguments."
        )
