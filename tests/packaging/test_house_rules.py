"""Rules that the source of the library keeps: no hidden randomness, no pickles, no swallowed errors, no bare rooms."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

NUMPY_RANDOM = {"Generator", "SeedSequence", "PCG64", "Philox", "BitGenerator", "default_rng"}
TORCH_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson"}
TORCH_DRAWS |= {"rand_like", "randn_like", "randint_like"}
IN_PLACE_DRAWS = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "cauchy_",
    "log_normal_",
    "random_",
}
GLOBAL_SEEDS = {"torch.manual_seed", "torch.seed", "torch.set_rng_state", "torch.random.fork_rng"}
GLOBAL_SEEDS |= {
    f"torch.{device}.{name}" for device in ("cuda", "random") for name in ("manual_seed", "manual_seed_all")
}
PICKLES = {"torch.load", "pandas.read_pickle", "pd.read_pickle"}
BANNED_IMPORTS = {"random", "pickle", "cloudpickle", "dill", "shelve", "agents", "envs", "configs"}


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for an attribute chain on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    owner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner else ""


def broken_by_call(call: ast.Call) -> Iterator[str]:
    name, keywords = dotted(call.func), {keyword.arg for keyword in call.keywords}
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in GLOBAL_SEEDS or (name.startswith(("np.random.", "numpy.random.")) and method not in NUMPY_RANDOM):
        yield "global random state"
    if method == "default_rng" and not call.args and not call.keywords:
        yield "unseeded generator"
    draws = method in IN_PLACE_DRAWS or (name.startswith("torch.") and method in TORCH_DRAWS)
    if draws and "generator" not in keywords:
        yield "draw without a generator"
    if name in PICKLES or (method == "load" and "allow_pickle" in keywords):
        yield "unpickling"


def broken_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        yield from broken_by_call(node)
    if isinstance(node, ast.ExceptHandler):
        catches_all = node.type is None or dotted(node.type) in {"Exception", "BaseException"}
        if catches_all and all(isinstance(step, ast.Pass | ast.Continue) for step in node.body):
            yield "swallowed error"
    if isinstance(node, ast.Import):
        yield from (f"import of {name.name}" for name in node.names if name.name.partition(".")[0] in BANNED_IMPORTS)
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        if node.module.partition(".")[0] in BANNED_IMPORTS:
            yield f"import of {node.module}"
        yield from (f"import of torch.{name.name}" for name in node.names if f"{node.module}.{name.name}" in PICKLES)


def broken_rules(source: str) -> list[str]:
    """Return `line: rule` for every rule that `source` breaks."""
    return [f"{getattr(node, 'lineno', 0)}: {rule}" for node in ast.walk(ast.parse(source)) for rule in broken_by(node)]


def test_the_library_keeps_the_rules(repository: Path) -> None:
    files = [path for top in ("ensemblepp", "agents", "envs") for path in (repository / top).rglob("*.py")]
    files = [path for path in files if not any(parent.is_symlink() for parent in path.parents)]
    assert len(files) >= 3
    broken = [f"{path.relative_to(repository)}:{rule}" for path in files for rule in broken_rules(path.read_text())]
    assert broken == []


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("np.random.seed(0)", "global random state"),
        ("numpy.random.normal(size=3)", "global random state"),
        ("torch.manual_seed(0)", "global random state"),
        ("torch.cuda.manual_seed_all(0)", "global random state"),
        ("np.random.default_rng()", "unseeded generator"),
        ("torch.randn(3)", "draw without a generator"),
        ("torch.randn_like(x)", "draw without a generator"),
        ("torch.empty(3).normal_()", "draw without a generator"),
        ("torch.load(path)", "unpickling"),
        ("from torch import load", "import of torch.load"),
        ("np.load(path, allow_pickle=True)", "unpickling"),
        ("import pickle", "import of pickle"),
        ("import random", "import of random"),
        ("from agents.linear import x", "import of agents.linear"),
        ("import envs", "import of envs"),
        ("try:\n    f()\nexcept:\n    pass", "swallowed error"),
        ("try:\n    f()\nexcept Exception as error:\n    pass", "swallowed error"),
    ],
)
def test_a_broken_rule_is_found(source: str, rule: str) -> None:
    assert [line.partition(": ")[2] for line in broken_rules(source)] == [rule]


@pytest.mark.parametrize(
    "source",
    [
        "torch.randn(3, generator=g)",
        "x.normal_(generator=g)",
        "torch.Generator().manual_seed(3)",
        "np.random.default_rng(seed)",
        "np.random.SeedSequence([1, 2])",
        "from ensemblepp.agents import LinearEnsemblePP",
        "from .agents import x",
        "try:\n    f()\nexcept KeyError:\n    pass",
        "try:\n    f()\nexcept Exception:\n    clean()\n    raise",
    ],
)
def test_what_the_rules_allow(source: str) -> None:
    assert broken_rules(source) == []
