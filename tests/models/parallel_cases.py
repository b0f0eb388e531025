"""Language models over several ranks, judged on every rank against one process.

python parallel_cases.py FOLDER RANKS      see worlds.py
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from anymamba.models import LanguageLoss, MambaConfig, MambaLM
from anymamba.nn import (
    fill_tensors,
    gather_tensors,
    line_mesh,
    official_shards,
    parallelize,
)
from worlds import main, worst_of

MAMBA2 = {"layer": "Mamba2", "d_state": 4, "headdim": 4}
MAMBA3 = {"layer": "Mamba3", "d_state": 8, "headdim": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba1": {"ssm_cfg": {"layer": "Mamba1", "d_state": 4, "bias": True}},
    "mamba2": {"ssm_cfg": {**MAMBA2, "bias": True, "D_has_hdim": True}},
    "mamba2 groups": {
        "ssm_cfg": {**MAMBA2, "ngroups": 2, "d_ssm": 16, "learnable_init_state": True}
    },
    "siso": {"ssm_cfg": MAMBA3},
    "mimo": {"ssm_cfg": {**MAMBA3, "is_mimo": True, "mimo_rank": 2, "ngroups": 2}},
    "quaternion": {"ssm_cfg": {**MAMBA3, "rotation": "quaternion", "is_outproj_norm": True}},
    "mlp": {"ssm_cfg": MAMBA3, "d_intermediate": 32},
}
LAYOUTS: dict[int, dict[str, tuple[dict[str, int], bool]]] = {
    2: {
        "ddp": ({"dp": 2}, False),
        "fsdp": ({"dp": 2}, True),
        "tp": ({"tp": 2}, False),
        "cp": ({"cp": 2}, False),
    },
    4: {
        "tp": ({"tp": 4}, False),
        "cp x ddp": ({"dp": 2, "cp": 2}, False),
        "cp x fsdp": ({"dp": 2, "cp": 2}, True),
        "ddp x tp": ({"dp": 2, "tp": 2}, False),
        "fsdp x tp": ({"dp": 2, "tp": 2}, True),
        "cp x tp": ({"cp": 2, "tp": 2}, True),
    },
    8: {
        "cp x ddp x tp": ({"dp": 2, "cp": 2, "tp": 2}, False),
        "cp x fsdp x tp": ({"dp": 2, "cp": 2, "tp": 2}, True),
    },
}
# Eight processes share the machine: a few families, and only what is new with three axes.
FEW = {8: ("mamba1", "mamba2", "mlp")}
BATCH, LENGTH = 4, 16


def build(name: str, dtype: torch.dtype | None = None) -> MambaLM:
    """Return a model by its name, the same on every rank."""
    torch.manual_seed(1)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=16, **FAMILIES[name])
    lm = MambaLM(config)
    random = torch.Generator().manual_seed(2)
    for parameter in lm.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=random)
    if dtype is None:
        return lm
    narrow = MambaLM(config, dtype=dtype)
    narrow.load_state_dict(lm.state_dict())
    return narrow


def tokens() -> tuple[Tensor, Tensor]:
    """Return rows and targets; the rows of the second half have fewer that count."""
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 16, (BATCH, LENGTH), generator=random)
    targets = torch.randint(0, 16, (BATCH, LENGTH), generator=random)
    targets[BATCH // 2 :, 3:9] = -100
    return ids, targets


def rows_here(mesh: DeviceMesh) -> slice:
    """Return the rows of the batch that this rank is given."""
    if "dp" not in (mesh.mesh_dim_names or ()):
        return slice(None)
    many, rank = BATCH // mesh["dp"].size(), mesh["dp"].get_local_rank()
    return slice(rank * many, (rank + 1) * many)


def gradients(lm: MambaLM) -> dict[str, Tensor]:
    """Return a model's gradients, whole and by official names."""
    named = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    return gather_tensors(lm, named)


def judged(name: str, axes: dict[str, int], shard: bool) -> float:
    """Return the worst error of the loss and of the gradients; weights must gather bit-equal."""
    ids, targets = tokens()
    alone = build(name)
    expected_loss = LanguageLoss(alone)(ids, targets)
    expected_loss.backward()
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    lm = build(name)
    model = parallelize(LanguageLoss(lm, mesh), mesh, shard=shard)
    together = gather_tensors(lm)
    for key, weight in alone.state_dict().items():
        assert torch.equal(weight, together[key]), key
    assert together.keys() == alone.state_dict().keys()
    loss = model(*(x[rows_here(mesh)] for x in (ids, targets)))
    loss.backward()
    want = {n: p.grad for n, p in alone.named_parameters()} | {"loss": expected_loss}
    return worst_of(want, gradients(lm) | {"loss": loss})


def official(name: str, axes: dict[str, int], shard: bool) -> float:
    """Return 0 if official tensors fill a parallel model and come out of it, bit for bit.

    The same for a moment of each weight, and for a number that belongs to it.
    """
    alone, random = build(name), torch.Generator().manual_seed(4)
    weights = dict(alone.named_parameters())
    for weight in weights.values():
        weight.data = torch.randn(weight.shape, generator=random)
    wanted = dict(alone.state_dict())
    wanted |= {f"{n}/moment": torch.randn(p.shape, generator=random) for n, p in weights.items()}
    wanted |= {f"{n}/step": torch.tensor(7.0) for n in weights}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    lm = build(name)
    parallelize(LanguageLoss(lm, mesh), mesh, shard=shard)
    into = dict(lm.state_dict())
    into |= {f"{n}/moment": torch.zeros_like(p) for n, p in lm.named_parameters()}
    into |= {f"{n}/step": torch.zeros(()) for n, _ in lm.named_parameters()}
    assert fill_tensors(lm, wanted, into) == into.keys()
    shards = official_shards(lm, into, line_mesh(mesh))
    for found in (gather_tensors(lm, into), gather_tensors(alone, shards)):
        assert found.keys() == wanted.keys()
        assert [key for key, x in wanted.items() if not torch.equal(x, found[key])] == []
    return 0.0


