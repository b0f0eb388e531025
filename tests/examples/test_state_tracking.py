"""State tracking: the curriculum, the score, the rotation by position, and the short form."""

import copy
import json
import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import anymamba as am
import state_tracking
import training
from anymamba.errors import BackendError
from formal_languages import LANGUAGES, UNASKED
from kernels import NATIVE
from standard_rotation import PositionRotation, rotate_by_position
from state_tracking import (
    LONG,
    ROWS,
    SHORT,
    SHORTER,
    TASKS,
    Size,
    after_start,
    is_over,
    learning_rate,
    longest_at,
    loss_of,
    main,
    model_of,
    row_of,
    score,
    table_by_length,
    train_cell,
)
from training import seeded


def test_the_curriculum_grows_from_short_to_long():
    lengths = [longest_at(step, 1000, (0.25, 0.75)) for step in range(1000)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[249], lengths[750], lengths[-1]) == (SHORT, SHORT, LONG, LONG)


def test_the_rate_rises_stays_and_falls():
    size = Size(layers=1, width=32, steps=1000, again=500)
    rate = learning_rate(1e-2, size, 0.5)
    assert rate(0) < rate(50) < rate(99) == rate(500) == 1e-2
    assert rate(999) == pytest.approx(1e-4, rel=0.02)
    assert rate(1000) < rate(1250) == 0.25e-2
    assert rate(1499) == pytest.approx(0.25e-4, rel=0.03)


def test_every_row_begins_with_a_symbol_of_its_own_that_asks_nothing():
    language = LANGUAGES["brackets"]
    batch = language.batch(4, 9, seeded(0))
    tokens, answers = after_start(batch, language)
    assert (tokens[:, 0] == language.vocabulary).all()
    assert (answers[:, 0] == UNASKED).all()
    assert tokens[:, 1:].equal(batch.tokens)
    assert answers[:, 1:].equal(batch.answers)


def test_batches_have_all_lengths_of_the_curriculum_and_about_the_same_tokens():
    shapes = []

    def model(tokens):
        shapes.append(tuple(tokens.shape))
        return torch.zeros(*tokens.shape, 2, requires_grad=True)

    for step in range(400):
        loss_of(model, "parity", seed=0, step=step, steps=400)
    lengths = [length - 1 for _, length in shapes]
    assert min(lengths) == 3
    begins = int(400 * TASKS["parity"].grows[0])
    assert max(lengths[:begins]) <= SHORT < 0.9 * LONG < max(lengths) <= LONG
    assert all(
        0.9 < rows * length / (64 * SHORT) <= 1
        for (rows, _), length in zip(shapes, lengths, strict=True)
    )


def test_a_perfect_model_scores_100_and_a_constant_one_nothing():
    language = LANGUAGES["parity"]

    def perfect(tokens):
        return torch.nn.functional.one_hot(tokens.cumsum(1) % 2, 2)

    assert score(perfect, language, 256, seed=0) == 100
    assert abs(score(lambda tokens: perfect(tokens * 0), language, 2048, seed=0)) < 8


def test_position_rotation_turns_by_the_frequencies_of_attention():
    block = am.Mamba3(8, d_state=16, headdim=8, rope_fraction=1.0)
    rotation = PositionRotation(block.rotation)
    *_, state = rotation.keys(
        (torch.randn(1, 5, 1, 1, 16), torch.randn(1, 5, 1, 1, 16)),
        (torch.ones(16), torch.ones(16)),
        (1e-5, 1e-5),
        (block.B_bias, block.C_bias),
        torch.randn(1, 5, 8),
        torch.rand(1, 5, 2),
        rotation.fresh(1, torch.device("cpu"), torch.float32),
        "auto",
        None,
    )
    expected = 5 * 10000.0 ** -(torch.arange(8) / 8)
    torch.testing.assert_close(state.angle_bha[0, 0].cos(), expected.cos(), atol=1e-5, rtol=0)


