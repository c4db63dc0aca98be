"""Whatever the documentation shows, runs: fenced Python, docstring examples, links, and the stripped example script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = [path for path in sorted(ROOT.glob("*.md")) if path not in PAGES] + PAGES
MODULES = sorted([*(ROOT / "src/gradwire").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
PYTHONPATH = os.pathsep.join([str(ROOT / "src"), str(ROOT)])


def blocks() -> list[tuple[str, str]]:
    """(page:line, text) of every fenced Python block."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match.group(1) == "python":
                found.append((f"{page.name}:{text[: match.start()].count(chr(10)) + 1}", match.group(3)))
    return found


def run(words: list[str], folder: Path) -> None:
    """Run Python on its own, as a world of one."""
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [pytest.param(text, id=place) for place, text in blocks()])
def test_a_fenced_python_block_runs(block: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(block)
    run(["block.py"], tmp_path)


def test_no_python_block_is_exempt() -> None:
    exempt = [f"{page.name}: {match.group(0)[:60]}" for page in PAGES for match in FENCE.finditer(page.read_text())]
    assert [words for words in exempt if re.search(r"```(python +\S|py\b|python3)", words)] == []


def test_docstring_examples_hold(tmp_path: Path) -> None:
    words = ["-m", "pytest", "-q", "--doctest-modules", "-p", "no:cacheprovider", "-o", "testpaths=", "-c", os.devnull]
    modules = [path for path in MODULES if path.name != "__main__.py" and ">>> " in path.read_text()]
    run([*words, *(str(path) for path in modules)], tmp_path)


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    local = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in local if link and not (page.parent / link).exists()] == []


def without_gradwire(text: str) -> str:
    """Every line that names gradwire or gw removed, and the blank lines that this leaves doubled."""
    kept = [line for line in text.splitlines() if not re.search(r"\bgw\b|gradwire", line)]
    return re.sub(r"\n{4,}", "\n\n\n", re.sub(r"(import [^\n]+\n)\n{2,}(?=[A-Z])", r"\1\n", "\n".join(kept) + "\n"))


def test_the_example_without_its_gradwire_lines_is_the_plain_script() -> None:
    changed = (ROOT / "examples/linear_gradwire.py").read_text()
    assert without_gradwire(changed) == (ROOT / "examples/linear_plain.py").read_text()
