"""The archive: objects to files and back. Nothing that a file holds is ever executed."""

from anymamba.io.state_file import load_state, save_state

__all__ = ["load_state", "save_state"]
