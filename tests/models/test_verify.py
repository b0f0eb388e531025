"""Laws of `verify`: it passes what is equal, names what is not, and leaves the model alone."""

import math
from itertools import pairwise

import pytest
import torch

import anymamba as am
from anymamba.errors import ConfigError
from anymamba.models import MambaConfig, MambaLM, VerifyReport, verify

SIZES = {"d_model": 16, "n_layer": 2, "vocab_size": 30}
SSD = {"d_state": 8, "headdim": 8}
FAMILIES = {
    "mamba1": {"ssm_cfg": {"layer": "Mamba1"}},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", **SSD}},
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", **SSD}, "d_intermediate": 16},
    "mimo": {"ssm_cfg": {"layer": "Mamba3", **SSD, "is_mimo": True, "mimo_rank": 2}},
    "hybrid": {
        "ssm_cfg": {"layer": "Mamba2", **SSD},
        "attn_layer_idx": [1],
        "attn_cfg": {"num_heads": 2, "causal": True, "rotary_emb_dim": 4, "d_conv": 3},
    },
}
PATHS = ["minimal", "serial", "serial_recalculated"]


def model(family: str = "mamba3", **kwargs) -> MambaLM:
    torch.manual_seed(0)
    return MambaLM(MambaConfig(**SIZES, **FAMILIES[family]), **kwargs)


def failing(report: VerifyReport) -> list[str]:
    return [row.way for row in report.rows if not row.ok]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_is_equal(family):
    """Forward, pieces, steps, packed, labelled, paths and implementations agree."""
    report = verify(model(family), length=13, dtypes=("float32", "float64"))
    assert report.ok, report
    assert (report.batch, report.length) == (2, 13)
    paths = [] if family == "mamba1" else PATHS
    expected = ["forward", "pieces", "steps", "packed", "seq_idx", *paths, "portable", "native"]
    assert [row.way for row in report.rows] == 2 * expected
    for row in report.rows:
        if row.ran:
            assert row.diverges_at is None
            assert row.error < (1e-5 if row.dtype == "float32" else 1e-12)
            has_state = row.way not in ("forward", "packed", "seq_idx")
            assert (row.state_error is not None) == has_state
        else:
            assert row.way == "native"
            assert row.note


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65])
def test_any_length_will_do(length):
    """One token and both sides of a chunk border are verified alike."""
    assert verify(model(), length=length, batch=1).ok


def test_given_tokens_are_used():
    """With `ids` the sizes are theirs."""
    report = am.verify(model(), torch.arange(12).view(3, 4))
    assert (report.batch, report.length, report.ok) == (3, 4, True)


SABOTAGE = {
    "steps": ["steps"],
    "pieces": ["pieces"],
    "packed": ["packed"],
    "seq_idx": ["seq_idx"],
    "minimal": ["minimal"],
    "portable": ["portable"],
    "state": ["portable"],
    "nan": ["serial"],
}


def break_hidden(monkeypatch, wrong):
    """Put a wrong function in the place of both ways to hidden states."""
    monkeypatch.setattr(MambaLM, "_hidden", wrong)
    monkeypatch.setattr(
        MambaLM, "_outputs", lambda self, ids_bs, how: wrong(self, ids_bs, None, how)[0]
    )


@pytest.mark.parametrize("what", SABOTAGE)
def test_a_broken_way_is_named(monkeypatch, what):
    """Each way that is made wrong fails, and only that one; NaN and a wrong state are wrong too."""
    hidden, step = MambaLM._hidden, MambaLM.step

    def wrong_hidden(self, ids_bs, cache, how):
        if what == "pieces" and cache is not None:
            cache = self.empty_cache(ids_bs.shape[0])
        if what in ("packed", "seq_idx"):
            name = "cu_seqlens" if what == "packed" else what
            if how[name] is not None:  # one sequence where there were several: it leaks
                how = {**how, name: None}
        y, new = hidden(self, ids_bs, cache, how)
        kind = None if how["path"] is None else how["path"].kind
        if (what, kind) == ("minimal", "minimal") or (what, how["impl"]) == (
            "portable",
            "portable",
        ):
            y = y.flip(-1)
        if (what, kind) == ("nan", "serial"):
            y = y.clone().fill_(math.nan)
        if (what, how["impl"]) == ("state", "portable"):
            new = new.map(lambda x: x * 2)
        return y, new

    def wrong_step(self, ids_b, cache):
        logits_bw, new = step(self, ids_b, cache)
        return (logits_bw.flip(-1) if what == "steps" else logits_bw), new

    break_hidden(monkeypatch, wrong_hidden)
    monkeypatch.setattr(MambaLM, "step", wrong_step)
    report = verify(model(), length=9)
    assert failing(report) == SABOTAGE[what]
    assert not report.ok
    assert "NOT EQUAL" in repr(report)
    assert repr(report).count("FAILS") == 1


