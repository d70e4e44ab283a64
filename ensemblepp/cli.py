"""The command line: `bandit` and `value` run experiments, `report` turns run folders into pages."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import MISSING, DictConfig, OmegaConf

import ensemblepp
from ensemblepp.diagnostics import PosteriorDiagnostics
from ensemblepp.duel_runs import DuelEnvironment, run_duels
from ensemblepp.errors import CheckpointError, DivergenceError, ParameterError, check_choice, check_int
from ensemblepp.linear import LinearPosterior
from ensemblepp.preferences import PreferenceLearner
from ensemblepp.report import build_report
from ensemblepp.runs import LearningStopped, run_bandit
from ensemblepp.store import RunFolder, RunFolderError
from ensemblepp.value import build_problem as build_value_problem
from ensemblepp.value import load_run, run_folder
from ensemblepp.value_video import EPISODE_FILE, check_recordable, record_episode

USAGE = """ensemblepp: Thompson-sampling exploration with Ensemble++

usage: ensemblepp COMMAND [options]

commands:
  bandit    run agents on bandit problems      ensemblepp bandit env=digits agent=linear_ensemble_pp
  value     run agents that learn values       ensemblepp value env=deep_sea agent=hyper_fqi
  select    learn which response is preferred  ensemblepp select env=duels acquisition=infomax
  report    compare finished runs              ensemblepp report runs/

`ensemblepp COMMAND --help` explains a command and lists its options.
`ensemblepp --version` prints the version.
"""

_DTYPES = {"float32": torch.float32, "float64": torch.float64}
# Keys that say where and how a run is carried out; every other key is part of what the run is.
_CONDUCT = ("output_dir", "checkpoint_period", "tensorboard", "progress", "overwrite", "resume", "video")

Result = TypeVar("Result")


@dataclass
class ModelConfig:
    """What every agent of a comparison assumes about rewards; environments set it, the command line overrides."""

    noise_scale: float = 1.0
    prior_mean: float = 0.0
    prior_covariance: float = 1.0


@dataclass
class BanditConfig:
    """Run-level options of `ensemblepp bandit`; agents and environments take theirs from their constructors."""

    agent: Any = MISSING
    env: Any = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = 0
    num_replicas: int = 16
    horizon: int = 1000
    device: str = "cpu"
    dtype: str = "float32"
    output_dir: str = "runs/bandit"
    checkpoint_period: int = 1000
    diagnostics: int = 0
    tensorboard: bool = True
    progress: bool = True
    overwrite: bool = False


@dataclass
class EvaluationConfig:
    """When `ensemblepp value` evaluates; see `ensemblepp.value_evaluation.Evaluation`. period null: never."""

    period: int | None = None
    unit: str = "episodes"
    episodes: int = 100
    copies: int | None = None
    solve_return: float | None = None
    stop_when_solved: bool = False


@dataclass
class ValueConfig:
    """Run-level options of `ensemblepp value`; agents and environments take theirs from their constructors."""

    agent: Any = MISSING
    env: Any = MISSING
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    seed: int = 0
    num_replicas: int = 8
    horizon: int = 20_000
    device: str = "cpu"
    dtype: str = "float32"
    log_period: int = 500
    output_dir: str = "runs/value"
    checkpoint_period: int = 5000
    tensorboard: bool = True
    progress: bool = True
    overwrite: bool = False
    resume: str | None = None
    video: bool = False


@dataclass
class SelectConfig:
    """Run-level options of `ensemblepp select`; learner and environment take theirs from their constructors."""

    env: Any = MISSING
    learner: Any = MISSING
    acquisition: str = "double_thompson"
    exploration_scale: float = 1.0
    exact: bool = False
    seed: int = 0
    num_replicas: int = 16
    horizon: int = 500
    eval_period: int = 10
    device: str = "cpu"
    dtype: str = "float32"
    output_dir: str = "runs/select"
    checkpoint_period: int = 500
    tensorboard: bool = True
    progress: bool = True
    overwrite: bool = False


@dataclass
class ReportConfig:
    """Options of `ensemblepp report`."""

    paths: list[str] = field(default_factory=lambda: ["runs"])
    output: str | None = None
    statistic: str = "mean"
    title: str | None = None


def main() -> None:
    """Run the command named first on the command line.

    A command is one process. Under torchrun, which starts one per device, rank 0 carries it out and writes; the other
    ranks say that they have nothing to do and end well.
    """
    rank = _rank()
    if rank > 0:
        print(
            f"ensemblepp: rank {rank} (RANK in the environment) has nothing to do; rank 0 runs alone", file=sys.stderr
        )
        return
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        print(ensemblepp.__version__)
        return
    commands: dict[str, Callable[[], None]] = {"bandit": _bandit, "report": _report, "select": _select, "value": _value}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return
    name, *rest = arguments
    if name not in commands:
        print(f"ensemblepp: unknown command {name!r}; known: {', '.join(sorted(commands))}", file=sys.stderr)
        sys.exit(2)
    if name == "report":
        rest = _name_paths(rest)
    store = ConfigStore.instance()
    store.store(name="bandit_schema", node=BanditConfig)
    store.store(name="value_schema", node=ValueConfig)
    store.store(name="select_schema", node=SelectConfig)
    store.store(name="report_schema", node=ReportConfig)
    sys.argv = [f"{sys.argv[0]} {name}", *rest]
    commands[name]()


def _rank() -> int:
    """Return this process's place among those that torchrun started; 0 outside torchrun."""
    value = os.environ.get("RANK") or "0"
    if not (value.isascii() and value.isdecimal()):
        message = "must be an int >= 0, as torchrun sets it; got {!r}. Outside torchrun, unset it"
        print(f"ensemblepp: RANK in the environment {message.format(value)}", file=sys.stderr)
        sys.exit(2)
    return int(value)


