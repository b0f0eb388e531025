"""Operators under their names in torch's profiler."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from anymamba.ops import native_status, selective_scan

IMPLS = ["portable", *["native"] * (native_status().variant is not None)]


def names_in(run):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run()
    return {event.key for event in found.key_averages()}


@pytest.mark.parametrize("impl", IMPLS)
def test_a_profile_names_the_operator(impl):
    """Forward and backward, and also where nobody differentiates."""
    u_bsi, dt_bsi = torch.randn(1, 5, 4, requires_grad=True), torch.rand(1, 5, 4)
    a_ir, b_bsr = -torch.ones(4, 3), torch.randn(1, 5, 3)
    forward, backward = "anymamba::selective_scan_fwd", "anymamba::selective_scan_bwd"

    def run():
        return selective_scan(u_bsi, dt_bsi, a_ir, b_bsr, b_bsr, impl=impl)

    with torch.no_grad():
        assert names_in(run) & {forward, backward} == {forward}
    assert names_in(lambda: run()[0].sum().backward()) >= {forward, backward}
