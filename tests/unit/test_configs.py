"""Every YAML of the package builds what it names."""

from pathlib import Path

import hydra
import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore

from ensemblepp.cli import (
    BanditConfig,
    ReportConfig,
    SelectConfig,
    ValueConfig,
    build_duels,
    build_problem,
    build_value_problem,
)
from ensemblepp.errors import ParameterError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DATA = ("mushroom", "mushroom_lottery", "shuttle", "letter", "adult", "magic", "covertype")


def _read(group: str, name: str) -> dict[str, object]:
    content: dict[str, object] = yaml.safe_load((CONFIGS / group / f"{name}.yaml").read_text())
    return content


def _learns_values(agent: str) -> bool:
    target = _read("agent", agent).get("_target_")  # absent where a file builds on another one
    return target is not None and hasattr(hydra.utils.get_class(str(target)), "act_evaluation")


def _has_states(env: str) -> bool:
    content = _read("env", env)["env"]
    assert isinstance(content, dict)
    return "_target_" in content and hasattr(hydra.utils.get_object(content["_target_"]), "make_evaluation")


def _offers_pairs(env: str) -> bool:
    return _read("env", env).get("defaults") == ["duels"] or "PreferenceDuels" in str(_read("env", env)["env"])


def _of_values(experiment: str) -> bool:
    defaults = _read("experiment", experiment).get("defaults", [])
    assert isinstance(defaults, list)
    return any(_learns_values(entry["override /agent"]) for entry in defaults if "override /agent" in entry)


def _names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


BANDIT_AGENTS = [name for name in _names("agent") if not _learns_values(name)]
VALUE_AGENTS = [name for name in _names("agent") if _learns_values(name)]
DUELS = [name for name in _names("env") if _offers_pairs(name)]
BANDIT_ENVS = [name for name in _names("env") if not _has_states(name) and name not in DUELS]
VALUE_ENVS = [name for name in _names("env") if _has_states(name)]


def _build(*overrides: str, command: str = "bandit") -> None:
    ConfigStore.instance().store(name="bandit_schema", node=BanditConfig)
    ConfigStore.instance().store(name="value_schema", node=ValueConfig)
    ConfigStore.instance().store(name="select_schema", node=SelectConfig)
    build = {"bandit": build_problem, "value": build_value_problem, "select": build_duels}[command]
    with initialize_config_module("ensemblepp.configs", version_base="1.3"):
        build(compose(command, [*overrides, "num_replicas=2"]))


@pytest.mark.parametrize("agent", BANDIT_AGENTS)
@pytest.mark.parametrize("env", ["linear", "digits"])
def test_every_agent_builds_on_arm_features_and_on_shared_contexts(agent: str, env: str) -> None:
    _build(f"agent={agent}", f"env={env}")


@pytest.mark.parametrize("env", BANDIT_ENVS)
def test_every_environment_builds(env: str, request: pytest.FixtureRequest) -> None:
    overrides = [f"env={env}"]
    if env in DATA:
        overrides.append(f"env.data_dir={request.getfixturevalue('data_dir')}")
    _build(*overrides)


@pytest.mark.parametrize("env", DUELS)
def test_all_duels_build(env: str) -> None:
    _build(f"env={env}", command="select")


@pytest.mark.parametrize("experiment", [name for name in _names("experiment") if not _of_values(name)])
def test_every_experiment_composes(experiment: str) -> None:
    _build(f"experiment={experiment}")


@pytest.mark.parametrize("agent", VALUE_AGENTS)
def test_every_value_agent_builds(agent: str) -> None:
    _build(f"agent={agent}", command="value")


@pytest.mark.parametrize("env", VALUE_ENVS)
def test_every_value_environment_builds(env: str) -> None:
    _build(f"env={env}", command="value")


@pytest.mark.parametrize("experiment", [name for name in _names("experiment") if _of_values(name)])
def test_every_value_experiment_builds(experiment: str) -> None:
    _build(f"experiment={experiment}", command="value")


@pytest.mark.parametrize(
    ("command", "override", "message"),
    [
        ("bandit", "agent=dqn", "agent of ensemblepp bandit must be a bandit agent"),
        ("value", "agent=lin_ucb", "agent of ensemblepp value must learn action values"),
    ],
)
def test_what_belongs_to_another_command_is_named(command: str, override: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        _build(override, command=command)


def test_report_options_compose() -> None:
    ConfigStore.instance().store(name="report_schema", node=ReportConfig)
    with initialize_config_module("ensemblepp.configs", version_base="1.3"):
        assert list(compose("report").paths) == ["runs"]
