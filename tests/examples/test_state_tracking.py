"""State tracking: the curriculum, the score, the rotation by position, and the short form."""

import json

import pytest
import torch

import anymamba as am
import state_tracking
from formal_languages import LANGUAGES
from standard_rotation import PositionRotation, rotate_by_position
from state_tracking import LONG, ROWS, SHORT, SIZES, Size, longest_at, main, model_of, score
from study import seeded


def test_the_curriculum_grows_from_short_to_long():
    lengths = [longest_at(step, 1000) for step in range(1000)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[249], lengths[750], lengths[-1]) == (SHORT, SHORT, LONG, LONG)


def test_a_perfect_model_scores_100_and_a_constant_one_nothing():
    language = LANGUAGES["parity"]

    def perfect(tokens):
        return torch.nn.functional.one_hot(tokens.cumsum(1) % 2, 2)

    assert score(perfect, language, 256, seed=0) == 100
    assert abs(score(torch.zeros_like, language, 2048, seed=0)) < 100
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


def test_every_row_of_the_paper_has_its_three_numbers():
    assert all(set(row.paper) == set(SIZES) for row in ROWS.values() if row.paper)


@pytest.mark.slow
def test_the_short_form_runs_resumes_and_repeats(tmp_path, capsys, monkeypatch):
    """Two runs of one seed agree to the last digit, and a second start computes nothing."""
    monkeypatch.setattr(state_tracking, "ROWS", {n: ROWS[n] for n in ("Mamba-3", "Mamba-2")})
    cells = []
    for folder in ("first", "second"):
        main(["--quick", "--seeds", "1", "--results", str(tmp_path / folder)])
        file = tmp_path / folder / "state_tracking.json"
        assert (tmp_path / folder / "state_tracking.png").stat().st_size > 10_000
        stored = json.loads(file.read_text())["cells"]
        cells.append({key: cell["result"] for key, cell in stored.items()})
    assert cells[0] == cells[1]
    capsys.readouterr()
    main(["--quick", "--seeds", "1", "--results", str(tmp_path / "first")])
    printed = capsys.readouterr().out
    assert "starts" not in printed
    assert "| Mamba-3 |" in printed
