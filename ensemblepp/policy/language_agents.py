"""From tokens to actions: what a language agent's token policy says about the actions its environment sees.

In turn k the agent draws a string v_k of thought and action from p(. | X_k); a parser turns it into an action, and only
the action reaches the environment. Many strings mean one action, so the macro-policy over actions is a sum::

    pi(A | X) = sum_v 1[parse(v) = A] p(v | X)          grad log pi(A | X) = E_v[grad log p(v | X) | A]

The environment is the same for any two token policies, so the ratio of a trajectory has own tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ensemblepp.errors import check_all, check_int, check_shape
from ensemblepp.policy.inputs import check_floating, check_integers, check_log_ratio, check_values


class ParsedActions(NamedTuple):
    """The action of each string, as a number, and what the numbers mean."""

    action: Int[Tensor, " strings"]
    """0 for a string that does not parse."""
    names: tuple[Hashable | None, ...]
    """names[action]; the first is None, the action of failing to parse."""


def parse_actions(strings: Sequence[str], parser: Callable[[str], Hashable | None]) -> ParsedActions:
    """Number the actions that strings parse to, in order of appearance, a failure being action 0.

    Failing to parse is an action like any other: leaving such strings out would make the macro-policy sum to less
    than 1 and hide from the update what the agent does most at the beginning.

    Args:
        strings: Decoded texts.
        parser: Returns an action, or None for a text without a valid one.
    """
    numbers: dict[Hashable | None, int] = {None: 0}
    actions = [numbers.setdefault(parser(text), len(numbers)) for text in strings]
    return ParsedActions(torch.tensor(actions, dtype=torch.long), tuple(numbers))


def macro_logprobs(
    string_logprob: Float[Tensor, "*lead strings"], action: Int[Tensor, " strings"], num_actions: int
) -> Float[Tensor, "*lead actions"]:
    """Return log pi(A | X), the log-probability of each action, differentiable; -inf for one that no string means.

    Its gradient is the Rao-Blackwell score: that of the strings, averaged given the action.

    Args:
        string_logprob: log p(v | X) of each string, summed over its tokens.
        action: Action of each string.
        num_actions: Actions there are.

    Raises:
        ParameterError: If a value is NaN, an action is out of range or the shapes do not match.

    Source: mathematical framework of language agents, macro-policy.
    """
    owner = "macro_logprobs"
    index = _check_actions(owner, string_logprob, action, num_actions).expand_as(string_logprob)
    floor = string_logprob.new_full((*string_logprob.shape[:-1], num_actions), -torch.inf)
    # Each action has a peak of its own, so that a rare one does not underflow beside a common one.
    peak = floor.scatter_reduce(-1, index, string_logprob.detach(), "amax")
    peak = torch.where(torch.isfinite(peak), peak, 0.0)
    mass = torch.zeros_like(peak).scatter_add(-1, index, (string_logprob - peak.gather(-1, index)).exp())
    some = mass > 0
    return torch.where(some, torch.where(some, mass, 1.0).log() + peak, -torch.inf)


def macro_scores(
    string_logprob: Float[Tensor, " strings"],
    scores: Float[Tensor, "strings parameters"],
    action: Int[Tensor, " strings"],
    num_actions: int,
) -> Float[Tensor, "actions parameters"]:
    """Return E_v[score(v) | A] for each action, the Rao-Blackwell score; 0 for an action that no string means.

    Where the learning signal depends on the string through the action only, the macro score in place of the string's
    own leaves the expected gradient as it is and never raises its variance.

    Args:
        string_logprob: log p(v | X) of each string.
        scores: grad log p(v | X) of each string.
        action: Action of each string.
        num_actions: Actions there are.

    Raises:
        ParameterError: If a value is NaN, an action is out of range or the shapes do not match.

    Source: Rao-Blackwell theorem on the macro-policy.
    """
    check_shape("string_logprob", "macro_scores", string_logprob, "strings", (None,))
    check_values("scores", "macro_scores", scores, "strings, parameters", (len(string_logprob), None))
    total = macro_logprobs(string_logprob, action, num_actions)
    # A string without probability has no share, and -inf - (-inf) is NaN.
    gap = torch.where(string_logprob > -torch.inf, string_logprob - total[action], -torch.inf)
    share = gap.exp().unsqueeze(1)
    return scores.new_zeros(num_actions, scores.shape[1]).index_add(0, action, share * scores)


def turn_log_ratios(
    log_ratio: Float[Tensor, "batch time"],
    mask: Shaped[Tensor, "batch time"],
    turn: Int[Tensor, "batch time"],
    num_turns: int,
) -> Float[Tensor, "batch turns"]:
    """Return log p(v_k | X_k) - log q(v_k | X_k) of each turn, whose sum over turns is that of the trajectory.

    Observations and prompts have mask 0: the environment's probabilities are those of both policies and cancel.

    Args:
        log_ratio: d, from `ratios.log_ratios`.
        mask: 1 on tokens that the agent drew itself.
        turn: Turn of each token, from 0; ignored where the mask is 0.
        num_turns: Turns there are; later ones of a shorter trajectory are 0.

    Raises:
        ParameterError: If a turn is out of range or the shapes do not match.

    Source: mathematical framework of language agents, trajectory probability.
    """
    owner = "turn_log_ratios"
    own, log_ratio = check_log_ratio(log_ratio, mask, owner)
    num_turns = check_int("num_turns", owner, num_turns)
    check_integers("turn", owner, check_shape("turn", owner, turn, "batch, time", own.shape))
    index = torch.where(own, turn, 0).long()
    check_all("turn", owner, f"be in 0 .. {num_turns - 1}", (index >= 0) & (index < num_turns), turn)
    zeros = log_ratio.new_zeros(len(log_ratio), num_turns)
    return zeros.scatter_add(1, index, log_ratio)


@dataclass(frozen=True)
class Turn:
    """What happened in one turn: the agent's thought and action, and the environment's answer."""

    thought: str
    action: Hashable | None
    observation: str


@dataclass(frozen=True)
class AgentState:
    """X_k, the finite memory that an agent acts on: the system prompt and the last `window` turns.

    A context of finite length forces some such summary, and histories that differ further back become one state: the
    value of a state is an average over them.
    """

    system_prompt: str
    window: int
    turns: tuple[Turn, ...] = field(default=())

    def __post_init__(self) -> None:
        check_int("window", "AgentState", self.window, minimum=0)

    def updated(self, thought: str, action: Hashable | None, observation: str) -> AgentState:
        """Return X_{k+1} = f_agent(X_k, thought, action, observation), a deterministic function of its arguments."""
        turns = (*self.turns, Turn(thought, action, observation))
        return replace(self, turns=turns[max(0, len(turns) - self.window) :])

    @property
    def external_history(self) -> tuple[tuple[Hashable | None, str], ...]:
        """What the environment saw of these turns: actions and observations, without thoughts."""
        return tuple((turn.action, turn.observation) for turn in self.turns)


def _check_actions(owner: str, string_logprob: Tensor, action: Tensor, num_actions: int) -> Tensor:
    num_actions = check_int("num_actions", owner, num_actions)
    check_floating("string_logprob", owner, string_logprob)
    check_all("string_logprob", owner, "be finite or -inf", string_logprob < torch.inf, string_logprob)
    check_integers("action", owner, check_shape("action", owner, action, "strings", string_logprob.shape[-1:]))
    check_all("action", owner, f"be in 0 .. {num_actions - 1}", (action >= 0) & (action < num_actions), action)
    return action.long()