def test_the_first_other_token_is_found(monkeypatch):
    """The place where the likeliest token changes is reported, counted from zero."""
    step = MambaLM.step

    def wrong(self, ids_b, cache):
        logits_bw, new = step(self, ids_b, cache)
        return (-logits_bw if int(cache.position_b[0]) == 5 else logits_bw), new

    monkeypatch.setattr(MambaLM, "step", wrong)
    [row] = [row for row in verify(model(), length=9).rows if row.way == "steps"]
    assert (row.diverges_at, row.ok) == (5, False)


def test_padded_vocabulary_decides_nothing(monkeypatch):
    """Ids beyond the vocabulary never count as the likeliest token, however large their logits."""
    size, step = SIZES["vocab_size"], MambaLM.step

    def wrong(self, ids_b, cache):
        logits_bw, new = step(self, ids_b, cache)
        logits_bw[:, :size] *= -1
        return logits_bw, new

    lm = model()
    lm.lm_head.register_forward_hook(
        lambda _, __, y: torch.cat([y[..., :size], y[..., size:] + 9], -1)
    )
    monkeypatch.setattr(MambaLM, "step", wrong)
    places = {row.way: row.diverges_at for row in verify(lm, length=5).rows}
    assert (places["steps"], places["forward"]) == (0, None)


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("bfloat16", 1e-3, 5e-2), ("float16", 1e-4, 5e-3)]
)
def test_half_types_are_judged_by_float32(dtype, least, most):
    """A half model is compared with float32: its error is that of its rounding."""
    report = verify(model(), length=9, dtypes=(dtype,))
    assert report.ok, report
    assert report.rows[0].way == "reference"
    assert all(least < row.error < most for row in report.rows if row.ran)
    assert all(row.state_error is None for row in report.rows)


def test_a_model_sensitive_to_rounding_raises_the_limit_of_half_types():
    """The loop over time sets the measure: twice its own error, at most ten times the usual."""
    usual = 2e-2 * math.sqrt(2)
    lm = model("mamba2")
    with torch.no_grad():
        for layer in lm.backbone.layers:
            layer.mixer.in_proj.weight *= 12
    report = verify(lm, length=33, dtypes=("bfloat16",))
    reference, *others = (row for row in report.rows if row.ran)
    assert usual < 2 * reference.error
    assert reference.tolerance == pytest.approx(10 * usual)
    limit = min(2 * reference.error, 10 * usual)
    assert [row.tolerance for row in others] == pytest.approx([limit] * len(others))
    fixed = verify(lm, length=9, dtypes=("bfloat16",), tolerance=0.125)
    assert {row.tolerance for row in fixed.rows} == {0.125}


def test_a_half_type_without_numbers_fails(monkeypatch):
    """NaN in the loop over time raises no limit and excuses nobody."""
    lm = model(dtype=torch.bfloat16)
    hidden = MambaLM._hidden

    def wrong(self, ids_bs, cache, how):
        y, new = hidden(self, ids_bs, cache, how)
        return (y * math.nan if self is lm else y), new

    break_hidden(monkeypatch, wrong)
    report = verify(lm, length=5, dtypes=("bfloat16",))
    assert not report.ok
    assert all(row.tolerance < 0.3 for row in report.rows)
    assert "reference" in failing(report)
    assert "forward" in failing(report)


def test_the_tolerance_can_be_chosen():
    """A tolerance below the rounding fails every way that ran."""
    report = verify(model(), length=9, tolerance=0.0)
    assert not report.ok
    assert all(row.tolerance == 0.0 for row in report.rows)


def test_the_limit_grows_with_depth():
    """Errors of layers add up like a random walk."""
    limits = []
    for layers in (1, 4):
        lm = MambaLM(MambaConfig(**{**SIZES, "n_layer": layers}))
        limits.append(verify(lm, length=2).rows[0].tolerance)
    assert limits[1] == pytest.approx(2 * limits[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_is_left_alone(dtype):
    """Casting happens on a copy: no bit and no dtype of the model changes."""
    lm = model(dtype=dtype)
    before = {name: x.clone() for name, x in lm.state_dict().items()}
    verify(lm, length=3, dtypes=("float64", "float32", "bfloat16"))
    after = lm.state_dict()
    assert before.keys() == after.keys()
    for name, x in before.items():
        assert after[name].dtype == x.dtype
        assert torch.equal(after[name], x)
    assert lm.lm_head.weight is lm.backbone.embedding.weight


def test_a_report_is_plain_data_too():
    """`to_dict` has only values that JSON knows, `repr` fits a terminal."""
    report = verify(model(), length=3)
    entries = report.to_dict()
    assert entries["ok"] is True
    assert entries["rows"][0]["way"] == "forward"
    assert set(entries["rows"][0]) == {"ok", *report.rows[0]._fields}
    assert max(map(len, repr(report).splitlines())) <= 80
    assert all(a.way != b.way for a, b in pairwise(report.rows))


@pytest.mark.parametrize(
    "options",
    [{"dtypes": ()}, {"dtypes": "float32"}, {"dtypes": ("int8",)}, {"length": 0}, {"batch": 0}],
)
def test_rejects_impossible_requests(options):
    """Unknown dtypes and empty sizes are refused with what was given."""
    with pytest.raises(ConfigError, match=r"verify: .*got"):
        verify(model(), **options)