def _name_paths(arguments: list[str]) -> list[str]:
    """Turn bare folder arguments of `report` into the override `paths=[...]`."""
    paths = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
    if not paths:
        return arguments
    quoted = ",".join("'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'" for path in paths)
    return [argument for argument in arguments if argument not in paths] + [f"paths=[{quoted}]"]


@hydra.main(version_base="1.3", config_path="pkg://ensemblepp.configs", config_name="bandit")
def _bandit(config: DictConfig) -> None:
    _tell_errors(lambda: _run_bandit(config))


@hydra.main(version_base="1.3", config_path="pkg://ensemblepp.configs", config_name="value")
def _value(config: DictConfig) -> None:
    _tell_errors(lambda: _run_value(config))


@hydra.main(version_base="1.3", config_path="pkg://ensemblepp.configs", config_name="select")
def _select(config: DictConfig) -> None:
    _tell_errors(lambda: _run_select(config))


@hydra.main(version_base="1.3", config_path="pkg://ensemblepp.configs", config_name="report")
def _report(config: DictConfig) -> None:
    def build() -> None:
        options = {"title": config.title} if config.title is not None else {}
        build_report(list(config.paths), config.output, statistic=config.statistic, **options)

    _tell_errors(build)


def _tell_errors(action: Callable[[], Result]) -> Result:
    """Run `action`; errors that the caller can mend are shown as one line instead of a traceback."""
    try:
        return action()
    except InstantiationException as error:
        raise CompactHydraException(str(error.__cause__ or error)) from None
    except (ParameterError, CheckpointError, DivergenceError, RunFolderError, FileNotFoundError, ImportError) as error:
        raise CompactHydraException(str(error)) from None


def _identify(config: DictConfig) -> tuple[dict[str, Any], dict[str, str], Path]:
    """Return what a run is, the labels of its agent and environment, and the folder that its configuration names."""
    choices = HydraConfig.get().runtime.choices
    identity = OmegaConf.to_container(config, resolve=True)
    assert isinstance(identity, dict)
    for key in _CONDUCT:
        identity.pop(key, None)
    labels = {"agent": str(choices.get("agent") or config.acquisition), "environment": str(choices["env"])}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    path = Path(config.output_dir) / f"{labels['environment']}-{labels['agent']}-{digest}"
    if config.overwrite and path.exists():
        shutil.rmtree(path)
    return {str(key): value for key, value in identity.items()}, labels, path