def packed_over_ranks() -> float:
    """Return the error of a packed row that several ranks share."""
    ids, _ = tokens()
    borders = torch.tensor([0, 5, LENGTH * BATCH - 7, LENGTH * BATCH])
    row = ids.view(1, -1)
    alone = build("mlp")
    expected = alone.loss(row, cu_seqlens=borders)
    expected.backward()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    lm = build("mlp")
    model = parallelize(LanguageLoss(lm, mesh), mesh)
    loss = model(row, cu_seqlens=borders)
    loss.backward()
    want = {n: p.grad for n, p in alone.named_parameters()} | {"loss": expected}
    return worst_of(want, gradients(lm) | {"loss": loss})


def half_precision(name: str, axes: dict[str, int]) -> float:
    """Return how much farther from float32 sharded bfloat16 is than one process in bfloat16.

    Sensitive parameters must be float32 inside the forward, matrices bfloat16.
    """
    ids, targets = tokens()
    exact, alone = build(name), build(name, torch.bfloat16)
    true = {"loss": LanguageLoss(exact)(ids, targets)}
    expected = {"loss": LanguageLoss(alone)(ids, targets)}
    for model, found in ((exact, true), (alone, expected)):
        found["loss"].backward()
        found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    lm = build(name)
    model = parallelize(LanguageLoss(lm, mesh), mesh, shard=True, param_dtype=torch.bfloat16)
    seen: dict[str, torch.dtype] = {}

    def look(block: Any, *_: Any) -> None:
        own = block.named_parameters(recurse=False)
        seen.update({n.removesuffix("_own"): p.dtype for n, p in own})
        seen["in_proj"] = block.in_proj.weight.dtype

    mixer = lm.backbone.layers[0].mixer
    mixer.out_proj.register_forward_pre_hook(lambda *_: look(mixer))
    loss = model(*(x[rows_here(mesh)] for x in (ids, targets)))
    loss.backward()
    sensitive = {n: d for n, d in seen.items() if n != "in_proj"}
    assert {"D", "dt_bias", "A_log"} & sensitive.keys(), seen
    assert set(sensitive.values()) == {torch.float32}, seen
    assert seen["in_proj"] == torch.bfloat16, seen
    found = gradients(lm)
    assert all(grad.dtype == torch.float32 for grad in found.values())
    return worst_of(true, found | {"loss": loss}) / worst_of(true, expected)


def verbs_of_shards() -> float:
    """Return the error of prefill, step and loss of a sharded model."""
    ids, _ = tokens()
    alone, lm = build("siso"), build("siso")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    parallelize(lm, mesh, shard=True)
    found = []
    for model in (alone, lm):
        with torch.no_grad():
            logits, cache = model.prefill(ids)
            after, _ = model.step(ids[:, 0], cache)
            found.append({"prefill": logits, "step": after, "loss": model.loss(ids)})
    return worst_of(*found)


def refused() -> float:
    """Return 0 if impossible plans are refused with their reason."""
    wrong = 0
    size = dist.get_world_size()
    line = {name: init_device_mesh("cpu", (size,), mesh_dim_names=(name,)) for name in ("tp", "dp")}
    odd = MambaLM(
        MambaConfig(d_model=12, n_layer=1, vocab_size=16, ssm_cfg={**MAMBA3, "headdim": 8})
    )
    cases: list[tuple[Any, Any, dict[str, Any], str]] = [
        (odd, line["tp"], {}, "divide the heads"),
        (odd, init_device_mesh("cpu", (size,), mesh_dim_names=("pp",)), {}, "must be named"),
        (odd, line["dp"], {"param_dtype": torch.bfloat16}, "needs shard=True"),
    ]
    for model, mesh, options, words in cases:
        try:
            parallelize(model, mesh, **options)
            wrong += 1
        except (ValueError, RuntimeError) as error:
            wrong += words not in str(error)
    return float(wrong)


def checks(size: int) -> dict[str, Callable[[], float]]:
    """Return what a world of this many ranks checks."""
    found: dict[str, Callable[[], float]] = {}
    for layout, (axes, shard) in LAYOUTS[size].items():
        for name in FEW.get(size, FAMILIES):
            found[f"{layout}: {name}"] = lambda n=name, a=axes, s=shard: judged(n, a, s)
            if "tp" in axes:
                found[f"official {layout}: {name}"] = lambda n=name, a=axes, s=shard: official(
                    n, a, s
                )
    if size in FEW:
        return found
    found["packed"] = packed_over_ranks
    halves: dict[int, dict[str, int]] = {2: {"dp": 2}, 4: {"dp": 2, "tp": 2}}
    for name in FAMILIES:
        found[f"bfloat16: {name}"] = lambda n=name: half_precision(n, halves[size])
    if size == 2:
        found["verbs"] = verbs_of_shards
    else:
        found["refused"] = refused
    return found


if __name__ == "__main__":
    import sys

    main(checks(int(sys.argv[2])))
