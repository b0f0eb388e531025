"""Laws of the figures about training memory."""

import pytest

from anymamba.bench import memory_figures
from anymamba.models import MambaConfig

WAYS = ("anymamba", "transformers", "anymamba, recomputing", "transformers, recomputing")


def config(layer):
    return MambaConfig(d_model=64, n_layer=6, vocab_size=50, ssm_cfg={"layer": layer})


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_every_way_has_the_same_loss_and_recomputing_holds_less(monkeypatch, layer):
    """Short for the plain ways, long for all; Mamba-3 has no peer and says so."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("anymamba.bench.training_memory.MOST_SECONDS", float("inf"))
    found = list(memory_figures(["toy"], (16, 200), configs={"toy": config(layer)}))
    assert [x.way for x in found] == [*WAYS[:2], *WAYS]
    assert [x.length for x in found] == [16, 16, 200, 200, 200, 200]
    assert all(x.ok for x in found), found
    long = {x.way: x for x in found[2:]}
    assert long["anymamba, recomputing"].peak < 0.6 * long["anymamba"].peak
    if layer == "Mamba3":
        assert "no Mamba-3" in long["transformers"].why_not
    else:
        assert long["anymamba"].peak < long["transformers"].peak
        assert long["transformers, recomputing"].peak < long["transformers"].peak


@pytest.mark.parametrize(
    ("limit", "message"),
    [("MOST_SECONDS", "would take"), ("MOST_SHARE", "would need")],
)
def test_a_peer_is_not_waited_for_for_ever(monkeypatch, limit, message):
    """What is predicted from the short sequence to take too long or too much is left out."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(f"anymamba.bench.training_memory.{limit}", 0.0)
    found = list(memory_figures(["toy"], (16, 32), configs={"toy": config("Mamba2")}))
    short, long = (next(x for x in found if x.length == n and x.way == WAYS[1]) for n in (16, 32))
    assert short.peak is not None
    assert long.peak is None
    assert message in long.why_not