def _open_folder(config: DictConfig, identity: dict[str, Any], labels: dict[str, str], path: Path) -> RunFolder:
    """Return the run's folder, new or as it was left, and say which it is."""
    kind = HydraConfig.get().job.name
    folder = RunFolder.create(
        path,
        identity,
        **labels,
        seed=config.seed,
        num_replicas=config.num_replicas,
        horizon=config.horizon,
        kind=kind,
        command=f"ensemblepp {kind} " + " ".join(sys.argv[1:]),
    )
    print(f"{labels['environment']} / {labels['agent']} -> {os.path.relpath(path)}")
    return folder


def _run_bandit(config: DictConfig) -> None:
    identity, labels, path = _identify(config)
    environment, agent = build_problem(config)
    diagnostics = build_diagnostics(config, environment, agent)
    folder = _open_folder(config, identity, labels, path)
    if folder.status == "finished":
        print("  already finished; overwrite=true runs it again")
        _tell_stopped(folder)
        return
    folder.resume()
    try:
        runs = run_bandit(
            agent,
            environment,
            config.horizon,
            folder=folder,
            checkpoint_period=config.checkpoint_period,
            tensorboard=config.tensorboard,
            progress=config.progress,
            diagnostics=diagnostics,
        )
    except LearningStopped as error:
        _tell_stopped(folder, str(error))
        return
    print(f"  regret after {runs.horizon} steps: {runs.summary()['regret/cumulative']}")
    _tell_stopped(folder)


def _run_value(config: DictConfig) -> None:
    if config.resume is None:
        _, environment = build_value_problem(config)  # before a folder is made: a bad value leaves nothing behind
        if config.video:
            check_recordable(environment, EPISODE_FILE)
        identity, labels, path = _identify(config)
        folder = _open_folder(config, identity, labels, path)
    else:
        folder = _open_resumed(config)
    if folder.status == "finished":
        print("  already finished; overwrite=true runs it again")
    else:
        _play_values(config, folder)
    if config.video:
        agent, environment = load_run(folder.path)
        total = record_episode(agent, environment, folder.path / EPISODE_FILE, seed=config.seed)
        print(f"  {os.path.relpath(folder.path / EPISODE_FILE)}: an evaluation episode of return {total:g}")


def _play_values(config: DictConfig, folder: RunFolder) -> None:
    conduct = {key: config[key] for key in ("checkpoint_period", "tensorboard", "progress")}
    runs = run_folder(folder, OmegaConf.create(folder.config), conduct)
    for name, interval in runs.summary().items():
        print(f"  {name} after {runs.num_steps} steps: {interval}")
    if runs.solve_return is not None:
        solved = [episodes for episodes in runs.episodes_to_solve if episodes is not None]
        print(f"  solved: {len(solved)} of {len(runs.episodes_to_solve)} learners, after {sorted(solved)} episodes")


def _run_select(config: DictConfig) -> None:
    identity, labels, path = _identify(config)
    learner, environment = build_duels(config)
    folder = _open_folder(config, identity, labels, path)
    if folder.status == "finished":
        print("  already finished; overwrite=true runs it again")
        return
    folder.resume()
    names = ("acquisition", "exploration_scale", "exact", "eval_period", "seed")
    conduct = ("checkpoint_period", "tensorboard", "progress")
    options = {name: config[name] for name in (*names, *conduct)}
    runs = run_duels(learner, environment, config.horizon, folder=folder, **options)
    for name, interval in runs.summary().items():
        print(f"  {name} after {config.horizon} questions: {interval}")


def _open_resumed(config: DictConfig) -> RunFolder:
    """Return the run folder that `resume` names; what the run is stays as the folder says."""
    for override in HydraConfig.get().overrides.task:
        key = override.split("=")[0].lstrip("+~")
        if key not in (*_CONDUCT, "resume"):
            rule = f"be left out with resume, or be one of {', '.join(_CONDUCT)}"
            raise ParameterError(key, "ensemblepp value", rule, override, "The run keeps its own configuration.")
    folder = RunFolder.open(config.resume)
    if folder.manifest.kind != "value":
        raise ParameterError("resume", "ensemblepp value", "name a value run", f"one of kind {folder.manifest.kind!r}")
    print(f"{folder.manifest.environment} / {folder.manifest.agent} -> {os.path.relpath(folder.path)}")
    return folder


