"""Prompts: checking them, and reading them into a state piece by piece."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anymamba.errors import CacheError, ConfigError, DtypeError, ShapeError
from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import ModelCache

__all__ = ["Progress", "Prompts", "check_model", "check_prompts", "read_prompts"]

Prompts = Tensor | Sequence[Sequence[int] | Tensor]
Progress = Callable[[int, int], object]


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
    sees at most `prefill_chunk` tokens, so memory does not grow with the prompt.

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
    for length, rows in groups.items():
        part = lm.empty_cache(len(rows)) if cache is None else cache.rows(rows)
        size = max(1, prefill_chunk // len(rows))
        last = None
        for start in range(0, length, size):
            # Made piece by piece: only the caller's ids are as long as the prompt.
            piece = [prompts[row][start : start + size] for row in rows]
            ids_bs = torch.tensor(piece, device=part.position_b.device)
            last, part = lm.prefill(ids_bs, part, num_last_tokens=1)
            done += ids_bs.numel()
            if progress is not None:
                progress(done, total)
        assert last is not None
        logits_bw.append(last[:, -1])
        caches.append(part)
    if len(groups) == 1:
        return logits_bw[0], caches[0]
    order = [row for rows in groups.values() for row in rows]
    back = sorted(range(len(order)), key=order.__getitem__)
    return torch.cat(logits_bw)[back], ModelCache.join(caches).rows(back)


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
