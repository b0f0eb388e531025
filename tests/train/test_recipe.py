"""Laws of recipes: what is written is read, slips are named, a changed run is noticed."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymamba.errors import ConfigError
from anymamba.train import (
    DataRecipe,
    LoopRecipe,
    ModelRecipe,
    OptimRecipe,
    ParallelRecipe,
    Recipe,
    ScheduleRecipe,
    load_recipe,
    recipe_difference,
    recipe_to_toml,
)

NOT_DEFAULT = Recipe(
    data=DataRecipe(
        train=("a b", 'with "quotes"\\'),
        valid=("ü\n\x7f",),
        valid_share=0.5,
        kind="jsonl",
        text_key="body",
        tokenizer="folder",
        window=7,
        batch=3,
        mode="carried",
        seed=4,
        cache_dir="none-such",
    ),
    model=ModelRecipe(
        layer="Mamba2",
        d_model=64,
        n_layer=3,
        d_intermediate=8,
        ssm_cfg={"d_state": 16, "headdim": 32, "dt_limit": [0.0, 1.5], "rmsnorm": True},
        attn_layer_idx=(1,),
        attn_cfg={"num_heads": 4},
        rms_norm=False,
        residual_in_fp32=False,
        pad_vocab_size_multiple=1,
        tie_embeddings=False,
    ),
    optim=OptimRecipe(
        name="muon", lr=1e-3, muon_lr=2e-2, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.0, clip=0.0
    ),
    schedule=ScheduleRecipe(kind="constant", warmup=0, decay_share=0.5, floor=0.25),
    loop=LoopRecipe(
        out="elsewhere",
        steps=None,
        seconds=2.5,
        accumulate=2,
        device="cuda:0",
        autocast="bfloat16",
        checkpoint_activations=True,
        compile=True,
        seed=9,
        threads=1,
        report_every=1,
        evaluate_every=0,
        evaluate_tokens=5,
        sample_every=6,
        sample_prompt="def",
        sample_tokens=8,
        checkpoint_every=0,
        keep=1,
        spike_factor=0.0,
        max_skips=0,
    ),
    parallel=ParallelRecipe(cp=2, tp=4, shard=True, param_dtype="bfloat16", timeout=7.0),
)


@pytest.mark.parametrize("recipe", [Recipe(), NOT_DEFAULT], ids=["defaults", "everything else"])
def test_a_written_recipe_is_read_back(recipe, tmp_path):
    """Reading what was written gives an equal recipe, whatever its fields say."""
    file = tmp_path / "recipe.toml"
    file.write_text(recipe_to_toml(recipe), encoding="utf-8")
    assert recipe == load_recipe(file)


def test_every_field_takes_part_in_that_law():
    """The recipe above differs from the defaults in every field but those that exclude others."""
    same = {
        f"{section.name}.{entry.name}"
        for section in fields(Recipe)
        for entry in fields(getattr(NOT_DEFAULT, section.name))
        if getattr(getattr(NOT_DEFAULT, section.name), entry.name)
        == getattr(getattr(Recipe(), section.name), entry.name)
    }
    assert same == {"data.dataset", "model.preset"}


@given(text=st.text(st.characters(exclude_categories=["Cs"])), number=st.floats(1e-9, 1e9))
def test_any_string_and_number_survive(text, number, tmp_path_factory):
    """Strings with any character and numbers with all their digits are read back."""
    recipe = Recipe(
        optim=OptimRecipe(lr=number), loop=LoopRecipe(sample_prompt=text), data=DataRecipe(batch=1)
    )
    file = tmp_path_factory.mktemp("recipes") / "recipe.toml"
    file.write_bytes(recipe_to_toml(recipe).encode("utf-8"))
    assert recipe == load_recipe(file)


def test_overrides_win_and_quotes_may_be_left_out(tmp_path):
    """An override replaces what the file says; text that is no TOML is a string."""
    file = tmp_path / "recipe.toml"
    file.write_text("[optim]\nlr = 1\nclip = 2.0\n[model.ssm_cfg]\nd_state = 32\nexpand = 1\n")
    recipe = load_recipe(
        file,
        [
            "optim.lr = 0.5",
            "optim.name=muon",
            'data.mode="carried"',
            "data.train=a folder",
            "data.valid=['x', 'y']",
            "data.cache_dir=2024",
            "model.ssm_cfg.d_state=64",
            "loop.seconds=3",
            "loop.sample_prompt=a = b",
            "optim.lr=0.25",
        ],
    )
    assert recipe.optim == OptimRecipe(name="muon", lr=0.25, clip=2.0)
    assert recipe.data == DataRecipe(
        train=("a folder",), valid=("x", "y"), mode="carried", cache_dir="2024"
    )
    assert recipe.model.ssm_cfg == {"d_state": 64, "expand": 1}
    assert recipe.loop == LoopRecipe(seconds=3.0, sample_prompt="a = b")
    assert isinstance(recipe.loop.seconds, float)


def test_none_empties_an_optional_field(tmp_path):
    """The word "none" takes back what a file set, in a file and in an override."""
    file = tmp_path / "recipe.toml"
    file.write_text('[loop]\nsteps = "none"\nseconds = 5\n[schedule]\nkind = "constant"\n')
    recipe = load_recipe(file, ["data.cache_dir=none"])
    assert recipe.loop.steps is None
    assert recipe.data.cache_dir is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.windw=3", "unknown field 'data.windw'. Did you mean 'data.window'?"),
        ("data.lr=3", "unknown field 'data.lr'. Did you mean 'optim.lr'?"),
        ("window=3", "unknown field 'window'. Did you mean 'data.window'?"),
        ("data.window.size=3", "unknown field 'data.window.size'"),
        ("data.window", "must have the form a.b=c; got 'data.window'"),
        ("=3", "must have the form a.b=c"),
        ("data.window=wide", "data.window must be a whole number; got 'wide'"),
        ("data.window=1.5", "data.window must be a whole number; got 1.5"),
        ("data.window=true", "data.window must be a whole number; got True"),
        ("data.window=0", "window must be positive; got 0"),
        ("data.valid_share=1", r"valid_share must be in \[0, 1\); got 1.0"),
        ("data.mode=pack", "data.mode must be one of 'packed', 'carried'; got 'pack'"),
        ("data.train=[1]", r"data.train must be a list of strings; got \(1,\)"),
        ("optim.betas=[0.9]", r"optim.betas must be a list of 2 finite numbers; got \(0.9,\)"),
        ("optim.betas=[0.9, 1.0]", r"betas must be two numbers in \[0, 1\)"),
        ("optim.lr=nan", "optim.lr must be a finite number; got nan"),
        ("optim.lr=none", "optim.lr must be a finite number; got 'none'"),
        ("optim.clip=-1", "clip must be at least 0"),
        ("schedule.floor=2", r"floor must be in \[0, 1\]"),
        ("schedule.warmup=2000", "warmup must not exceed loop.steps; got 2000 of 1000"),
        ("loop.steps=none", "loop: steps or seconds must be given"),
        ("loop.spike_factor=0.5", "spike_factor must be greater than 1, or 0"),
        ("loop.compile=yes", "loop.compile must be true or false; got 'yes'"),
        ("model.layer=Mamba4", "model.layer must be one of 'Mamba1', 'Mamba2', 'Mamba3'"),
        ("model.preset=mamba2-13b", "unknown model 'mamba2-13b'"),
        ("model.ssm_cfg.d_stat=3", "Mamba3 has no option 'd_stat'. Did you mean 'd_state'"),
        ("model.ssm_cfg.layer=Mamba1", "Set model.layer instead"),
        ("model.ssm_cfg=3", "model.ssm_cfg must be a table"),
        ("model.ssm_cfg.d_state=2024-01-01", "model.ssm_cfg must be a table of numbers"),
    ],
)
def test_rejects_a_wrong_override(override, message):
    """Each slip is refused with the field's name and what it wants."""
    with pytest.raises(ConfigError, match=message):
        load_recipe(None, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[dta]\n", "unknown section 'dta'; known: data, .* Did you mean 'data'"),
        ("data = 3\n", "data must be a table; got 3"),
        ("[optim]\nlrr = 1\n", "unknown field 'optim.lrr'. Did you mean 'optim.lr'"),
        ("[optim\n", "must hold TOML"),
        ("[optim]\nname = 'a'\nname = 'b'\n", "must hold TOML"),
    ],
)
def test_rejects_a_wrong_file(text, message, tmp_path):
    """A section or field that does not exist, and text that is no TOML, are refused."""
    file = tmp_path / "recipe.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(file)


