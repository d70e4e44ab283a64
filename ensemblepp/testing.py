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
from ensemblepp.testing_values import (
    ValueAgentFactory,
    ValueEnvironmentFactory,
    check_value_agent,
    check_value_environment,
)

__all__ = [
    "AgentFactory",
    "EnvironmentFactory",
    "ValueAgentFactory",
    "ValueEnvironmentFactory",
    "check_agent",
    "check_environment",
    "check_index_distribution",
    "check_value_agent",
    "check_value_environment",
    "forbid_host_sync",
]
