"""Laws of writing state files: whole or not at all, whatever happens meanwhile."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from anymamba.errors import CheckpointError
from anymamba.io import load_state, save_state
from state_files import assert_same_cache, make, saved_state

saved = pytest.fixture(saved_state)


class Interrupted(BaseException):
    """Like KeyboardInterrupt: not an error that anybody catches."""


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), Interrupted()])
@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_failed_write_leaves_the_old_file_whole(saved, monkeypatch, place, error):
    """If writing stops half-way, the old file is as it was and nothing lies beside it."""
    before = saved.read_bytes()

    def fail(*_):
        raise error

    monkeypatch.setattr(os, place, fail)
    expected = CheckpointError if isinstance(error, OSError) else Interrupted
    with pytest.raises(expected) as caught:
        save_state(make("mamba1"), saved)
    monkeypatch.undo()
    if expected is CheckpointError:
        assert str(saved) in str(caught.value)
        assert "No space left" in str(caught.value)
    assert [file.name for file in saved.parent.iterdir()] == ["talk.state"]
    assert saved.read_bytes() == before
    assert_same_cache(make(), load_state(saved))


def test_a_failed_write_is_told_while_another_error_is_handled(saved, monkeypatch):
    """Who saves the state because something went wrong is told why it could not be saved."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    try:
        raise ValueError("what went wrong before")
    except ValueError:
        with pytest.raises(CheckpointError, match="No space left"):
            save_state(make("mamba1"), saved)


def test_killed_writer_leaves_the_old_file_whole(saved):
    """A process that dies in the middle of a write leaves the old file readable."""
    program = f"""
    import os, safetensors.torch, torch
    from anymamba.io import save_state
    from anymamba.nn import Mamba1Cache
    real = safetensors.torch.save_file
    def dying(tensors, file, metadata):
        real(tensors, file, metadata)
        os.truncate(file, 100)
        os._exit(9)
    safetensors.torch.save_file = dying
    save_state(Mamba1Cache(torch.ones(1, 2, 3), torch.ones(1, 2, 4)), {str(saved)!r})
    """
    path = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        timeout=60,
    )
    assert result.returncode == 9, result.stderr
    assert len(list(saved.parent.iterdir())) == 2
    assert_same_cache(make(), load_state(saved))


def test_writers_at_the_same_time_leave_one_whole_file(tmp_path):
    """Each of several writers to one name succeeds; the file is one of theirs, never a mixture."""
    caches = [make().map(lambda x, n=n: x * 0 + n) for n in range(4)]
    file = tmp_path / "a"

    def write(cache):
        for _ in range(10):
            save_state(cache, file)

    threads = [threading.Thread(target=write, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loaded = load_state(file)
    assert any(torch.equal(loaded.ssm_bhpr, cache.ssm_bhpr) for cache in caches)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_missing_folder_is_named(tmp_path):
    """Saving into a folder that does not exist says which one."""
    with pytest.raises(CheckpointError, match=r"save_state: the folder '.*nowhere' must exist.*Cr"):
        save_state(make(), tmp_path / "nowhere" / "a")


def test_folder_in_the_place_of_the_file_is_refused(tmp_path):
    """A folder can neither be replaced nor read."""
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match="a' must be writable"):
        save_state(make(), tmp_path / "a")
    with pytest.raises(CheckpointError, match="a' must be a readable file"):
        load_state(tmp_path / "a")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_missing_file_is_named(tmp_path):
    """Reading a file that does not exist says which one; the cause is Python's own error."""
    with pytest.raises(CheckpointError, match=r"absent' must be a readable file.*path\.") as caught:
        load_state(tmp_path / "absent")
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")
def test_permissions_and_links_survive(saved):
    """A private file stays private, a new one obeys the umask, a link stays a link."""
    saved.chmod(0o600)
    link = saved.with_name("link")
    link.symlink_to(saved)
    save_state(make("mamba1"), link)
    assert link.is_symlink()
    assert saved.stat().st_mode & 0o777 == 0o600
    assert_same_cache(make("mamba1"), load_state(saved))
    before = os.umask(0o027)
    try:
        save_state(make(), saved.with_name("new"))
    finally:
        os.umask(before)
    assert saved.with_name("new").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("package", ["safetensors", "numpy"])
def test_missing_extra_is_named(saved, monkeypatch, package):
    """Without the extra's packages, saving says what to install and leaves the old file whole."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "safetensors.torch", raising=False)
    with pytest.raises(CheckpointError, match=r"pip install 'anymamba\[io\]'") as caught:
        save_state(make("mamba1"), saved)
    assert isinstance(caught.value.__cause__, ImportError)
    monkeypatch.undo()
    assert_same_cache(make(), load_state(saved))
