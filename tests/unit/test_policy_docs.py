"""The page of systems, papers, functions and tests: what it names exists, and what exists it names."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks import common
from benchmarks.policy import analysis
from benchmarks.policy.run import FOLDER, load_config
from ensemblepp import policy
from ensemblepp.intervals import paired_difference


def rows(repository: Path) -> Iterator[tuple[list[str], list[str]]]:
    """(functions, tests) of every row."""
    page = (repository / "docs" / "policy.md").read_text(encoding="utf-8")
    for line in [line for line in page.splitlines() if line.startswith("| ")][1:]:
        _, system, paper, functions, tests, default, _ = line.split("|")
        assert all(cell.strip() for cell in (system, paper, default)), line
        yield re.findall(r"`(\w+)`", functions), re.findall(r"`(\w+)`", tests)


def test_every_function_on_the_page_exists_and_is_used_by_a_test_of_its_row(repository: Path) -> None:
    for functions, tests in rows(repository):
        assert functions
        code = [(repository / "tests" / "unit" / f"{name}.py").read_text(encoding="utf-8") for name in tests]
        for name in functions:
            assert name in policy.__all__
            assert any(re.search(rf"\b{name}\b", text) for text in code), (name, tests)
        for name, text in zip(tests, code, strict=True):
            assert any(re.search(rf"\b{function}\b", text) for function in functions), (name, functions)


def test_every_public_function_is_on_the_page(repository: Path) -> None:
    named = {name for functions, _ in rows(repository) for name in functions}
    public = {name for name in policy.__all__ if inspect.isfunction(getattr(policy, name))}
    assert public <= named, public - named


def test_the_readme_links_the_page_and_quotes_measured_figures(repository: Path) -> None:
    readme = " ".join((repository / "README.md").read_text(encoding="utf-8").split())
    for target in ("docs/policy.md", "benchmarks/policy/README.md"):
        assert f"]({target})" in readme
        assert (repository / target).is_file()
    results, config = common.read_json(FOLDER / "results.json"), load_config()
    centred, naive, energy, naive_energy = (
        f"{results['memory'][f'{task}/{form}']['extra_peak_mib']:,.0f}"
        for task in ("centered", "energy")
        for form in ("blocks", "naive")
    )
    assert f"peaks at {centred} MiB beside the logits, gradient included (whole vocabulary in" in readme
    assert f"float32: {naive}), the" in readme
    assert f"token-baseline energy at {energy} MiB ({naive_energy})" in readme
    masked, plain = (
        analysis.final(config, results["cells"], "stale", method, "returns") for method in ("seq_mis", "none")
    )
    assert f"gains {paired_difference(masked, plain)} of the true return over no correction" in readme
