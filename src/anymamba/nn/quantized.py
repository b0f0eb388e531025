"""Linear layers and embeddings whose weights are 8-bit or 4-bit integers in blocks of 32.

    weight[row, column] = integer * scale[row, column // 32]

Scales are bfloat16, and integers have no offset. The dequantised weight is readable as a plain
tensor (`.weight`), and `forward` is the ordinary operator on it: that is what any other
implementation is compared with.

They lie in panels of 16 rows, in the order in which the decoder reads them: of a block of 32
columns four columns of all rows, then the next four.

    values[panel, block, four, row % 16, byte]    (panels, blocks, 8 or 4, 16, 4)
    scales[panel, block, row % 16]                (panels, blocks, 16)
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import ConfigError, ShapeError
from anymamba.ops import linear

__all__ = [
    "BLOCK",
    "SCHEMES",
    "QuantizedEmbedding",
    "QuantizedLinear",
    "check_scheme",
    "dequantize",
    "quantize",
]

BLOCK = 32
PANEL = 16
SCHEMES = ("int8", "int4")
# Of a large layer: 8 MB of float32. Cores that share a cache prefer 4 MB by a tenth, others 16.
_WEIGHTS_AT_ONCE = 1 << 21
_LARGEST = {"int8": 127, "int4": 8}
# Shrinking the range of a block a little costs its largest entry and serves the others.
_SHRINKS = {"int8": (1.0,), "int4": (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)}


def check_scheme(where: str, scheme: str) -> None:
    """Raise `ConfigError` unless the scheme is known."""
    if scheme not in SCHEMES:
        raise ConfigError(f"{where}: quantize must be one of {', '.join(SCHEMES)}; got {scheme!r}.")


def quantize(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of a matrix, padded with zeros to whole blocks and panels.

    Each scale is the one, out of a few, with the least squared error in its block. A column block
    of int4 has 16 bytes: low nibbles are columns 0 to 15, high ones 16 to 31, each a signed number.
    Large matrices are quantised some rows at a time, which needs little memory beside the result.

    Args:
        weight: (rows, columns); finite.
        scheme: "int8" or "int4".

    Returns:
        Integers (panels, blocks, 8, 16, 4) as int8 or (panels, blocks, 4, 16, 4) as uint8, and
        scales (panels, blocks, 16) as bfloat16.

    Raises:
        ConfigError: the scheme is unknown, or a weight is not finite.
        ShapeError: the weight is no matrix.

    Example:
        >>> values, scales = quantize(torch.tensor([[1.0, -127.0]]), "int8")
        >>> values[0, 0, 0, 0].tolist(), scales[0, 0, 0].item()
        ([1, -127, 0, 0], 1.0)
    """
    where = "quantize"
    check_scheme(where, scheme)
    if weight.dim() != 2:
        raise ShapeError(f"{where}: a matrix must have two axes; got {tuple(weight.shape)}.")
    rows, columns = weight.shape
    panels = max(_WEIGHTS_AT_ONCE // max(columns, 1) // PANEL, 1)
    values, scales = _room(rows, columns, scheme, weight.device)
    for place, piece in enumerate(weight.detach().split(panels * PANEL)):
        some = slice(place * panels, (place + 1) * panels)
        values[some], scales[some] = _quantized_rows(where, piece, scheme)
    return values, scales


def _room(
    rows: int, columns: int, scheme: str, device: torch.device | str | None
) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of zeros."""
    blocks = (-(-rows // PANEL), -(-columns // BLOCK))
    kind = torch.int8 if scheme == "int8" else torch.uint8
    shape = (*blocks, BLOCK // (4 if scheme == "int8" else 8), PANEL, 4)
    values = torch.zeros(shape, dtype=kind, device=device)
    return values, torch.ones(*blocks, PANEL, dtype=torch.bfloat16, device=device)


def _quantized_rows(where: str, weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of some rows, in panels."""
    if not bool(weight.isfinite().all()):
        raise ConfigError(
            f"{where}: weights must be finite; got NaN or infinity, which no scale can hold. "
            "Load another checkpoint, or keep this layer in floating point."
        )
    blocks = F.pad(weight.float(), (0, -weight.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    best_scale = best_error = None
    for shrink in _SHRINKS[scheme]:
        scale = _scale(blocks, scheme, shrink)
        error = (_rounded(blocks, scale, scheme) * scale - blocks).square().sum(-1, keepdim=True)
        if best_scale is None or best_error is None:
            best_scale, best_error = scale, error
        else:
            is_better = error < best_error
            best_scale = torch.where(is_better, scale, best_scale)
            best_error = torch.where(is_better, error, best_error)
    assert best_scale is not None
    values = _rounded(blocks, best_scale, scheme)
    scales = best_scale.squeeze(-1).to(torch.bfloat16)
    values = values.to(torch.int8)
    if scheme == "int4":
        low, high = (values.view(torch.uint8) & 15).split(BLOCK // 2, -1)
        values = low | high << 4
    return _in_panels(values, scales)


def _in_panels(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Put integers (rows, blocks, bytes) and scales (rows, blocks) into panels."""
    missing = -len(values) % PANEL
    fours = F.pad(values, (0, 0, 0, 0, 0, missing)).view(torch.int32).unflatten(0, (-1, PANEL))
    by_block = fours.permute(0, 2, 3, 1).contiguous().unsqueeze(-1)
    scales = F.pad(scales, (0, 0, 0, missing), value=1.0).unflatten(0, (-1, PANEL))
    return by_block.view(values.dtype), scales.transpose(1, 2).contiguous()


def _scale(blocks: Tensor, scheme: str, shrink: float) -> Tensor:
    """Return the scale of each block, rounded as it is stored; 1 for a block of zeros."""
    largest = blocks.abs().amax(-1, keepdim=True)
    if scheme == "int4":
        # Integers reach from -8 to 7: the entry of largest size is given the longer side.
        place = blocks.abs().argmax(-1, keepdim=True)
        largest = -blocks.gather(-1, place)
    scale = (largest * (shrink / _LARGEST[scheme])).to(torch.bfloat16).float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _rounded(blocks: Tensor, scale: Tensor, scheme: str) -> Tensor:
    low, high = (-127, 127) if scheme == "int8" else (-8, 7)
    return (blocks / scale).round().clamp(low, high)


def dequantize(
    values: Tensor, scales: Tensor, scheme: str, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Return the matrix that integers and scales stand for; the inverse of `quantize`.

    Args:
        values: integers; (panels, blocks, 8, 16, 4) or (panels, blocks, 4, 16, 4).
        scales: (panels, blocks, 16).
        scheme: "int8" or "int4".
        shape: rows and columns of the matrix, without padding.
        dtype: of the result.
    """
    rows, columns = shape
    # Whole words change places, which is faster than bytes.
    fours = values.view(torch.int32).squeeze(-1).permute(0, 3, 1, 2).contiguous()
    by_row = fours.view(values.dtype).flatten(0, 1)[:rows]
    scales_by_row = scales.transpose(1, 2).flatten(0, 1)[:rows]
    return _dequantized_rows(by_row, scales_by_row, scheme, columns, dtype)


def _dequantized_rows(
    values: Tensor, scales: Tensor, scheme: str, columns: int, dtype: torch.dtype
) -> Tensor:
    """Return rows from their integers (rows, blocks, bytes) and scales (rows, blocks)."""
    if scheme == "int4":
        both = values.view(torch.int8)
        values = torch.cat([both << 4 >> 4, both >> 4], -1)  # shifts of signed bytes keep signs
    wide = values.to(torch.float32).mul_(scales.float().unsqueeze(-1))
    whole = wide.flatten(-2).to(dtype)
    # Where it cuts in the loop that finds each column's scale, Inductor (torch 2.13) splits that
    # loop into whole blocks and loses the last columns. It never fuses past `as_strided`.
    return whole.as_strided((*whole.shape[:-1], columns), whole.stride())


class _Quantized(nn.Module):
    """Integers, scales, and the matrix they stand for."""

    values: Tensor
    scales: Tensor

    def __init__(
        self,
        rows: int,
        columns: int,
        scheme: str,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_scheme(type(self).__name__, scheme)
        self.scheme, self.rows, self.columns = scheme, rows, columns
        self.dtype = dtype or torch.get_default_dtype()
        values, scales = _room(rows, columns, scheme, device)
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)

    def _apply(self, fn, recurse=True):  # pyright: ignore
        # Scales keep their dtype: a cast of the module casts what it computes with.
        kept = self.scales
        probe = fn(torch.zeros(0, dtype=self.dtype, device=kept.device))
        super()._apply(fn, recurse)
        if self.scales.dtype != torch.bfloat16:
            self.scales = kept.to(self.scales.device)
        if probe.is_floating_point():
            self.dtype = probe.dtype
        return self

    def dequantize(self) -> Tensor:
        """Return the weight as a plain tensor."""
        return self._dequantized_panels(0, len(self.values))

    def _dequantized_panels(self, first: int, last: int) -> Tensor:
        """Return the rows of some panels, without those that only fill the last one."""
        shape = (min(last * PANEL, self.rows) - first * PANEL, self.columns)
        values, scales = self.values[first:last], self.scales[first:last]
        return dequantize(values, scales, self.scheme, shape, self.dtype)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight; made afresh, so writing into it changes nothing."""
        return self.dequantize()

    def extra_repr(self) -> str:
        """Name the sizes and the scheme."""
        return f"{self.columns}, {self.rows}, scheme={self.scheme!r}, dtype={self.dtype}"


class QuantizedLinear(_Quantized):
    """A linear layer with integer weights; inference only.

    Args:
        in_features: columns of the weight.
        out_features: rows of the weight.
        scheme: "int8" or "int4".
        bias: whether there is a bias; it stays floating point.
        device: of the buffers.
        dtype: of the dequantised weight and the bias.

    Example:
        >>> layer = QuantizedLinear.of(nn.Linear(64, 8), "int8")
        >>> layer(torch.zeros(2, 64)).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: str = "int8",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create zeros."""
        super().__init__(out_features, in_features, scheme, device, dtype)
        self.in_features, self.out_features = in_features, out_features
        self.bias = None
        if bias:
            self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype))

    @classmethod
    def of(cls, linear: nn.Linear, scheme: str) -> "QuantizedLinear":
        """Quantise a linear layer."""
        weight = linear.weight
        layer = cls(
            linear.in_features,
            linear.out_features,
            scheme,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer.values, layer.scales = quantize(weight, scheme)
        layer.bias = linear.bias
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the dequantised weight to the last axis.

        On the CPU a large weight is made and met piece by piece: whole, it would be new memory at
        every call, and for a few tokens that costs more than their products. Elsewhere, and for the
        compiler, which fuses what it sees, it is one product.
        """
        count = -(-self.rows * self.columns // _WEIGHTS_AT_ONCE)
        if count <= 1 or not x.is_cpu or torch.compiler.is_compiling():
            return linear(x, self.dequantize().to(x.dtype), self.bias)
        panels = -(-len(self.values) // count)
        pieces = []
        for first in range(0, len(self.values), panels):
            weight = self._dequantized_panels(first, first + panels).to(x.dtype)
            rows = slice(first * PANEL, first * PANEL + len(weight))
            bias = None if self.bias is None else self.bias[rows]
            pieces.append(linear(x, weight, bias))
        return torch.cat(pieces, -1)


class QuantizedEmbedding(_Quantized):
    """An embedding with integer weights; inference only.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        scheme: "int8" or "int4".
        device: of the buffers.
        dtype: of the rows that come out.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        scheme: str = "int8",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create zeros."""
        super().__init__(num_embeddings, embedding_dim, scheme, device, dtype)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @classmethod
    def of(cls, embedding: nn.Embedding, scheme: str) -> "QuantizedEmbedding":
        """Quantise an embedding."""
        weight = embedding.weight
        rows, columns = weight.shape
        table = cls(rows, columns, scheme, device=weight.device, dtype=weight.dtype)
        table.values, table.scales = quantize(weight, scheme)
        return table

    def forward(self, ids: Tensor) -> Tensor:
        """Return the dequantised rows of the ids."""
        # Unlike an index, this refuses negative ids and those of the padding, as an embedding does.
        known = torch.arange(self.rows, device=ids.device).index_select(0, ids.flatten())
        panel, row = known // PANEL, known % PANEL
        fours = self.values.view(torch.int32).squeeze(-1)[panel, :, :, row]
        values = fours.contiguous().view(self.values.dtype)
        scales = self.scales[panel, :, row]
        rows = _dequantized_rows(values, scales, self.scheme, self.columns, self.dtype)
        return rows.unflatten(0, ids.shape)
