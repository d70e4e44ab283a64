"""Macro-policies over actions against brute force over all strings of a small token policy."""

import math

import pytest
import torch

from ensemblepp.errors import ParameterError
from ensemblepp.policy.language_agents import (
    AgentState,
    Turn,
    macro_logprobs,
    macro_scores,
    parse_actions,
    turn_log_ratios,
)
from ensemblepp.policy.ratios import log_ratios, sequence_ratios
from tests.policy_toy import Tree, make_generator

EXACT = {"rtol": 0.0, "atol": 1e-10}
TREE = Tree(3, 3, eos=2)
STRINGS = ["".join("ab."[i] for i in row[own].tolist()) for row, own in zip(TREE.tokens, TREE.mask, strict=True)]


def parser(text: str) -> str | None:
    """The last letter before the full stop; a text without either is no action."""
    return text[-2] if text.endswith(".") and len(text) > 1 else None


PARSED = parse_actions(STRINGS, parser)
ACTIONS = len(PARSED.names)


def policies() -> tuple[torch.Tensor, torch.Tensor]:
    generator = make_generator()
    return TREE.random_logits(generator), TREE.random_logits(generator)


def test_strings_become_numbered_actions() -> None:
    assert set(PARSED.names) == {None, "a", "b"}
    assert PARSED.names[0] is None
    assert [PARSED.names[i] for i in PARSED.action.tolist()] == [parser(text) for text in STRINGS]
    assert parse_actions([], parser).names == (None,)


def test_macro_policy_is_the_sum_over_strings_and_sums_to_one() -> None:
    logits, _ = policies()
    logprob = TREE.logprobs(logits).sum(1)
    macro = macro_logprobs(logprob, PARSED.action, ACTIONS)
    for action in range(ACTIONS):
        brute = sum(math.exp(x) for x, a in zip(logprob.tolist(), PARSED.action.tolist(), strict=True) if a == action)
        assert macro[action].exp().item() == pytest.approx(brute, abs=1e-12)
    assert macro.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    assert 0 < macro[0].exp() < 1  # failing to parse is an action
    batch = macro_logprobs(torch.stack([logprob, logprob - 1]), PARSED.action, ACTIONS)
    torch.testing.assert_close(batch, torch.stack([macro, macro - 1]), **EXACT)


def test_rare_and_meaningless_actions_stay_finite_in_gradient() -> None:
    logprob = torch.tensor([0.0, -2000.0, -2000.0], requires_grad=True)
    macro = macro_logprobs(logprob, torch.tensor([0, 1, 1]), 3)
    assert macro.tolist() == pytest.approx([0.0, -2000 + math.log(2), -math.inf])
    macro[:2].sum().backward()
    assert logprob.grad.tolist() == pytest.approx([1.0, 0.5, 0.5])
    excluded = torch.tensor([0.0, -math.inf])
    assert macro_logprobs(excluded, torch.tensor([0, 1]), 2).tolist() == [0.0, -math.inf]


def test_macro_score_is_the_gradient_of_the_macro_policy_and_never_raises_the_variance() -> None:
    logits, _ = policies()
    leaf = logits.clone().requires_grad_()
    p, scores = TREE.probs(logits), TREE.scores(logits)
    macro = macro_scores(p.log(), scores, PARSED.action, ACTIONS)
    live = macro_logprobs(TREE.logprobs(leaf).sum(1), PARSED.action, ACTIONS)
    for action in range(ACTIONS):
        gradient = torch.autograd.grad(live[action], leaf, retain_graph=True)[0].flatten()
        torch.testing.assert_close(macro[action], gradient, **EXACT)
    for seed in range(20):
        signal = torch.randn(ACTIONS, generator=make_generator(seed), dtype=torch.float64)[PARSED.action].unsqueeze(1)
        own, averaged = signal * scores, signal * macro[PARSED.action]
        mean = p @ own
        torch.testing.assert_close(p @ averaged, mean, **EXACT)
        reduction = p @ (own - mean).square() - p @ (averaged - mean).square()
        assert (reduction >= -1e-13).all()
        assert reduction.sum() > 0