def test_rejects_a_file_that_cannot_be_read(tmp_path):
    """A missing file and a file that is no text are refused with the path."""
    with pytest.raises(ConfigError, match="must be a readable file"):
        load_recipe(tmp_path / "absent.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xff\n")
    with pytest.raises(ConfigError, match="must hold TOML"):
        load_recipe(tmp_path / "latin.toml")


def test_rejects_wrong_values_without_a_file():
    """A recipe made in Python is checked as one from a file is."""
    with pytest.raises(ConfigError, match="window must be a whole number; got '3'"):
        DataRecipe(window="3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="dataset and train exclude each other"):
        DataRecipe(dataset="a", train=("b",))
    with pytest.raises(ConfigError, match="data must be DataRecipe"):
        Recipe(data={})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="kind='cosine' needs to know the last step"):
        Recipe(loop=LoopRecipe(steps=None, seconds=3.0))


def test_the_model_is_the_preset_with_what_is_said():
    """Fields that are given lie over the preset's; the family must agree with it."""
    small = ModelRecipe().config(vocab_size=257)
    assert (small.layer, small.vocab_size) == ("Mamba3", 257)
    config = ModelRecipe(preset="mamba2-130m", n_layer=2, ssm_cfg={"d_state": 16}).config(257)
    assert (config.layer, config.d_model, config.n_layer) == ("Mamba2", 768, 2)
    assert config.ssm_cfg == {"layer": "Mamba2", "d_state": 16}
    assert config.pad_vocab_size_multiple == 16
    config = ModelRecipe(preset="mamba3-mimo-187m", ssm_cfg={"d_state": 64}).config(257)
    assert (config.ssm_cfg["mimo_rank"], config.ssm_cfg["d_state"]) == (4, 64)
    with pytest.raises(ConfigError, match="layer must be 'Mamba2', the family of the preset"):
        ModelRecipe(preset="mamba2-130m", layer="Mamba3")


