"""Laws of the cases: what is measured, how much work it is, and that every way is the same."""

import pytest
import torch
from bench_cases import tiny_report

from anymamba import settings
from anymamba.bench import (
    GROUPS,
    LARGE,
    PUBLISHED,
    SMALL,
    CoreSizes,
    Effort,
    Suite,
    block_cases,
    conv_cases,
    core_cases,
    fastest_path,
    growth_figures,
    lm_case,
    measure,
    profile_block,
    scan_cases,
    suite_cases,
    tensor_bytes,
    thread_figures,
)
from anymamba.bench import core_inputs as inputs_of_the_core
from anymamba.errors import ConfigError
from anymamba.models import MambaConfig
from anymamba.nn import Mamba2, flops_per_token

EFFORT = Effort(0.01, 1, 2)
TINY = CoreSizes(b=1, s=40, m=1, h=2, g=1, p=8, r=16)


def rows_of(case):
    rows = {row.way: row for row in measure(case, EFFORT)}
    assert all(row.ok for row in rows.values()), rows
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_pass_the_gate_in_every_way(dtype):
    """Core, scan and convolution: all columns agree with the reference, forward and backward."""
    for case in core_cases(TINY, dtype=dtype):
        assert {"portable", "serial"} <= {w for w, row in rows_of(case).items() if row.timing}
    for case in scan_cases(40, 12, 4, dtype=dtype):
        rows = rows_of(case)
        assert rows["portable"].timing
        assert (rows["unbind"].timing is None) == (dtype == torch.bfloat16)
    for case in conv_cases(40, 12, dtype=dtype):
        assert {"portable", "torch"} <= {w for w, row in rows_of(case).items() if row.timing}


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
def test_models_pass_the_gate_beside_transformers(layer):
    """Loss, gradients and the last logits agree, transformers' model included."""
    pytest.importorskip("transformers")
    config = MambaConfig(d_model=64, n_layer=2, vocab_size=50, ssm_cfg={"layer": layer})
    has_peer = layer != "Mamba3"
    case = lm_case("toy", 20, "train", config)
    rows = rows_of(case)
    assert rows["portable"].timing
    assert rows["portable"].results > 4 * 64 * 50
    assert (rows["transformers"].timing is not None) == has_peer
    prompt = lm_case("toy", 20, "forward", config)
    rows = rows_of(prompt)
    # One row of logits, and a third of the work without the head of the tokens before.
    assert rows["portable"].results == 4 * config.padded_vocab_size
    assert (rows["transformers"].timing is not None) == has_peer
    head = 2 * 64 * config.padded_vocab_size
    assert prompt.work.flops == case.work.flops / 3 - 19 * head


def test_a_peer_that_would_take_minutes_is_not_started():
    """transformers' Mamba-1 trains on short sequences only; a longer one gets the reason."""
    pytest.importorskip("transformers")
    config = MambaConfig(d_model=16, n_layer=1, vocab_size=50, ssm_cfg={"layer": "Mamba1"})
    case = lm_case("toy", 257, "train", config)
    ways_at = case.prepare()
    assert not isinstance(ways_at(256)["transformers"], str)
    assert "quadratic" in ways_at(257)["transformers"]


def test_work_is_counted_by_the_conventions():
    """SSD: b h s m (64 (r + p) + 4 p r); training three times; a step reads weights and state."""
    forward, train = core_cases(CoreSizes(1, 2048, 1, 24, 24, 64, 128))
    assert forward.work.flops == 24 * 2048 * (64 * 192 + 4 * 64 * 128)
    assert train.work.flops == 3 * forward.work.flops
    block = SMALL[1]
    cases = {case.mode: case for case in block_cases("small", block)}
    module = Mamba2(256, d_state=64, headdim=64)
    assert cases["forward"].work.flops == 512 * flops_per_token(module)
    assert cases["train"].work.flops == 3 * cases["forward"].work.flops
    weights = tensor_bytes(list(module.parameters()))
    state = 4 * 2 * (8 * 64 * 64 + module.conv_dim * 4)
    assert cases["step"].work.moved == weights + 2 * state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_inputs_are_those_of_the_tensors(dtype):
    """The budget divides intermediates by them."""
    v, da, b, c, state = inputs_of_the_core(*TINY)
    tensors = [v.to(dtype), da, b.to(dtype), c.to(dtype), state]
    assert TINY.input_bytes(dtype) == tensor_bytes(tensors)


