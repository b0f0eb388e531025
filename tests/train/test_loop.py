"""Laws of the loop: what is learned, what is written down, and what the options mean."""

import math

import pytest
import torch
from run_recipes import WORDS, losses, plant_corpus, plant_tokenizer, tiny_recipe

from anymamba.errors import CheckpointError, ConfigError, NonFiniteError
from anymamba.io import load_pretrained
from anymamba.models import MambaConfig, MambaLM
from anymamba.train import (
    Batch,
    Learner,
    LoopRecipe,
    Recipe,
    RunFolder,
    Trainer,
    compare_run,
    describe_recipe,
    evaluate,
    read_metrics,
    sample,
    steps_within,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a small corpus."""
    return plant_corpus(tmp_path_factory.mktemp("loop") / "corpus")


def kinds(out) -> list[str]:
    """Return the kinds of entries of a run, in order."""
    return [entry["kind"] for entry in read_metrics(out / "metrics.jsonl")]


def small_lm(**options) -> MambaLM:
    """Return a small model of bytes."""
    torch.manual_seed(0)
    ssm = {"layer": "Mamba3", "headdim": 8, "d_state": 8, **options}
    return MambaLM(MambaConfig(d_model=16, n_layer=2, vocab_size=257, ssm_cfg=ssm))


def carried(ids_bs: torch.Tensor, targets_bs: torch.Tensor, carry: list[bool]) -> Batch:
    """Return a batch whose rows carry their state, or not."""
    return Batch(ids_bs, targets_bs, None, torch.tensor(carry), None, 1.0)


def test_the_tokenizer_that_was_used_is_kept(corpus, tmp_path):
    """A file of another name becomes the model's tokenizer, whatever lies beside it."""
    used = {word: number for number, word in enumerate(["</s>", "?", *WORDS])}
    file = plant_tokenizer(tmp_path / "toks" / "small.json", used)
    plant_tokenizer(tmp_path / "toks" / "tokenizer.json", {"</s>": 0, "?": 1})
    Trainer(tiny_recipe(corpus, tmp_path / "run", f"data.tokenizer={file}")).run()
    kept = tmp_path / "run" / "model" / "tokenizer.json"
    assert kept.read_bytes() == (tmp_path / "toks" / "small.json").read_bytes()


@pytest.mark.parametrize("mode", ["packed", "carried"])
def test_a_run_learns_and_leaves_everything(corpus, tmp_path, mode):
    """The loss falls, and model, curves, report, recipe and metrics are there and fit together."""
    more = ["loop.steps=30", "optim.lr=0.02", "loop.evaluate_every=10", "loop.sample_every=15"]
    recipe = tiny_recipe(corpus, tmp_path / "run", f"data.mode={mode}", *more)
    told: list[dict] = []
    summary = Trainer(recipe, watch=lambda entry: told.append(dict(entry))).run()
    assert summary.finished
    assert summary.step == 30
    seen = losses(tmp_path / "run")
    assert sum(loss for _, loss, _ in seen[-5:]) < 0.8 * sum(loss for _, loss, _ in seen[:5])
    entries = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [entry["kind"] for entry in entries] == [entry["kind"] for entry in told]
    assert [e["step"] for e in entries if e["kind"] == "valid"] == [10, 20, 30]
    assert [e["step"] for e in entries if e["kind"] == "sample"] == [15, 30]
    folder = RunFolder(tmp_path / "run")
    assert folder.saved_recipe() == recipe
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    assert "bits per byte" in folder.report.read_text()
    assert summary.evaluation is not None
    found = compare_run(folder, order=2)
    assert found.model == pytest.approx(summary.evaluation.bits_per_byte, rel=1e-6)
    assert found.seen_bytes <= sum(len((corpus / f"{n}.txt").read_bytes()) for n in range(6))


def test_the_saved_model_is_the_trained_one(corpus, tmp_path):
    """What `from_pretrained` reads has the last checkpoint's weights."""
    Trainer(tiny_recipe(corpus, tmp_path / "run")).run()
    folder = RunFolder(tmp_path / "run")
    newest = folder.checkpoints().newest()
    assert newest is not None
    for name, value in load_pretrained(folder.model).state_dict().items():
        assert torch.equal(value, newest.tensors["model"][name]), name


def test_accumulated_batches_are_one_update(corpus, tmp_path):
    """Two batches per update: half the updates, the gradient of their mean, the same bytes read."""
    two = Trainer(tiny_recipe(corpus, tmp_path / "two", "loop.accumulate=2", "loop.steps=2")).run()
    one = Trainer(tiny_recipe(corpus, tmp_path / "one", "loop.steps=4")).run()
    assert two.bytes == one.bytes
    first_two = [loss for _, loss, _ in losses(tmp_path / "one")][:2]
    # The second batch of "one" was read after an update of the warm-up, half of a small rate.
    assert losses(tmp_path / "two")[0][1] == pytest.approx(sum(first_two) / 2, rel=2e-2)


@pytest.mark.parametrize("option", ["loop.checkpoint_activations=true", "loop.threads=1"])
def test_means_do_not_change_what_is_learned(corpus, tmp_path, option):
    """Recomputing activations gives the same losses."""
    threads = torch.get_num_threads()
    try:
        Trainer(tiny_recipe(corpus, tmp_path / "plain")).run()
        Trainer(tiny_recipe(corpus, tmp_path / "other", option)).run()
    finally:
        torch.set_num_threads(threads)
    plain, other = (losses(tmp_path / name) for name in ("plain", "other"))
    assert [x[1] for x in other] == pytest.approx([x[1] for x in plain], rel=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_run_again_in_the_backward_when_asked(monkeypatch, recompute):
    """Recomputation is real: each layer runs once more while gradients are taken."""
    lm, runs = small_lm(), []
    kind = type(lm.backbone.layers[0])
    forward = kind.forward

    def counted(self, *arguments, **options):
        runs.append(1)
        return forward(self, *arguments, **options)

    monkeypatch.setattr(kind, "forward", counted)
    learner = Learner(lm, LoopRecipe(checkpoint_activations=recompute))
    ids_bs = torch.randint(257, (2, 9))
    loss = learner.loss(carried(ids_bs[:, :-1], ids_bs[:, 1:], [False, False]))
    assert len(runs) == 2
    loss.backward()
    assert len(runs) == (4 if recompute else 2)


def test_autocast_is_used_and_close(corpus, tmp_path):
    """bfloat16 moves the losses a little, and not not at all."""
    Trainer(tiny_recipe(corpus, tmp_path / "plain")).run()
    Trainer(tiny_recipe(corpus, tmp_path / "half", "loop.autocast=bfloat16")).run()
    plain, half = ([x[1] for x in losses(tmp_path / name)] for name in ("plain", "half"))
    assert half == pytest.approx(plain, rel=2e-2)
    assert half != plain


def test_compiling_gives_the_same_losses(corpus, tmp_path, monkeypatch):
    """The compiled loss is the loss; the backend is one that needs no compiler."""
    compiled: list[object] = []
    compile_ = torch.compile

    def traced(function, **_):
        compiled.append(function)
        return compile_(function, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    Trainer(tiny_recipe(corpus, tmp_path / "plain", "loop.steps=2")).run()
    assert not compiled
    Trainer(tiny_recipe(corpus, tmp_path / "other", "loop.steps=2", "loop.compile=true")).run()
    assert compiled
    plain, other = ([x[1] for x in losses(tmp_path / name)] for name in ("plain", "other"))
    assert other == pytest.approx(plain, rel=1e-5)


def test_a_time_limit_ends_the_run(corpus, tmp_path):
    """After the time is over no further step is taken, and the run is finished."""
    more = ["loop.steps=100000", "loop.seconds=0.3", "loop.checkpoint_every=0"]
    summary = Trainer(tiny_recipe(corpus, tmp_path / "run", *more)).run()
    assert summary.finished
    assert 0 < summary.step < 100_000
    assert summary.seconds >= 0.3


def test_bad_steps_are_skipped_and_told(corpus, tmp_path, monkeypatch):
    """A NaN leaves the weights as they were, drops the carried state, and is written down."""
    trainer = Trainer(tiny_recipe(corpus, tmp_path / "run", "data.mode=carried"))
    seen: list[torch.Tensor] = []
    loss = Learner.loss

    def poisoned(self: Learner, batch: Batch) -> torch.Tensor:
        value = loss(self, batch)
        if not torch.is_grad_enabled():
            return value
        seen.append(self.lm.lm_head.weight.detach().clone())
        return value * (math.nan if len(seen) == 3 else 1)

    monkeypatch.setattr(Learner, "loss", poisoned)
    summary = trainer.run()
    assert summary.skipped == 1
    assert not torch.equal(seen[1], seen[2])
    assert torch.equal(seen[2], seen[3])
    [skip] = [e for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if e["kind"] == "skip"]
    assert (skip["step"], skip["why"]) == (3, "the loss is nan")


def test_a_hopeless_run_stops_with_a_reason(corpus, tmp_path, monkeypatch):
    """More bad steps in a row than allowed end the run; the checkpoints before stay."""
    recipe = tiny_recipe(corpus, tmp_path / "run", "loop.max_skips=2", "loop.steps=20")
    loss, calls = Learner.loss, []

    def poisoned(self: Learner, batch: Batch) -> torch.Tensor:
        calls.append(1)
        return loss(self, batch) * (math.nan if len(calls) > 5 else 1)

    monkeypatch.setattr(Learner, "loss", poisoned)
    with pytest.raises(NonFiniteError, match="after 2 skipped ones"):
        Trainer(recipe).run()
    assert RunFolder(tmp_path / "run").checkpoints().steps() == [2, 4, 6]


def test_a_full_disk_stops_the_run_and_keeps_its_checkpoints(corpus, tmp_path, monkeypatch):
    """The reason is told, and with room the run goes on to the same losses."""
    recipe = tiny_recipe(corpus, tmp_path / "run")
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(entry) -> None:
        if entry["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    try:
        with pytest.raises(CheckpointError, match="must be writable"):
            Trainer(recipe, watch=fill_disk).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert RunFolder(tmp_path / "run").checkpoints().steps() == [2]
    assert Trainer(recipe, resume=True).run().finished
    Trainer(tiny_recipe(corpus, tmp_path / "straight")).run()
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_carried_windows_are_one_long_document():
    """Two windows with a carried state have the loss of the whole; a fresh row has its own."""
    lm = small_lm()
    ids_bs = torch.randint(257, (2, 25))
    inputs_bs, targets_bs = ids_bs[:, :-1], ids_bs[:, 1:]
    learner = Learner(lm, LoopRecipe())
    with torch.no_grad():
        expected = lm.loss(inputs_bs, targets_bs)
        first = learner.loss(carried(inputs_bs[:, :12], targets_bs[:, :12], [False, False]))
        second = learner.loss(carried(inputs_bs[:, 12:], targets_bs[:, 12:], [True, True]))
        torch.testing.assert_close((first + second) / 2, expected)
        # A row that begins anew must not see what the row held before.
        again = learner.loss(carried(inputs_bs[:, :12], targets_bs[:, :12], [False, False]))
        torch.testing.assert_close(again, first)
        mixed = learner.loss(carried(inputs_bs[:, 12:], targets_bs[:, 12:], [True, False]))
    assert abs(float(mixed - second)) > 1e-4


def test_gradients_stop_at_the_border_of_a_window_but_reach_a_learned_start():
    """The carried state is a constant; a learnable initial state is learned by fresh rows."""
    lm = small_lm(learnable_init_state=True)
    starts = [p for name, p in lm.named_parameters() if "init" in name]
    assert starts
    learner = Learner(lm, LoopRecipe())
    ids_bs = torch.randint(257, (2, 9))
    learner.loss(carried(ids_bs[:, :-1], ids_bs[:, 1:], [False, False])).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in starts)
    lm.zero_grad()
    learner.loss(carried(ids_bs[:, :-1], ids_bs[:, 1:], [True, True])).backward()
    assert all(p.grad is None or p.grad.abs().sum() == 0 for p in starts)


def test_attention_cannot_carry(corpus, tmp_path):
    """Keys and values would grow without end, so the recipe is refused."""
    more = ["data.mode=carried", "model.attn_layer_idx=[1]", "model.attn_cfg.num_heads=2"]
    with pytest.raises(ConfigError, match=r"needs layers whose state has a fixed size.*packed"):
        Trainer(tiny_recipe(corpus, tmp_path / "run", *more)).run()


def test_evaluation_needs_text_and_disturbs_nothing():
    """No batch is an error; gradients and mode of the model stay as they are."""
    lm = small_lm()
    with pytest.raises(ConfigError, match="there must be held-out text"):
        evaluate(lm, [])
    ids_bs = torch.randint(256, (2, 9))
    found = evaluate(lm, [carried(ids_bs[:, :-1], ids_bs[:, 1:], [False, False])])
    assert found.predictions == 16
    assert found.bits_per_byte == pytest.approx(found.loss * 16 / math.log(2))
    assert all(p.grad is None for p in lm.parameters())


def test_samples_begin_where_documents_begin():
    """An empty prompt is the start of a document, and the same seed writes the same text."""
    from anymamba.io import ByteTokenizer

    lm = small_lm()
    texts = [sample(lm, ByteTokenizer(), "", max_new_tokens=8, seed=s) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_plans_are_made_before_a_run(corpus, tmp_path):
    """A time becomes a number of steps, and every parameter has an owner."""
    recipe = tiny_recipe(corpus, tmp_path / "run", "optim.name=muon")
    few, many = steps_within(recipe, 0.05), steps_within(recipe, 500.0)
    assert 1 <= few < many
    lines = describe_recipe(recipe).splitlines()
    assert any("in_proj" in line and "muon" in line for line in lines)
    assert "parameters" in lines[-1]
    with pytest.raises(ConfigError, match="seconds must be positive"):
        steps_within(recipe, 0)
    assert isinstance(recipe, Recipe)
