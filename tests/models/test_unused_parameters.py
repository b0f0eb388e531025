"""One backward reaches every trainable parameter, so replicas never wait for one that is unused."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from anymamba.errors import ConfigError
from anymamba.models import LatentConfig, LatentModel, MambaConfig, MambaLM, hybrid_config
from anymamba.nn import (
    BidirectionalConfig,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    StackConfig,
    VirtualLayers,
)
from laws import randn

OPTIONS: dict[str, dict[str, Any]] = {
    "Mamba1": {"layer": "Mamba1", "d_state": 4},
    "Mamba2": {"layer": "Mamba2", "d_state": 4, "headdim": 4, "chunk_size": 4},
    "Mamba3": {"layer": "Mamba3", "d_state": 8, "headdim": 4, "chunk_size": 4},
    "MHA": {"layer": "MHA", "causal": True, "num_heads": 2},
}
MARKERS = st.sampled_from(
    [Marker.start(), Marker.middle(), Marker.end(), Marker.custom(1), Marker.custom(9)]
)


def idle(model: nn.Module) -> list[str]:
    """Return the trainable parameters that have no gradient."""
    return [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and weight.grad is None
    ]


@st.composite
def stacks(draw: st.DrawFn) -> dict[str, Any]:
    """Return fields of a stack's config, sensible or not."""
    real = draw(st.integers(1, 4))
    layers = [OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))] for _ in range(real)]
    fields: dict[str, Any] = {"d_model": 8, "layers": layers}
    fields["d_intermediate"] = draw(st.sampled_from([0, 8]))
    fields["final_norm"] = draw(st.booleans())
    fields["rms_norm"] = draw(st.booleans())
    fields["residual"] = ResidualConfig(
        multi_gate=draw(
            st.none() | st.builds(MultiGate, n_stream=st.integers(1, 4), per_virtual=st.booleans())
        ),
        skip_first=draw(st.booleans()),
        skip_last=draw(st.booleans()),
    )
    rows = draw(st.lists(MARKERS, max_size=3))
    fields["registers"] = RegisterConfig(stack=rows) if rows else None
    return fields


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_causal_configuration_trains_all_it_declares(data: st.DataObject):
    """Whatever layers, schedules, residuals, registers, horizons and readouts are combined."""
    fields = data.draw(stacks())
    real = len(fields["layers"])
    count = data.draw(st.integers(1, 6))
    named = st.sampled_from(["cyclic", "stretched"])
    listed = st.lists(st.integers(0, real - 1), min_size=count, max_size=count)
    try:
        fields["virtual"] = data.draw(
            st.none() | st.builds(VirtualLayers, st.just(count), named | listed)
        )
        fields["grad_horizon"] = data.draw(st.none() | st.integers(0, 4))
        places = data.draw(
            st.dictionaries(st.integers(0, real - 1), st.lists(MARKERS, min_size=1, max_size=2))
        )
        if places:
            rows = fields["registers"].stack if fields["registers"] else ()
            fields["registers"] = RegisterConfig(stack=rows, layers=places)
        stack = StackConfig(**fields)
    except ConfigError:
        return
    readout = data.draw(st.sampled_from(["each", "last", "mean"]))
    net = LatentModel(LatentConfig(d_input=2, d_output=2, stack=stack, readout=readout))
    net(randn(1, 4, 2, seed=1, dtype=torch.float32)).sum().backward()
    assert idle(net) == []


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_every_bidirectional_configuration_trains_all_it_declares(data: st.DataObject):
    """The same for pairs of layers, their schedules and their merges."""
    fields = data.draw(stacks())
    real = len(fields["layers"])
    count = data.draw(st.sampled_from([2, 4, 6]))
    named = st.sampled_from(
        ["strided_cyclic", "strided_stretched", "symmetric_cyclic", "symmetric_stretched"]
    )
    listed = st.lists(st.integers(0, real - 1), min_size=count, max_size=count)
    try:
        fields["virtual"] = data.draw(
            st.none() | st.builds(VirtualLayers, st.just(count), named | listed)
        )
        fields["merge"] = data.draw(st.sampled_from(["mean", "cat_linear"]))
        stack = BidirectionalConfig(**fields)
    except ConfigError:
        return
    readout = data.draw(st.sampled_from(["each", "last", "mean"]))
    net = LatentModel(LatentConfig(d_input=2, d_output=2, stack=stack, readout=readout))
    net(randn(1, 4, 2, seed=1, dtype=torch.float32)).sum().backward()
    assert idle(net) == []


@pytest.mark.parametrize(
    "config",
    [
        MambaConfig(d_model=8, n_layer=2, vocab_size=16, virtual=VirtualLayers(4)),
        MambaConfig(d_model=8, n_layer=4, vocab_size=16, grad_horizon=2),
        MambaConfig(d_model=8, n_layer=2, vocab_size=16, grad_horizon=0, tie_embeddings=False),
        hybrid_config(16, 6, head_dim=8, vocab_size=16, ssm_cfg={"headdim": 4, "d_state": 8}),
    ],
    ids=["virtual", "horizon", "no_layers", "hybrid"],
)
def test_language_models_train_all_they_declare(config: MambaConfig):
    """The same for the loss of language models."""
    lm = MambaLM(config)
    lm.loss(torch.tensor([[1, 2, 3, 4]])).backward()
    assert idle(lm) == []


def test_the_check_finds_an_idle_parameter():
    """A parameter that no output depends on is told."""
    net = LatentModel(LatentConfig(d_input=2, d_output=2, stack=StackConfig(d_model=8, n_layer=1)))
    net.spare = nn.Parameter(torch.zeros(1))
    net(torch.zeros(1, 3, 2)).sum().backward()
    assert idle(net) == ["spare"]
