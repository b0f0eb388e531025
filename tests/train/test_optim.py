"""The optimiser of a run: who owns what, what decays, and a state that returns to the last bit."""

import copy
import json

import pytest
import torch
from test_segments import language_model
from torch import nn

from anymamba.errors import CheckpointError, ConfigError, ShapeError
from anymamba.nn import GatedMLP, Mamba2, Mamba3, RMSNorm
from anymamba.train import Float32Muon, OptimRecipe, Segment, SegmentPlan, build_optimizer

ADAMW = OptimRecipe(lr=0.01, weight_decay=0.1)
MUON = OptimRecipe(name="muon", lr=0.01, weight_decay=0.1)


def small_block() -> Mamba3:
    torch.manual_seed(0)
    return Mamba3(16, d_state=8, headdim=8, bias=True, is_mimo=True, mimo_rank=2)


def take_steps(model: nn.Module, optimizer, seeds: range) -> None:
    """Train a model on gradients that depend on the seed and on its own weights."""
    for seed in seeds:
        made = torch.Generator().manual_seed(seed)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=made)
            parameter.grad = parameter.detach() * 0.1 + noise
        optimizer.step()
        optimizer.zero_grad()


def difference(left: nn.Module, right: nn.Module) -> float:
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def everything_on_adamw(model: nn.Module) -> SegmentPlan:
    return SegmentPlan(
        {
            name: (Segment("top", 3, "adamw"), Segment("rest", p.shape[0] - 3, "adamw"))
            for name, p in model.named_parameters()
            if p.dim() == 2
        }
    )


def test_segments_on_adamw_equal_plain_adamw() -> None:
    """Cutting a weight does not change an update that is made entry by entry."""
    cut, plain = small_block(), small_block()
    plan = everything_on_adamw(cut).extend(
        {"out_proj.weight": (Segment("a", 15, "adamw"), Segment("b", 1, "muon"))}
    )
    take_steps(cut, build_optimizer(cut, MUON, plan), range(3))
    decaying = [plain.in_proj.weight, plain.out_proj.weight]
    rest = [p for p in plain.parameters() if all(p is not weight for weight in decaying)]
    options = {"lr": 0.01, "betas": MUON.betas, "eps": MUON.eps}
    judge = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        fused=False,
        **options,
    )
    take_steps(plain, judge, range(3))
    with torch.no_grad():
        cut.out_proj.weight[15] = plain.out_proj.weight[15]
    assert difference(cut, plain) < 1e-6