def test_position_rotation_ignores_what_the_tokens_ask_for():
    row = ROWS["Mamba-3, standard rotation"]
    language, size = LANGUAGES["parity"], Size(layers=1, width=32, steps=1)
    torch.manual_seed(0)
    model = model_of(row, size, language)
    plain = am.MambaLM(model.config)
    plain.load_state_dict(model.state_dict())
    tokens = language.batch(2, 20, seeded(0)).tokens
    before = model(tokens)
    assert not torch.allclose(before, plain(tokens), atol=1e-5)
    for each in (model, plain):
        with torch.no_grad():
            each.backbone.layers[0].mixer.in_proj.weight[-16:].normal_()
    torch.testing.assert_close(before, model(tokens))
    rotate_by_position(plain)
    torch.testing.assert_close(before, plain(tokens))


def test_position_rotation_turns_the_same_in_steps():
    """Modules alone serve it: a sequence in one go equals token by token."""
    row = row_of("Mamba-3, standard rotation", "parity")
    torch.manual_seed(0)
    model = model_of(row, Size(layers=1, width=32, steps=1), LANGUAGES["parity"]).eval()
    assert am.verify(model).ok
    reason = "PositionRotation" if NATIVE else "no compiled kernels"
    with pytest.raises(BackendError, match=reason), torch.no_grad():
        model.step_(torch.tensor([1]), model.empty_cache(1), impl="native")
    ids_bs = torch.ones(1, 5, dtype=torch.int64)
    assert torch.equal(copy.deepcopy(model)(ids_bs), model(ids_bs))


def test_rows_get_what_the_task_wants_unless_they_have_their_own():
    assert row_of("Mamba-3", "parity").ssm_cfg["rope_fraction"] == 0.5
    assert row_of("Mamba-3, no rotation", "arithmetic").ssm_cfg["rope_fraction"] == 0.0
    assert row_of("Mamba-3", "arithmetic").ssm_cfg["dt_max"] == 1.0
    assert row_of("Mamba-2", "brackets").ssm_cfg["headdim"] == 8
    for name in ("Mamba-3, no rotation", "Mamba-2", "Mamba-3, standard rotation"):
        assert "dt_max" not in row_of(name, "arithmetic").ssm_cfg
    assert "rope_fraction" not in row_of("Mamba-2", "arithmetic").ssm_cfg


def test_a_training_ends_when_all_is_learnt_or_nothing_is():
    """Only brackets give up, after a fifth of the steps, on what short sequences do not show."""

    def ends(step, score, short, task="brackets"):
        return is_over({"step": step, "score": score, "short": short}, task, 1000)

    assert ends(100, 99.5, 100.0)
    assert ends(200, 0.0, 79.9)
    assert not ends(199, 0.0, 79.9)
    assert not ends(200, 0.0, 80.0)
    assert not ends(999, 0.0, 0.0, task="arithmetic")


