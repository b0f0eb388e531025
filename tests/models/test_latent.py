"""Laws of models on continuous inputs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anymamba.errors import (
    BackendError,
    CacheError,
    CheckpointError,
    ConfigError,
    PackingError,
    ShapeError,
)
from anymamba.io import load_model, load_pretrained, load_state, save_state
from anymamba.models import LatentConfig, LatentModel, verify
from anymamba.nn import (
    BidirectionalConfig,
    Marker,
    MultiGate,
    RegisterConfig,
    ResidualConfig,
    StackConfig,
    VirtualLayers,
)
from laws import assert_same, randn

MAMBA3: dict[str, Any] = {"layer": "Mamba3", "d_state": 8, "headdim": 4, "chunk_size": 4}
STACKS: dict[str, dict[str, Any]] = {
    "mamba1": {"n_layer": 2, "ssm_cfg": {"layer": "Mamba1", "d_state": 4}},
    "mamba3": {"n_layer": 2, "ssm_cfg": MAMBA3, "final_norm": True},
    "hybrid": {"layers": [MAMBA3, "MHA"], "attn_cfg": {"causal": True, "num_heads": 2}},
    "everything": {
        "n_layer": 2,
        "ssm_cfg": MAMBA3,
        "d_intermediate": 8,
        "final_norm": True,
        "virtual": VirtualLayers(4),
        "residual": ResidualConfig(multi_gate=MultiGate(n_stream=2)),
    },
}


def net_of(name: str = "mamba3", **changes: Any) -> LatentModel:
    """Return a model with random weights, so that nothing is zero by construction."""
    options: dict[str, Any] = {"d_input": 3, "d_output": 2, **changes}
    options.setdefault("stack", StackConfig(d_model=8, **STACKS[name]))
    net = LatentModel(LatentConfig(**options), dtype=torch.float64)
    with torch.no_grad():
        for place, weight in enumerate(net.parameters()):
            weight.add_(randn(*weight.shape, seed=place, scale=0.2))
    return net


def both_ways(**changes: Any) -> BidirectionalConfig:
    return BidirectionalConfig(d_model=8, **{"n_layer": 2, "ssm_cfg": MAMBA3, **changes})


def stepped(net: LatentModel, x: Tensor) -> tuple[Tensor, Any]:
    cache, outputs = net.empty_cache(x.shape[0]), []
    for x_now in x.unbind(1):
        y, cache = net.step(x_now, cache)
        outputs.append(y)
    return torch.stack(outputs, 1), cache


@pytest.mark.parametrize("name", STACKS)
def test_whole_equals_pieces_equals_steps(name: str):
    """Outputs, states and the gradient of every parameter are the same, however time is cut."""
    net, x = net_of(name), randn(2, 7, 3, seed=1)
    head = randn(2, 7, 2, seed=2)

    def pieces() -> tuple[Tensor, Any]:
        first, cache = net.prefill(x[:, :3])
        second, cache = net.prefill(x[:, 3:], cache)
        return torch.cat([first, second], 1), cache

    whole, after = net.prefill(x)
    assert torch.equal(whole, net(x))
    wanted = torch.autograd.grad((whole * head).sum(), list(net.parameters()))
    for way in (pieces, lambda: stepped(net, x)):
        outputs, cache = way()
        assert_same(whole.detach(), outputs.detach())
        for key, tensor in after.to_tensors().items():
            assert_same(tensor.detach().double(), cache.to_tensors()[key].detach().double())
        got = torch.autograd.grad((outputs * head).sum(), list(net.parameters()))
        for one, other in zip(wanted, got, strict=True):
            assert_same(one, other, "grad")


def test_step_in_place_equals_step():
    """`step_` gives what `step` gives, in the memory of its cache."""
    net, x = net_of(), randn(2, 4, 3, seed=3)
    cache = net.empty_cache(2)
    outputs = [net.step_(x_now, cache) for x_now in x.unbind(1)]
    assert_same(net(x).detach(), torch.stack(outputs, 1))


@pytest.mark.parametrize("name", ["mamba3", "everything"])
def test_step_infinite_is_the_limit(name: str):
    """A constant input leads to the fixed point."""
    net, x = net_of(name), randn(1, 1, 3, seed=4)
    cache, y = net.empty_cache(1), None
    with torch.no_grad():
        for key, weight in net.named_parameters():
            # Steps near 1 forget within tens of tokens.
            if key.endswith("dt_bias"):
                weight.fill_(1.0)
        for _ in range(300):
            y, cache = net.step(x[:, 0], cache)
    assert y is not None
    limit = net.step_infinite(x[:, 0]).detach()
    assert float((y - limit).abs().max()) < 1e-4


@pytest.mark.parametrize("stack", [None, both_ways()], ids=["causal", "both_ways"])
@pytest.mark.parametrize("readout", ["last", "mean", "each"])
def test_a_row_does_not_notice_its_padding(readout: str, stack: Any):
    """With lengths, every row of a padded batch reads out what it reads out alone."""
    net = net_of(readout=readout, **({} if stack is None else {"stack": stack}))
    x, lengths = randn(3, 6, 3, seed=5), [6, 4, 1]
    together = net(x, lengths=torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone = net(x[row : row + 1, :length])[0]
        kept = together[row, :length] if readout == "each" else together[row]
        assert_same(alone.detach(), kept.detach())


def test_readouts_are_what_they_say():
    """Last and mean are the head of one place, or of the mean, which is the mean of the head."""
    x, each = randn(2, 5, 3, seed=6), net_of()
    last, mean = net_of(readout="last"), net_of(readout="mean")
    last.load_state_dict(each.state_dict())
    mean.load_state_dict(each.state_dict())
    assert_same(each(x)[:, -1].detach(), last(x).detach())
    assert_same(each(x).mean(1).detach(), mean(x).detach())
    assert_same(last(x).detach(), last.prefill(x).y.detach())


def test_an_end_register_is_a_class_token():
    """With readout "last" the head reads the end register, whole, in pieces and by steps."""
    registers = RegisterConfig(stack=[Marker.start(), Marker.end()])
    stack = StackConfig(d_model=8, n_layer=2, ssm_cfg=MAMBA3, registers=registers)
    net, x = net_of(stack=stack, readout="last"), randn(2, 4, 3, seed=7)
    cache = net.empty_cache(2, length=4)
    primed, cache = net.prime(2, cache)
    assert primed is not None
    assert primed.shape == (2, 2)
    y = None
    for x_now in x.unbind(1):
        y, cache = net.step(x_now, cache)
    assert y is not None
    assert_same(net(x).detach(), y.detach())
    _, cache = net.prefill(x[:, :3], length=4)
    assert_same(net(x).detach(), net.prefill(x[:, 3:], cache).y.detach())


@pytest.mark.parametrize("final_norm", [False, True])
def test_prime_goes_through_the_head(final_norm: bool):
    """Before any input is known a prime says what the whole says at the start register's place."""
    registers = RegisterConfig(stack=[Marker.start(), Marker.custom(2)], layers={1: [Marker.end()]})
    stack = StackConfig(
        d_model=8, n_layer=2, ssm_cfg=MAMBA3, registers=registers, final_norm=final_norm
    )
    net, x = net_of(stack=stack), randn(2, 3, 3, seed=7)
    whole = net(x)
    assert ("norm_f" in net.stack._modules) is final_norm
    y, cache = net.prime(2, length=3)
    assert y is not None
    assert_same(whole[:, 0].detach(), y.detach())
    assert net.prime(2, cache)[0] is None
    found = []
    for x_now in x.unbind(1):
        y, cache = net.step(x_now, cache)
        found.append(y)
    # Start, u0, u1, custom, u2, end: steps answer with their last row.
    assert_same(whole[:, [1, 2, 5]].detach(), torch.stack(found, 1).detach())


