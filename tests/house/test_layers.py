"""The layers of pyproject.toml hold, and every contract has been seen to break."""

import shutil
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

#: One line of code for each contract, by the contract's name, that must break it.
VIOLATIONS = {
    "The contract half of nsa_core loads no torch": (
        "nsa_core/rundir/planted.py", "import torch",
    ),
    "The operator side never loads torch, not even through nsa_core": (
        "nsa_ops/runs/planted.py", "import numpy",
    ),
    "nsa_ops sees only the contract half of nsa_core: config and rundir": (
        "nsa_ops/gpu/planted.py", "import nsa_core.kernels",
    ),
    "nsa_core does not know who operates it": (
        "nsa_core/data/planted.py", "import nsa_ops",
    ),
    "The agents on the pod need neither a transport nor a terminal": (
        "nsa_ops/pod/planted.py", "import nsa_ops.remote",
    ),
    "Only the command line draws": (
        "nsa_ops/remote/planted.py", "import rich",
    ),
    "nsa_core builds upward": (
        "nsa_core/kernels/planted.py", "import nsa_core.train",
    ),
    "nsa_ops builds upward": (
        "nsa_ops/runs/planted_too.py", "import nsa_ops.cli",
    ),
}  # fmt: skip


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "lint-imports"
    if not program.exists():
        pytest.skip("import-linter is not installed beside this Python")
    return subprocess.run(
        [program, "--no-logo", "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": str(root), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_layers_hold(repository: Path) -> None:
    done = lint_imports(repository)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("package", ["nsa_core", "nsa_ops"])
def test_no_module_imports_itself_through_others(package: str) -> None:
    """Not within a function either, where such an import works by luck of the order."""
    grimp = pytest.importorskip("grimp", reason="import-linter is not installed here")
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


def test_every_contract_breaks_when_it_is_violated(tmp_path: Path, repository: Path) -> None:
    for package in ("nsa_core", "nsa_ops"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repository / package, tmp_path / package, ignore=ignored)
    shutil.copy2(repository / "pyproject.toml", tmp_path)
    for place, line in VIOLATIONS.values():
        (tmp_path / place).write_text(f'"""Planted."""\n\n{line}\n')
    done = lint_imports(tmp_path)
    assert done.returncode != 0
    contracts = tomllib.loads((repository / "pyproject.toml").read_text())
    names = [entry["name"] for entry in contracts["tool"]["importlinter"]["contracts"]]
    assert sorted(names) == sorted(VIOLATIONS)
    kept = [name for name in names if f"{name} BROKEN" not in done.stdout]
    assert kept == [], done.stdout
