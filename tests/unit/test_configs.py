"""Every YAML of the package builds what it names."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from ensemblepp.cli import BanditConfig, ReportConfig, build_problem

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _build(*overrides: str) -> None:
    ConfigStore.instance().store(name="bandit_schema", node=BanditConfig)
    with initialize_config_module("ensemblepp.configs", version_base="1.3"):
        build_problem(compose("bandit", [*overrides, "num_replicas=2"]))


@pytest.mark.parametrize("agent", _names("agent"))
@pytest.mark.parametrize("env", ["linear", "digits"])
def test_every_agent_builds_on_arm_features_and_on_shared_contexts(agent: str, env: str) -> None:
    _build(f"agent={agent}", f"env={env}")


@pytest.mark.parametrize("env", _names("env"))
def test_every_environment_builds(env: str, request: pytest.FixtureRequest) -> None:
    overrides = [f"env={env}"]
    if env in ("mushroom", "mushroom_lottery", "shuttle", "letter", "adult", "magic", "covertype"):
        overrides.append(f"env.data_dir={request.getfixturevalue('data_dir')}")
    _build(*overrides)


@pytest.mark.parametrize("experiment", _names("experiment"))
def test_every_experiment_composes(experiment: str) -> None:
    _build(f"experiment={experiment}")


def test_report_options_compose() -> None:
    ConfigStore.instance().store(name="report_schema", node=ReportConfig)
    with initialize_config_module("ensemblepp.configs", version_base="1.3"):
        assert list(compose("report").paths) == ["runs"]
