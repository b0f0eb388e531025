"""One token of a language model: the verbs, and who runs it, the CPU decoder or the modules."""

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anymamba.errors import BackendError
from anymamba.models.decoder import (
    decodable,
    is_decodable,
    is_served,
    native_state,
    native_step,
    repeated_state,
    repeated_step,
    unchanged,
)
from anymamba.models.inputs import check_ids, check_known, check_rows, check_way
from anymamba.nn import ModelCache, QuantizedEmbedding, project, with_room
from anymamba.ops import without_gradients

__all__ = ["LmStep", "TokenVerbs"]


class LmStep(NamedTuple):
    """Logits and the state after them."""

    logits: Tensor
    cache: ModelCache


class TokenVerbs(nn.Module):
    """What a language model does with one token per row: the part of `MambaLM` that decodes."""

    backbone: Any
    lm_head: Any

    @decodable
    def step(self, ids_b: Tensor, cache: ModelCache, *, impl: str = "auto") -> LmStep:
        """Run one token: pure and differentiable; returns `(logits_bw, cache)`.

        Args:
            ids_b: one token id per row.
            cache: state before the token; not changed.
            impl: "auto" runs the CPU decoder where no gradient is wanted and the model allows it,
                else the modules; "native" insists on the decoder, "portable" on the modules.

        Raises:
            BackendError: `impl="native"` cannot be obeyed.
            ConfigError: the embedding has no such id.
            CacheError: the state is not one of this model's, or has other rows than there are ids.
        """
        self._check_token("MambaLM.step", ids_b, cache, impl)
        if impl == "native" and torch.is_grad_enabled():
            raise BackendError(
                "MambaLM.step: impl='native' has no gradient, and gradients are enabled. Call it "
                "under torch.no_grad(), or use impl='auto'."
            )
        # Copying the state for nothing would cost more than asking first.
        tries = not torch.is_grad_enabled() and self._decodes(impl)
        if tries and (impl == "native" or is_served(self, ids_b)):
            found = native_step(self, ids_b, with_room(cache, 1), impl)
            if found is not None:
                return LmStep(*found)
        hidden_bd, new = self._token(ids_b, cache)
        return LmStep(project(self.lm_head, hidden_bd), new)

    @without_gradients
    def step_(self, ids_b: Tensor, cache: ModelCache, *, impl: str = "auto") -> Tensor:
        """Run one token and write the new state into the cache's own memory; inference only.

        The arguments are those of `step`. An error leaves the cache as it was.
        """
        if self._decodes(impl):
            repeated_bw = repeated_step(self, ids_b, cache)
            if repeated_bw is not None:
                return repeated_bw
        where = "MambaLM.step_"
        self._check_token(where, ids_b, cache, impl)
        self.backbone.check_in_place(where, cache)
        if self._decodes(impl):
            found = native_step(self, ids_b, cache, impl)
            if found is not None:
                return found[0]
        logits_bw, new = self.step(ids_b, cache, impl="portable")
        cache.assign_(new)
        return logits_bw

    @without_gradients
    def advance(
        self,
        ids_b: Tensor,
        cache: ModelCache,
        *,
        impl: str = "auto",
        landing_bw: Tensor | None = None,
    ) -> LmStep:
        """Run one token with a cache that the caller gives up; returns `(logits_bw, cache)`.

        The cheapest of `step_` and `step`: the CPU decoder writes into the given cache and returns
        it; where modules run, or keys and values of attention have no room left, a new one is
        returned. Inference only.

        Args:
            ids_b: as for `step`.
            cache: as for `step`.
            impl: as for `step`.
            landing_bw: where the decoder writes the logits, and what it then returns as logits: in
                float32, whatever the model's dtype; modules return the model's. An interrupt that
                arrives while it runs is raised before this function returns: if the given cache
                then holds the new state (its position tells), only here are the logits to be found.
                (batch, rows of the head), float32, contiguous, on the CPU. Modules leave the given
                cache alone, and this too.

        Raises:
            ShapeError: the decoder cannot write into `landing_bw`.
        """
        if self._decodes(impl):
            repeated_bw = repeated_step(self, ids_b, cache, landing_bw)
            if repeated_bw is not None:
                return LmStep(repeated_bw, cache)
        self._check_token("MambaLM.advance", ids_b, cache, impl)
        if self._decodes(impl):
            found = native_step(self, ids_b, cache, impl, landing_bw)
            if found is not None:
                return LmStep(*found)
        return self.step(ids_b, cache, impl="portable")

    @without_gradients
    def advance_state(self, ids_b: Tensor, cache: ModelCache, *, impl: str = "auto") -> ModelCache:
        """Run one token as `advance` does, but without the head: nobody wants its logits.

        The arguments are those of `advance`.

        Example:
            >>> from anymamba.models import MambaConfig, MambaLM
            >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
            >>> cache = lm.advance_state(torch.tensor([1]), lm.empty_cache(1))
            >>> cache.position
            tensor([1])
        """
        if self._decodes(impl) and repeated_state(self, ids_b, cache):
            return cache
        self._check_token("MambaLM.advance_state", ids_b, cache, impl)
        found = native_state(self, ids_b, cache, impl) if self._decodes(impl) else None
        if found is not None:
            return found
        if is_decodable(self.step):
            return self._token(ids_b, cache)[1]
        # A subclass runs tokens in its own way, with their logits.
        return self.step(ids_b, cache, impl="portable").cache

    def unchanged(self) -> AbstractContextManager[None]:
        """Promise that nothing in the model changes inside a `with`.

        The decoder otherwise looks at every token whether a weight, a submodule or a hook is new:
        half a millisecond, a tenth of a token of a 130M model in int4. Inside it looks once.
        `generate` promises this itself, unless it is given functions of the caller's. Other threads
        have promised nothing and look. The state of the last token is held until the end of the
        promise, or until another state is decoded with.

        Example:
            >>> from anymamba.models import MambaConfig, MambaLM
            >>> lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
            >>> cache = lm.empty_cache(1)
            >>> with lm.unchanged():
            ...     for _ in range(3):
            ...         logits_bw = lm.step_(torch.tensor([1]), cache)
            >>> cache.position
            tensor([3])
        """
        return unchanged(self)

    def step_infinite(self, ids_b: Tensor) -> Tensor:
        """Return the limit of the logits when the same token is fed for ever; Mamba-3 only."""
        where = "MambaLM.step_infinite"
        check_ids(where, ids_b, 1)
        stream = self.backbone.fixed_point(where, self.backbone.embedding(ids_b))
        return self.lm_head(self.backbone.finish(stream))

    def _token(self, ids_b: Tensor, cache: ModelCache) -> tuple[Tensor, ModelCache]:
        """Return the normalised hidden states of one token through the modules, and the state."""
        embedding = self.backbone.embedding
        # Whatever was put in its place knows its own ids.
        if isinstance(embedding, nn.Embedding | QuantizedEmbedding):
            check_known("MambaLM", ids_b, embedding.num_embeddings)
        return self.backbone.token(embedding(ids_b), cache)

    def _check_token(self, where: str, ids_b: Tensor, cache: ModelCache, impl: str) -> None:
        check_way(where, impl)
        check_ids(where, ids_b, 1)
        self.backbone.check_cache(where, cache, is_needed=True)
        check_rows(where, ids_b, cache.position_b.shape[0])

    @staticmethod
    def _decodes(impl: str) -> bool:
        """Whether the decoder may be tried; a traced call stays in the modules."""
        return impl in ("auto", "native") and not torch.compiler.is_compiling()
