"""`inspect --text` names the activation that trained weights want."""

import pytest

from trained import TEXT, trained


@pytest.mark.parametrize("truth", ["heavy_tail", "softplus"])
def test_inspect_names_the_activation_of_trained_weights(run, tmp_path, truth):
    """Two tiny trained models, one per activation, each loaded as the other: both are found out."""
    wrong = "softplus" if truth == "heavy_tail" else "heavy_tail"
    trained(truth).save_pretrained(tmp_path / "model")
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    result = run(
        "inspect", tmp_path / "model", "--text", file, "--text-tokens", 400, "--length", 0, "--json"
    )
    activation = result.document["activation"]
    assert (activation["best"], activation["is_decisive"]) == (truth, True)
    assert activation["configured"] == truth
    result = run(
        *("inspect", tmp_path / "model", "--text", file, "--text-tokens", 400, "--length", 0),
        *("--a-activation", wrong),
    )
    assert f"Load it with --a-activation {truth}" in result.out
