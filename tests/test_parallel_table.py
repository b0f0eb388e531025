"""The table of docs/parallel.md is the one that its tool prints."""

from pathlib import Path

from simulate_parallel import Machine, Model, Plan, simulate, table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "parallel.md"


def test_the_documents_have_the_table_of_the_tool():
    """Line by line."""
    assert "\n".join(table()) in PAGE.read_text()


def test_states_cost_the_same_whatever_the_length():
    """What context parallelism sends does not depend on the length, what it saves does."""
    short, long = (
        simulate(Model(), Machine(), Plan(dp=1, cp=8, length=length)) for length in (8192, 1048576)
    )
    assert short.context_bytes == long.context_bytes > 0
    assert long.compute > 100 * short.compute