@pytest.mark.parametrize("is_torch", [False, True])
def test_one_segment_on_muon_equals_plain_muon(
    is_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan of one part is Muon on the whole weight, ours or torch's."""
    if is_torch and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon since 2.9")
    capability = "AVX512" if is_torch else "AVX2"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    ours, plain = nn.Linear(6, 10, bias=False), nn.Linear(6, 10, bias=False)
    plain.load_state_dict(ours.state_dict())
    plan = SegmentPlan({"weight": (Segment("whole", 10, "muon"),)})
    take_steps(ours, build_optimizer(ours, MUON, plan), range(3))
    if is_torch:
        options = {"momentum": 0.95, "adjust_lr_fn": "match_rms_adamw"}
        judge = torch.optim.Muon(plain.parameters(), lr=0.01, weight_decay=0.1, **options)
    else:
        judge = Float32Muon(plain.parameters(), lr=0.01, weight_decay=0.1)
    take_steps(plain, judge, range(3))
    assert difference(ours, plain) < 1e-6


@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_two_segments_are_two_matrices(capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon on two parts is Muon on each alone, and not Muon on their stack."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    torch.manual_seed(0)
    cut = nn.Linear(6, 10, bias=False)
    whole = copy.deepcopy(cut)
    parts = nn.ParameterList([cut.weight.detach()[:4].clone(), cut.weight.detach()[4:].clone()])
    two = SegmentPlan({"weight": (Segment("a", 4, "muon"), Segment("b", 6, "muon"))})
    one = SegmentPlan({"weight": (Segment("whole", 10, "muon"),)})
    alone = SegmentPlan({"0": (Segment("whole", 4, "muon"),), "1": (Segment("whole", 6, "muon"),)})
    recipe = OptimRecipe(name="muon", lr=0.01, weight_decay=0.0)
    for model, plan in ((cut, two), (whole, one), (parts, alone)):
        optimizer = build_optimizer(model, recipe, plan)
        made = torch.Generator().manual_seed(5)
        gradient = torch.randn(10, 6, generator=made)
        if model is parts:
            parts[0].grad, parts[1].grad = gradient[:4].clone(), gradient[4:].clone()
        else:
            model.weight.grad = gradient
        optimizer.step()
    assert difference(cut, whole) > 1e-4
    assert (cut.weight - torch.cat(list(parts))).abs().max() < 1e-6


@pytest.mark.parametrize("recipe", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_a_loaded_state_goes_on_to_the_last_bit(
    recipe: OptimRecipe, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, a copy of weights and state, two steps: as four in a row."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    straight = small_block()
    optimizer = build_optimizer(straight, recipe)
    optimizer.set_lr_factor(0.3)
    take_steps(straight, optimizer, range(2))
    state = optimizer.state_dict()
    tensors = {name: value.clone() for name, value in state["tensors"].items()}
    saved = {"tensors": tensors, "values": json.loads(json.dumps(state["values"]))}
    resumed = small_block()
    resumed.load_state_dict(straight.state_dict())
    other = build_optimizer(resumed, recipe)
    other.load_state_dict(saved)
    take_steps(straight, optimizer, range(2, 4))
    take_steps(resumed, other, range(2, 4))
    assert difference(straight, resumed) == 0
    ends = [o.state_dict()["tensors"] for o in (optimizer, other)]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    # What was loaded is a copy: the two steps did not write into the file's tensors.
    assert not any(torch.equal(value, ends[1][name]) for name, value in tensors.items())


def test_a_parameter_without_a_gradient_has_no_state() -> None:
    """What was never moved is missing from the state, and the state loads all the same."""
    model = nn.ModuleList([GatedMLP(8, 128), GatedMLP(8, 128)])
    optimizer = build_optimizer(model, MUON)
    for parameter in model[0].parameters():
        parameter.grad = torch.randn_like(parameter)
    before = model[1].fc1.weight.detach().clone()
    optimizer.step()
    state = optimizer.state_dict()
    assert {name.partition("/")[0] for name in state["tensors"]} == {
        "0.fc1.weight[value]",
        "0.fc1.weight[gate]",
        "0.fc2.weight",
    }
    assert torch.equal(before, model[1].fc1.weight)
    build_optimizer(model, MUON).load_state_dict(state)


def test_rejects_a_state_of_something_else() -> None:
    """Another optimiser, a missing tensor, a stranger, half a parameter, another shape."""
    model = small_block()
    optimizer = build_optimizer(model, MUON)
    take_steps(model, optimizer, range(1))
    state = optimizer.state_dict()

    def altered(change) -> dict:
        tensors = dict(state["tensors"])
        change(tensors)
        return {"tensors": tensors, "values": {**state["values"], "tensors": len(tensors)}}

    mistakes = {
        "got 'adamw'": {**state, "values": {**state["values"], "name": "adamw"}},
        "must hold all of its": {**state, "tensors": {}},
        "'other/step', which no parameter has": altered(
            lambda t: t.update({"other/step": t["D/step"]})
        ),
        "D must have the tensors": altered(lambda t: t.pop("D/step")),
        "D/exp_avg must have shape": altered(lambda t: t.update({"D/exp_avg": torch.zeros(1)})),
    }
    for says, mistake in mistakes.items():
        with pytest.raises(CheckpointError, match=says):
            build_optimizer(model, MUON).load_state_dict(mistake)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
@pytest.mark.parametrize("recipe", [ADAMW, MUON], ids=["adamw", "muon"])
def test_only_weights_of_linear_maps_decay(layer: str, recipe: OptimRecipe) -> None:
    """With gradients of 0 exactly those shrink; norms, biases, tags and scalings stay."""
    lm = language_model(layer)
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    for parameter in lm.parameters():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(lm, recipe).step()
    kinds = ("embedding", "lm_head", "_proj", "conv1d", "fc1", "fc2")
    for name, parameter in lm.named_parameters():
        decays = name.endswith("weight") and name.split(".")[-2].endswith(kinds)
        factor = 1 - 0.01 * 0.1 if decays else 1.0
        assert torch.allclose(before[name] * factor, parameter, rtol=1e-6, atol=0), name
        if not decays:
            assert torch.equal(before[name], parameter), name


def test_a_tag_exempts_a_weight_from_decay() -> None:
    """`_no_weight_decay` is obeyed wherever it is put."""
    model = nn.Linear(3, 2)
    model.weight._no_weight_decay = True
    before = model.weight.detach().clone()
    model.weight.grad = torch.zeros_like(model.weight)
    build_optimizer(model, ADAMW).step()
    assert torch.equal(before, model.weight)


def test_the_factor_scales_every_rate() -> None:
    """Half the factor is half the recipe's rates; 0 moves nothing, however much decay there is."""
    half, low = small_block(), small_block()
    recipe = OptimRecipe(name="muon", lr=0.01, muon_lr=0.04)
    optimizer = build_optimizer(half, recipe)
    optimizer.set_lr_factor(0.9)
    optimizer.set_lr_factor(0.5)
    take_steps(half, optimizer, range(2))
    judge = build_optimizer(low, OptimRecipe(name="muon", lr=0.005, muon_lr=0.02))
    take_steps(low, judge, range(2))
    assert difference(half, low) == 0
    before = copy.deepcopy(half)
    optimizer.set_lr_factor(0.0)
    take_steps(half, optimizer, range(2, 4))
    assert difference(half, before) == 0
    with pytest.raises(ConfigError, match="at least 0; got -1"):
        optimizer.set_lr_factor(-1)


def test_muon_has_a_rate_of_its_own_if_asked() -> None:
    """`muon_lr` moves the matrices only; without it both share one rate."""
    shared, own = small_block(), small_block()
    start = small_block()
    take_steps(shared, build_optimizer(shared, MUON), range(1))
    fast = OptimRecipe(name="muon", lr=0.01, muon_lr=0.02, weight_decay=0.1)
    take_steps(own, build_optimizer(own, fast), range(1))
    assert torch.equal(shared.dt_bias, own.dt_bias)
    z = slice(0, own.d_inner)
    moved = [(m.in_proj.weight - start.in_proj.weight)[z] for m in (shared, own)]
    assert torch.allclose(2 * moved[0], moved[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("recipe", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_training_lowers_the_loss(layer: str, recipe: OptimRecipe) -> None:
    """Ten steps on one row, every family, every part of a hybrid."""
    torch.manual_seed(0)
    lm = language_model(layer)
    ids_bs = torch.randint(0, 64, (1, 24))
    optimizer = build_optimizer(lm, recipe)
    losses = []
    for _ in range(10):
        loss = lm.loss(ids_bs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.grad is None for parameter in lm.parameters())


def test_a_model_that_was_moved_is_still_trained() -> None:
    """Segments follow the weight when its memory is replaced, as `.to()` does."""
    model = small_block()
    optimizer = build_optimizer(model, MUON)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    before = copy.deepcopy(model)
    take_steps(model, optimizer, range(1))
    assert all(
        not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)
    )


def test_a_step_is_seen_by_whoever_looks_at_versions() -> None:
    """Caches of packed weights, and autograd, learn of the write through the segments."""
    model = GatedMLP(8, 128)
    optimizer = build_optimizer(model, MUON)
    before = [p._version for p in model.parameters()]
    take_steps(model, optimizer, range(1))
    assert all(p._version > old for p, old in zip(model.parameters(), before, strict=True))


def test_gradients_are_let_go() -> None:
    """After a step no segment keeps a piece of a gradient, and with it all of its memory."""
    model = GatedMLP(8, 128)
    optimizer = build_optimizer(model, MUON)
    take_steps(model, optimizer, range(1))
    assert all(unit.handle.grad is None for unit in optimizer._units)


def test_frozen_parameters_stay_and_tied_ones_move_once() -> None:
    """What needs no gradient is left alone, even if it has one; a shared weight has one state."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    model["c"].requires_grad_(False)
    frozen = copy.deepcopy(model["c"])
    optimizer = build_optimizer(model, ADAMW)
    take_steps(model, optimizer, range(1))
    assert difference(model["c"], frozen) == 0
    names = {name.partition("/")[0] for name in optimizer.state_dict()["tensors"]}
    assert names == {"a.weight", "a.bias", "b.bias"}
    assert [line.split()[4] for line in optimizer.describe().splitlines()[3:5]] == ["frozen"] * 2


@pytest.mark.parametrize("recipe", [ADAMW, MUON], ids=["adamw", "muon"])
def test_the_report_has_a_line_for_each_parameter_and_a_sum(recipe: OptimRecipe) -> None:
    """Rank, name, shape, size, owner, rate, decay, segments with stars; the share in the end."""
    model = small_block()
    lines = build_optimizer(model, recipe).describe().splitlines()
    assert len(list(model.parameters())) + 1 == len(lines)
    by_name = {line.split()[1]: line for line in lines[:-1]}
    assert list(by_name) == [name for name, _ in model.named_parameters()]
    fused = " ".join(by_name["in_proj.weight"].split())
    if recipe.name == "muon":
        parts = "z 32, x 32, B 16, C 16, dt 4*, A 4*, lambda 4*, rotation 2"
        assert f"2-D in_proj.weight 110x16 1760 muon lr 0.01 decay 0.1 {parts}" == fused
        assert "2742 parameters, 2080 on muon" in lines[-1]
        assert "75.9 %" in lines[-1]
    else:
        assert fused == "2-D in_proj.weight 110x16 1760 adamw lr 0.01 decay 0.1"
        assert lines[-1] == "2742 parameters, 0 on muon, 0.0 %"
    assert " ".join(by_name["dt_bias"].split()) == "1-D dt_bias 4 4 adamw lr 0.01 decay 0"


def test_nine_tenths_of_a_small_classifier_are_on_muon() -> None:
    """The published sequence classifier: 34 816 of 38 322 parameters, about 91 %, are on Muon.

    As here, but for its output norm, which shares one gain per channel of a head among all heads.
    """
    layers = [
        nn.ModuleDict(
            {
                "norm": RMSNorm(32),
                "mixer": Mamba3(
                    32,
                    d_state=64,
                    expand=4,
                    headdim=32,
                    rope_fraction=1.0,
                    bias=True,
                    is_outproj_norm=True,
                ),
            }
        )
        for _ in range(2)
    ]
    model = nn.ModuleDict(
        {"enter": nn.Linear(1, 32), "layers": nn.ModuleList(layers), "leave": nn.Linear(32, 10)}
    )
    summary = build_optimizer(model, MUON).describe().splitlines()[-1]
    shared_gains = 2 * (128 - 32)
    assert summary.startswith(f"{38322 + shared_gains} parameters, 34816 on muon")


def test_rejects_what_it_cannot_train() -> None:
    """Nothing to train, nothing for Muon, a plan for AdamW, a plan of other widths."""
    with pytest.raises(ConfigError, match="at least one parameter must require gradients"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), ADAMW)
    with pytest.raises(ConfigError, match="'muon' needs a plan with trained rows"):
        build_optimizer(nn.Linear(2, 2), MUON)
    with pytest.raises(ConfigError, match="a plan needs name='muon'; got 'adamw'"):
        build_optimizer(nn.Linear(2, 2), ADAMW, SegmentPlan())
    wrong = SegmentPlan({"weight": (Segment("a", 3, "muon"),)})
    with pytest.raises(ShapeError, match="must add up to its 2 rows; got a 3"):
        build_optimizer(nn.Linear(2, 2), MUON, wrong)


def test_a_block_inside_another_module_keeps_its_segments() -> None:
    """Owners follow from the type of a module, wherever it stands."""
    model = nn.Sequential(nn.Linear(4, 16), nn.Sequential(Mamba2(16, d_state=4, headdim=8)))
    lines = build_optimizer(model, MUON).describe().splitlines()
    owners = {line.split()[1]: line.split()[4] for line in lines[:-1]}
    on_muon = {name for name, owner in owners.items() if owner == "muon"}
    assert on_muon == {"1.0.in_proj.weight", "1.0.out_proj.weight"}
