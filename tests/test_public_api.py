"""The front door: which names it offers, what it needs, what opening it costs."""

import os
import statistics
import subprocess
import sys
import textwrap
import time

import pytest

import anymamba as am

PUBLIC = {
    *("Mamba", "Mamba1", "Mamba2", "Mamba3", "MambaConfig", "MambaLM", "SsdPath"),
    *("Mamba1Cache", "Mamba2Cache", "Mamba3Cache", "Mamba3DoubleSsdCache"),
    *("Mamba3SingleSsdCache", "ModelCache", "RotationState"),
    *("BidirectionalStack", "LatentModel"),
    *("generate", "stream", "load_state", "save_state", "verify", "ops", "__version__"),
}


def python(program: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_the_public_names_are_frozen():
    """A new public name is a decision, so it changes this list; there are at most 25."""
    assert set(am.__all__) == PUBLIC
    assert len(am.__all__) == len(PUBLIC) <= 25
    assert am.Mamba1 is am.Mamba


def test_generate_is_a_function_and_a_room():
    """`am.generate` is the function; the package of that name is still there to import from."""
    program = """
    import anymamba as am
    import anymamba.generate
    from anymamba.generate import Stream, generate
    from anymamba.models import MambaConfig, MambaLM
    assert am.generate is generate and callable(am.generate)
    lm = MambaLM(MambaConfig(d_model=8, n_layer=1, vocab_size=16))
    assert am.generate(lm, [[1, 2]], max_new_tokens=2)
    assert isinstance(am.stream(lm, [1], max_new_tokens=1), Stream)
    import anymamba.cli
    assert am.generate is generate, "a later import put the package in the function's place"
    """
    result = python(program)
    assert result.returncode == 0, result.stderr


def test_only_torch_is_needed():
    """Without any extra installed the library imports, runs and verifies; files name the extra."""
    program = """
    import sys
    for name in ("safetensors", "rich", "tyro", "tokenizers", "huggingface_hub", "numpy"):
        sys.modules[name] = None
    import torch
    import anymamba as am
    from anymamba.errors import CheckpointError
    lm = am.MambaLM(am.MambaConfig(d_model=8, n_layer=1, vocab_size=16))
    assert am.verify(lm, length=3).ok
    assert am.generate(lm, [[1, 2]], max_new_tokens=2)
    try:
        am.save_state(lm.prefill(torch.tensor([[1, 2]])).cache, "never.state")
    except CheckpointError as error:
        assert "anymamba[io]" in str(error), error
    else:
        raise AssertionError("saved without safetensors")
    import anymamba.cli
    assert anymamba.cli.main(["doctor"]) == 2
    """
    result = python(program)
    assert result.returncode == 0, result.stderr
    assert "anymamba[cli]" in result.stderr


@pytest.mark.slow
def test_importing_costs_little_more_than_torch():
    """Interleaved medians: at most 1.3 times `import torch` here, where other work may run."""
    seconds: dict[str, list[float]] = {"torch": [], "anymamba": []}
    for _ in range(7):
        for name, taken in seconds.items():
            start = time.perf_counter()
            assert python(f"import {name}").returncode == 0
            taken.append(time.perf_counter() - start)
    alone, ours = (statistics.median(seconds[name]) for name in ("torch", "anymamba"))
    assert ours <= 1.3 * alone, (alone, ours)
