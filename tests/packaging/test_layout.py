"""The three folders on top and the packages they install as."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOMS = ("agents", "envs", "configs")


@pytest.fixture(scope="module")
def setuptools_table(repository: Path) -> dict:
    return tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["setuptools"]


def real_folders(repository: Path) -> list[Path]:
    """Every folder of the library with Python or YAML in it, links not followed."""
    files = [
        path
        for top in ("ensemblepp", *ROOMS)
        for path in (repository / top).rglob("*")
        if path.suffix in {".py", ".yaml", ".yml"} and not any(parent.is_symlink() for parent in path.parents)
    ]
    return sorted({path.parent for path in files})


@pytest.mark.parametrize("room", ROOMS)
def test_links_point_to_the_folders_on_top(repository: Path, room: str) -> None:
    link = repository / "ensemblepp" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..") / room


def test_listed_packages_are_the_folders_with_python(repository: Path, setuptools_table: dict) -> None:
    package_dir = setuptools_table["package-dir"]
    listed = {package_dir.get(name, name.replace(".", "/")) for name in setuptools_table["packages"]}
    with_python = {
        str(folder.relative_to(repository)) for folder in real_folders(repository) if list(folder.glob("*.py"))
    }
    assert listed == with_python
    assert all((repository / folder / "__init__.py").is_file() for folder in with_python)


def test_every_yaml_is_a_config_with_hydras_suffix(repository: Path) -> None:
    yaml_folders = [folder for folder in real_folders(repository) if list(folder.glob("*.y*ml"))]
    assert all(folder.relative_to(repository).parts[0] == "configs" for folder in yaml_folders)
    assert not [path for folder in yaml_folders for path in folder.glob("*.yml")]


@pytest.mark.parametrize("room", ROOMS)
def test_the_bare_name_refuses_to_import(repository: Path, room: str) -> None:
    result = subprocess.run([sys.executable, "-c", f"import {room}"], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 1
    assert f"ImportError: the folder {room} is the package ensemblepp.{room}" in result.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_the_installed_name_imports(repository: Path, room: str) -> None:
    code = f"import ensemblepp.{room} as room; print(room.__name__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, f"ensemblepp.{room}\n"), result.stderr
