"""Laws of integer weights: how exact they are, and that they behave as layers do."""

import copy
import functools
import math

import pytest
import torch
from torch import nn

from anymamba.errors import ConfigError, ShapeError
from anymamba.models import MambaConfig, MambaLM, quantize_lm, scheme_of
from anymamba.nn import QuantizedEmbedding, QuantizedLinear, dequantize, quantize
from kernels import DECODERS, running
from laws import randn
from trained import TEXT

SCHEMES = pytest.mark.parametrize("scheme", ["int8", "int4"])


def restored(weight, scheme):
    values, scales = quantize(weight, scheme)
    return dequantize(values, scales, scheme, weight.shape, weight.dtype)


@SCHEMES
@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_every_entry_is_near(scheme, columns):
    """No entry is further off than a step of its block, whatever the number of columns."""
    weight = randn(7, columns, seed=1, dtype=torch.float32)
    gap = (restored(weight, scheme) - weight).abs()
    steps = {"int8": 1 / 127, "int4": 1 / 7}
    for start in range(0, columns, 32):
        largest = weight[:, start : start + 32].abs().amax(1, keepdim=True)
        assert (gap[:, start : start + 32] <= 1.01 * steps[scheme] * largest).all()


@pytest.mark.parametrize(("scheme", "limit"), [("int8", 0.006), ("int4", 0.09)])
def test_the_error_of_normal_weights(scheme, limit):
    """The root mean square error of normal weights is small beside the weights."""
    weight = randn(64, 256, seed=2, dtype=torch.float32)
    assert (restored(weight, scheme) - weight).square().mean().sqrt() <= limit


@SCHEMES
def test_quantised_twice_is_quantised_once(scheme):
    """A weight that integers can say is said exactly.

    A block's largest entry has the largest integer, for bfloat16 changes a scale by less than it
    takes to make another of it; so the second time has the scale of the first.
    """
    sizes = 10 ** randn(64, 1, seed=4, dtype=torch.float32, scale=3.0)
    once = restored(sizes * randn(64, 300, seed=3, dtype=torch.float32), scheme)
    assert torch.equal(restored(once, scheme), once)


@SCHEMES
def test_zeros_stay_zero(scheme):
    """A block of zeros has a scale that is no zero, and comes back as zeros."""
    weight = torch.zeros(3, 64)
    weight[:, 40] = 1e-38
    values, scales = quantize(weight, scheme)
    assert scales.isfinite().all()
    assert (scales != 0).all()
    got = dequantize(values, scales, scheme, (3, 64), torch.float32)
    assert torch.equal(got[:, :32], weight[:, :32])


