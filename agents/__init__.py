"""Agents, one file per family of methods."""

from ensemblepp.agents.bootstrapped_dqn import BootstrappedDQN
from ensemblepp.agents.dqn import DQN
from ensemblepp.agents.dropout import NeuralDropout
from ensemblepp.agents.enn_dqn import EnnDQN
from ensemblepp.agents.frame import BanditAgent
from ensemblepp.agents.gaussian_process import GaussianProcessOracle
from ensemblepp.agents.gradient_bonus import NeuralThompson, NeuralUCB
from ensemblepp.agents.hyper_fqi import HyperFQI
from ensemblepp.agents.langevin import LangevinTS
from ensemblepp.agents.linear import LinearAgent, LinearEnsemblePP, default_index_dim
from ensemblepp.agents.linear_baselines import (
    EpsilonGreedy,
    Greedy,
    LinearEnsembleSampling,
    LinearThompsonSampling,
    LinUCB,
    Uniform,
)
from ensemblepp.agents.neural import NeuralEnsemblePP
from ensemblepp.agents.neural_baselines import EnsemblePlus, EpiNet, NeuralEpsilonGreedy, NeuralGreedy, NeuralLinear
from ensemblepp.agents.neural_frame import NeuralAgent
from ensemblepp.agents.random_features import RandomFeatureEnsemblePP
from ensemblepp.agents.value_frame import ValueLearner

__all__ = [
    "DQN",
    "BanditAgent",
    "BootstrappedDQN",
    "EnnDQN",
    "EnsemblePlus",
    "EpiNet",
    "EpsilonGreedy",
    "GaussianProcessOracle",
    "Greedy",
    "HyperFQI",
    "LangevinTS",
    "LinUCB",
    "LinearAgent",
    "LinearEnsemblePP",
    "LinearEnsembleSampling",
    "LinearThompsonSampling",
    "NeuralAgent",
    "NeuralDropout",
    "NeuralEnsemblePP",
    "NeuralEpsilonGreedy",
    "NeuralGreedy",
    "NeuralLinear",
    "NeuralThompson",
    "NeuralUCB",
    "RandomFeatureEnsemblePP",
    "Uniform",
    "ValueLearner",
    "default_index_dim",
]

if __name__ != "ensemblepp.agents":
    raise ImportError(f"the folder agents is the package ensemblepp.agents: import ensemblepp.agents, not {__name__}")
