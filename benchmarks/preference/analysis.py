"""From accuracy curves to queries, ratios with intervals, tables and the picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from scipy import stats

from benchmarks import common
from benchmarks.preference.play import queries_to
from ensemblepp.intervals import Interval, bootstrap_band, bootstrap_interval, paired_difference

Array = NDArray[np.float64]
BASELINE = ("passive", "uniform")
_SHARE = 0.95


def best_prior(config: Mapping[str, Any], trials: Mapping[str, Any]) -> float:
    """Return the prior scale at which passive ends with the highest accuracy on the search's seeds."""

    def score(prior: float) -> float:
        cells = [trials[f"{scale}/passive/{prior}"] for scale in ("fitted", "2.0")]
        return float(np.mean([[row[-1] for row in cell["accuracy"]] for cell in cells]))

    return float(max(config["tuning"]["prior_scales"], key=score))


def best_rule(config: Mapping[str, Any], trials: Mapping[str, Any]) -> str:
    """Return the rule with the lowest geometric mean, over both judges, of its ratio on the search's seeds."""
    prior = best_prior(config, trials)

    def score(rule: str) -> float:
        ratios = []
        for scale in ("fitted", "2.0"):
            cells = {name: trials[f"{scale}/{name}/{prior}"] for name in config["rules"]}
            ratios.append(ratio(config, cells, rule).estimate)
        return float(np.log(ratios).mean())

    return min((rule for rule in config["rules"] if rule not in BASELINE), key=score)


def baseline_queries(config: Mapping[str, Any], cells: Mapping[str, Any]) -> tuple[float, Array]:
    """Return the level, 95 % of the baseline's mean final accuracy, and the baseline's queries to it.

    The baseline is passive and uniform pooled: two names of one policy.
    """
    final = [row[-1] for rule in BASELINE for row in cells[rule]["accuracy"]]
    level = _SHARE * float(np.mean(final))
    return level, np.concatenate([queries_to(cells[rule], level, config["horizon"]) for rule in BASELINE])


def ratio(config: Mapping[str, Any], cells: Mapping[str, Any], rule: str) -> Interval:
    """Return a rule's mean queries over the baseline's, with a 95 % bootstrap interval over both sets of replicas."""
    level, base = baseline_queries(config, cells)
    return ratio_interval(queries_to(cells[rule], level, config["horizon"]), base)


