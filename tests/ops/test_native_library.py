"""The compiled library: loaded once, refused with a reason, obedient to settings and threads."""

import logging
import os
import subprocess
import sys
import threading

import pytest
import torch

from anymamba.errors import BackendError, ConfigError
from anymamba.ops import native_status, ssd_core
from anymamba.ops.native.library import load
from anymamba.settings import NATIVE_CHOICES, override
from kernels import NATIVE, running
from laws import assert_same, rand, randn

needs_kernels = pytest.mark.skipif(not NATIVE, reason="this installation has no compiled kernels")


def inputs(dtype=torch.float32, s=70, device="cpu"):
    tensors = (
        randn(1, s, 1, 2, 8, seed=1),
        -rand(1, s, 2, seed=2),
        randn(1, s, 1, 1, 16, seed=3),
        randn(1, s, 1, 1, 16, seed=4),
    )
    return [x.to(device, dtype) for x in tensors]


def test_turned_off_means_portable():
    """With native=off, auto runs the portable code and native is refused with the reason."""
    with override(native="off"):
        assert native_status().variant is None
        ssd_core(*inputs())
        with pytest.raises(BackendError, match="native=off"):
            ssd_core(*inputs(), impl="native")


def test_an_unknown_instruction_set_is_refused():
    """A name that no build knows is an error; one that this machine lacks is a reason."""
    with pytest.raises(ConfigError, match="must be one of auto, off"), override(native="avx3"):
        pass
    lacking = set(NATIVE_CHOICES[2:]) - set(native_status().available)
    with override(native=sorted(lacking)[0]):
        assert "does not have" in str(native_status().why_not) or not NATIVE


@pytest.mark.parametrize("content", [None, b"", b"not a library"])
def test_a_file_that_is_no_library_leaves_the_portable_code(tmp_path, content):
    """A missing or damaged library is a reason, not a crash."""
    file = tmp_path / "_native.so"
    if content is not None:
        file.write_bytes(content)
    with override(native_library=str(file)):
        assert "cannot be loaded" in str(native_status().why_not)
        ssd_core(*inputs())
        with pytest.raises(BackendError, match="cannot be loaded"):
            ssd_core(*inputs(), impl="native")


@needs_kernels
def test_the_kernels_share_the_openmp_runtime_of_torch():
    """The loader found one OpenMP runtime, or the build has none."""
    library = load(None)
    assert not isinstance(library, str), library
    assert library.threading in ("openmp", "threads")


@needs_kernels
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.float16}, "float16"),
        ({"device": "meta"}, "on meta"),
    ],
)
def test_native_refuses_what_it_cannot_serve(call, reason):
    """An explicit native is refused with the reason; auto serves the same call portably."""
    with pytest.raises(BackendError, match=reason):
        ssd_core(*inputs(**call), impl="native")
    ssd_core(*inputs(**call))


@needs_kernels
def test_native_refuses_second_derivatives_and_auto_has_them():
    """The kernel's backward is not differentiable; auto takes the portable one for it."""
    v, *rest = inputs()
    v.requires_grad_()
    for impl in ("native", "auto"):
        y = ssd_core(v, *rest, impl=impl).y_bsmhp
        (grad,) = torch.autograd.grad(y.square().sum(), v, create_graph=True)
        if impl == "native":
            with pytest.raises(BackendError, match="no second derivative"):
                torch.autograd.grad(grad.sum(), v)
        else:
            assert torch.autograd.grad(grad.sum(), v)[0].isfinite().all()


@needs_kernels
def test_auto_says_once_what_it_chose(caplog):
    """The choice is logged once for each reason."""
    caplog.set_level(logging.INFO, "anymamba.ops")
    from anymamba.ops import select

    select._told.clear()
    for _ in range(2):
        ssd_core(*inputs())
        ssd_core(*inputs(torch.float64))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "native kernel" in said[0]
    assert "portable code" in said[1]
    assert "float64" in said[1]


@pytest.mark.parametrize("kind", NATIVE)
def test_native_threads_of_python_do_not_disturb_each_other(kind):
    """Calls from several Python threads at once give what they give alone."""
    with running(kind):
        cases = [inputs(s=200 + place) for place in range(4)]
        alone = [ssd_core(*case, impl="native") for case in cases]
        together: list = [None] * len(cases)

        def work(place: int) -> None:
            for _ in range(5):
                together[place] = ssd_core(*cases[place], impl="native")

        workers = [threading.Thread(target=work, args=(place,)) for place in range(len(cases))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.y_bsmhp, other.y_bsmhp)
        assert torch.equal(one.final_bhpr, other.final_bhpr)


_FORKED = """
import os, signal, torch
from anymamba.ops import ssd_core
def run():
    torch.manual_seed(0)
    # Small enough for torch to work on one thread: its own pool is gone in the child too.
    v, c = torch.randn(1, 200, 1, 8, 16), torch.randn(1, 200, 1, 8, 16)
    return ssd_core(v, -torch.rand(1, 200, 8), c, c, impl="native").y_bsmhp
torch.set_num_threads(2)
want = run()
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if torch.equal(run(), want) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer does not follow a fork")
def test_a_forked_child_runs_on_one_thread_instead_of_hanging():
    """After the parent's pool has started, a forked child still answers, with the same numbers."""
    command = [sys.executable, "-W", "ignore", "-c", _FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "0", done.stderr


def test_the_portable_code_is_the_same_without_the_library():
    """Turning the kernels off changes results by rounding only."""
    plain = ssd_core(*inputs())
    with override(native="off"):
        portable = ssd_core(*inputs())
    assert_same(portable.y_bsmhp, plain.y_bsmhp)
    assert_same(portable.final_bhpr, plain.final_bhpr)