def _tell_stopped(folder: RunFolder, reason: str | None = None) -> None:
    """Name the replicas that stopped learning; with any, the command ends in an error, though all is written."""
    known = folder.manifest
    for line in known.describe_stopped():
        print(f"  {line}", flush=True)
    if known.stopped:
        if reason is None:
            finished = f"{known.num_replicas - len(known.stopped)} of {known.num_replicas} replicas finished"
            reason = f"{finished}, the learning of the others became non-finite."
        raise CompactHydraException(f"{reason} The results are in {os.path.relpath(folder.path)}")


def build_problem(config: DictConfig) -> tuple[Any, Any]:
    """Build the environment and the agent that a bandit configuration names, and check that they fit."""
    check_choice("dtype", "ensemblepp bandit", config.dtype, _DTYPES)
    for name in ("horizon", "checkpoint_period"):
        check_int(name, "ensemblepp bandit", config[name])
    shared: dict[str, Any] = {
        "num_replicas": config.num_replicas,
        "seed": config.seed,
        "device": config.device,
        "dtype": _DTYPES[config.dtype],
    }
    for name, kind, member in (("env", "problem", "observe"), ("agent", "agent", "update")):
        if not hasattr(hydra.utils.get_object(config[name]._target_), member):
            remedy = "`ensemblepp value` takes it."
            raise ParameterError(name, "ensemblepp bandit", f"be a bandit {kind}", config[name]._target_, remedy)
    environment = hydra.utils.instantiate(config.env, **shared)
    agent = hydra.utils.instantiate(
        config.agent,
        feature_dim=environment.feature_dim,
        num_arms=environment.num_arms if environment.per_arm else None,
        **shared,
    )
    agent.check_environment(environment)
    return environment, agent


def build_duels(config: DictConfig) -> tuple[PreferenceLearner, Any]:
    """Build the learner and the duels that a selection names, and check that the duels are some."""
    check_choice("dtype", "ensemblepp select", config.dtype, _DTYPES)
    for name in ("horizon", "eval_period", "checkpoint_period"):
        check_int(name, "ensemblepp select", config[name])
    shared: dict[str, Any] = {
        "num_replicas": config.num_replicas,
        "seed": config.seed,
        "device": config.device,
        "dtype": _DTYPES[config.dtype],
    }
    environment = hydra.utils.instantiate(config.env, **shared)
    if not isinstance(environment, DuelEnvironment):
        rule = "be a problem of duels, such as duels or duels_fixed"
        raise ParameterError("env", "ensemblepp select", rule, config.env._target_)
    learner = hydra.utils.instantiate(config.learner, feature_dim=environment.feature_dim, **shared)
    return learner, environment


def build_diagnostics(config: DictConfig, environment: Any, agent: Any) -> PosteriorDiagnostics | None:
    """Build what judges the agent's posterior at `diagnostics` test points, and check that both can be asked.

    On a linear problem the exact posterior of the configured model judges along.
    """
    count = check_int("diagnostics", "ensemblepp bandit", config.diagnostics, minimum=0)
    if count == 0:
        return None
    exact = None
    if getattr(environment, "parameter", None) is not None:
        model = OmegaConf.to_container(config.model, resolve=True)
        assert isinstance(model, dict)
        exact = LinearPosterior(
            environment.feature_dim,
            num_replicas=config.num_replicas,
            dtype=_DTYPES[config.dtype],
            device=config.device,
            **{str(key): value for key, value in model.items()},
        )
    diagnostics = PosteriorDiagnostics.from_environment(
        environment, count, config.model.noise_scale, exact=exact, seed=config.seed
    )
    diagnostics.check_agent(agent)
    return diagnostics