def test_the_portable_column_runs_without_kernels():
    """Its context switches the compiled kernels off, and on again after."""
    [case] = core_cases(TINY, ["forward"])
    way = case.prepare()(4)["portable"]
    before = settings.current().native
    with way.around():
        assert settings.current().native == "off"
    assert settings.current().native == before


def test_the_baseline_is_the_fastest_path_that_was_tried(monkeypatch):
    """Every algorithm is tried at every chunk length that fits; the quickest is the baseline."""
    tried = set()

    def seconds(path, inputs, mode, runs):
        tried.add((path.kind, path.chunk_len))
        return 1.0 if (path.kind, path.chunk_len) == ("minimal", 64) else 2.0

    monkeypatch.setattr("anymamba.bench.portable._seconds", seconds)
    path = fastest_path(TINY._replace(s=71), "forward")
    assert (path.kind, path.chunk_len) == ("minimal", 64)
    kinds = ("minimal", "serial", "serial_recalculated")
    assert tried == {(kind, length) for kind in kinds for length in (32, 64, 96)}


def test_the_suite_has_the_cases_of_the_issue():
    """Seven small blocks, six large ones, core with 24 groups and with one, scan, four models."""
    cases = list(suite_cases(Suite()))
    names = {group: [x for x in cases if x.group == group] for group in GROUPS}
    assert len(SMALL) == 7
    assert len(LARGE) == 6
    assert len(names["small"]) == 21
    assert len(names["blocks"]) == 18
    dtypes = (torch.float32, torch.bfloat16)
    trained = [(f"{name} b1 s256", dtype) for name in PUBLISHED for dtype in dtypes]
    assert [(case.name, case.dtype) for case in names["train"]] == trained
    prompts = [
        (f"{name} b1 s{length}", dtype)
        for name in PUBLISHED
        for dtype in dtypes
        for length in (256, 2048)
    ]
    assert [(case.name, case.dtype) for case in names["prefill"]] == prompts
    titles = {case.title for case in cases}
    for groups in (24, 1):
        for mode in ("forward", "train"):
            assert f"SSD core b1 s2048 h24 p64 r128 g{groups}, {mode}, float32" in titles
    assert "selective scan b1 s2048 d1536 r16, train, float32" in titles
    assert "mamba3 quaternion b2 s256 d256, step, float32" in titles
    quick = {case.title for case in suite_cases(Suite(quick=True))}
    assert len(quick) < len(titles)
    assert not list(suite_cases(Suite(groups=["growth"])))
    assert all(case.mode == "step" for case in suite_cases(Suite(modes=["step"])))


@pytest.mark.parametrize("wrong", [{"groups": ["cores"]}, {"modes": ["decode"]}])
def test_unknown_names_are_refused(wrong):
    """A misspelt table or mode is an error, not an empty report."""
    with pytest.raises(ConfigError, match="must be one of"):
        Suite(**wrong)


def test_growth_is_per_token_and_threads_are_restored():
    """Every length has its figure; the number of threads is what it was."""
    sizes = {"h": 2, "p": 8, "r": 16, "i": 12}
    figures = growth_figures((16, 32), **sizes)
    assert [(f.mode, list(f.per_token)) for f in figures] == [
        (mode, [16, 32]) for _ in range(2) for mode in ("forward", "train")
    ]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert thread_figures(16, **sizes) == []
        torch.set_num_threads(2)
        found = thread_figures(16, ["forward"], mm_size=32, **sizes)
        assert [sorted(f.seconds) for f in found] == [[1, 2]] * 2
        assert all(sorted(f.mm_seconds) == [1, 2] and f.mm_speedup > 0 for f in found)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_profile_accounts_for_the_whole_time():
    """Shares add up to one."""
    [profile] = profile_block(LARGE[1]._replace(length=9, width=64), ["forward"])
    assert abs(sum(profile.shares.values()) - 1) < 0.02
    report = tiny_report(profiles=[profile])
    assert report.to_dict()["profiles"][0]["way"] == profile.way
