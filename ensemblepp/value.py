"""Value learning from configurations: build a problem, run it in a folder, read a saved agent back.

Three lines evaluate what a run saved::

    from ensemblepp.value import evaluate, load_run
    agent, environment = load_run("runs/value/deep_sea-hyper_fqi-1f2e3d4c")
    print(evaluate(agent, environment.make_evaluation(100), 100, seed=1).returns.mean(1))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from ensemblepp import checkpoint
from ensemblepp.errors import ParameterError, check_choice
from ensemblepp.store import RunFolder
from ensemblepp.value_evaluation import EpisodeReturns, Evaluation, evaluate
from ensemblepp.value_runs import CHECKPOINT_KIND, ValueRuns, run_value
from ensemblepp.value_types import ValueAgent, ValueEnvironment

__all__ = [
    "EpisodeReturns",
    "Evaluation",
    "ValueRuns",
    "build_problem",
    "evaluate",
    "load_run",
    "run_folder",
    "run_value",
]

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def build_problem(config: DictConfig) -> tuple[Any, Any]:
    """Return the agent and the environment that a value configuration names, checked against each other.

    Raises:
        ParameterError: A value that breaks a rule, or an agent or environment of another command.
    """
    rules = (("env", "make_evaluation", "be a problem with states"), ("agent", "act_evaluation", "learn action values"))
    for name, member, rule in rules:
        if not hasattr(hydra.utils.get_object(config[name]._target_), member):
            remedy = "`ensemblepp bandit` takes it."
            raise ParameterError(name, "ensemblepp value", rule, config[name]._target_, remedy)
    check_choice("dtype", "ensemblepp value", config.dtype, _DTYPES)
    shared = {"num_replicas": config.num_replicas, "seed": config.seed, "device": config.device}
    environment = hydra.utils.instantiate(config.env, **shared)
    agent: Any = hydra.utils.instantiate(
        config.agent,
        observation_shape=list(environment.observation_shape),
        num_actions=environment.num_actions,
        num_states=environment.num_states,
        observation_dtype=environment.observation_dtype,
        dtype=_DTYPES[config.dtype],
        **shared,
    )
    agent.check_environment(environment)
    return agent, environment


def run_folder(folder: RunFolder, config: DictConfig, conduct: Mapping[str, Any]) -> ValueRuns:
    """Run, or continue, what `config` says in `folder`.

    Args:
        folder: A run folder that is not finished.
        config: What the run is.
        conduct: How it is carried out: `checkpoint_period`, `tensorboard` and `progress` of `run_value`.

    Raises:
        ParameterError: A value that breaks a rule.
        DivergenceError: A training loss became non-finite.
    """
    agent, environment = build_problem(config)
    options = OmegaConf.to_container(config.evaluation, resolve=True)
    assert isinstance(options, dict)
    period = options.pop("period")
    evaluation = None if period is None else Evaluation(period, **{str(key): value for key, value in options.items()})
    folder.resume()
    return run_value(
        agent,
        environment,
        config.horizon,
        evaluation=evaluation,
        seed=config.seed,
        folder=folder,
        log_period=config.log_period,
        **conduct,
    )


def load_run(path: str | os.PathLike[str]) -> tuple[ValueAgent, ValueEnvironment]:
    """Return agent and environment of a run folder as its last checkpoint saved them.

    Raises:
        RunFolderError: No run folder.
        FileNotFoundError: The run has no checkpoint yet.
        CheckpointError: The checkpoint is damaged.
    """
    folder = RunFolder.open(path)
    state = checkpoint.load(Path(folder.checkpoints) / "latest.ckpt", kind=CHECKPOINT_KIND)
    agent, environment = build_problem(OmegaConf.create(folder.config))
    agent.load_state_dict(state["agent"])
    if environment.can_restore:
        environment.load_state_dict(state["environment"])
    return agent, environment