def test_a_row_before_the_projection_is_a_register_behind_it():
    """The projection of any class token is a register, so none is offered before it."""
    net, x, row = net_of(), randn(2, 4, 3, seed=7), randn(1, 3, seed=8)
    registers = RegisterConfig(stack=[Marker.custom(1)])
    marked = net_of(stack=replace(net.config.stack, registers=registers))
    table = {"stack.registers.table": net.in_proj(row)}
    marked.load_state_dict({**net.state_dict(), **table})
    longer = torch.cat([x[:, :1], row.expand(2, 1, 3), x[:, 1:]], 1)
    assert_same(net(longer).detach(), marked(x).detach())


def test_states_of_another_family_are_refused():
    """A cache belongs to the family that made it."""
    with pytest.raises(CacheError, match="must be a Mamba3"):
        net_of().step(randn(2, 3, seed=9), net_of("mamba1").empty_cache(2))


def test_packed_equals_alone():
    """Packed and labelled sequences do not see each other."""
    net, x = net_of(), randn(1, 7, 3, seed=8)
    alone = torch.cat([net(piece) for piece in x.split([3, 4], 1)], 1)
    assert_same(alone.detach(), net(x, cu_seqlens=torch.tensor([0, 3, 7])).detach())
    assert_same(alone.detach(), net(x, seq_idx=torch.tensor([[0] * 3 + [1] * 4])).detach())