def test_a_difference_is_told_for_each_field_that_decides_the_run():
    """Every field of a section is compared, and tables by their content."""
    assert recipe_difference(Recipe(), Recipe()) == []
    told = {line.partition(":")[0] for line in recipe_difference(Recipe(), NOT_DEFAULT)}
    assert {"data.window", "model.ssm_cfg", "optim.betas", "schedule.kind", "loop.steps"} <= told
    changed = load_recipe(None, ["model.ssm_cfg.d_state=64", "optim.muon_lr=1.0"])
    assert recipe_difference(Recipe(), changed) == [
        "model.ssm_cfg: {} -> {'d_state': 64}",
        "optim.muon_lr: none -> 1.0",
    ]


@pytest.mark.parametrize(
    "override",
    ["loop.report_every=3", "loop.seconds=7", "loop.out=b", "loop.keep=1", "data.cache_dir=c"],
)
def test_what_is_only_written_down_may_change(override):
    """Fields that decide nothing of what is learned are no difference."""
    changed = load_recipe(None, [override])
    assert changed != Recipe()
    assert recipe_difference(Recipe(), changed) == []


def test_more_steps_are_a_difference_unless_the_schedule_is_constant():
    """The number of steps shapes a cosine, but not a constant."""
    longer = replace(Recipe(), loop=LoopRecipe(steps=2000))
    assert recipe_difference(Recipe(), longer) == ["loop.steps: 1000 -> 2000"]
    constant = ScheduleRecipe(kind="constant")
    before, after = replace(Recipe(), schedule=constant), replace(longer, schedule=constant)
    assert recipe_difference(before, after) == []
