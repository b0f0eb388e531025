"""Causal attention for hybrid stacks: official parameters, torch's own attention, a typed cache."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anymamba.errors import BackendError, CacheError, ConfigError
from anymamba.nn.block import Block
from anymamba.nn.cache import KVCache
from anymamba.nn.cache_room import check_past
from anymamba.nn.conv import convolve, convolve_token, short_convolution
from anymamba.nn.options import reject_unknown
from anymamba.nn.plain import project
from anymamba.nn.state_spec import StateSpec, check_state
from anymamba.ops import SsdPath, check_impl, packing, rotate_pairs

__all__ = ["MHA"]


class MHA(Block[KVCache]):
    """Multi-head attention: grouped keys, rotary positions, a short convolution, an MLP part.

    Every option of `mamba_ssm`'s class; decoding agrees with the full computation for all of them.
    Attention itself is torch's, whatever `impl` and `path` a stack hands to all its layers; `impl`
    chooses who computes the convolution.

    Args:
        embed_dim: width of inputs and outputs.
        num_heads: query heads.
        num_heads_kv: key and value heads; as many as query heads if None.
        head_dim: width of a head; embed_dim / num_heads if None.
        mlp_dim: hidden width of a gated MLP beside the heads; rounded up to 256; 0 means none.
        qkv_proj_bias: whether `in_proj` has a bias.
        out_proj_bias: whether `out_proj` has a bias.
        softmax_scale: factor of the scores; 1 / sqrt(head_dim) if None.
        causal: False attends both ways, in `forward` only; prefill and step refuse it.
        layer_idx: place in a stack; needed with `inference_params`.
        d_conv: width of a convolution over queries, keys and values; 0 means none.
        rotary_emb_dim: entries of a head that turn with the position; 0 means none.
        rotary_emb_base: base of the rotary frequencies.
        rotary_emb_interleaved: turn neighbours instead of halves.
        device: of the parameters.
        dtype: of the parameters.
    """

    cache_types = (KVCache,)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int = 0,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        d_conv: int = 0,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **unknown: Any,
    ) -> None:
        """Create the parameters with the official names and shapes."""
        super().__init__()
        reject_unknown("MHA", unknown, MHA.__init__.__annotations__)
        self.d_model, self.layer_idx, self.causal = embed_dim, layer_idx, causal
        _check_sizes(num_heads, num_heads_kv, head_dim, mlp_dim, d_conv)
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if head_dim is None and embed_dim % num_heads:
            raise ConfigError(f"MHA: num_heads must divide embed_dim {embed_dim}; got {num_heads}.")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if num_heads % self.num_heads_kv:
            raise ConfigError(
                f"MHA: num_heads_kv must divide num_heads {num_heads}; got {self.num_heads_kv}."
            )
        if rotary_emb_dim % 2 or not 0 <= rotary_emb_dim <= self.head_dim:
            raise ConfigError(
                f"MHA: rotary_emb_dim must be even, from 0 to head_dim {self.head_dim}; "
                f"got {rotary_emb_dim}."
            )
        self.softmax_scale = softmax_scale
        self.mlp_dim = -(-mlp_dim // 256) * 256
        self.d_conv, self.rotary_emb_dim = d_conv, rotary_emb_dim
        self.rotary_emb_base = rotary_emb_base
        self.pairing = "interleaved" if rotary_emb_interleaved else "half_split"
        self.qkv_dim = self.head_dim * (num_heads + 2 * self.num_heads_kv)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(
            embed_dim, self.qkv_dim + self.mlp_dim, bias=qkv_proj_bias, **factory
        )
        if d_conv > 0:
            self.conv1d = short_convolution(self.qkv_dim, d_conv, True, **factory)
        self.out_proj = nn.Linear(self.d_inner, embed_dim, bias=out_proj_bias, **factory)

    @property
    def d_inner(self) -> int:
        """What `out_proj` reads: all heads, and the MLP beside them."""
        return self.head_dim * self.num_heads + self.mlp_dim // 2

    def extra_repr(self) -> str:
        """Name the sizes."""
        return (
            f"d_model={self.d_model}, num_heads={self.num_heads}, "
            f"num_heads_kv={self.num_heads_kv}, head_dim={self.head_dim}, causal={self.causal}, "
            f"d_conv={self.d_conv}, rotary_emb_dim={self.rotary_emb_dim}"
        )

    def forward(self, u_bsd: Tensor, *, inference_params: Any = None, **options: Any) -> Tensor:
        """Run whole sequences; the arguments are those of every block."""
        if self.causal or inference_params is not None:
            return super().forward(u_bsd, inference_params=inference_params, **options)
        return super().prefill(u_bsd, None, **options)[0]

    def prefill(
        self, u_bsd: Tensor, cache: KVCache | None = None, **options: Any
    ) -> tuple[Tensor, KVCache]:
        """Run a piece of a sequence; the arguments are those of every block."""
        self._check_causal("MHA.prefill")
        return super().prefill(u_bsd, cache, **options)

    def step(self, u_bd: Tensor, cache: KVCache) -> tuple[Tensor, KVCache]:
        """Run one token: pure and differentiable; the given cache is not changed."""
        self._check_causal("MHA.step")
        return super().step(u_bd, cache)

    def _check_causal(self, where: str) -> None:
        if not self.causal:
            raise BackendError(
                f"{where}: causal must be True; got False, which attends to tokens still to come. "
                "Run whole sequences with forward, or create the layer with causal=True."
            )

    def _fresh(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> KVCache:
        shape = (batch_size, self.num_heads_kv, 0, self.head_dim)
        conv_bvk = None
        if self.d_conv > 0:
            conv_bvk = torch.zeros(
                batch_size, self.qkv_dim, self.d_conv, device=device, dtype=dtype
            )
        return KVCache(
            torch.zeros(shape, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=dtype),
            torch.zeros(batch_size, device=device, dtype=torch.int64),
            conv_bvk,
        )

    def _checked(self, where: str, cache: KVCache | None, count: int, u: Tensor) -> KVCache:
        if cache is None:
            return self._fresh(count, u.device, self._like().dtype)
        if not isinstance(cache, KVCache):
            raise CacheError(f"{where}: the cache must be a KVCache; got {type(cache).__name__}.")
        if (cache.conv_bvk is None) != (self.d_conv == 0):
            raise CacheError(f"{where}: the cache belongs to a layer with another convolution.")
        dtype = self._like().dtype
        past = StateSpec((self.num_heads_kv, cache.k_bhst.shape[2], self.head_dim), dtype)
        wanted = {"k_bhst": past, "v_bhst": past}
        if self.d_conv > 0:
            wanted["conv_bvk"] = StateSpec((self.qkv_dim, self.d_conv), dtype)
        for name, spec in wanted.items():
            check_state(where, name, getattr(cache, name), count, spec, u.device)
        lengths = cache.length_b
        if lengths.shape != (count,) or lengths.dtype != torch.int64:
            raise CacheError(
                f"{where}: length_b of the cache must be int64 of shape {(count,)}; got "
                f"{lengths.dtype} of shape {tuple(lengths.shape)}. Use empty_cache(batch_size)."
            )
        if _can_be_read(lengths):
            check_past(where, cache)
        return cache

    def _sequence(
        self,
        u_bsd: Tensor,
        cache: KVCache,
        path: SsdPath | None,
        impl: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, KVCache]:
        check_impl("MHA", impl)
        qkv_bsv, mlp = project(self.in_proj, u_bsd).split([self.qkv_dim, self.mlp_dim], dim=-1)
        conv_bvk = cache.conv_bvk
        if conv_bvk is not None:
            qkv_bsv, conv_bvk = convolve(
                self.conv1d, qkv_bsv, conv_bvk, cu_seqlens, None, impl=impl
            )
        if cu_seqlens is None:
            context_bsv, cache = self._attend(qkv_bsv, cache, qkv_bsv.shape[1])
        else:
            context_bsv, cache = self._attend_packed(qkv_bsv, cache, cu_seqlens)
        return self._finish(context_bsv, mlp), cache._replace(conv_bvk=conv_bvk)

    def _token(self, u_bd: Tensor, cache: KVCache) -> tuple[Tensor, KVCache]:
        qkv_bv, mlp = project(self.in_proj, u_bd).split([self.qkv_dim, self.mlp_dim], dim=-1)
        conv_bvk = cache.conv_bvk
        if conv_bvk is not None:
            qkv_bv, conv_bvk = convolve_token(self.conv1d, qkv_bv, conv_bvk, None)
        context_bsv, cache = self._attend(qkv_bv.unsqueeze(1), cache, 1)
        return self._finish(context_bsv.squeeze(1), mlp), cache._replace(conv_bvk=conv_bvk)

    def _attend(
        self, qkv_bsv: Tensor, cache: KVCache, added: int | Tensor
    ) -> tuple[Tensor, KVCache]:
        """Attend from new tokens to the cached and the new ones; `added` real tokens per row."""
        batch, length = qkv_bsv.shape[:2]
        heads = [self.num_heads, self.num_heads_kv, self.num_heads_kv]
        flat_bshd = qkv_bsv.unflatten(-1, (sum(heads), self.head_dim))
        q_bshd, k_bshd, v_bshd = flat_bshd.split(heads, dim=2)
        place_bs = cache.length_b[:, None] + torch.arange(length, device=qkv_bsv.device)
        q_bhsd, k_bhsd = (self._rotary(x, place_bs).transpose(1, 2) for x in (q_bshd, k_bshd))
        v_bhsd = v_bshd.transpose(1, 2)
        new = cache._replace(length_b=cache.length_b + added)
        is_opening = cache.k_bhst.shape[2] == 0
        if is_opening:
            keys, values = k_bhsd, v_bhsd
        else:
            keys, values = (
                _written(past, piece, place_bs)
                for past, piece in ((cache.k_bhst, k_bhsd), (cache.v_bhst, v_bhsd))
            )
        reach = torch.arange(keys.shape[2], device=keys.device)
        mask = None
        if not is_opening:
            # A key is visible up to the query's own place; beyond lie padding and the future.
            mask = (reach <= place_bs[:, :, None]).unsqueeze(1)
        elif not self.causal and isinstance(added, Tensor):
            # Padding is hidden. A row without tokens keeps one key: a softmax over none is NaN.
            mask = (reach < added.clamp(min=1)[:, None])[:, None, None]
        context_bhsd = F.scaled_dot_product_attention(
            q_bhsd,
            keys.to(q_bhsd.dtype),
            values.to(q_bhsd.dtype),
            attn_mask=mask,
            is_causal=self.causal and is_opening,
            scale=self.softmax_scale,
            enable_gqa=self.num_heads != self.num_heads_kv,
        )
        dtype = cache.k_bhst.dtype
        new = new._replace(k_bhst=keys.to(dtype), v_bhst=values.to(dtype))
        return context_bhsd.transpose(1, 2).reshape(batch, length, -1), new

    def _attend_packed(
        self, qkv_1sv: Tensor, cache: KVCache, cu_seqlens: Tensor
    ) -> tuple[Tensor, KVCache]:
        """Spread packed sequences over rows, attend, and gather them again."""
        batch, length, width = qkv_1sv.shape
        pack = packing("MHA", cu_seqlens, batch, length, qkv_1sv.device)
        place = pack.sequence_s, pack.position_s
        rows_qsv = qkv_1sv.new_zeros(pack.count, int(pack.length_q.max()), width)
        rows_qsv = rows_qsv.index_put(place, qkv_1sv[0])
        context_qsv, cache = self._attend(rows_qsv, cache, pack.length_q)
        return context_qsv[place].unsqueeze(0), cache

    def rotary_rates(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return by how much each pair of a head turns from one position to the next."""
        width = self.rotary_emb_dim
        exponent = torch.arange(0, width, 2, device=device, dtype=dtype) / width
        return self.rotary_emb_base**-exponent

    def _rotary(self, x_bshd: Tensor, place_bs: Tensor) -> Tensor:
        width = self.rotary_emb_dim
        if width == 0:
            return x_bshd
        dtype = torch.float64 if x_bshd.dtype == torch.float64 else torch.float32
        angle_bs1a = place_bs[..., None, None].to(dtype) * self.rotary_rates(dtype, x_bshd.device)
        turned = rotate_pairs(x_bshd[..., :width], angle_bs1a, self.pairing)
        return torch.cat([turned, x_bshd[..., width:]], dim=-1)

    def _finish(self, context: Tensor, mlp: Tensor) -> Tensor:
        if self.mlp_dim:
            value, gate = mlp.chunk(2, dim=-1)
            context = torch.cat([context, value * F.silu(gate)], dim=-1)
        return project(self.out_proj, context)


def _can_be_read(length_b: Tensor) -> bool:
    """Whether looking at numbers costs nothing: not on other devices, not while tracing."""
    return (
        type(length_b) is Tensor
        and length_b.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _written(past_bhsd: Tensor, piece_bhsd: Tensor, place_bs: Tensor) -> Tensor:
    """Return the past with a piece written behind each row's own end."""
    longer = F.pad(past_bhsd, (0, 0, 0, piece_bhsd.shape[2]))
    index = place_bs[:, None, :, None].expand(-1, past_bhsd.shape[1], -1, past_bhsd.shape[3])
    return longer.scatter(2, index, piece_bhsd.to(longer.dtype))


def _check_sizes(
    num_heads: int, num_heads_kv: int | None, head_dim: int | None, mlp_dim: int, d_conv: int
) -> None:
    """Raise `ConfigError` on a size that no layer could have."""
    sizes = {"num_heads": num_heads, "num_heads_kv": num_heads_kv, "head_dim": head_dim}
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"MHA: {name} must be positive; got {size}.")
    for name, size in {"mlp_dim": mlp_dim, "d_conv": d_conv}.items():
        if size < 0:
            raise ConfigError(f"MHA: {name} must not be negative; got {size}. 0 means none.")
