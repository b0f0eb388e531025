"""Tiny Mamba-3 models, trained for seconds: enough for their weights to want one activation."""

from functools import cache

import torch

from anymamba.models import MambaConfig, MambaLM

TEXT = (
    "one fish two fish red fish blue fish, black fish blue fish old fish new fish; "
    "this one has a little star and this one has a little car. "
) * 6


def fresh(a_activation: str) -> MambaLM:
    """Return the model before training; bytes are its tokens."""
    torch.manual_seed(0)
    options = {"layer": "Mamba3", "d_state": 16, "headdim": 16, "a_activation": a_activation}
    return MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=256, ssm_cfg=options))


@cache
def trained(a_activation: str, steps: int = 100) -> MambaLM:
    """Return the model after some steps on repetitive text."""
    lm = fresh(a_activation)
    ids = torch.tensor(list(TEXT.encode()))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 64, (8,), generator=random)
        loss = lm.loss(torch.stack([ids[start : start + 64] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lm