@SCHEMES
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (37, 70)])
def test_where_an_integer_lies(scheme, rows, columns):
    """In panels of 16 rows, four columns of all rows after the other; what is missing is zero."""
    weight = randn(rows, columns, seed=5, dtype=torch.float32)
    values, scales = quantize(weight, scheme)
    assert values.shape == (-(-rows // 16), -(-columns // 32), 8 if scheme == "int8" else 4, 16, 4)
    assert scales.shape == (*values.shape[:2], 16)
    want = torch.zeros(16 * len(values), 32 * values.shape[1])
    want[:rows, :columns] = dequantize(values, scales, scheme, (rows, columns), torch.float32)
    for row in range(len(want)):
        for column in range(want.shape[1]):
            block, place = column // 32, column % 32
            lane = values[row // 16, block, :, row % 16].flatten()
            if scheme == "int8":
                integer = int(lane[place])
            else:
                nibble = int(lane[place % 16]) >> (0 if place < 16 else 4) & 15
                integer = (nibble ^ 8) - 8
            scale = float(scales[row // 16, block, row % 16])
            assert integer * scale == want[row, column], (row, column)


@SCHEMES
@pytest.mark.parametrize(("rows", "columns"), [(100, 70), (96, 32), (50, 2000)])
def test_pieces_are_the_whole(scheme, rows, columns, monkeypatch):
    """A large matrix is quantised some panels at a time, to the same bits and checks."""
    weight = randn(rows, columns, seed=8, dtype=torch.float32)
    whole = quantize(weight, scheme)
    monkeypatch.setattr("anymamba.nn.quantized._WEIGHTS_AT_ONCE", 3000)
    for want, got in zip(whole, quantize(weight, scheme), strict=True):
        assert torch.equal(want, got)
    weight[-1, -1] = torch.inf
    with pytest.raises(ConfigError, match="finite"):
        quantize(weight, scheme)


@SCHEMES
@pytest.mark.parametrize("wrong", [-1, 9, 15])
def test_ids_outside_of_the_table_are_refused(scheme, wrong):
    """Negative ids, and those of the rows that only fill the last panel."""
    table = QuantizedEmbedding.of(nn.Embedding(9, 40), scheme)
    with pytest.raises(IndexError):
        table(torch.tensor([0, wrong]))


@SCHEMES
def test_a_layer_is_its_dequantised_weight(scheme):
    """`forward` is that of an ordinary layer with `.weight`; the bias stays what it was."""
    linear = nn.Linear(40, 6)
    layer = QuantizedLinear.of(linear, scheme)
    x = randn(3, 40, seed=4, dtype=torch.float32)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, linear.bias))
    table = QuantizedEmbedding.of(nn.Embedding(9, 40), scheme)
    ids = torch.tensor([[1, 8], [0, 1]])
    assert torch.equal(table(ids), table.weight[ids])


@SCHEMES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [48, 101])
def test_a_large_layer_is_its_dequantised_weight(scheme, bias, dtype, rows, monkeypatch):
    """A weight that is met piece by piece is met whole, whether or not its last panel is full."""
    monkeypatch.setattr("anymamba.nn.quantized._WEIGHTS_AT_ONCE", 1000)
    plain = nn.Linear(70, rows, bias=bias, dtype=dtype)
    layer = QuantizedLinear.of(plain, scheme)
    calls = []
    pieces = layer._dequantized_panels
    monkeypatch.setattr(layer, "_dequantized_panels", lambda *at: calls.append(at) or pieces(*at))
    x = randn(2, 3, 70, seed=6, dtype=dtype).requires_grad_()
    got = layer(x)
    assert len(calls) == -(-rows // 16)
    want = nn.functional.linear(x, layer.weight, plain.bias)
    limits = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
    atol, rtol = limits[dtype]
    torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
    grad = randn(*got.shape, seed=7, dtype=dtype)
    (got_grad,) = torch.autograd.grad(got, x, grad)
    (want_grad,) = torch.autograd.grad(want, x, grad)
    torch.testing.assert_close(got_grad, want_grad, atol=4 * atol, rtol=rtol)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own, about torch.jit
@pytest.mark.filterwarnings("ignore:bf16 and fp16 are mixed")  # inductor's own, of slower code
@SCHEMES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_compiled_layer_keeps_its_last_columns(scheme, dtype):
    """Columns that fill no block are there for the compiler too."""
    layer = QuantizedLinear.of(nn.Linear(70, 5).to(dtype), scheme)
    u_bi = randn(3, 70, seed=5, dtype=torch.float32).to(dtype)
    torch._dynamo.reset()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer.dequantize)(), layer.weight)
        torch.testing.assert_close(torch.compile(layer)(u_bi), layer(u_bi))
    torch._dynamo.reset()


@SCHEMES
def test_a_layer_keeps_its_integers_through_everything(scheme):
    """Casts change what it computes with, not what it stores; state dicts and copies carry it."""
    layer = QuantizedLinear.of(nn.Linear(40, 6), scheme)
    other = QuantizedLinear(40, 6, scheme, bias=True)
    other.load_state_dict(layer.state_dict())
    half = copy.deepcopy(layer).half()
    for name in ("values", "scales"):
        assert torch.equal(getattr(other, name), getattr(layer, name))
        assert torch.equal(getattr(half, name), getattr(layer, name))
    assert half.weight.dtype == torch.float16
    assert half(torch.zeros(1, 40, dtype=torch.float16)).dtype == torch.float16


@SCHEMES
def test_a_quantised_model_reads_as_it_steps(scheme):
    """Prefill and step of a quantised model agree, and its tied head stays tied."""
    torch.manual_seed(0)
    config = MambaConfig(d_model=32, n_layer=2, vocab_size=50, ssm_cfg={"layer": "Mamba2",
        "headdim": 8, "d_state": 16}, d_intermediate=40)  # fmt: skip
    lm = quantize_lm(MambaLM(config), scheme)
    assert scheme_of(lm) == scheme
    assert lm.lm_head.values.data_ptr() == lm.backbone.embedding.values.data_ptr()
    ids_bs = torch.randint(50, (2, 7))
    with torch.no_grad():
        whole = lm(ids_bs)
        _, cache = lm.prefill(ids_bs[:, :6])
        last, _ = lm.step(ids_bs[:, 6], cache, impl="portable")
    torch.testing.assert_close(last, whole[:, -1], rtol=1e-4, atol=1e-5)
    assert lm.loss(ids_bs).isfinite()


def test_mistakes_are_refused():
    """An unknown scheme, a vector, a hooked layer and a second time are named."""
    with pytest.raises(ConfigError, match="int3"):
        quantize(torch.zeros(2, 2), "int3")
    with pytest.raises(ShapeError, match="two axes"):
        quantize(torch.zeros(2), "int8")
    lm = MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=16))
    hook = lm.backbone.layers[0].mixer.in_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="in_proj of Mamba must be a plain layer"):
        quantize_lm(lm, "int8")
    hook.remove()
    quantize_lm(lm, "int8")
    with pytest.raises(ConfigError, match="already"):
        quantize_lm(lm, "int4")


