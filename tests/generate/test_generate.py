"""Laws of generation: rows are independent, states are values, tokens follow the model."""

import math
from itertools import pairwise

import pytest
import torch

from anymamba.bench import peak_bytes
from anymamba.errors import CacheError, ConfigError, DtypeError, NonFiniteError, ShapeError
from anymamba.generate import generate, generate_detailed, penalize_counts, row_seed, stream
from anymamba.models import MambaConfig, MambaLM
from anymamba.ops import TokenChooser
from laws import assert_same

VOCABULARY = 61
HEADS = {"headdim": 8, "d_state": 8, "chunk_size": 8}
ATTENTION = {"num_heads": 2, "causal": True, "rotary_emb_dim": 4, "d_conv": 4}
HYBRID = {"attn_layer_idx": [1], "attn_cfg": ATTENTION}
FAMILIES = {
    "mamba1": {"ssm_cfg": {"layer": "Mamba1", "d_state": 8}},
    "mamba2": {"ssm_cfg": {"layer": "Mamba2", **HEADS}},
    "mamba3": {"ssm_cfg": {"layer": "Mamba3", **HEADS}, "d_intermediate": 32},
    "mamba3_mimo": {"ssm_cfg": {"layer": "Mamba3", **HEADS, "is_mimo": True, "mimo_rank": 2}},
    "hybrid": {"ssm_cfg": {"layer": "Mamba2", **HEADS}, **HYBRID},
}
# Eight prompts, ragged; lengths 1, and two that occur twice.
PROMPTS = [
    [(7 * row + 3 * place * place + 5) % VOCABULARY for place in range(length)]
    for row, length in enumerate((5, 1, 17, 5, 64, 1, 9, 33))
]
# Each model below says some of these to some of the prompts.
STOPS = [5, 15, 20, 50]
SAMPLED = {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}


def model(name, dtype=torch.float32):
    """Return a small model whose predictions depend on what it read."""
    torch.manual_seed(1)
    sizes = {"d_model": 16, "n_layer": 2, "vocab_size": VOCABULARY, "tie_embeddings": False}
    lm = MambaLM(MambaConfig(**sizes, **FAMILIES[name]))
    with torch.no_grad():
        for parameter in lm.backbone.layers.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)
        lm.backbone.embedding.weight.mul_(40)
        lm.lm_head.weight.mul_(60)
    return lm.to(dtype)


@pytest.fixture(scope="module")
def lm():
    return model("mamba3")


