"""Laws of batches: nothing lost, nothing doubled, no state across borders, exact positions."""

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch
from numbers_as_tokens import END, START, number_store, token

from anymamba.errors import CheckpointError, ConfigError
from anymamba.models import MambaConfig, MambaLM
from anymamba.nn import ModelCache
from anymamba.train import (
    Batch,
    CarriedBatches,
    DataRecipe,
    PackedBatches,
    Span,
    training_batches,
    validation_batches,
)
from laws import assert_same

LENGTHS = [1, 9, 30, 4, 4, 17, 2, 64, 11]
TOTAL = sum(LENGTHS) + len(LENGTHS)
IGNORE = -100
KINDS = [PackedBatches, CarriedBatches]


@pytest.fixture
def store(tmp_path):
    return number_store(tmp_path / "store", LENGTHS)


def sequences(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return ids and targets of each stretch that lies between borders, filling left out."""
    if batch.cu_seqlens is not None:
        borders = list(pairwise(batch.cu_seqlens.tolist()))
        rows = [(0, begin, end) for begin, end in borders]
    else:
        labels = torch.zeros_like(batch.ids_bs) if batch.seq_idx is None else batch.seq_idx
        rows = []
        for row in range(len(labels)):
            changes = (labels[row].diff() != 0).nonzero().flatten().add(1).tolist()
            rows += [(row, *pair) for pair in pairwise([0, *changes, labels.shape[1]])]
    found = []
    for row, begin, end in rows:
        counts = batch.targets_bs[row, begin:end] != IGNORE
        ids_s = batch.ids_bs[row, begin:end][counts]
        found.append((ids_s.tolist(), batch.targets_bs[row, begin:end][counts].tolist()))
    return [sequence for sequence in found if sequence[0]]


def place(ids: list[int], targets: list[int], lengths: list[int] = LENGTHS) -> Span:
    """Return where a stretch was cut from; its tokens say so, and must follow one another."""
    known = next(number for number in [*ids, *targets] if number not in (START, END))
    document = known // 1000 - 1
    row = [START, *(token(document, t) for t in range(lengths[document])), END]
    begin = row.index(ids[0])
    assert row[begin : begin + len(ids)] == ids
    assert row[begin + 1 : begin + 1 + len(ids)] == targets
    return Span(document, begin, begin + len(ids))


def predictions(batches) -> Counter:
    """Count how often each prediction of the corpus was asked for."""
    spans = [place(*sequence) for batch in batches for sequence in sequences(batch)]
    return Counter((span.document, t) for span in spans for t in range(span.begin, span.end))


def everything() -> set[tuple[int, int]]:
    return {(number, t) for number, length in enumerate(LENGTHS) for t in range(length + 1)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "batch"), [(8, 2), (5, 3), (64, 1), (1, 1), (200, 2)])
def test_every_prediction_comes_as_often_as_the_epochs_say(kind, window, batch, store):
    """After any number of batches, no prediction is an epoch ahead of another it shares a row with.

    Packed: the counts differ by at most one, and sum to the tokens handed out. Carried rows may lag
    behind by the span that they are reading.
    """
    batches = kind(store, window=window, batch=batch, seed=3)
    drawn = [next(batches) for _ in range(2 * TOTAL // (window * batch) + 2)]
    counts = predictions(drawn)
    assert sum(counts.values()) == len(drawn) * window * batch
    assert set(counts) <= everything()
    assert sum(one.predictions for one in drawn) == len(drawn) * window * batch
    if kind is PackedBatches:
        assert set(counts) == everything()
        assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_seen_is_what_was_handed_out(kind, store):
    """`seen_spans` names exactly the predictions of the batches so far, after each batch."""
    batches = kind(store, window=6, batch=3, seed=1)
    drawn = []
    for _ in range(30):
        drawn.append(next(batches))
        spans = batches.seen_spans()
        seen = [(span.document, t) for span in spans for t in range(span.begin, span.end)]
        assert len(seen) == len(set(seen))
        assert set(seen) == set(predictions(drawn))
    assert set(seen) == everything()
    assert len(spans) == len(LENGTHS)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_never_change(kind, store):
    """Batches of training have one shape, so a compiled model is compiled once."""
    batches = kind(store, window=6, batch=3)
    shape = (1, 18) if kind is PackedBatches else (3, 6)
    for _ in range(20):
        batch = next(batches)
        assert batch.ids_bs.shape == batch.targets_bs.shape == shape
        assert batch.ids_bs.dtype == batch.targets_bs.dtype == torch.int64


def test_packed_sequences_are_no_longer_than_a_window(store):
    """Borders run from 0 to the end, and no two of them are further apart than the window."""
    batches = PackedBatches(store, window=6, batch=3)
    for _ in range(20):
        batch = next(batches)
        assert batch.cu_seqlens is not None
        steps = batch.cu_seqlens.diff()
        assert (batch.cu_seqlens[0], batch.cu_seqlens[-1]) == (0, 18)
        assert int(steps.min()) >= 1
        assert int(steps.max()) <= 6
        assert batch.carry is None
        assert batch.seq_idx is None


def test_carried_rows_go_on_where_they_stopped(store):
    """A row that carries begins with the next prediction of the document it ended with."""
    batches = CarriedBatches(store, window=7, batch=3, seed=5)
    last: list[Span | None] = [None] * 3
    begun = carried = 0
    for _ in range(60):
        batch = next(batches)
        assert batch.carry is not None
        for row in range(3):
            mine = batch._replace(
                ids_bs=batch.ids_bs[row : row + 1],
                targets_bs=batch.targets_bs[row : row + 1],
                seq_idx=None if batch.seq_idx is None else batch.seq_idx[row : row + 1],
            )
            spans = [place(*sequence) for sequence in sequences(mine)]
            before, first = last[row], spans[0]
            if batch.carry[row]:
                assert before is not None
                assert (first.document, first.begin) == (before.document, before.end)
                carried += 1
            else:
                begun += 1
            last[row] = spans[-1]
    assert begun > 3
    assert carried > 60


def test_one_long_document_gives_every_row_text_of_its_own(tmp_path):
    """A corpus of one file is shared out between the rows, not read by all of them."""
    store = number_store(tmp_path, [99])
    batches = CarriedBatches(store, window=5, batch=4)
    drawn = [next(batches) for _ in range(5)]
    spans = [place(*sequence, [99]) for batch in drawn for sequence in sequences(batch)]
    counts = Counter(t for span in spans for t in range(span.begin, span.end))
    assert len(counts) == 100
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_a_position_is_exact(kind, cut, store):
    """A stream that takes up a saved position goes on with the very same batches."""
    straight = kind(store, window=5, batch=2, seed=9)
    for _ in range(cut):
        next(straight)
    text = json.dumps(straight.state_dict())
    resumed = kind(store, window=5, batch=2, seed=9)
    next(resumed)
    resumed.load_state_dict(json.loads(text))
    assert resumed.epoch == straight.epoch
    for _ in range(25):
        for expected, got in zip(next(straight), next(resumed), strict=True):
            if isinstance(expected, torch.Tensor):
                assert torch.equal(expected, got)
            else:
                assert expected == got
    assert resumed.state_dict() == straight.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_and_the_epoch_decide_the_order(kind, store):
    """Equal seeds give equal batches; another seed, and another epoch, another order."""

    def order(seed: int, batches: int = 9) -> list[list[int]]:
        stream = kind(store, window=8, batch=2, seed=seed)
        return [next(stream).targets_bs.flatten().tolist() for _ in range(batches)]

    assert order(0) == order(0)
    assert order(0) != order(1)
    tokens = [number for batch in order(0, 40) for number in batch]
    first = [number for number in tokens if number == END or number % 1000 == 0]
    whole = len(LENGTHS) * 2
    assert first[:whole] != first[whole : 2 * whole]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": 6}, "window"),
        ({"batch": 3}, "batch"),
        ({"seed": 1}, "seed"),
    ],
)
def test_rejects_a_foreign_position(options, name, store, tmp_path):
    """A position of other sizes, another seed, mode or corpus is refused by name."""
    settings = {"window": 5, "batch": 2, "seed": 0}
    state = PackedBatches(store, **settings).state_dict()
    with pytest.raises(CheckpointError, match=f"only with the same {name}"):
        PackedBatches(store, **(settings | options)).load_state_dict(state)
    with pytest.raises(CheckpointError, match="only with the same kind"):
        CarriedBatches(store, **settings).load_state_dict(state)
    other = number_store(tmp_path / "other", LENGTHS[1:])
    with pytest.raises(CheckpointError, match="only with the same tokens"):
        PackedBatches(other, **settings).load_state_dict(state)


def test_rejects_empty_batches(store):
    """A window or a batch of nothing is refused."""
    with pytest.raises(ConfigError, match="must be positive; got 0 and 2"):
        PackedBatches(store, window=0, batch=2)


@pytest.mark.parametrize("mode", ["packed", "carried"])
@pytest.mark.parametrize(("window", "batch"), [(8, 2), (5, 3), (200, 4)])
def test_validation_asks_every_prediction_once(mode, window, batch, store):
    """One pass over the held-out text: each prediction once, and exactly all bytes."""
    recipe = DataRecipe(mode=mode, window=window, batch=batch)
    drawn = list(validation_batches(store, recipe))
    assert predictions(drawn) == Counter(everything())
    assert sum(one.predictions for one in drawn) == TOTAL
    assert sum(one.bytes_count for one in drawn) == pytest.approx(int(store.bytes_q.sum()))


@pytest.mark.parametrize("mode", ["packed", "carried"])
def test_a_limited_validation_is_always_the_same_part(mode, store):
    """A limit is kept to the token, and the part does not depend on the seed of training."""
    parts = []
    for seed in (0, 1):
        recipe = DataRecipe(mode=mode, window=8, batch=2, seed=seed)
        drawn = list(validation_batches(store, recipe, max_tokens=37))
        assert sum(one.predictions for one in drawn) == 37
        parts.append(predictions(drawn))
    assert parts[0] == parts[1]
    assert set(parts[0].values()) == {1}


@pytest.mark.parametrize("mode", ["packed", "carried"])
def test_a_recipe_chooses_the_stream(mode, store):
    """Mode, sizes and seed of the recipe reach the stream."""
    stream = training_batches(store, DataRecipe(mode=mode, window=5, batch=2, seed=8))
    assert isinstance(stream, PackedBatches if mode == "packed" else CarriedBatches)
    state = stream.state_dict()
    assert (state["window"], state["batch"], state["seed"]) == (5, 2, 8)
    stream.close()
    with pytest.raises(CheckpointError, match="closed"):
        next(stream)


def tiny(layer: str) -> MambaLM:
    torch.manual_seed(0)
    options = {"Mamba1": {"d_state": 4}, "Mamba2": {"d_state": 8, "headdim": 8}}
    config = MambaConfig(
        d_model=16,
        n_layer=2,
        vocab_size=10 * 1000 + 100,
        ssm_cfg={
            "layer": layer,
            **options.get(layer, {"d_state": 8, "headdim": 8, "chunk_size": 4}),
        },
    )
    return MambaLM(config, dtype=torch.float64)


@pytest.mark.parametrize("layer", ["Mamba1", "Mamba2", "Mamba3"])
@torch.no_grad()
def test_no_state_crosses_a_border_and_none_is_lost(layer, store):
    """Through a model, a carried stream gives the logits of whole spans run alone.

    The caller's part is to keep the cache, and to begin anew the rows that do not carry.
    """
    lm = tiny(layer)
    recipe = DataRecipe(mode="carried", window=7, batch=3)
    alone: dict[int, torch.Tensor] = {}
    for document, length in enumerate(LENGTHS):
        ids_s, _ = store.piece(Span(document, 0, length + 1))
        for span_begin in range(0, length + 1, 56):
            logits_bsw = lm(ids_s[None, span_begin : span_begin + 56])
            for t, logits_w in enumerate(logits_bsw[0], start=span_begin):
                alone[document * 1000 + t] = logits_w
    cache = lm.empty_cache(3)
    for batch in validation_batches(store, recipe):
        assert batch.carry is not None
        fresh, kept = lm.empty_cache(3).to_tensors(), cache.to_tensors()
        mixed = {
            name: torch.where(batch.carry.view(-1, *[1] * (old.dim() - 1)), old, fresh[name])
            for name, old in kept.items()
        }
        cache = ModelCache.from_tensors(mixed, [type(layer) for layer in cache.layers])
        logits_bsw, cache = lm.prefill(batch.ids_bs, cache, seq_idx=batch.seq_idx)
        for row in range(3):
            counts = batch.targets_bs[row] != IGNORE
            for place_in_row in counts.nonzero().flatten().tolist():
                ids = [int(batch.ids_bs[row, place_in_row])]
                span = place(ids, [int(batch.targets_bs[row, place_in_row])])
                expected = alone[span.document * 1000 + span.begin]
                assert_same(expected, logits_bsw[row, place_in_row])


def test_a_batch_moves_as_a_whole(store):
    """`to` moves every tensor and keeps the rest."""
    for kind in KINDS:
        batch = next(kind(store, window=5, batch=2))
        moved = batch.to("meta")
        for before, after in zip(batch, moved, strict=True):
            if isinstance(before, torch.Tensor):
                assert after.device.type == "meta"
                assert after.shape == before.shape
            else:
                assert before == after