def drawn(rows, length, random):
    """Return bytes of a language of few words that follow each other as they like."""
    words = TEXT.split()
    places = torch.randint(len(words), (rows * length,), generator=random).tolist()
    text = " ".join(words[place] for place in places).encode()[: rows * length]
    return torch.tensor(list(text)).view(rows, length)


@functools.cache
def reader():
    """Return a model of that language, and text that it has not read."""
    torch.manual_seed(0)
    options = {"layer": "Mamba3", "d_state": 16, "headdim": 16}
    # 160 and 320 columns: more than one scale of 128 activations.
    lm = MambaLM(MambaConfig(d_model=160, n_layer=1, vocab_size=128, ssm_cfg=options))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(0)
    for _ in range(100):
        optimizer.zero_grad()
        lm.loss(drawn(8, 64, random)).backward()
        optimizer.step()
    return lm, drawn(16, 128, random)


def decoded_loss(lm, ids_bs):
    """Return the loss of text that the decoder reads token by token."""
    cache, losses = lm.empty_cache(len(ids_bs)), []
    for ids_b, targets_b in zip(ids_bs.T[:-1], ids_bs.T[1:], strict=True):
        logits_bw = lm.step_(ids_b, cache, impl="native")
        losses.append(nn.functional.cross_entropy(logits_bw, targets_b))
    return torch.stack(losses).mean()


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize(("scheme", "limit"), [("int8", 0.002), ("int4", 0.015)])
def test_a_trained_model_loses_little(scheme, limit, kind):
    """Decoded, the perplexity of unread text changes by at most 0.2% in int8 and 1.5% in int4.

    Four trainings from other seeds changed by 0.03% and 0.25%; the text has 2032 tokens.
    """
    lm, ids_bs = reader()
    with torch.no_grad(), running(kind):
        plain = lm.loss(ids_bs)
        loss = decoded_loss(quantize_lm(copy.deepcopy(lm), scheme), ids_bs)
    # It knows the words: unread bytes cost 4.9 nats to one that knows nothing.
    assert plain < 0.8
    assert abs(float((loss - plain).exp() - 1)) <= limit


@SCHEMES
def test_a_tied_head_stays_tied_on_another_device(scheme):
    """Moved memory is still held once; an untied head stays untied."""
    for is_tied in (True, False):
        config = MambaConfig(d_model=8, n_layer=1, vocab_size=16, tie_embeddings=is_tied)
        lm = quantize_lm(MambaLM(config), scheme).to("meta")
        head, embedding = lm.lm_head, lm.backbone.embedding
        assert head.values.device.type == head.scales.device.type == "meta"
        assert (head.values is embedding.values) == (head.scales is embedding.scales) == is_tied


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(scheme, wrong):
    """One infinity would turn its whole block into NaN."""
    weight = torch.ones(2, 40)
    weight[1, 3] = wrong
    with pytest.raises(ConfigError, match="finite"):
        quantize(weight, scheme)


def test_a_refused_model_stays_as_it_was():
    """No layer is replaced before all could be, and the error names the one that could not."""
    lm = MambaLM(MambaConfig(d_model=32, n_layer=2, vocab_size=16))
    weight = lm.backbone.layers[1].mixer.in_proj.weight
    with torch.no_grad():
        weight[0, 0] = math.nan
    kinds = [type(module) for module in lm.modules()]
    with pytest.raises(ConfigError, match="in_proj of Mamba"):
        quantize_lm(lm, "int8")
    assert [type(module) for module in lm.modules()] == kinds
    with torch.no_grad():
        weight[0, 0] = 0.0
    quantize_lm(lm, "int8")


@pytest.mark.parametrize("ids", [[-1, 1], [1, 16]])
def test_ids_outside_the_table_are_refused(ids):
    """As by an embedding in floating point, which does not count from the end."""
    lm = quantize_lm(MambaLM(MambaConfig(d_model=32, n_layer=1, vocab_size=16)), "int8")
    with pytest.raises(IndexError):
        lm(torch.tensor([ids]))