def continued_by_forward(lm, prompt, count):
    """Return the likeliest continuation, every token from a run over the whole text."""
    ids = list(prompt)
    for _ in range(count):
        logits_w = lm(torch.tensor([ids]), num_last_tokens=1)[0, -1, :VOCABULARY]
        ids.append(int(logits_w.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_rows_of_a_ragged_batch_equal_each_prompt_alone(name, options):
    """Token for token, in every family, although rows leave the batch at different times."""
    lm = model(name)
    options = {**options, "max_new_tokens": 9, "stop_ids": STOPS}
    together = generate(lm, PROMPTS, seed=5, **options)
    alone = [
        generate(lm, [prompt], seed=row_seed(5, row), **options)[0]
        for row, prompt in enumerate(PROMPTS)
    ]
    assert alone == together
    streamed = [
        list(stream(lm, prompt, seed=row_seed(5, row), **options))
        for row, prompt in enumerate(PROMPTS[:3])
    ]
    assert streamed == together[:3]
    # The laws above mean little if all rows say the same, or end together.
    assert len({tuple(ids[:3]) for ids in together}) > 4
    assert len({len(ids) for ids in together}) > 1


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_those_of_forward(name):
    """Reading, stepping and batching choose what a run over the whole text would choose."""
    lm = model(name, torch.float64)
    with torch.no_grad():
        expected = [continued_by_forward(lm, prompt, 6) for prompt in PROMPTS[:4]]
    assert expected == generate(lm, PROMPTS[:4], max_new_tokens=6)


def test_prompts_may_be_lists_or_tensors(lm):
    """Lists, 1-D tensors of both integer types and one tensor of a batch mean the same."""
    rows = [PROMPTS[0], PROMPTS[3]]
    expected = generate(lm, rows, max_new_tokens=4)
    assert expected == generate(lm, torch.tensor(rows), max_new_tokens=4)
    assert expected == generate(
        lm, [torch.tensor(rows[0], dtype=torch.int32), tuple(rows[1])], max_new_tokens=4
    )
    assert expected[0] == list(stream(lm, torch.tensor(rows[0]), max_new_tokens=4))


@pytest.mark.parametrize("piece", [1, 7, 63, 64, 65])
def test_piece_length_does_not_matter(lm, piece):
    """Prompts read in pieces of any length lead to the same tokens and states."""
    prompts = PROMPTS[:4] if piece == 1 else PROMPTS
    whole = generate_detailed(lm, prompts, max_new_tokens=3)
    pieces = generate_detailed(lm, prompts, max_new_tokens=3, prefill_chunk=piece)
    assert whole.ids == pieces.ids
    for name, expected in whole.cache.to_tensors().items():
        if expected.is_floating_point():
            assert_same(expected, pieces.cache.to_tensors()[name], name=name)


def test_progress_counts_every_prompt_token_once(lm):
    """The counts rise to the number of all prompt tokens, in pieces of the asked length."""
    seen = []
    generate(
        lm,
        PROMPTS,
        max_new_tokens=1,
        prefill_chunk=16,
        progress=lambda *counts: seen.append(counts),
    )
    done = [0, *(done for done, _ in seen)]
    assert {total for _, total in seen} == {sum(map(len, PROMPTS))}
    assert done[-1] == sum(map(len, PROMPTS))
    assert all(0 < after - before <= 16 for before, after in pairwise(done))


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "hybrid"])
def test_state_comes_back_complete(name):
    """The returned state has read prompt and new ids: each row in its place, as far as it went."""
    lm = model(name)
    output = generate_detailed(lm, PROMPTS, max_new_tokens=9, stop_ids=STOPS)
    assert set(output.finish_reasons) == {"stop", "length"}
    for row, (prompt, ids) in enumerate(zip(PROMPTS, output.ids, strict=True)):
        mine = output.cache.rows([row])
        expected = lm.prefill(torch.tensor([prompt + ids])).cache
        assert mine.position.tolist() == expected.position.tolist() == [len(prompt + ids)]
        wanted_bw = lm.step(torch.tensor([1]), expected).logits
        assert_same(wanted_bw.detach(), lm.step(torch.tensor([1]), mine).logits.detach())


@pytest.mark.parametrize("name", ["mamba1", "mamba2", "mamba3", "hybrid"])
def test_continuing_from_a_state_equals_reading_everything(name):
    """A second turn on the returned state is a turn after the whole conversation."""
    lm = model(name)
    first = generate_detailed(lm, PROMPTS, max_new_tokens=5)
    turns = [[9, 4, 2], [8], [7, 7], [1], [30, 31], [5], [6, 60], [2, 3, 4, 5]]
    everything = [a + b + c for a, b, c in zip(PROMPTS, first.ids, turns, strict=True)]
    kept = first.cache.clone()
    expected = generate(lm, everything, max_new_tokens=7)
    assert expected == generate(lm, turns, cache=first.cache, max_new_tokens=7)
    # Caches are values: the state was not used up, so the same turn can be taken again.
    for name, tensor in kept.to_tensors().items():
        assert torch.equal(tensor, first.cache.to_tensors()[name])
    assert expected == generate(lm, turns, cache=first.cache, max_new_tokens=7)


def test_branches_of_a_fork_are_rows_of_their_own(lm):
    """A repeated row continues differently in each branch, and as the branch's seed says."""
    prompt = PROMPTS[4]
    root = generate_detailed(lm, [prompt], max_new_tokens=0).cache
    assert root.position.tolist() == [len(prompt)]
    options = {"max_new_tokens": 10, "temperature": 1.0}
    branches = generate(lm, [[7]] * 4, cache=root.rows([0] * 4), seed=[1, 2, 3, 1], **options)
    assert branches[0] == branches[3]
    assert len({tuple(ids) for ids in branches}) == 3
    expected = [generate(lm, [[*prompt, 7]], seed=seed, **options)[0] for seed in (1, 2, 3, 1)]
    assert expected == branches


