"""Laws of the house: doors, names, documents, what an import may do, and what files may say."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import anymamba
import check_docs
import check_doors
import check_names

ROOT = Path(__file__).resolve().parents[1]
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".sh", ".cpp", ".h", ".yaml", ".yml", ""}
FOLDERS = ("src", "tests", "tools", "docs", "examples", "native", "benchmarks", ".ci")


def plant(root: Path, files: dict[str, str]) -> Path:
    """Write a tree of files below `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return root


def house_of(root: Path, files: dict[str, str]) -> Path:
    """Write a small house with two rooms, `ops` and `nn`, and the given files."""
    rooms = {
        "src/anymamba/__init__.py": "from anymamba.ops import ssd\n",
        "src/anymamba/ops/__init__.py": '__all__ = ["ssd"]\nfrom anymamba.ops.inner import ssd\n',
        "src/anymamba/ops/inner.py": "import math\nfrom .other import helper\n",
        "src/anymamba/nn/__init__.py": '__all__ = ["Block"]\n',
        "src/anymamba/nn/block.py": "from anymamba.notation import LEGEND\nimport torch.nn\n",
    }
    return plant(root, rooms | files)


def public_modules() -> list[str]:
    """List the modules of the package that a user may import; kernels need their compiler."""
    walk = pkgutil.walk_packages(anymamba.__path__, "anymamba.", onerror=lambda _: None)
    names = [module.name for module in walk]
    return ["anymamba", *(n for n in names if not re.search(r"\.(_|triton$)", n))]


def files_of_the_repository() -> list[Path]:
    """List the text files that belong to the project."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return [
        path
        for path in [*ROOT.iterdir(), *inside]
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts
    ]


def test_rooms_are_entered_through_their_doors():
    """Nobody in this repository imports past a door."""
    found = check_doors.problems(ROOT)
    assert not found, "\n".join(found)


def test_compulsory_suffixes_spell_their_layout():
    """Every einsum and every bind_dims of this repository reads as what it computes."""
    found = check_names.problems(ROOT)
    assert not found, "\n".join(found)


def test_documents_hold_what_they_promise():
    """Links lead somewhere and the examples in README.md and docs run."""
    found = check_docs.problems(ROOT)
    assert not found, "\n".join(found)


def test_door_check_accepts_a_tidy_house(tmp_path):
    """Doors, foundations, own room, and op internals in tests are all allowed."""
    root = house_of(tmp_path, {"tests/test_x.py": "from anymamba.ops.inner import ssd\n"})
    assert check_doors.problems(root) == []


@pytest.mark.parametrize(
    ("file", "statement", "complaint"),
    [
        ("src/anymamba/nn/x.py", "from anymamba.ops.inner import ssd", "lies inside"),
        ("src/anymamba/nn/x.py", "import anymamba.ops.inner", "lies inside"),
        ("src/anymamba/nn/x.py", "def f():\n    from ..ops.inner import ssd", "lies inside"),
        ("src/anymamba/nn/x.py", "from anymamba.ops import inner", "not in __all__"),
        ("src/anymamba/nn/x.py", "from ..ops import inner", "not in __all__"),
        ("src/anymamba/__main__.py", "from anymamba.nn.block import Block", "lies inside"),
        ("tests/test_x.py", "from anymamba.nn.block import Block", "lies inside"),
        ("tools/x.py", "from anymamba.ops.inner import ssd", "lies inside"),
        ("src/anymamba/ops/x.py", "import numpy as np", "'numpy' may not"),
        (
            "src/anymamba/nn/x.py",
            "from safetensors.torch import load_file",
            "'safetensors' may not",
        ),
        ("src/anymamba/ops/x.py", "import triton", "'triton' may not"),
    ],
)
def test_door_check_catches(tmp_path, file, statement, complaint):
    """Each way around a door, and each foreign package on a lower floor, is reported once."""
    [found] = check_doors.problems(house_of(tmp_path, {file: statement + "\n"}))
    assert re.match(rf"{file}:\d: ", found)
    assert complaint in found


def test_door_check_lets_a_kernel_import_its_compiler(tmp_path):
    """Triton is allowed in files called triton.py, and nowhere else."""
    root = house_of(tmp_path, {"src/anymamba/ops/x/triton.py": "import triton"})
    assert check_doors.problems(root) == []


@pytest.mark.parametrize(
    "line",
    [
        'y_bh = torch.einsum("bhp,p->bh", x_bhp, w_p)',
        'y_bh = torch.einsum("bhp, bhp -> bh", x_bhp, x_bhp * 2)',
        "y = torch.einsum(equation, x, z)",
        'self.y = torch.einsum("bS->S", grad_x_bS)',
        'return torch.einsum("...p,p->...", x_bhp, w_p)',
        'y_b = torch.einsum("bp,bp->b", *pair)',
        'bind_dims("f", x_bShp=x, q_bhj4=q, **more)',
    ],
)
def test_name_check_accepts(tmp_path, line):
    """Names that spell their subscripts, and everything that is not a plain name, pass."""
    root = plant(tmp_path, {"src/x.py": f"def f():\n    {line}\n"})
    assert check_names.problems(root) == []


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('y_bh = torch.einsum("bhp,p->bh", x_bph, w_p)', "operand x_bph must end in _bhp"),
        ('y_bh = torch.einsum("bhp,p->bh", xbhp, w_p)', "operand xbhp must end in _bhp"),
        ('y_hb = torch.einsum("bhp,p->bh", x_bhp, w_p)', "result y_hb must end in _bh"),
        ('y_hb: Tensor = torch.einsum("bhp->bh", x_bhp)', "result y_hb must end in _bh"),
        ('y_bh = einsum("bhp->bh", x_xbhp)', "operand x_xbhp must end in _bhp"),
        ('y_bs = torch.einsum("bS->bS", x_bS)', "result y_bs must end in _bS"),
        ('y_bh = torch.einsum("bhx->bh", z_bhx)', "uses 'x'"),
        ('y_bh = torch.einsum("bh,b->bh", x_bh)', "names 2 operands; got 1"),
        ('y_b = torch.einsum("bp,bp", x_bp, x_bp)', "after '->'"),
        ('return torch.einsum("...p,p->...", x_bph, w_p)', "operand x_bph must end in _p"),
        ('bind_dims("f", x_bsx=x)', "x_bsx uses 'x'"),
        ('bind_dims("f", xs=x)', "xs must end in _<layout>"),
    ],
)
def test_name_check_catches(tmp_path, line, complaint):
    """Each way a name can lie about its axes is reported once, with its place."""
    root = plant(tmp_path, {"src/x.py": f"def f():\n    {line}\n"})
    [found] = check_names.problems(root)
    assert found.startswith("src/x.py:2: ")
    assert complaint in found


def test_document_check_accepts(tmp_path):
    """Good links, anchors, code that looks like a link, and blocks that build on each other."""
    readme = """
    # A title: with `code`
    [here](#a-title-with-code), [there](docs/a.md#part-1), [outside](https://example.org/x)
    and `[not](a-link.md)`.
    ```python
    x = 1
    ```
    ```sh
    false [no](link.md)
    ```
    ```python
    assert x == 1
    ```
    """
    root = plant(tmp_path, {"README.md": readme, "docs/a.md": "# Part 1\n[up](../README.md)\n"})
    assert check_docs.problems(root) == []


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("README.md", "[x](missing.md)", "'missing.md' leads nowhere"),
        ("src/anymamba/ops/x/README.md", "[x](../missing.md)", "leads nowhere"),
        ("README.md", "# One\n[x](#two)", "'#two' names a heading"),
        ("docs/a.md", "```python\nassert False\n```", "a python block fails"),
        ("README.md", "text\n```python\nx = (\n```", "a python block fails"),
    ],
)
def test_document_check_catches(tmp_path, file, text, complaint):
    """A dead link, a dead anchor and a failing example are each reported once."""
    [found] = check_docs.problems(plant(tmp_path, {file: text + "\n"}))
    assert found.startswith(file)
    assert complaint in found


def test_document_check_points_at_the_failing_line(tmp_path):
    """The traceback has the line numbers of the document."""
    text = "# Title\n\n```python\nx = 1\nraise ValueError(x)\n```\n"
    [found] = check_docs.problems(plant(tmp_path, {"README.md": text}))
    assert 'README.md", line 5' in found


def test_importing_asks_for_no_extra_and_touches_no_device():
    """After torch, importing the package tries no optional package and starts no device."""
    program = """
    import sys, torch
    asked = []
    class Ask:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in {"triton", "safetensors", "rich", "transformers", "einops"}:
                asked.append(name)
    torch.cuda.init = torch.cuda._lazy_init = lambda: asked.append("cuda")
    had_numpy = "numpy" in sys.modules
    sys.meta_path.insert(0, Ask())
    import anymamba, anymamba.ops
    assert "anymamba.settings" in sys.modules
    assert not asked, asked
    assert ("numpy" in sys.modules) == had_numpy
    assert not torch.cuda.is_initialized()
    """
    path = os.pathsep.join(path for path in sys.path if path)
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", public_modules())
def test_public_names_are_sorted_and_real(name):
    """`__all__` names things that exist, once: constants, then classes, then the rest."""
    module = importlib.import_module(name)
    names = list(getattr(module, "__all__", []))
    assert names == sorted(set(names), key=lambda n: (not n.isupper(), not n[0].isupper(), n))
    assert [n for n in names if not hasattr(module, n)] == []


def test_every_folder_of_the_package_is_a_package():
    """A folder without `__init__.py` would be left out of layers, doors and doctests unseen."""
    folders = {file.parent for file in (ROOT / "src" / "anymamba").rglob("*.py")}
    assert [folder.name for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_doors_have_public_names():
    """Each room says what it offers."""
    rooms = [m for m in pkgutil.iter_modules(anymamba.__path__) if not m.name.startswith("_")]
    assert rooms
    for room in rooms:
        assert importlib.import_module(f"anymamba.{room.name}").__all__, room.name


def test_files_name_no_machine_and_no_registry():
    """No file holds a path of some machine or the host of a package registry."""
    # Assembled from parts, so that this file passes its own law.
    folders = "|".join(["work", "tmp", "root", "home", "Users"])
    hosts = "|".join(["pypi" + r"\.org", "python" + "hosted", "download" + r"\.pytorch"])
    forbidden = re.compile(rf"(?<![\w.\]\)*])/(?:{folders})\b|{hosts}")
    files = files_of_the_repository()
    assert ROOT / "src" / "anymamba" / "notation.py" in files
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        for match in forbidden.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
    assert forbidden.search("see " + "/" + "tmp/x")