def test_regression_loss_is_the_mean_over_what_is_there():
    """The loss of a padded batch is the mean over all real numbers, whatever pads the target."""
    net, x, target = net_of(), randn(2, 5, 3, seed=9), randn(2, 5, 2, seed=10)
    assert_same((net(x) - target).square().mean().detach(), net.loss(x, target).detach())
    target[1, 3:] = float("nan")
    errors = [(net(x[:1]) - target[:1]).square(), (net(x[1:, :3]) - target[1:, :3]).square()]
    expected = torch.cat([error.flatten() for error in errors]).mean()
    assert_same(expected.detach(), net.loss(x, target, lengths=torch.tensor([5, 3])).detach())


@pytest.mark.parametrize("readout", ["each", "last"])
def test_classification_loss_is_cross_entropy(readout: str):
    """Targets are class ids: one per sequence, or one per place, where padding does not count."""
    net, x = net_of(readout=readout, task="classification"), randn(2, 5, 3, seed=11)
    lengths = torch.tensor([5, 3])
    rows = [net(x[:1])[0], net(x[1:, :3])[0]]
    target = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])
    if readout == "last":
        target = target[:, 0]
        expected = torch.nn.functional.cross_entropy(torch.stack(rows), target)
    else:
        kept = torch.cat([target[0], target[1, :3]])
        expected = torch.nn.functional.cross_entropy(torch.cat(rows), kept)
    assert_same(expected.detach(), net.loss(x, target, lengths=lengths).detach())


@pytest.mark.parametrize("stack", [StackConfig(d_model=8, **STACKS["everything"]), both_ways()])
def test_models_survive_their_files(stack: StackConfig, tmp_path: Path):
    """Config and weights come back as they were, by the class and by whatever the folder holds."""
    net, x = net_of(stack=stack, readout="last"), randn(1, 4, 3, seed=12)
    assert LatentConfig.from_dict(json.loads(json.dumps(net.config.to_dict()))) == net.config
    net.save_pretrained(tmp_path)
    again = LatentModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config == net.config
    assert torch.equal(net(x), again(x))
    same = load_model(tmp_path, dtype=torch.float64)
    assert torch.equal(net(x), same(x))
    half = LatentModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16


def test_states_survive_their_files(tmp_path: Path):
    """A stream goes on from a state that was saved."""
    net, x = net_of("everything"), randn(2, 6, 3, seed=13)
    _, cache = net.prefill(x[:, :4])
    save_state(cache.detach(), tmp_path / "state")
    y, _ = net.prefill(x[:, 4:], load_state(tmp_path / "state"))
    assert_same(net(x)[:, 4:].detach(), y.detach())


@pytest.mark.parametrize("length", [None, 6])
def test_states_with_registers_survive_their_files(length: int | None, tmp_path: Path):
    """The file remembers which registers have been inserted, and where the end was announced."""
    rows = [Marker.start(), Marker.custom(5)] + ([Marker.end()] if length else [])
    registers = RegisterConfig(stack=rows, layers={1: [Marker.start()]})
    stack = StackConfig(d_model=8, n_layer=2, ssm_cfg=MAMBA3, registers=registers)
    net, x = net_of(stack=stack), randn(2, 6, 3, seed=16)
    _, cache = net.prefill(x[:, :4], length=length)
    save_state(cache.detach(), tmp_path / "state")
    again = load_state(tmp_path / "state")
    assert again.cursor == cache.cursor
    expected, _ = net.prefill(x[:, 4:], cache)
    y, _ = net.prefill(x[:, 4:], again)
    assert torch.equal(expected, y)
    assert y.shape[1] > 2