def test_stream_rewinds_to_any_of_its_states(lm):
    """A state taken on the way continues as the stream did, and taking it changes nothing."""
    expected = generate(lm, [PROMPTS[2]], max_new_tokens=8)[0]
    tokens = stream(lm, PROMPTS[2], max_new_tokens=8)
    states = [tokens.cache, *(tokens.cache for _ in tokens)]
    assert expected == tokens.ids
    assert [int(state.position) for state in states] == list(range(17, 26))
    for place in (0, 2, 7):
        # The state after `place` tokens, and the token that came next, lead to the rest.
        again = generate(lm, [[expected[place]]], cache=states[place], max_new_tokens=7 - place)
        assert again == [expected[place + 1 :]]


def test_stream_goes_on_after_a_break(lm):
    """A second loop takes up where the first broke off, and the end stays the end."""
    expected = generate(lm, [PROMPTS[2]], max_new_tokens=8)[0]
    tokens = stream(lm, PROMPTS[2], max_new_tokens=8)
    first = []
    for token in tokens:
        first.append(token)
        if len(first) == 3:
            break
    assert tokens.finish_reason is None
    assert expected == first + list(tokens)
    assert (list(tokens), tokens.finish_reason) == ([], "length")
    assert list(stream(lm, [1], max_new_tokens=0)) == []


def test_state_of_a_generation_carries_gradients(lm):
    """What comes back are ordinary tensors: a training step may start from them."""
    output = generate_detailed(lm, [PROMPTS[0]], max_new_tokens=2)
    tokens = stream(lm, PROMPTS[0], max_new_tokens=2)
    next(tokens)
    for cache in (output.cache, tokens.cache):
        logits, _ = lm.prefill(torch.tensor([[1, 2, 3]]), cache)
        grads = torch.autograd.grad(logits.sum(), list(lm.parameters()), allow_unused=True)
        assert any(grad is not None and bool(grad.abs().sum() > 0) for grad in grads)


def test_rows_end_at_stop_ids_and_stop_functions(lm):
    """The token that ends a row is its last, and the reason is told."""
    free = generate(lm, [PROMPTS[2]], max_new_tokens=8)[0]
    assert len(set(free[:5])) == 5, "a model that repeats itself cannot show this"
    output = generate_detailed(lm, [PROMPTS[2]], max_new_tokens=8, stop_ids=iter([free[4]]))
    assert (output.ids, output.finish_reasons) == ([free[:5]], ["stop"])
    pair = generate_detailed(
        lm,
        [PROMPTS[2], PROMPTS[0]],
        max_new_tokens=8,
        stop=[lambda ids: ids[-2:] == free[2:4], lambda ids: len(ids) == 7],
    )
    assert [len(ids) for ids in pair.ids] == [4, 7]
    tokens = stream(lm, PROMPTS[2], max_new_tokens=3, stop=lambda ids: len(ids) == 3)
    assert (list(tokens), tokens.finish_reason) == (free[:3], "stop")


def test_log_probabilities_are_those_of_the_model(lm):
    """Of the real vocabulary, before penalties, temperature and filters."""
    output = generate_detailed(lm, PROMPTS[:3], max_new_tokens=6, logprobs=True, **SAMPLED)
    assert output.logprobs is not None
    for prompt, ids, actual in zip(PROMPTS, output.ids, output.logprobs, strict=False):
        logits_sw = lm(torch.tensor([prompt + ids]))[0, len(prompt) - 1 : -1, :VOCABULARY].detach()
        expected = logits_sw.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        assert_same(expected, torch.tensor(actual))
    tokens = stream(lm, PROMPTS[0], max_new_tokens=6, logprobs=True, **SAMPLED)
    assert list(tokens) == output.ids[0]
    assert_same(torch.tensor(output.logprobs[0]), torch.tensor(tokens.logprobs))
    assert generate_detailed(lm, PROMPTS[:1], max_new_tokens=1).logprobs is None
    assert stream(lm, PROMPTS[0], max_new_tokens=1).logprobs is None


@pytest.mark.parametrize("options", [{}, {"temperature": 5.0}], ids=["greedy", "sampled"])
def test_padded_ids_are_never_sampled(options):
    """However large the logits of the padding are."""
    torch.manual_seed(0)
    config = MambaConfig(d_model=16, n_layer=1, vocab_size=VOCABULARY, tie_embeddings=False)
    lm = MambaLM(config)

    def flood(module, inputs, logits):
        logits[..., VOCABULARY:] = 1e4
        return logits

    lm.lm_head.register_forward_hook(flood)
    assert config.padded_vocab_size > VOCABULARY
    assert lm(torch.tensor([[1]]))[0, 0].argmax() >= VOCABULARY
    output = generate_detailed(lm, PROMPTS, max_new_tokens=20, logprobs=True, **options)
    assert max(map(max, output.ids)) < VOCABULARY
    assert min(map(min, output.logprobs)) > -100


