"""The rules of docs/design.md that a program can keep: imports, the environment, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
FILES = sorted((SOURCE / "gradwire").rglob("*.py"))
MAX_LINES = 400

# A file may import from its own part and from lower ones; parts on one level never import each other.
LEVELS = {
    "errors": 0,
    "launch": 1,
    "core": 2,
    "comm": 3,
    "compress": 4,
    "sync": 5,
    "parallel": 5,
    "checkpoint": 5,
    "verbs": 5,
    "data": 5,
    "training": 6,
    "cli": 7,
    "testing": 8,
    "__init__": 9,
    "__main__": 9,
}
OPEN_TO_TORCH_DISTRIBUTED = {"comm", "parallel", "checkpoint"}
THE_ENVIRONMENT = "launch/environment.py"


def part_of(module: str) -> str:
    """gradwire.comm.gloo -> comm; gradwire itself -> __init__."""
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def part_of_file(path: Path) -> str:
    return path.relative_to(SOURCE / "gradwire").parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module that a file names in an import, wherever it stands; ``from a import b`` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward(part: str, imported: list[str]) -> list[str]:
    """The imports of gradwire's own modules that ``part`` may not have."""
    own = [module for module in imported if module.split(".")[0] == "gradwire"]
    return [
        module
        for module in own
        if part_of(module) != part
        and (part_of(module) == "testing" or LEVELS.get(part_of(module), LEVELS["__init__"]) >= LEVELS[part])
    ]


def reads_environment(tree: ast.AST) -> bool:
    names = {"environ", "getenv", "environb", "putenv"}
    attributes = any(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(tree))
    return attributes or any(module.removeprefix("os.") in names for module in imports(tree))


def uses_torch_distributed(tree: ast.AST) -> bool:
    named = any(module.startswith("torch.distributed") for module in imports(tree))
    spelled = any(
        isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed" for node in ast.walk(tree)
    )
    return named or spelled


@pytest.fixture(params=FILES, ids=lambda path: str(path.relative_to(SOURCE / "gradwire")))
def path(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_every_file_belongs_to_a_known_part(path: Path) -> None:
    assert part_of_file(path) in LEVELS, "give the new part a level in tests/test_architecture.py and in docs/design.md"


def test_imports_go_downwards_only(path: Path, tree: ast.Module) -> None:
    assert upward(part_of_file(path), list(imports(tree))) == []


def test_imports_are_absolute(tree: ast.Module) -> None:
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level] == []


def test_torch_distributed_is_used_only_where_it_may_be(path: Path, tree: ast.Module) -> None:
    assert part_of_file(path) in OPEN_TO_TORCH_DISTRIBUTED or not uses_torch_distributed(tree)


def test_the_environment_is_read_in_one_file(path: Path, tree: ast.Module) -> None:
    assert path == SOURCE / "gradwire" / THE_ENVIRONMENT or not reads_environment(tree)


def test_the_launcher_needs_only_the_standard_library(path: Path, tree: ast.Module) -> None:
    if part_of_file(path) == "launch":
        foreign = {module.split(".")[0] for module in imports(tree)} - set(sys.stdlib_module_names) - {"gradwire"}
        assert foreign == set()


def test_no_file_holds_two_ideas(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_the_launcher_starts_without_torch() -> None:
    code = "import sys, gradwire.cli; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("part", "module", "allowed"),
    [
        ("sync", "gradwire.comm.lane.Lane", True),
        ("sync", "gradwire.data.loader.DataLoader", False),
        ("comm", "gradwire.sync.buckets.Layout", False),
        ("launch", "gradwire.errors.LaunchError", True),
        ("launch", "gradwire.core.plan.Plan", False),
        ("core", "gradwire.core.group.Group", True),
        ("cli", "gradwire.testing.check_group", False),
        ("comm", "gradwire", False),
        ("comm", "torch.distributed", True),
    ],
)
def test_the_rule_of_directions_itself(part: str, module: str, allowed: bool) -> None:
    assert (upward(part, [module]) == []) is allowed


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed import rpc", True),
        ("import torch\ntorch.distributed.barrier()", True),
        ("from torch.utils.data import DistributedSampler", False),
    ],
)
def test_torch_distributed_is_found_however_it_is_spelled(text: str, found: bool) -> None:
    assert uses_torch_distributed(ast.parse(text)) is found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import os\nos.environ['RANK']", True),
        ("from os import environ", True),
        ("from os import getenv as g", True),
        ("import os\nos.cpu_count()", False),
    ],
)
def test_the_environment_is_found_however_it_is_spelled(text: str, found: bool) -> None:
    assert reads_environment(ast.parse(text)) is found
