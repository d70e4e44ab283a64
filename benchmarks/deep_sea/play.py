"""Build and play one method on DeepSea of one size, as the command line does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from ensemblepp.cli import ValueConfig
from ensemblepp.store import RunFolder
from ensemblepp.value import Evaluation, build_problem, run_value

FOLDER = Path(__file__).resolve().parent


def load_config(path: Path = FOLDER / "config.yaml") -> dict[str, Any]:
    """Return the sweep."""
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


def preset(name: str) -> dict[str, Any]:
    """Return the options of a preset, as its YAML says."""
    path = FOLDER.parents[1] / "configs" / "agent" / f"{name}.yaml"
    options: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    del options["_target_"]
    return options


def overrides(config: dict[str, Any], method: str, size: int) -> list[str]:
    """Return the command line's overrides for one cell."""
    spec = config["methods"][method]
    budget = spec["cells"][size]
    return [
        *spec["overrides"],
        f"env.size={size}",
        f"seed={config['seed']}",
        f"num_replicas={spec.get('num_replicas', config['num_replicas'])}",
        f"horizon={budget * size}",
        f"evaluation.solve_return={config['criterion']}",
        "evaluation.stop_when_solved=true",
    ]


def play(config: dict[str, Any], method: str, size: int, folder: Path | None = None) -> dict[str, Any]:
    """Play one cell and return the episodes that every learner needed; with a folder it survives being killed."""
    torch.set_num_threads(1)
    ConfigStore.instance().store(name="value_schema", node=ValueConfig)
    arguments = overrides(config, method, size)
    with initialize_config_module("ensemblepp.configs", version_base="1.3"):
        run = compose("value", arguments)
    agent, environment = build_problem(run)
    options: Any = OmegaConf.to_container(run.evaluation, resolve=True)
    kept = None
    if folder is not None:
        plain: Any = OmegaConf.to_container(run, resolve=True)
        sizes = {"seed": run.seed, "num_replicas": run.num_replicas, "horizon": run.horizon}
        kept = RunFolder.create(folder, plain, agent=method, environment=f"deep_sea_{size}", kind="value", **sizes)
        kept.resume()
    runs = run_value(
        agent,
        environment,
        run.horizon,
        evaluation=Evaluation(**options),
        seed=run.seed,
        folder=kept,
        checkpoint_period=100 * size,
    )
    return {
        "command": " ".join(["ensemblepp value", *arguments]),
        "size": size,
        "budget": config["methods"][method]["cells"][size],
        "updates_per_step": agent.updates_per_step,
        "index_dim": getattr(agent, "index_dim", None),
        "episodes_to_solve": runs.episodes_to_solve,
        "steps": runs.num_steps,
        "cpu_seconds": round(runs.cpu_seconds, 1),
        "learner_steps_per_cpu_second": round(runs.num_steps * run.num_replicas / runs.cpu_seconds),
    }