class Fixed(MambaLM):
    """A model whose logits are fixed numbers, whatever it reads."""

    def __init__(self, logits_w):
        super().__init__(MambaConfig(d_model=8, n_layer=1, vocab_size=len(logits_w)))
        padding = torch.zeros(self.config.padded_vocab_size - len(logits_w))
        fixed_w = torch.cat([torch.tensor(logits_w), padding])
        self.lm_head.register_forward_hook(lambda module, inputs, y: fixed_w.expand_as(y).clone())


def test_penalties_act_on_what_was_written():
    """Worked out by hand on fixed logits: which token is the likeliest after each penalty."""
    lm = Fixed([3.0, 2.9, 2.0, -1.0, -1.1])
    # Presence: each token once, then no more is subtracted.
    assert generate(lm, [[0]], max_new_tokens=4, presence_penalty=0.5) == [[0, 1, 0, 0]]
    # Frequency: 3.0, 2.9, then 2.5 and 2.4, then 2.0 from the third token and the two others.
    assert generate(lm, [[0]], max_new_tokens=5, frequency_penalty=0.5) == [[0, 1, 0, 1, 0]]
    # Repetition counts the prompt: 3.0 / 2 there from the start, 2.9 / 2 after the first token.
    assert generate(lm, [[0], [4]], max_new_tokens=3, repetition_penalty=2.0) == [
        [1, 2, 0],
        [0, 1, 2],
    ]
    # Negative logits are multiplied: -1.0 becomes -2.0, below -1.1.
    lm = Fixed([-1.0, -1.1, -9.0])
    assert generate(lm, [[0]], max_new_tokens=1, repetition_penalty=2.0) == [[1]]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 4}])
def test_penalties_count_as_the_ids_do(lm, options):
    """Counts that are kept are those of the ids, in every row, while others leave."""
    how = {"max_new_tokens": 60, "stop_ids": [7, 11], **options}

    def counted(ids, logits_w):
        counts_w = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(logits_w))
        return penalize_counts(logits_w, counts_w.to(logits_w), 0.3, 0.1)

    want = generate(lm, PROMPTS, processors=counted, **how)
    assert generate(lm, PROMPTS, frequency_penalty=0.3, presence_penalty=0.1, **how) == want
    assert len({len(ids) for ids in want}) > 1
    assert any(len(set(ids)) < len(ids) for ids in want)


class Compared(int):
    """A token id that counts how often ids are compared."""

    times = 0

    def __eq__(self, other):
        Compared.times += 1
        return int(self) == int(other)

    __hash__ = int.__hash__


def test_a_late_token_is_counted_like_an_early_one(lm, monkeypatch):
    """Penalties look at the newest id, not at all that were written before it."""
    choose, times = TokenChooser.choose, []

    def compared(*given):
        chosen = choose(*given)
        return chosen and chosen._replace(ids=[Compared(token) for token in chosen.ids])

    monkeypatch.setattr(TokenChooser, "choose", compared)
    for _ in stream(lm, [1, 2], max_new_tokens=200, frequency_penalty=0.1, presence_penalty=0.1):
        times.append(Compared.times)
    assert max(after - before for before, after in pairwise(times)) <= 2


def test_a_token_that_failed_is_counted_once(lm):
    """A processor that fails, after the penalties, leaves their counts as the ids have them."""
    how = {"max_new_tokens": 40, "frequency_penalty": 0.5}
    seen, expected = [], []
    generate(
        lm, [[1, 2]], processors=lambda _, logits_w: expected.append(logits_w) or logits_w, **how
    )

    def fail_once(_, logits_w):
        seen.append(logits_w)
        if len(seen) % 2:
            raise ValueError("once")
        return logits_w

    tokens = stream(lm, [1, 2], processors=fail_once, **how)
    for _ in range(40):
        with pytest.raises(ValueError, match="once"):
            next(tokens)
        next(tokens)
    assert len(set(tokens.ids)) < 40
    assert torch.equal(torch.stack(seen[1::2]), torch.stack(expected))


