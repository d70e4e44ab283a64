"""The wheel and the source archive hold everything and run away from the source tree."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOPS = ("ensemblepp", "agents", "envs", "configs")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, *map(str, command)], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def library_files(repository: Path) -> set[str]:
    """Every file that an installation must hold, by its path in the source tree."""
    return {
        str(path.relative_to(repository))
        for top in TOPS
        for path in (repository / top).rglob("*")
        if (path.suffix in {".py", ".yaml"} or path.name == "py.typed")
        and not any(parent.is_symlink() for parent in path.parents)
    }


@pytest.fixture(scope="module")
def archives(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the source archive, and the wheel out of that archive, from a copy of the tree."""
    source, archives = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("archives")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(repository / name, source)
    for top in TOPS:
        shutil.copytree(repository / top, source / top, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    run("-m", "build", "--no-isolation", "--outdir", archives, source, cwd=archives)
    return archives


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, without its dependencies, into a folder of its own."""
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = archives.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel, cwd=archives)
    return target


def test_source_archive_holds_the_folders(repository: Path, archives: Path) -> None:
    (archive,) = archives.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        members = {name.partition("/")[2] for name in tar.getnames()}
    assert library_files(repository) | {"pyproject.toml", "README.md", "LICENSE"} <= members


def test_wheel_holds_exactly_the_library(repository: Path, archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as zipped:
        names = {name for name in zipped.namelist() if ".dist-info/" not in name}
    expected = {name if name.startswith("ensemblepp/") else f"ensemblepp/{name}" for name in library_files(repository)}
    assert names == expected
    assert any(name.endswith(".yaml") for name in names)


def test_wheel_imports_away_from_the_source(repository: Path, installed: Path, tmp_path: Path) -> None:
    code = (
        "import ensemblepp, ensemblepp.agents, ensemblepp.envs, ensemblepp.configs\n"
        "for module in (ensemblepp, ensemblepp.agents, ensemblepp.envs, ensemblepp.configs): print(module.__file__)\n"
        "print(ensemblepp.__version__)"
    )
    *files, version = run("-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    assert all(Path(file).is_relative_to(installed) for file in files), files
    assert version == tomllib.loads((repository / "pyproject.toml").read_text())["project"]["version"]


def test_wheel_runs_away_from_the_source(installed: Path, tmp_path: Path) -> None:
    assert "bandit" in run("-m", "ensemblepp", "--help", cwd=tmp_path, PYTHONPATH=str(installed))


def test_hydra_finds_the_configs_of_the_wheel(repository: Path, installed: Path, tmp_path: Path) -> None:
    code = (
        "from hydra._internal.config_loader_impl import ConfigLoaderImpl\n"
        "from hydra._internal.utils import create_config_search_path\n"
        "loader = ConfigLoaderImpl(create_config_search_path('pkg://ensemblepp.configs'))\n"
        "for group in ('agent', 'env', 'experiment'): print(*loader.get_group_options(group))"
    )
    printed = run("-c", code, cwd=tmp_path, PYTHONPATH=str(installed)).splitlines()
    for group, options in zip(("agent", "env", "experiment"), printed, strict=True):
        assert options.split() == sorted(path.stem for path in (repository / "configs" / group).glob("*.yaml"))
