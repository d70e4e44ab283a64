"""Speed of neural agents: `python benchmarks/neural_speed/run.py` measures all sections, `--sections` some anew."""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import common
from benchmarks.speed.timing import cpu_per_call, cpu_seconds
from ensemblepp import envs
from ensemblepp.agents import NeuralEnsemblePP
from ensemblepp.heads import EnsembleNetwork
from ensemblepp.losses import expected_index_loss
from ensemblepp.types import Decision, Transition

FOLDER = Path(__file__).resolve().parent
_DIM, _WIDTH, _MEMBERS, _BATCH = 100, 64, 8, 128
_NAMES = (("weight_0", "bias_0", "weight_1", "bias_1"), ("weight", "bias"))


def update_flops(dim: int = _DIM, width: int = _WIDTH, members: int = _MEMBERS, batch: int = _BATCH) -> int:
    """Return the floating-point operations of one minibatch update of one learner, matrix products alone.

    Forward and weight gradients cost the layers' products each; the gradient flows back through the second layer and
    the mean's output column. Two operations per multiplication.
    """
    layers = dim * width + width * width + width * (1 + members)
    return 2 * batch * (2 * layers + width * width + width)


def act_flops(dim: int = _DIM, width: int = _WIDTH, members: int = _MEMBERS, arms: int = 50) -> int:
    """Return the operations of one decision of one learner: torso, frozen prior torso and their output columns."""
    return 2 * arms * (2 * (dim * width + width * width) + width * (1 + 2 * members))


def _agent(seed: int, **options: Any) -> NeuralEnsemblePP:
    return NeuralEnsemblePP(_DIM, head="sgd", seed=seed, **options)


def _play(agent: NeuralEnsemblePP, environment: Any, steps: int) -> None:
    for _ in range(steps):
        contexts, mask = environment.observe()
        decision = agent.act(contexts, mask)
        feedback = environment.step(decision)
        agent.update(Transition(decision.features, feedback.reward, decision.arm))


