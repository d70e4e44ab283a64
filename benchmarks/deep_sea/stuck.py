"""Why learners get stuck: the preset hyper_fqi_optimistic from other initial weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks import common
from ensemblepp.agents import HyperFQI
from ensemblepp.envs import DeepSea
from ensemblepp.intervals import bootstrap_interval
from ensemblepp.networks import MLP
from ensemblepp.seeding import make_generator
from ensemblepp.value_runs import Evaluation, run_value


def _start(torso: MLP, rows: float, biases: float, generator: torch.Generator) -> None:
    """Draw rows and biases of the first layer anew, and the biases of the others if there shall be any."""
    torso.parameters["weight_0"].uniform_(-rows, rows, generator=generator)
    torso.parameters["bias_0"].uniform_(-biases, biases, generator=generator)
    if biases:
        bound = 1 / math.sqrt(torso.hidden_dims[0])
        torso.parameters["bias_1"].uniform_(-bound, bound, generator=generator)


def measure(spec: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return, per variant, the episodes that every learner needed; None where the budget did not suffice."""
    torch.set_num_threads(1)
    replicas, seed = spec["num_replicas"], spec["seed"]
    cells = {}
    for name, variant in spec["variants"].items():
        size, budget = variant.get("size", spec["size"]), variant.get("budget", spec["budget"])
        environment = DeepSea(size, num_replicas=replicas, seed=seed)
        options = {**preset, **variant.get("agent", {})}
        agent = HyperFQI((), 2, num_states=environment.num_states, num_replicas=replicas, seed=seed, **options)
        if "rows" in variant:
            rows = 1 / size if variant["rows"] == "usual" else variant["rows"]
            generator = make_generator(seed, "initial weights of the ablation")
            for torso in (agent.network.torso, agent.network.prior_torso):
                _start(torso, rows, rows if variant["biases"] else 0.0, generator)
            agent.network.load_state_dict(agent.network.state_dict())  # tabulates the prior anew
            agent.target = agent.network.clone()
        judge = Evaluation(5, solve_return=0.985, stop_when_solved=True)
        runs = run_value(agent, environment, budget * size, evaluation=judge, seed=seed)
        cells[name] = {"budget": budget, "episodes_to_solve": runs.episodes_to_solve}
        print(f"{name}: {runs.episodes_to_solve}", flush=True)
    return cells


def table(section: Mapping[str, Any]) -> str:
    """Return the variants as Markdown, an unsolved learner counted at the budget."""
    rows = []
    for name, cell in section.items():
        solved = [each for each in cell["episodes_to_solve"] if each is not None]
        missing = len(cell["episodes_to_solve"]) - len(solved)
        values = [float(each) for each in solved] + [float(cell["budget"])] * missing
        rows.append([name, str(bootstrap_interval(values)), f"{min(values):.0f} to {max(values):.0f}", missing])
    return common.make_table(["initial weights", "episodes to solve", "range", "unsolved"], rows)