def parity_by_hand(rotation_range=2.0):
    """One block of two heads that turns by half a turn at every one, and writes only there.

    The writes cancel in pairs: 1, 1 - 1, 1 - 1 + 1, ... is the parity of their number.
    """
    block = {"d_state": 2, "headdim": 1, "expand": 1, "bias": True, "A_floor": 1e-8}
    turning = {"rope_fraction": 1.0, "rotation_range": rotation_range, "a_activation": "softplus"}
    config = am.MambaConfig(
        d_model=2,
        n_layer=1,
        vocab_size=2,
        pad_vocab_size_multiple=1,
        tie_embeddings=False,
        ssm_cfg={"layer": "Mamba3", **block, **turning},
    )
    model = am.MambaLM(config)
    mixer, unit, half_turn = model.backbone.layers[0].mixer, math.log(math.e - 1), math.atanh(0.5)
    # What each channel is for a zero and for a one: z, x, B, C, dt, A, lambda, rotation.
    channels = [(5, 5), (5, 5), (0, 1), (0, 1), (1, 1), (0, 0), (1, 1), (0, 0)]
    channels += [(unit, unit)] * 2 + [(-30, -30)] * 2 + [(20, 20)] * 2 + [(0, half_turn)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (model.backbone.layers[0].norm, model.backbone.norm_f):
            norm.weight.fill_(1)
        mixer.B_norm.weight.fill_(1)
        mixer.C_norm.weight.fill_(1)
        # Of length sqrt 2, so that the norm in front of the block changes nothing.
        model.backbone.embedding.weight.copy_(math.sqrt(2) * torch.eye(2))
        mixer.in_proj.weight.copy_(torch.tensor(channels) / math.sqrt(2))
        mixer.out_proj.weight.copy_(100 * torch.eye(2))
        mixer.out_proj.bias.fill_(-500)
        model.lm_head.weight.copy_(torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    return model


@pytest.mark.parametrize("length", [1, 2, 40, 256, 3000])
def test_one_block_can_follow_parity_at_any_length(length):
    tokens, answers = LANGUAGES["parity"].batch(8, length, seeded(4))
    assert parity_by_hand()(tokens).argmax(-1).equal(answers)


def test_half_a_turn_is_what_makes_it_parity():
    """With turns of another angle the same block is lost after a few tokens."""
    tokens, answers = LANGUAGES["parity"].batch(64, 256, seeded(4))
    right = parity_by_hand(rotation_range=1.9)(tokens).argmax(-1) == answers
    assert right[:, -64:].float().mean() < 0.6


def test_every_row_of_the_paper_has_its_three_numbers():
    assert all(set(row.paper) == set(TASKS) for row in ROWS.values() if row.paper)


def test_sizes_steps_and_lengths_are_shown():
    shorter = {str(length): 50.0 for length in SHORTER}
    results = [
        {"score": 10.0 * seed, "shorter": shorter, "steps": steps, "parameters": 1234}
        for seed, steps in enumerate([900, 2000])
    ]
    lines = table_by_length("brackets", {"Mamba-3": results, "Mamba-2": []}).splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("| Mamba-3 | 1,234 | 900, 2000 | 50.0 (50.0 to 50.0) |")
    assert lines[-1].endswith("| 5.0 (0.0 to 10.0) |")


class Interrupted(Exception):
    """Stands for a power cut."""


def test_an_interrupted_training_ends_as_one_in_a_single_go(tmp_path, monkeypatch):
    """The mean of the last weights, which is judged, is part of what is kept."""
    monkeypatch.setattr(training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    size, row = Size(layers=1, width=16, steps=12, tested=64), row_of("Mamba-3", "arithmetic")

    def learn(name):
        run = training.Run(name, {}, tmp_path / f"{name}.pt")
        return train_cell(run, "arithmetic", row, size, 0, 1e-3, size.steps)

    means = []
    update = AveragedModel.update_parameters
    monkeypatch.setattr(
        AveragedModel,
        "update_parameters",
        lambda mean, model: means.append(update(mean, model) or mean.state_dict()),
    )
    expected, kept = learn("whole"), means.copy()
    real = state_tracking.loss_of

    def cut(model, task, seed, step, steps):
        if step == 9:
            raise Interrupted
        return real(model, task, seed, step, steps)

    means.clear()
    with monkeypatch.context() as patch:
        patch.setattr(state_tracking, "loss_of", cut)
        with pytest.raises(Interrupted):
            learn("cut")
    assert learn("cut") == expected
    assert len(kept) == 5
    assert all(torch.equal(value, means[-1][name]) for name, value in kept[-1].items())


@pytest.mark.slow
def test_the_short_form_runs_resumes_and_repeats(tmp_path, capsys, monkeypatch):
    """Two runs of one seed agree to the last digit, and a second start computes nothing."""
    monkeypatch.setattr(state_tracking, "ROWS", {n: ROWS[n] for n in ("Mamba-3", "Mamba-2")})
    cells = []
    for folder in ("first", "second"):
        main(["--quick", "--jobs", "1", "--results", str(tmp_path / folder)])
        file = tmp_path / folder / "quick" / "state_tracking.json"
        assert (tmp_path / folder / "quick" / "state_tracking.png").stat().st_size > 10_000
        stored = json.loads(file.read_text())["cells"]
        cells.append({key: cell["result"] for key, cell in stored.items()})
    assert cells[0] == cells[1]
    capsys.readouterr()
    main(["--quick", "--jobs", "1", "--results", str(tmp_path / "first")])
    printed = capsys.readouterr().out
    assert "starts" not in printed
    assert "| Mamba-3 |" in printed