def ratio_interval(values: Array, base: Array) -> Interval:
    """Return mean(values) / mean(base) with its percentile bootstrap interval, both resampled."""
    found = stats.bootstrap(
        (values, base),
        lambda x, y, axis: x.mean(axis=axis) / y.mean(axis=axis),
        n_resamples=9999,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Interval(float(values.mean() / base.mean()), float(found.low), float(found.high), len(values), 0)


def of(content: Mapping[str, Any], backbone: str, scale: str, candidates: str) -> dict[str, Any]:
    """Return the cells of one judge and one kind of offer, by rule."""
    prefix = f"{backbone}/{scale}/{candidates}/"
    return {name.removeprefix(prefix): cell for name, cell in content["cells"].items() if name.startswith(prefix)}


def judge(config: Mapping[str, Any], content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every bar with its figure on MiniLM's features."""
    verdicts: list[dict[str, Any]] = []
    chosen = content["chosen"]["rule"]
    for scale, bar in config["bars"]["queries"].items():
        found = ratio(config, of(content, "minilm", scale, "redrawn"), chosen)
        assert found.high is not None
        claim = f"queries of {chosen}, sd {scale}: ratio to the baseline, upper end below 1"
        met = found.estimate <= bar and found.high < 1
        verdicts.append({"claim": claim, "bar": f"{bar}", "measured": str(found), "met": bool(met)})
        goal = config["bars"]["goals"][scale]
        verdicts.append(
            {
                "claim": f"the same, goal for sd {scale}",
                "bar": f"{goal}",
                "measured": str(found),
                "met": found.estimate <= goal,
            }
        )
    for scale in map(str, config["backbones"]["minilm"]["reward_scales"]):
        redrawn, fixed = (of(content, "minilm", scale, kind) for kind in ("redrawn", "fixed"))
        share = ratio_interval(np.array(redrawn["double_thompson"]["regret"]), np.array(redrawn["passive"]["regret"]))
        claim = f"regret of double_thompson, redrawn, sd {scale}: share of passive's"
        verdicts.append({"claim": claim, "bar": "0.5", "measured": str(share), "met": share.estimate <= 0.5})
        gap = paired_difference(fixed["double_thompson"]["regret"], fixed["greedy"]["regret"])
        claim = f"regret of double_thompson minus greedy, 64 fixed, sd {scale}"
        verdicts.append({"claim": claim, "bar": "below 0", "measured": str(gap), "met": gap.estimate < 0})
        lag = online_minus_batch(redrawn)
        claim = f"final accuracy, online minus batch, sd {scale}: worst rule"
        bar = config["bars"]["online_minus_batch"]
        verdicts.append({"claim": claim, "bar": f"{bar}", "measured": f"{lag:.4f}", "met": lag >= bar})
    return verdicts


def online_minus_batch(cells: Mapping[str, Any]) -> float:
    """Return the smallest mean difference over rules."""
    gaps = [np.mean([row[-1] for row in cell["accuracy"]]) - np.mean(cell["batch_accuracy"]) for cell in cells.values()]
    return float(min(gaps))


def bars_table(content: Mapping[str, Any]) -> str:
    """Return the bars as Markdown."""
    rows = [
        [each["claim"], each["measured"], each["bar"], "met" if each["met"] else "**missed**"]
        for each in content["bars"]
    ]
    return common.make_table(["claim", "measured", "bar", ""], rows)


def queries_table(config: Mapping[str, Any], content: Mapping[str, Any], backbone: str) -> str:
    """Return queries, ratios and final figures of every rule, all judges of one backbone, redrawn responses."""
    rows = []
    for scale in map(str, config["backbones"][backbone]["reward_scales"]):
        cells = of(content, backbone, scale, "redrawn")
        if not set(BASELINE) <= cells.keys():
            continue
        level, base = baseline_queries(config, cells)
        rows.append([f"sd {scale}", "baseline", f"{base.mean():.0f} to {level:.3f}", "1", "", "", ""])
        for rule in config["rules"]:
            if rule in cells:
                cell = cells[rule]
                queries = queries_to(cell, level, config["horizon"])
                never = int((np.array(cell["accuracy"]).max(1) < level).sum())
                mark = f" ({never} never)" if never else ""
                rows.append(
                    [
                        "",
                        rule,
                        f"{bootstrap_interval(queries)}{mark}",
                        str(ratio_interval(queries, base)),
                        str(bootstrap_interval([row[-1] for row in cell["accuracy"]])),
                        str(bootstrap_interval(cell["regret"])),
                        str(bootstrap_interval(cell["best_of_regret"])),
                    ]
                )
    header = ["judge", "rule", "queries", "ratio", "final accuracy", "regret of shown pairs", "best-of-12 regret"]
    return common.make_table(header, rows)


def null_table(config: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return passive against uniform, which are one policy: how often an interval misses 1 by chance."""
    rows = []
    for backbone, settings in config["backbones"].items():
        for scale in map(str, settings["reward_scales"]):
            cells = of(content, backbone, scale, "redrawn")
            if set(BASELINE) <= cells.keys():
                level, _ = baseline_queries(config, cells)
                passive, uniform = (queries_to(cells[rule], level, config["horizon"]) for rule in BASELINE)
                found = ratio_interval(passive, uniform)
                assert found.low is not None
                assert found.high is not None
                holds = "yes" if found.low <= 1 <= found.high else "**no**"
                rows.append([backbone, scale, str(found), holds])
    return common.make_table(["backbone", "sd", "queries of passive / uniform", "holds 1"], rows)


def fixed_table(config: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return the regret of the shown pairs with the same 64 responses on offer for the whole run."""
    rows = []
    scales = list(map(str, config["backbones"]["minilm"]["reward_scales"]))
    for rule in config["fixed_rules"]:
        cells = [of(content, "minilm", scale, "fixed").get(rule) for scale in scales]
        rows.append([rule, *("-" if cell is None else str(bootstrap_interval(cell["regret"])) for cell in cells)])
    return common.make_table(["rule", *(f"sd {scale}" for scale in scales)], rows)


def search_table(config: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return what the search on other seeds found."""
    trials, rows = content["trials"], []
    for prior in config["tuning"]["prior_scales"]:
        final = [np.mean([row[-1] for row in trials[f"{s}/passive/{prior}"]["accuracy"]]) for s in ("fitted", "2.0")]
        rows.append(["passive", f"{prior}", *(f"final accuracy {value:.4f}" for value in final)])
    prior = content["chosen"]["prior_scale"]
    for rule in config["rules"]:
        found = []
        for scale in ("fitted", "2.0"):
            cells = {name: trials[f"{scale}/{name}/{prior}"] for name in config["rules"]}
            found.append(f"ratio {ratio(config, cells, rule)}")
        mark = " (chosen)" if rule == content["chosen"]["rule"] else ""
        rows.append([rule + mark, f"{prior}", *found])
    return common.make_table(["rule", "prior_scale", "sd fitted", "sd 2"], rows)


def blocks(config: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, str]:
    """Return every generated block of the README."""
    pools = [
        [name, each["responses"], each["fitted_reward_scale"], each["human_accuracy"]]
        for name, each in content["pools"].items()
    ]
    return {
        "bars": bars_table(content),
        "pools": common.make_table(["backbone", "responses", "sd of the fitted reward", "agrees with people"], pools),
        **{backbone: queries_table(config, content, backbone) for backbone in config["backbones"]},
        "null": null_table(config, content),
        "fixed": fixed_table(config, content),
        "search": search_table(config, content),
    }


def plot(path: Path, config: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Draw accuracy against questions, a panel per judge on MiniLM's features."""
    scales = list(map(str, config["backbones"]["minilm"]["reward_scales"]))
    figure, axes = plt.subplots(1, len(scales), figsize=(5 * len(scales), 4.2), layout="constrained", sharey=True)
    rules = ["passive", "greedy", "double_thompson", "delta_ucb", "infomax", content["chosen"]["rule"]]
    for axis, scale in zip(axes, scales, strict=True):
        cells = of(content, "minilm", scale, "redrawn")
        for rule in dict.fromkeys(rules):
            center, low, high = bootstrap_band(np.array(cells[rule]["accuracy"]))
            axis.plot(cells[rule]["evaluated"], center, label=rule)
            axis.fill_between(cells[rule]["evaluated"], low, high, alpha=0.2, linewidth=0)
        axis.axhline(baseline_queries(config, cells)[0], color="gray", linestyle=":", linewidth=1)
        axis.set_title(f"judge's reward sd {scale}")
        axis.set_xlabel("questions asked")
        axis.set_xscale("log")
    axes[0].set_ylabel("pairs ordered as the judge would")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