def test_processors_see_new_ids_and_penalized_logits():
    """A plain function can forbid a token; it may write into its argument; filters come later."""
    lm = Fixed([3.0, 2.0, 1.0])
    calls = []

    def forbid_repeats(new_ids, logits_w):
        calls.append((list(new_ids), logits_w.tolist()))
        if new_ids:
            logits_w[new_ids[-1]] = -math.inf
        return logits_w

    output = generate_detailed(
        lm,
        [[2]],
        max_new_tokens=3,
        processors=[forbid_repeats],
        presence_penalty=0.25,
        logprobs=True,
    )
    assert output.ids == [[0, 1, 0]]
    assert calls[1] == ([0], [2.75, 2.0, 1.0])
    expected = torch.tensor([3.0, 2.0, 1.0]).log_softmax(-1)[[0, 1, 0]]
    assert_same(expected, torch.tensor(output.logprobs[0]))
    options = {"max_new_tokens": 3, "temperature": 1.0, "top_k": 1, "logprobs": True}
    sampled = generate_detailed(lm, [[2]], processors=[forbid_repeats], **options)
    assert sampled.ids == [[0, 1, 0]]
    assert_same(expected, torch.tensor(sampled.logprobs[0]))


def test_seeds_decide_the_draws(lm):
    """One seed repeats itself, another differs, and a list gives each row its own."""
    options = {"max_new_tokens": 10, "temperature": 1.0}
    rows = [PROMPTS[2]] * 3
    first = generate(lm, rows, seed=1, **options)
    assert first == generate(lm, rows, seed=1, **options)
    assert len({tuple(ids) for ids in first}) == 3
    assert first != generate(lm, rows, seed=2, **options)
    listed = generate(lm, rows, seed=[4, 1, 4], **options)
    assert listed[0] == listed[2]
    assert listed[1] == first[0] == list(stream(lm, rows[0], seed=1, **options))
    state = torch.get_rng_state()
    generate(lm, rows, seed=1, **options)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_follow_the_temperature():
    """Frequencies over many rows are the softmax of the divided logits."""
    logits_w = [1.0, 0.0, 2.0, -1.0]
    rows = generate(Fixed(logits_w), [[0]] * 4000, max_new_tokens=1, temperature=2.0)
    share = torch.tensor(rows).flatten().bincount(minlength=4) / 4000
    expected = (torch.tensor(logits_w) / 2).softmax(-1)
    # Three deviations of a share of 4000 draws are 0.024 at most.
    torch.testing.assert_close(share, expected, rtol=0, atol=0.024)


def test_half_types_generate(lm):
    """A bfloat16 model runs the same way, its rows as well."""
    half = model("mamba3").to(torch.bfloat16)
    output = generate_detailed(half, PROMPTS[:2], max_new_tokens=5, logprobs=True, **SAMPLED)
    assert [len(ids) for ids in output.ids] == [5, 5]
    assert all(math.isfinite(value) for row in output.logprobs for value in row)