def test_macro_ratio_averages_string_ratios_and_loses_divergence() -> None:
    sampler, trainer = policies()
    q, p = TREE.probs(sampler), TREE.probs(trainer)
    macro_q, macro_p = (macro_logprobs(x.log(), PARSED.action, ACTIONS) for x in (q, p))
    by_action = torch.nn.functional.one_hot(PARSED.action, ACTIONS).double()
    average = (q * (p / q)) @ by_action / (q @ by_action)
    torch.testing.assert_close((macro_p - macro_q).exp(), average, **EXACT)
    macro_kl = (macro_q.exp() * (macro_q - macro_p)).sum()
    assert 0 < macro_kl < TREE.sequence_kl(sampler, trainer)


@pytest.mark.parametrize("seed", range(5))
def test_trajectory_ratio_has_own_tokens_only(seed: int) -> None:
    # Two turns: the agent draws a token, the environment answers by a random rule, the agent draws again.
    generator = make_generator(seed)
    environment = torch.rand(2, 2, generator=generator, dtype=torch.float64)
    environment = environment / environment.sum(1, keepdim=True)
    first = torch.randn(2, 2, generator=generator, dtype=torch.float64).log_softmax(1)  # (policy, token)
    second = torch.randn(2, 2, 2, 2, generator=generator, dtype=torch.float64).log_softmax(3)  # given token, answer
    tokens = torch.cartesian_prod(*[torch.arange(2)] * 3)
    a, answer, b = tokens.T
    p, q = (torch.stack([first[i][a], environment[a, answer].log(), second[i][a, answer, b]], 1) for i in range(2))
    whole = p.sum(1).exp() / q.sum(1).exp()
    # Whatever the observation's slot holds, it has mask 0.
    mask = torch.tensor([[1, 0, 1]]).expand(8, 3)
    turn = torch.tensor([[0, -1, 1]]).expand(8, 3)
    d = log_ratios(torch.where(mask == 1, p, math.nan), q, mask)
    torch.testing.assert_close(sequence_ratios(d, mask), whole, **EXACT)
    turns = turn_log_ratios(d, mask, turn, 3)
    torch.testing.assert_close(turns.sum(1).exp(), whole, **EXACT)
    torch.testing.assert_close(turns[:, 0], first[0][a] - first[1][a], **EXACT)
    assert not turns[:, 2].any()
    assert q.sum(1).exp().sum().item() == pytest.approx(1.0)


def test_agent_state_is_a_sliding_window_and_a_pure_function() -> None:
    start = AgentState("be brief", window=2)
    one = start.updated("hm", "bash ls", "a.py")
    three = one.updated("so", "edit a.py", "ok").updated("done", None, "no action found")
    assert start.turns == ()
    assert three.turns == (Turn("so", "edit a.py", "ok"), Turn("done", None, "no action found"))
    assert three.external_history == (("edit a.py", "ok"), (None, "no action found"))
    again = AgentState("be brief", window=2).updated("other", "submit", "-1")
    # Histories that differ only before the window become the same state.
    assert again.updated("so", "edit a.py", "ok").updated("done", None, "no action found") == three
    assert hash(three) == hash(
        three.updated("x", "y", "z").updated("so", "edit a.py", "ok").updated("done", None, "no action found")
    )
    assert AgentState("", window=0).updated("a", "b", "c").turns == ()


def test_bad_input_is_named(without_shape_checks: None) -> None:
    with pytest.raises(ParameterError, match=r"action of macro_logprobs must be in 0 \.\. 1; got 2 at index \(1,\)"):
        macro_logprobs(torch.zeros(2), torch.tensor([0, 2]), 2)
    with pytest.raises(ParameterError, match="action of macro_logprobs must have shape"):
        macro_logprobs(torch.zeros(3), torch.tensor([0, 1]), 2)
    with pytest.raises(ParameterError, match="scores of macro_scores must have shape"):
        macro_scores(torch.zeros(2), torch.zeros(3, 1), torch.tensor([0, 1]), 2)
    with pytest.raises(ParameterError, match=r"turn of turn_log_ratios must be in 0 \.\. 0; got 1"):
        turn_log_ratios(torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[0, 1]]), 1)
    with pytest.raises(ParameterError, match="window of AgentState must be an int >= 0"):
        AgentState("", window=-1)
