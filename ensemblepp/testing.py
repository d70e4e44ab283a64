"""Checkers for agents, environments and index distributions of your own; they raise AssertionError with the reason.

Example:
    >>> from functools import partial
    >>> from ensemblepp.agents import LinearThompsonSampling
    >>> from ensemblepp.envs import LinearBandit
    >>> from ensemblepp.testing import check_agent, check_environment
    >>> check_environment(partial(LinearBandit, 3, 5))
    >>> check_agent(partial(LinearThompsonSampling, 3), partial(LinearBandit, 3, 5))
"""

from __future__ import annotations

from ensemblepp.host_sync import forbid_host_sync
from ensemblepp.testing_agents import check_agent
from ensemblepp.testing_common import AgentFactory, EnvironmentFactory
from ensemblepp.testing_environments import check_environment
from ensemblepp.testing_indices import check_index_distribution

__all__ = [
    "AgentFactory",
    "EnvironmentFactory",
    "check_agent",
    "check_environment",
    "check_index_distribution",
    "forbid_host_sync",
]
