"""Agents, one file per family of methods."""

from ensemblepp.agents.linear import LinearAgent, LinearEnsemblePP, default_index_dim
from ensemblepp.agents.linear_baselines import (
    EpsilonGreedy,
    Greedy,
    LinearEnsembleSampling,
    LinearThompsonSampling,
    LinUCB,
    Uniform,
)

__all__ = [
    "EpsilonGreedy",
    "Greedy",
    "LinUCB",
    "LinearAgent",
    "LinearEnsemblePP",
    "LinearEnsembleSampling",
    "LinearThompsonSampling",
    "Uniform",
    "default_index_dim",
]

if __name__ != "ensemblepp.agents":
    raise ImportError(f"the folder agents is the package ensemblepp.agents: import ensemblepp.agents, not {__name__}")