def sgemm_peak() -> float:
    """Return the GFLOP/s of one large float32 product on one thread."""
    square = torch.randn(1536, 1536, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(square)
    return 2 * 1536**3 / cpu_per_call(lambda: torch.mm(square, square, out=out), 0.2, 5) / 1e9


def measure_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Time the whole loop: act, environment, store, train."""
    spec, rows = config["training"], []
    for name, setting in spec["settings"].items():
        for replicas in spec["num_replicas"]:
            environment = getattr(envs, setting["environment"])(num_replicas=replicas, seed=config["seed"])
            agent = _agent(config["seed"], num_replicas=replicas, updates_per_step=setting["updates_per_step"])
            steps = spec["steps"][replicas]
            _play(agent, environment, steps)
            # The peak is measured next to each row: the machine's clock and neighbours change it.
            peak = sgemm_peak()
            seconds = [cpu_seconds(partial(_play, agent, environment, steps)) / steps for _ in range(spec["repeats"])]
            best = statistics.median(seconds)
            flops = replicas * (setting["updates_per_step"] * update_flops() + act_flops())
            rows.append(
                {
                    "setting": name,
                    "num_replicas": replicas,
                    "updates_per_step": setting["updates_per_step"],
                    "dtype": "float32",
                    "learner_steps_per_cpu_second": replicas / best,
                    "range": [replicas / max(seconds), replicas / min(seconds)],
                    "bar": setting["bars"].get(replicas),
                    "reference": setting["reference"],
                    "mflop_per_learner_step": flops / replicas / 1e6,
                    "sgemm_gflops": peak,
                    "share_of_peak": flops / best / 1e9 / peak,
                }
            )
    return {"rows": rows}


def measure_backward(config: Mapping[str, Any]) -> dict[str, Any]:
    """Time one minibatch's forward and backward pass, written out and by autograd on the same parameters."""
    return {"rows": [_backward_row(replicas, config["seed"]) for replicas in config["training"]["num_replicas"]]}


def _backward_row(replicas: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    network = EnsembleNetwork(_DIM, (_WIDTH, _WIDTH), _MEMBERS, num_replicas=replicas, generator=generator)
    x = torch.randn(replicas, _BATCH, _DIM, generator=generator)
    y = torch.randn(replicas, _BATCH, generator=generator)
    z, prior = (torch.randn(replicas, _BATCH, _MEMBERS, generator=generator) for _ in range(2))
    leaves = [
        block[name].clone().requires_grad_()
        for block, names in zip(network.blocks, _NAMES, strict=True)
        for name in names
    ]

    def written_out() -> None:
        output, cache = network.forward(x)
        _, gradient = expected_index_loss(output.with_prior(prior.unsqueeze(2), 0.35), y, z, 0.1)
        network.backward(cache, (gradient / _BATCH).unsqueeze(2))

    def by_autograd() -> tuple[torch.Tensor, ...]:
        first, first_bias, second, second_bias, weight, bias = leaves
        hidden = torch.baddbmm(first_bias, x, first).relu()
        hidden = torch.baddbmm(second_bias, hidden, second).relu()
        mean = torch.baddbmm(bias[:, :1], weight[:, :1], hidden.mT).squeeze(1)
        members = torch.baddbmm(bias[:, 1:], weight[:, 1:], hidden.detach().mT).mT + 0.35 * prior
        loss = (y - mean).square().mean(-1) + (0.1 * z - members).square().sum(-1).mean(-1)
        return torch.autograd.grad(loss.sum(), leaves)

    written_out()
    mine = [block.grad(name) for block, names in zip(network.blocks, _NAMES, strict=True) for name in names]
    for own, other in zip(mine, by_autograd(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-5)
    return {
        "num_replicas": replicas,
        "written_out_ms": 1e3 * cpu_per_call(written_out),
        "autograd_ms": 1e3 * cpu_per_call(by_autograd),
    }


def measure_scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    """Time act and one update against members, arms and replicas, one at a time."""
    spec, rows = config["scaling"], []
    for axis in ("index_dim", "num_arms", "num_replicas"):
        for value in spec[axis]:
            size = {**spec["base"], axis: value}
            replicas = size["num_replicas"]
            if axis == "num_arms":
                replicas = size["num_replicas"] = 1  # 10,000 arms of 16 learners would measure memory instead
            agent = _agent(config["seed"], num_replicas=replicas, index_dim=size["index_dim"], updates_per_step=1)
            generator = torch.Generator().manual_seed(config["seed"])
            contexts = torch.randn(replicas, 1, size["num_arms"], _DIM, generator=generator)
            for _ in range(150):
                decision = agent.act(contexts)
                agent.update(Transition(decision.features, torch.ones(replicas, 1), decision.arm))
            datum = Transition(decision.features, torch.zeros(replicas, 1), decision.arm)
            rows.append(
                {
                    "axis": axis,
                    **size,
                    "act_ms": 1e3 * cpu_per_call(partial(agent.act, contexts)),
                    "update_ms": 1e3 * cpu_per_call(partial(agent.update, datum)),
                }
            )
    return {"rows": rows}


def measure_memory(config: Mapping[str, Any]) -> dict[str, Any]:
    """Play one small learner for many steps and report the process's largest memory so far, in MiB."""
    spec = config["memory"]
    agent = NeuralEnsemblePP(
        4,
        hidden_dims=(16,),
        batch_size=16,
        updates_per_step=1,
        refit_period=200,
        replay_capacity=1000,
        seed=config["seed"],
    )
    generator = torch.Generator().manual_seed(config["seed"])
    marks = []
    for step in range(1, spec["steps"] + 1):
        decision: Decision = agent.act(torch.randn(1, 1, 5, 4, generator=generator))
        agent.update(Transition(decision.features, decision.features[..., 0].square(), decision.arm))
        if step % spec["report_every"] == 0:
            gc.collect()
            marks.append([step, round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)])
    return {"steps_and_mib": marks}


def training_table(section: Mapping[str, Any]) -> str:
    """Return the throughput table."""
    rows = []
    for row in section["rows"]:
        bar = row["bar"]
        verdict = "" if bar is None else "met" if row["learner_steps_per_cpu_second"] >= bar else "**missed**"
        low, high = row["range"]
        rows.append(
            [
                row["setting"].replace("_", " "),
                row["num_replicas"],
                row["updates_per_step"],
                f"{row['learner_steps_per_cpu_second']:,.0f} ({low:,.0f} to {high:,.0f})",
                f"{bar or ''} {verdict}".strip(),
                row["reference"],
                f"{row['mflop_per_learner_step']:.1f}",
                f"{row['sgemm_gflops']:.0f}",
                f"{row['share_of_peak']:.0%}",
            ]
        )
    header = ["game", "learners", "updates per step", "learner-steps per CPU-second", "bar", "reference code"]
    return common.make_table([*header, "MFLOP per learner-step", "sgemm GFLOP/s", "share"], rows)


def backward_table(section: Mapping[str, Any]) -> str:
    """Return the times of the two ways to a gradient."""
    rows = [
        [
            row["num_replicas"],
            row["written_out_ms"],
            row["autograd_ms"],
            f"{row['autograd_ms'] / row['written_out_ms']:.2f}",
        ]
        for row in section["rows"]
    ]
    return common.make_table(["learners", "written out, ms", "autograd, ms", "ratio"], rows)


def scaling_table(section: Mapping[str, Any]) -> str:
    """Return act and update times along each axis."""
    rows = [
        [
            row["axis"],
            row["index_dim"],
            row["num_arms"],
            row["num_replicas"],
            f"{row['act_ms']:.3g}",
            f"{row['update_ms']:.3g}",
        ]
        for row in section["rows"]
    ]
    return common.make_table(["varied", "members", "arms", "learners", "act ms", "update ms"], rows)


def memory_table(section: Mapping[str, Any]) -> str:
    """Return the memory marks."""
    return common.make_table(
        ["steps", "largest memory so far, MiB"], [[f"{step:,}", mib] for step, mib in section["steps_and_mib"]]
    )


Section = tuple[Callable[[Mapping[str, Any]], dict[str, Any]], Callable[[Mapping[str, Any]], str]]
SECTIONS: dict[str, Section] = {
    "training": (measure_training, training_table),
    "backward": (measure_backward, backward_table),
    "scaling": (measure_scaling, scaling_table),
    "memory": (measure_memory, memory_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sections", nargs="*", choices=list(SECTIONS), default=list(SECTIONS), help="what to measure")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.json", help="result file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config: dict[str, Any] = yaml.safe_load((FOLDER / "config.yaml").read_text(encoding="utf-8"))
    sections = common.read_json(arguments.output).get("sections", {})
    for name in arguments.sections:
        sections[name] = common.round_floats(SECTIONS[name][0](config), 4)
        content = common.provenance("neural_speed", config["seed"]) | {"sections": sections}
        common.write_json(arguments.output, content)
        print(SECTIONS[name][1](sections[name]), flush=True)
    if arguments.output.parent == FOLDER:
        common.fill_readme(FOLDER / "README.md", {name: SECTIONS[name][1](part) for name, part in sections.items()})


if __name__ == "__main__":
    main()
