"""What the tests of operators share."""

import pytest
from ssd_core_cases import KINDS

from kernels import running


@pytest.fixture(params=KINDS)
def kind(request):
    """One implementation of the SSD core after the other, a kernel's instruction set in force."""
    with running(request.param):
        yield request.param