@pytest.mark.parametrize("name", ["Mamba2", "Mamba3"])
def test_memory_does_not_grow_with_the_prompt(name):
    """Reading 100,000 tokens holds as much at once as reading 10,000."""
    family = {"layer": name, "headdim": 8, "d_state": 8}
    lm = MambaLM(MambaConfig(d_model=16, n_layer=1, vocab_size=VOCABULARY, ssm_cfg=family))
    peaks = []
    for length in (10_000, 100_000):
        prompt = [(5 * place + place // 7) % VOCABULARY for place in range(length)]
        peaks.append(peak_bytes(lambda: generate(lm, [prompt], max_new_tokens=2)))  # noqa: B023
    assert peaks[1] == pytest.approx(peaks[0], rel=0.05)


@pytest.mark.parametrize(
    ("prompts", "error", "complaint"),
    [
        ([], ShapeError, "at least one prompt"),
        ([[1], []], ShapeError, "prompt 1 is empty"),
        (torch.tensor([1, 2]), ShapeError, r"\(batch, sequence\); got shape \(2,\)"),
        ([1, 2], DtypeError, "prompt 0 must be a list or a tensor"),
        ([torch.zeros(1, 2)], DtypeError, r"prompt 0 must be .*; got shape \(1, 2\)"),
        ("text", DtypeError, "Encode text"),
        (["text"], DtypeError, "text through a tokenizer"),
        ([[1.5]], DtypeError, "prompt 0 must hold integers"),
        ([torch.tensor([1.0])], DtypeError, "prompt 0 must hold integers"),
        ([[1], [VOCABULARY]], ConfigError, r"0\.\.60; prompt 1 has 61"),
        ([[-1]], ConfigError, "prompt 0 has -1"),
    ],
)
def test_rejects_prompts(lm, prompts, error, complaint):
    """Each mistake is named with its place."""
    with pytest.raises(error, match=f"generate: .*{complaint}"):
        generate(lm, prompts, max_new_tokens=1)


def test_functions_come_alone_in_a_list_or_from_an_iterator(lm):
    """One function, a list of it and an iterator over it steer every token alike."""

    def forbid_seven(_ids, logits_w):
        logits_w[7] = -math.inf
        return logits_w

    def is_long(ids):
        return len(ids) == 3

    options = {"max_new_tokens": 6, "temperature": 3.0}
    want = generate(lm, [[1], [2]], processors=[forbid_seven], stop=[is_long], **options)
    assert {len(ids) for ids in want} == {3}
    alone = generate(lm, [[1], [2]], processors=forbid_seven, stop=is_long, **options)
    once = {"processors": iter([forbid_seven]), "stop": iter([is_long])}
    assert want == alone == generate(lm, [[1], [2]], **once, **options)


def test_a_wrong_seed_names_the_function_that_was_called(lm):
    """The message opens with what the caller wrote."""
    with pytest.raises(ConfigError, match="stream: seed must be"):
        stream(lm, [1], max_new_tokens=1, seed=[1, 2])


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"max_new_tokens": -1}, ConfigError, "max_new_tokens must be"),
        ({"prefill_chunk": 0}, ConfigError, "prefill_chunk must be"),
        ({"seed": [1, 2]}, ConfigError, "seed must be one integer"),
        ({"seed": 0.5}, ConfigError, "seed must be one integer"),
        ({"seed": True}, ConfigError, "seed must be one integer"),
        ({"max_new_tokens": True}, ConfigError, "max_new_tokens must be an integer"),
        ({"stop_ids": [True]}, ConfigError, "stop_ids must be a list of token ids"),
        ({"stop_ids": ["</s>"]}, ConfigError, "stop_ids must be"),
        ({"stop_ids": 3}, ConfigError, "stop_ids must be"),
        ({"stop_ids": [[1, 2]]}, ConfigError, "got \\[\\[1, 2\\]\\]"),
        ({"stop": "</s>"}, ConfigError, "stop must be"),
        ({"stop": 3}, ConfigError, "stop must be"),
        ({"processors": [None]}, ConfigError, "processors must be"),
        ({"processors": 3}, ConfigError, "processors must be"),
        ({"temperature": -1}, ConfigError, "temperature must be"),
        ({"cache": ()}, CacheError, "must be a ModelCache"),
        ({"processors": [lambda ids, x: x[:3]]}, ShapeError, r"shape \(61,\); got \(3,\)"),
        ({"processors": [lambda ids, x: x - math.inf]}, NonFiniteError, "largest logit"),
        ({"processors": [lambda ids, x: x * math.nan]}, NonFiniteError, "row 0"),
    ],
)
def test_rejects_options(lm, options, error, complaint):
    """Each mistake is named, with what to do."""
    with pytest.raises(error, match=complaint):
        generate(lm, [[1]], **{"max_new_tokens": 1, **options})


def test_rejects_a_cache_of_other_rows(lm):
    """A cache has one row per prompt; the message says how to fork."""
    with pytest.raises(CacheError, match=r"got 2 rows and 1 prompts. Repeat a row"):
        generate(lm, [[1]], cache=lm.empty_cache(2), max_new_tokens=1)


def test_rejects_unknown_options(lm):
    """An option that does not exist is not ignored."""
    with pytest.raises(TypeError, match="warmth"):
        stream(lm, [1], max_new_tokens=1, warmth=1.0)
    with pytest.raises(TypeError, match="Did you mean 'top_k'"):
        generate_detailed(lm, [[1]], max_new_tokens=1, topk=3)
