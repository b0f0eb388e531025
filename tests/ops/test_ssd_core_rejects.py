"""Mistakes of callers of the SSD core, each refused by name."""

import pytest
import torch
from ssd_core_cases import core_inputs

from anymamba.errors import AnyMambaError, BackendError, ConfigError
from anymamba.ops import SsdPath, ssd_core
from anymamba.settings import override

BAD_CALLS = {
    "v_bsmhp must have 5 axes": lambda i: {0: i[0][0]},
    "sequence length is 7": lambda i: {1: i[1][:, :6]},
    "groups must divide heads": lambda i: {
        2: i[2].expand(2, 7, 1, 3, 4),
        3: i[3].expand(2, 7, 1, 3, 4),
    },
    "sequence length axis of v_bsmhp is empty": lambda i: {0: i[0][:, :0]},
    "b_bsmgr: activations must be float64": lambda i: {2: i[2].long()},
    "c_bsmgr (torch.float32) must accumulate": lambda i: {3: i[3].float()},
    "da_bsh must be on the device": lambda i: {1: i[1].to("meta")},
    "initial state must have shape (2, 2, 3, 4)": lambda i: {4: i[4][:1]},
    "v_bsmhp must be a tensor": lambda i: {0: [1.0]},
    "scale_bsh must have 3 axes": lambda i: {5: i[5][0]},
    "heads is 2 in v_bsmhp": lambda i: {6: i[6][..., :1]},
    "own_bsh (torch.float32) must accumulate": lambda i: {6: i[6].float()},
}


@pytest.mark.parametrize("message", BAD_CALLS)
def test_rejects_bad_tensors(message):
    """Every mistake names the argument, what was expected and what came."""
    inputs = dict(enumerate(core_inputs()))
    with pytest.raises(AnyMambaError) as error:
        ssd_core(*(inputs | BAD_CALLS[message](inputs)).values())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ([1, 3, 7], "must start at 0"),
        ([0, 4, 3, 7], "must not decrease"),
        ([0, 3, 6], "must end at the sequence length 7"),
        ([0], "at least 2 borders"),
    ],
)
def test_rejects_bad_borders(borders, message):
    """Borders that do not describe the sequence are refused."""
    with pytest.raises(AnyMambaError, match=message):
        ssd_core(*core_inputs(1), cu_seqlens=torch.tensor(borders))
    with pytest.raises(AnyMambaError, match="batch must be 1"):
        ssd_core(*core_inputs(2), cu_seqlens=torch.tensor([0, 7]))
    with pytest.raises(AnyMambaError, match="int32 or int64"):
        ssd_core(*core_inputs(1), cu_seqlens=torch.tensor([0.0, 7.0]))


def test_rejects_implementations_it_cannot_obey():
    """An explicit implementation is obeyed or refused with the reason."""
    with pytest.raises(BackendError, match="cannot serve this call"):
        ssd_core(*core_inputs(), impl="native")
    with pytest.raises(BackendError, match="names a portable algorithm"):
        ssd_core(*core_inputs(), impl="native", path=SsdPath.minimal())
    with pytest.raises(BackendError, match="has no path"):
        ssd_core(*core_inputs(), impl="reference", path=SsdPath())
    with pytest.raises(ConfigError, match="impl must be one of"):
        ssd_core(*core_inputs(), impl="fast")


def test_rejects_two_words_on_the_own_weight():
    """`strict` says what `own` is, so that both together are refused."""
    with pytest.raises(ConfigError, match="strict is own_bsh = 0"):
        ssd_core(*core_inputs(), strict=True)


def test_guards_find_nan_only_when_on():
    """NaN passes silently by default and is named when the guard is on."""
    inputs = core_inputs()
    inputs[2][0, 0] = torch.nan
    ssd_core(*inputs)
    with override(deny_nan=True), pytest.raises(AnyMambaError, match="b_bsmgr contains NaN"):
        ssd_core(*inputs)
    inputs[2][0, 0] = torch.inf
    with override(deny_inf=True), pytest.raises(AnyMambaError, match="b_bsmgr contains infinity"):
        ssd_core(*inputs)
