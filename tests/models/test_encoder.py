"""Laws of encoders and their heads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from anymamba.errors import ConfigError, ShapeError
from anymamba.io import load_model
from anymamba.models import Encoder, EncoderConfig, mask_tokens, verify
from anymamba.nn import BidirectionalConfig, Marker, RegisterConfig
from laws import assert_same, randn

MAMBA3: dict[str, Any] = {"layer": "Mamba3", "d_state": 8, "headdim": 4, "chunk_size": 4}
HEADS: dict[str, dict[str, Any]] = {
    "embedding": {},
    "register": {"pool": "register"},
    "classes": {"n_classes": 3},
    "tokens": {"head": "tokens", "n_classes": 3},
    "masked": {"head": "masked"},
}
IDS = torch.tensor([[1, 2, 3, 4, 5, 6], [7, 8, 9, 0, 0, 0]])
LENGTHS = torch.tensor([6, 3])


def encoder_of(name: str, registers: bool = True) -> Encoder:
    """Return an encoder with random weights and, if asked, a register at either end."""
    rows = RegisterConfig(stack=[Marker.start(), Marker.end()]) if registers else None
    stack = BidirectionalConfig(
        d_model=8, n_layer=2, ssm_cfg=MAMBA3, registers=rows, final_norm=True
    )
    config = EncoderConfig(vocab_size=16, stack=stack, **HEADS[name])
    encoder = Encoder(config, dtype=torch.float64)
    with torch.no_grad():
        for place, weight in enumerate(encoder.parameters()):
            weight.add_(randn(*weight.shape, seed=place, scale=0.3))
    return encoder


@pytest.mark.parametrize("name", HEADS)
def test_a_row_does_not_notice_its_padding(name: str):
    """Every head says about a row of a padded batch what it says about the row alone."""
    encoder = encoder_of(name)
    together = encoder(IDS, lengths=LENGTHS)
    other = IDS.masked_fill(IDS == 0, 11)
    assert_same(together[1, :3].detach(), encoder(other, lengths=LENGTHS)[1, :3].detach())
    for row, length in enumerate(LENGTHS.tolist()):
        alone = encoder(IDS[row : row + 1, :length])[0]
        kept = together[row, :length] if name in ("tokens", "masked") else together[row]
        assert_same(alone.detach(), kept.detach())


@pytest.mark.parametrize(
    ("name", "registers"),
    [(name, yes) for name in HEADS for yes in (True, False) if yes or name != "register"],
)
def test_shapes_do_not_depend_on_registers(name: str, registers: bool):
    """Heads speak of tokens and sequences; registers are no tokens."""
    shape = {"tokens": (2, 6, 3), "masked": (2, 6, 16), "classes": (2, 3)}.get(name, (2, 8))
    assert encoder_of(name, registers)(IDS).shape == shape


def test_a_pooled_embedding_is_the_mean_of_the_tokens():
    """The mean is taken over tokens only: not over padding, not over registers."""
    encoder = encoder_of("embedding")
    stack = encoder.stack
    y_bsd = stack(encoder.embedding(IDS), lengths=LENGTHS)
    tokens_bsd = stack.tokens_of(y_bsd, 6, LENGTHS)
    expected = torch.stack([tokens_bsd[0].mean(0), tokens_bsd[1, :3].mean(0)])
    assert_same(expected.detach(), encoder(IDS, lengths=LENGTHS).detach())


def test_a_register_pool_reads_the_first_register():
    """The start register stands at place 0."""
    encoder = encoder_of("register")
    y_bsd = encoder.stack(encoder.embedding(IDS), lengths=LENGTHS)
    assert_same(y_bsd[:, 0].detach(), encoder(IDS, lengths=LENGTHS).detach())


@pytest.mark.parametrize("name", ["classes", "tokens", "masked"])
def test_losses_are_cross_entropies(name: str):
    """The loss is the mean over what is asked; padding and -100 do not count."""
    encoder = encoder_of(name)
    logits = encoder(IDS, lengths=LENGTHS)
    if name == "classes":
        targets = torch.tensor([2, 0])
        expected = F.cross_entropy(logits, targets)
    else:
        targets = torch.tensor([[0, 1, 2, -100, 1, 0], [2, 2, 1, 1, 1, 1]])
        counted = targets.clone()
        counted[1, 3:] = -100
        expected = F.cross_entropy(logits.flatten(0, 1), counted.flatten())
    loss = encoder.loss(IDS, targets, lengths=LENGTHS)
    assert_same(expected.detach(), loss.detach())
    loss.backward()
    assert all(weight.grad is not None for weight in encoder.parameters())


def test_masked_training_learns():
    """A few steps on a periodic text let the encoder guess hidden tokens from both sides."""
    torch.manual_seed(0)
    stack = BidirectionalConfig(d_model=16, n_layer=2, ssm_cfg=MAMBA3, final_norm=True)
    encoder = Encoder(EncoderConfig(vocab_size=8, stack=stack, head="masked"))
    optimiser = torch.optim.AdamW(encoder.parameters(), lr=3e-2)
    ids_bs = torch.arange(24).remainder(6).expand(4, -1)
    random = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(60):
        hidden_bs, targets_bs = mask_tokens(
            ids_bs, mask_id=7, vocab_size=8, generator=random, rate=0.3
        )
        loss = encoder.loss(hidden_bs, targets_bs)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]


def test_mask_tokens_keeps_its_shares():
    """Of many tokens the rate is chosen, and 8, 1 and 1 tenths of those share three fates."""
    ids_bs = torch.full((64, 256), 3)
    lengths = torch.full((64,), 200)
    random = torch.Generator().manual_seed(2)
    hidden_bs, targets_bs = mask_tokens(
        ids_bs, mask_id=99, vocab_size=100, rate=0.2, lengths=lengths, generator=random
    )
    chosen_bs = targets_bs != -100
    assert not bool(chosen_bs[:, 200:].any())
    assert bool((targets_bs[chosen_bs] == 3).all())
    assert bool((hidden_bs[~chosen_bs] == 3).all())
    assert float(chosen_bs[:, :200].double().mean()) == pytest.approx(0.2, abs=0.02)
    fates = hidden_bs[chosen_bs]
    assert float((fates == 99).double().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((fates == 3).double().mean()) == pytest.approx(0.1, abs=0.03)
    again = mask_tokens(
        ids_bs,
        mask_id=99,
        vocab_size=100,
        rate=0.2,
        lengths=lengths,
        generator=torch.Generator().manual_seed(2),
    )
    assert torch.equal(again.ids_bs, hidden_bs)


def test_mask_tokens_always_asks_something():
    """However small the rate, one token is hidden or asked for."""
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)
        _, targets_bs = mask_tokens(
            IDS, mask_id=9, vocab_size=16, rate=1e-6, lengths=LENGTHS, generator=random
        )
        assert int((targets_bs != -100).sum()) >= 1
        assert bool((targets_bs[1, 3:] == -100).all())


@pytest.mark.parametrize("name", HEADS)
def test_encoders_survive_their_files(name: str, tmp_path: Path):
    """Config and weights come back as they were."""
    encoder = encoder_of(name)
    entries = json.loads(json.dumps(encoder.config.to_dict()))
    assert EncoderConfig.from_dict(entries) == encoder.config
    encoder.save_pretrained(tmp_path)
    again = Encoder.from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(encoder(IDS), again(IDS))
    assert type(load_model(tmp_path)) is Encoder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"head": "tokens"}, "n_classes"),
        ({"head": "masked", "n_classes": 3}, "vocabulary"),
        ({"head": "words"}, "head"),
        ({"n_classes": 0}, "n_classes"),
        ({"pool": "register"}, "register"),
        ({"stack": None}, "BidirectionalConfig"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    """A config says which fields do not go together."""
    stack = BidirectionalConfig(d_model=8, n_layer=2)
    with pytest.raises(ConfigError, match=message):
        EncoderConfig(**{"vocab_size": 16, "stack": stack, **changes})


def test_mistakes_in_calls_are_refused():
    """Ids, targets, rates and losses must fit."""
    with pytest.raises(TypeError, match="int64"):
        encoder_of("masked")(torch.zeros(1, 3))
    with pytest.raises(ShapeError, match="sequence"):
        encoder_of("masked")(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match="targets"):
        encoder_of("tokens").loss(IDS, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="no classes"):
        encoder_of("embedding").loss(IDS, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ConfigError, match="rate"):
        mask_tokens(IDS, mask_id=1, vocab_size=4, rate=0.0)


def test_an_encoder_says_why_it_cannot_be_verified():
    """It has one way to run, from both ends."""
    with pytest.raises(ConfigError, match="both ends"):
        verify(encoder_of("masked"))  # pyright: ignore[reportArgumentType]