def test_folders_of_other_models_are_refused(tmp_path: Path):
    """A language model's loader says what the folder holds; damaged folders say what is wrong."""
    net_of().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="LatentModel"):
        load_pretrained(tmp_path)
    file = tmp_path / "config.json"
    entries = json.loads(file.read_text())
    for changed, message in (
        ({**entries, "anymamba_model": "Oracle"}, "Oracle"),
        ({**entries, "config": {**entries["config"], "d_inptu": 3}}, "d_input"),
        ({**entries, "config": {**entries["config"], "d_output": 5}}, "head.weight"),
    ):
        file.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)


@pytest.mark.parametrize("name", STACKS)
def test_verify_judges_latent_models(name: str):
    """Every way of running the model agrees, and steps and pieces are among them."""
    report = verify(net_of(name, readout="last").float(), length=9)
    assert report.ok, report
    assert {row.way for row in report.rows if row.ran} >= {"forward", "pieces", "steps", "packed"}


def test_verify_finds_a_broken_model(monkeypatch: pytest.MonkeyPatch):
    """A step that forgets its state is told from the others."""
    net = net_of().float()
    step = net.step

    def forgetful(x: Tensor, cache: Any) -> Any:
        return step(x, net.empty_cache(x.shape[0]))

    monkeypatch.setattr(net, "step", forgetful)
    failed = [row.way for row in verify(net, length=5).rows if not row.ok]
    assert failed == ["steps"]


def test_verify_refuses_what_has_one_way_only():
    """A bidirectional model, and one with registers, say why there is nothing to compare."""
    with pytest.raises(ConfigError, match="both ends"):
        verify(net_of(stack=both_ways()))
    registers = RegisterConfig(stack=[Marker.start()])
    stack = StackConfig(d_model=8, n_layer=1, ssm_cfg=MAMBA3, registers=registers)
    with pytest.raises(ConfigError, match="registers"):
        verify(net_of(stack=stack))


def test_what_cannot_stream_says_why():
    """Both ends cannot be read in steps, and a mean is known at the end only."""
    x = randn(1, 3, seed=14)
    for verb in ("step", "step_", "prefill", "empty_cache", "prime", "step_infinite"):
        arguments = {"step": (x, None), "step_": (x, None), "prefill": (x[None],)}
        given = arguments.get(verb, (1,) if verb != "step_infinite" else (x,))
        with pytest.raises(BackendError, match=r"bidirectional.*forward"):
            getattr(net_of(stack=both_ways()), verb)(*given)
        with pytest.raises(ConfigError, match="mean"):
            getattr(net_of(readout="mean"), verb)(*given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_input": 0}, "d_input"),
        ({"readout": "first"}, "readout"),
        ({"task": "ranking"}, "task"),
        ({"stack": {}}, "StackConfig"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes: dict[str, Any], message: str):
    """A config says which field is wrong."""
    with pytest.raises(ConfigError, match=message):
        net_of(**changes)


def test_mistakes_in_calls_are_refused():
    """Shapes, packing and targets must fit the model."""
    net = net_of(readout="last")
    with pytest.raises(ShapeError, match="d_input=3"):
        net(randn(2, 5, 4, seed=15))
    with pytest.raises(ShapeError, match="target"):
        net.loss(randn(2, 5, 3, seed=15), randn(2, 5, 2, seed=15))
    with pytest.raises(PackingError, match="each"):
        net(randn(1, 5, 3, seed=15), cu_seqlens=torch.tensor([0, 5]))
    registers = RegisterConfig(stack=[Marker.start()])
    stack = StackConfig(d_model=8, n_layer=1, ssm_cfg=MAMBA3, registers=registers)
    with pytest.raises(PackingError, match="registers"):
        net_of(stack=stack)(randn(2, 5, 3, seed=15), lengths=torch.tensor([5, 4]))
