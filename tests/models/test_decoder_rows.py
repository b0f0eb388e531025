"""Rows of the decoder come and go in the middle of a text, and nobody notices."""

import pytest
import torch

from anymamba.models import quantize_lm
from anymamba.nn import ModelCache
from decoder_cases import MODELS, model, tokens
from kernels import DECODERS, running

pytestmark = pytest.mark.skipif(not DECODERS, reason="no compiled kernels")
KINDS = pytest.mark.parametrize("kind", DECODERS)
FORMS = pytest.mark.parametrize("form", ["float32", "int8"])
# Of the prompts. The last row joins when the others have gone on for a while.
LENGTHS = (5, 2, 9, 1)


def model_in(form, name):
    """Return a model; integers need some columns to be worth a block."""
    return model(name) if form == "float32" else quantize_lm(model(name, d_model=48), form)


class Text:
    """What one row reads: its state after a prompt of its own length, and the tokens after it."""

    def __init__(self, lm, row):
        self.ids = tokens(8, seed=20 + row).tolist()
        prompt_bs = tokens(1, LENGTHS[row], seed=10 + row)
        self.start = lm.prefill(prompt_bs, impl="portable").cache

    def alone(self, lm, count):
        """Return the logits of each of its first tokens and the state after them."""
        cache = self.start.clone()
        logits = [lm.step_(torch.tensor([i]), cache, impl="native")[0] for i in self.ids[:count]]
        return logits, cache


class Company:
    """Rows that decode together; each knows its text and collects its logits."""

    def __init__(self, lm, texts):
        self.lm, self.rows = lm, [(text, []) for text in texts]
        self.cache = ModelCache.join([text.start for text in texts])

    def decode(self, count):
        """Run the next tokens of all rows."""
        for _ in range(count):
            ids_b = torch.tensor([text.ids[len(logits)] for text, logits in self.rows])
            logits_bw = self.lm.step_(ids_b, self.cache, impl="native")
            for (_, logits), logits_w in zip(self.rows, logits_bw, strict=True):
                logits.append(logits_w)

    def join(self, text):
        """Take in a row, at the end."""
        self.cache = ModelCache.join([self.cache, text.start])
        self.rows.append((text, []))

    def keep(self, places):
        """Go on with these rows."""
        self.cache = self.cache.rows(places)
        self.rows = [self.rows[place] for place in places]

    def assert_each_is_itself(self):
        """Every row has the bits that it has alone: logits of all its tokens, and its state."""
        for place, (text, logits) in enumerate(self.rows):
            want, cache = text.alone(self.lm, len(logits))
            assert torch.equal(torch.stack(logits), torch.stack(want)), place
            for name, tensor in self.cache.rows([place]).to_tensors().items():
                assert torch.equal(tensor, cache.to_tensors()[name]), (place, name)


@KINDS
@FORMS
@pytest.mark.parametrize("name", MODELS)
def test_a_row_joins_and_each_is_itself(name, form, kind):
    """A state of another length enters a running batch: newcomer and others go on as alone."""
    lm = model_in(form, name)
    with torch.inference_mode(), running(kind):
        texts = [Text(lm, row) for row in range(4)]
        company = Company(lm, texts[:3])
        company.decode(3)
        company.join(texts[3])
        company.decode(4)
        company.assert_each_is_itself()
    lengths = torch.tensor([length + 7 for length in LENGTHS[:3]] + [LENGTHS[3] + 4])
    assert torch.equal(company.cache.position_b, lengths)


@KINDS
@FORMS
@pytest.mark.parametrize("name", MODELS)
def test_rows_leave_and_each_is_itself(name, form, kind):
    """Those that stay go on as alone, one of them is left at last, and a row may come after it."""
    lm = model_in(form, name)
    with torch.inference_mode(), running(kind):
        texts = [Text(lm, row) for row in range(4)]
        company = Company(lm, texts)
        company.decode(2)
        company.keep([3, 0, 2])
        company.decode(2)
        company.assert_each_is_itself()
        company.keep([1])
        company.decode(2)
        company.join(texts[1])
        company.decode(2)
        company.assert_each_is_itself()


@torch.no_grad()
def test_who_left_is_a_state_of_its_own():
    """A row that was taken out is not written to by those that go on."""
    lm = model("mamba3")
    texts = [Text(lm, row) for row in range(3)]
    company = Company(lm, texts)
    company.decode(3)
    gone, want = company.cache.rows([1]), texts[1].alone(lm, 3)[1]
    company.decode(2)
    company.keep([0, 2])
    company.decode(2)
    for name, tensor in gone.to_tensors().items():
        assert torch.equal(tensor, want.to_tensors()[name]), name


@KINDS
@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3 rank 2", "turned halves"])
@pytest.mark.parametrize("form", ["bfloat16", "int4"])
def test_more_rows_than_share_the_weights(form, name, kind):
    """They run in groups, in one call: every row has its own bits, and its state goes on."""
    dtype = torch.bfloat16 if form == "bfloat16" else torch.float32
    lm = model(name, dtype, d_model=48)
    if form == "int4":
        quantize_lm(lm, form)
    rows = 67
    start = lm.prefill(tokens(rows, 3), impl="portable").cache
    ids_b = tokens(rows, seed=4)
    with running(kind):
        logits_bw, cache = lm.advance(ids_b, start.clone(), impl="native")
        for first, last in ((0, 34), (34, 67)):
            part = start.rows(list(range(first, last)))
            want_bw, want = lm.advance(ids_b[first:last], part, impl="native")
            assert torch.equal(logits_bw[first:last], want_bw)
            got = cache.rows(list(range(first, last)))
            for field, tensor in want.to_tensors().items():
                assert torch.equal(got.to_tensors()[field], tensor), field


@KINDS
@pytest.mark.parametrize("name", MODELS)
def test_a_state_without_logits_is_the_same(name, kind):
    """Who wants no logits spares the head, and nothing else."""
    lm, ids_b = model(name), tokens(3)
    start = lm.prefill(tokens(3, 4), impl="portable").cache
    with running(kind):
        want = lm.advance(ids_b, start.clone(), impl="native").cache
        got = lm.advance_state(ids_b, start.clone(), impl="native")
    with torch.no_grad():
        modules = lm.advance_state(ids_b, start.clone(), impl="portable")
    portable = lm.step(ids_b, start, impl="portable").cache
    for field, tensor in want.to_tensors().items():
        assert torch.equal(got.to_tensors()[field], tensor), field
        assert torch.equal(modules.to_tensors()[field], portable.to_tensors()[field]), field
