"""How fast a model could decode if nothing but memory counted."""

from typing import NamedTuple

from anymamba.bench.machine import array_to_read, read_rate
from anymamba.models import MambaLM
from anymamba.nn import KVCache, ModelCache

__all__ = ["TokenLimit", "stored_bytes", "token_limit"]


def stored_bytes(lm: MambaLM) -> int:
    """Return the bytes of all weights that one token reads; of an untied embedding only a row.

    Example:
        >>> from anymamba.models import MambaConfig
        >>> stored_bytes(MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))) > 8 * 16 * 4
        True
    """
    tensors = {}
    for name, tensor in lm.state_dict().items():
        is_table = name.startswith("backbone.embedding.") and not lm.config.tie_embeddings
        if not is_table:
            tensors[tensor.data_ptr()] = tensor.nbytes
    return sum(tensors.values())


class TokenLimit(NamedTuple):
    """How fast one sequence could decode if nothing but memory counted."""

    bytes_per_token: int
    bandwidth: float

    @property
    def tokens_per_second(self) -> float:
        """The limit."""
        return self.bandwidth / self.bytes_per_token

    def share(self, tokens_per_second: float) -> float:
        """Return a measured speed over the limit.

        Example:
            >>> TokenLimit(bytes_per_token=10, bandwidth=100.0).share(5.0)
            0.5
        """
        return tokens_per_second / self.tokens_per_second


def token_limit(lm: MambaLM, cache: ModelCache) -> TokenLimit:
    """Measure the rate of reading memory, and count what a token of one row moves.

    All weights, and the state: in and out, but keys and values of attention only in.

    Args:
        lm: the model.
        cache: its state; one row.
    """
    state = sum(layer.nbytes * (2 - isinstance(layer, KVCache)) for layer in cache.layers)
    return TokenLimit(stored_bytes(lm) + state, read_rate(array_to_read()))
