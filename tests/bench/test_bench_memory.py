"""Laws of the figures about training memory."""

import pytest

from anymamba.bench import PeerStep, memory_figures, peer_step
from anymamba.models import MambaConfig

# Each step of a peer is a process that imports transformers.
pytestmark = pytest.mark.slow
WAYS = ("anymamba", "transformers", "anymamba, recomputing", "transformers, recomputing")


def config(layer):
    return MambaConfig(d_model=64, n_layer=6, vocab_size=50, ssm_cfg={"layer": layer})


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_every_way_has_the_same_loss_and_recomputing_holds_less(monkeypatch, layer):
    """Short for the plain ways, long for all; Mamba-3 has no peer and says so."""
    pytest.importorskip("transformers")
    # Time is not the question here, and tests may share the machine.
    monkeypatch.setattr("anymamba.bench.training_memory.MOST_SECONDS", 600.0)
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
    [("MOST_SECONDS", "was not over after"), ("MOST_SHARE", "needs more than")],
)
def test_a_peer_gets_neither_all_time_nor_all_memory(monkeypatch, limit, message):
    """What takes too long or too much has a row that says so, and the figures go on."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(f"anymamba.bench.training_memory.{limit}", 0.001)
    found = list(memory_figures(["toy"], (16, 32), configs={"toy": config("Mamba2")}))
    assert [x.way for x in found] == [*WAYS[:2], *WAYS]
    for figure in found:
        theirs = figure.way.startswith("transformers")
        assert (figure.peak is None) == theirs
        assert (message in figure.why_not) == theirs


def test_a_peer_that_fails_otherwise_is_no_bound():
    """An error that has nothing to do with memory is told as it is."""
    pytest.importorskip("transformers")
    step = PeerStep(config("Mamba2"), -1, False, 8 << 30, 1)
    with pytest.raises(RuntimeError, match="a step of transformers failed"):
        peer_step(step, 120.0)
