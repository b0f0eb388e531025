"""Prompts: checking them, and reading them into a state piece by piece."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from anymamba.errors import CacheError, ConfigError, DtypeError, ShapeError
from anymamba.models import MambaConfig, MambaLM, native_refusal, scheme_of
from anymamba.nn import ModelCache

__all__ = ["Progress", "Prompts", "check_model", "check_prompts", "read_prompts"]

Prompts = Tensor | Sequence[Sequence[int] | Tensor]
Progress = Callable[[int, int], object]
# Prompts of quantised models up to this length go through the decoder. Modules make floating-point
# numbers of all integers first, whatever the length. Of their time the decoder took, on the
# published sizes and two cores that share a cache, 0.5 to 0.8 for 16 tokens of one row of int8 and
# 0.8 to 1.6 for 32, of one row of int4 0.3 to 0.8 for 32, of eight rows 0.4 to 0.55 for 32. Where
# cores share none, modules lose more: 0.5 for 32 tokens of int8 (mamba-130m). So the border lies
# between 16 and 32; 24 itself was not measured.
FEW = 24


def check_model(where: str, lm: MambaLM) -> None:
    """Raise `ConfigError` unless the model continues token ids."""
    # By the config, not by the class: a compiled or wrapped language model is still one, whose
    # `advance` tracks no gradients, as that of `MambaLM` does not.
    if not isinstance(getattr(lm, "config", None), MambaConfig):
        raise ConfigError(
            f"{where}: the model must be a language model, which says the next token; got "
            f"{type(lm).__name__}. A causal LatentModel streams numbers with its own step and "
            "prime; a model that reads from both ends has no next token."
        )


def check_prompts(where: str, prompts: Prompts, vocab_size: int) -> list[list[int]]:
    """Return the prompts as lists of token ids.

    Raises:
        ShapeError: no prompts, an empty prompt, or wrong axes.
        DtypeError: something that is not a token id.
        ConfigError: an id that the vocabulary does not have.
    """
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise ShapeError(
            f"{where}: a tensor of prompts must have the axes (batch, sequence); got shape "
            f"{tuple(prompts.shape)}. For one prompt pass [ids]."
        )
    if isinstance(prompts, str) or not isinstance(prompts, Tensor | Sequence):
        raise DtypeError(
            f"{where}: prompts must be a list of prompts, each a list or tensor of token ids; "
            f"got {type(prompts).__name__}. Encode text with a tokenizer first."
        )
    if len(prompts) == 0:
        raise ShapeError(f"{where}: there must be at least one prompt; got none.")
    return [_ids(where, row, prompt, vocab_size) for row, prompt in enumerate(prompts)]


def _ids(where: str, row: int, prompt: Any, vocab_size: int) -> list[int]:
    if isinstance(prompt, Tensor) and prompt.dim() == 1:
        prompt = prompt.tolist()
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence):
        what = f"shape {tuple(prompt.shape)}" if isinstance(prompt, Tensor) else repr(prompt)[:40]
        raise DtypeError(
            f"{where}: prompt {row} must be a list or a tensor (sequence,) of token ids; "
            f"got {what}. Prompts come as a list of prompts, text through a tokenizer."
        )
    if len(prompt) == 0:
        raise ShapeError(
            f"{where}: prompt {row} is empty; a prompt needs at least one token id. "
            "Start from the tokenizer's bos_id or eos_id."
        )
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise DtypeError(f"{where}: prompt {row} must hold integers; {error}.") from error
    if min(ids) < 0 or max(ids) >= vocab_size:
        worst = min(ids) if min(ids) < 0 else max(ids)
        raise ConfigError(
            f"{where}: token ids must lie in 0..{vocab_size - 1}; prompt {row} has {worst}. "
            "Use the tokenizer that belongs to the model."
        )
    return ids


def read_prompts(
    where: str,
    lm: MambaLM,
    prompts: list[list[int]],
    cache: ModelCache | None,
    prefill_chunk: int,
    progress: Progress | None,
) -> tuple[Tensor, ModelCache]:
    """Run the prompts into a state, one row each; return the last logits and that state.

    Prompts of one length run together, others one after the other: measured on CPU, packing
    ragged prompts into one sequence costs 1 to 1.4 times as much as running them apart. A call
    sees at most `prefill_chunk` tokens, so memory does not grow with the prompt. Short prompts of
    quantised models run token by token where the CPU decoder serves the model.

    Args:
        where: the function that asks; opens every message.
        lm: the model.
        prompts: checked token ids.
        cache: state before the prompts, one row each; it is not changed.
        prefill_chunk: tokens per call.
        progress: called with the number of tokens done and the number of all.

    Raises:
        CacheError: the cache has another number of rows.
    """
    if cache is not None:
        _check_cache(where, cache, len(prompts))
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(row)
    done, total = 0, sum(map(len, prompts))
    logits_bw, caches = [], []

    def tell(tokens: int) -> None:
        nonlocal done
        done += tokens
        if progress is not None:
            progress(done, total)

    for length, rows in groups.items():
        part = lm.empty_cache(len(rows)) if cache is None else cache.rows(rows)
        group = [prompts[row] for row in rows]
        is_short = length <= FEW and scheme_of(lm) is not None
        step = _read_tokens(lm, group, part, tell) if is_short else None
        last_bw, part = step or _read_pieces(lm, group, part, prefill_chunk, tell)
        logits_bw.append(last_bw)
        caches.append(part)
    if len(groups) == 1:
        return logits_bw[0], caches[0]
    order = [row for rows in groups.values() for row in rows]
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(logits_bw)[back], ModelCache.join(caches).rows(back)


def _read_tokens(
    lm: MambaLM, prompts: list[list[int]], cache: ModelCache, tell: Callable[[int], None]
) -> tuple[Tensor, ModelCache] | None:
    """Run prompts of one length through the decoder; None where it cannot, and nothing was done."""
    ids_bs = torch.tensor(prompts, device=cache.position_b.device)
    *others, last_b = ids_bs.unbind(1)
    with lm.unchanged():
        # Of this model and these rows; later tokens differ in nothing that could be refused.
        if native_refusal(lm, last_b, cache) is not None:
            return None
        for ids_b in others:
            cache = lm.advance_state(ids_b, cache)
        logits_bw, cache = lm.advance(last_b, cache)
    tell(ids_bs.numel())
    return logits_bw, cache


def _read_pieces(
    lm: MambaLM,
    prompts: list[list[int]],
    cache: ModelCache,
    prefill_chunk: int,
    tell: Callable[[int], None],
) -> tuple[Tensor, ModelCache]:
    """Run prompts of one length through the modules, piece by piece."""
    size, device = max(1, prefill_chunk // len(prompts)), cache.position_b.device

    def piece(start: int) -> Tensor:
        # Made piece by piece: only the caller's ids are as long as the prompt.
        return torch.tensor([prompt[start : start + size] for prompt in prompts], device=device)

    last = (len(prompts[0]) - 1) // size * size
    for start in range(0, last, size):
        ids_bs = piece(start)
        # Without the head: nobody uses these logits, and of integers it would be opened each time.
        x_bsd = lm.backbone.embedding(ids_bs)
        cache = cast("ModelCache", lm.backbone.prefill(x_bsd, cache).cache)
        tell(ids_bs.numel())
    ids_bs = piece(last)
    logits_bsw, cache = lm.prefill(ids_bs, cache, num_last_tokens=1)
    tell(ids_bs.numel())
    return logits_bsw[:, -1], cache


def _check_cache(where: str, cache: ModelCache, prompts: int) -> None:
    if not isinstance(cache, ModelCache):
        raise CacheError(
            f"{where}: the cache must be a ModelCache; got {type(cache).__name__}. "
            "Pass what lm.prefill or generate_detailed returned."
        )
    if cache.position_b.shape[0] != prompts:
        raise CacheError(
            f"{where}: the cache must have one row per prompt; got {cache.position_b.shape[0]} "
            f"rows and {prompts} prompts. Repeat a row with cache.rows([0] * n)."
        )
