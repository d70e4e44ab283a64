"""Top-k routing: exact blackout, gradients of the chosen gates, and the jump at a switch."""

import pytest
import torch
from torch import Tensor

from ensemblepp.errors import ParameterError
from ensemblepp.policy.moe import blackout_share, switch_jump, switch_rate, topk_gates, topk_mixture, topk_set
from tests.policy_toy import make_generator

ROUTER = torch.randn(5, 6, generator=make_generator(0), dtype=torch.float64)
EXPERTS = torch.randn(5, 6, 3, generator=make_generator(1), dtype=torch.float64)
GATES = [{"gate": "softmax"}, {"gate": "sigmoid"}, {"gate": "softmax", "renormalise": False}]


def jacobian(k: int, **options: object) -> Tensor:
    """d mixture / d h: (tokens, out, experts)."""
    rows = [
        torch.autograd.functional.jacobian(
            lambda h, e=experts: topk_mixture(h, e, k, **options),  # type: ignore[arg-type]
            router,
        )
        for router, experts in zip(ROUTER, EXPERTS, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_unchosen_logits_get_exactly_no_gradient_and_chosen_ones_sum_to_zero(k: int) -> None:
    slope, chosen = jacobian(k), topk_set(ROUTER, k).unsqueeze(1)
    assert (slope.masked_select(~chosen) == 0).all()
    torch.testing.assert_close(slope.sum(-1), torch.zeros(5, 3, dtype=torch.float64), rtol=0, atol=1e-12)
    gates, mixture = topk_gates(ROUTER, k), topk_mixture(ROUTER, EXPERTS, k)
    wanted = (gates.unsqueeze(-1) * (EXPERTS - mixture.unsqueeze(1))).mT
    torch.testing.assert_close(slope, wanted, rtol=0, atol=1e-12)
    assert blackout_share(slope[:, 0]) == pytest.approx(1 - k / 6 if k > 1 else 1.0)


def test_finite_differences_of_an_unchosen_logit_are_identically_zero() -> None:
    """Not small: the same bits, for any step that does not overtake. Of a dense softmax they are not."""
    lowest = ROUTER.argmin(1)
    for step in (1e-8, 1e-3, -5.0):
        moved = ROUTER.scatter_add(1, lowest.unsqueeze(1), torch.full((5, 1), step, dtype=torch.float64))
        assert torch.equal(topk_mixture(moved, EXPERTS, 2), topk_mixture(ROUTER, EXPERTS, 2))
        assert not torch.equal(topk_mixture(moved, EXPERTS, 6), topk_mixture(ROUTER, EXPERTS, 6))
    dense = jacobian(6)
    assert (dense != 0).all()


def test_masking_a_softmax_over_all_experts_is_no_exact_blackout_but_separate_sigmoids_are() -> None:
    chosen = topk_set(ROUTER, 2).unsqueeze(1)
    leaking = jacobian(2, renormalise=False)
    assert (leaking.masked_select(~chosen) != 0).all()
    share, mixture = ROUTER.softmax(1), topk_mixture(ROUTER, EXPERTS, 2, renormalise=False)
    wanted = -(share.unsqueeze(-1) * mixture.unsqueeze(1)).mT
    torch.testing.assert_close(leaking.masked_select(~chosen), wanted.masked_select(~chosen), rtol=0, atol=1e-12)
    assert (jacobian(2, gate="sigmoid").masked_select(~chosen) == 0).all()


@pytest.mark.parametrize("options", GATES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_jump_is_the_gate_times_the_difference_of_the_experts(k: int, options: dict[str, object]) -> None:
    margin, gate, jump = switch_jump(ROUTER, EXPERTS, k, **options)  # type: ignore[arg-type]
    values, order = ROUTER.topk(k + 1, 1)
    rival, level = order[:, k:], values[:, k - 1 : k]
    torch.testing.assert_close(margin, values[:, k - 1] - values[:, k])
    sides = [
        topk_mixture(ROUTER.scatter(1, rival, level + side), EXPERTS, k, **options)  # type: ignore[arg-type]
        for side in (-1e-9, 1e-9)
    ]
    torch.testing.assert_close(jump, sides[1] - sides[0], rtol=0, atol=1e-7)
    assert (jump.abs().amax(1) > 1e-3).all()
    assert (gate > 0).all()
    same = EXPERTS.scatter(
        1, rival.unsqueeze(-1).expand(5, 1, 3), EXPERTS.gather(1, order[:, k - 1 : k, None].expand(5, 1, 3))
    )
    assert torch.equal(switch_jump(ROUTER, same, k, **options).jump, torch.zeros(5, 3, dtype=torch.float64))  # type: ignore[arg-type]


def test_a_policy_value_jumps_at_a_switch_where_its_tangent_sees_nothing() -> None:
    """J = reward of softmax(mixture): along the rival's logit the tangent is 0 and J has a step."""
    rewards = torch.tensor([1.0, 0.0, 0.3], dtype=torch.float64)
    router, experts = ROUTER[0], EXPERTS[0]
    values, order = router.topk(3)
    direction = torch.zeros(6, dtype=torch.float64)
    direction[order[2]] = 1.0

    def value(step: Tensor) -> Tensor:
        return topk_mixture(router + step * direction, experts, 2).softmax(0) @ rewards

    gap = (values[1] - values[2]).item()
    before, after = (torch.tensor(gap + side, dtype=torch.float64, requires_grad=True) for side in (-1e-7, 1e-7))
    (tangent,) = torch.autograd.grad(value(before), before)
    assert tangent == 0
    assert (value(after) - value(before)).abs() > 0.01
    mixture = topk_mixture(router, experts, 2)
    predicted = (mixture + switch_jump(router, experts, 2).jump).softmax(0) @ rewards - mixture.softmax(0) @ rewards
    torch.testing.assert_close(value(after) - value(before), predicted, rtol=0, atol=1e-5)


def test_the_rate_of_switches_counts_own_tokens() -> None:
    sampler = ROUTER.clone()
    sampler[0] = -sampler[0]
    sampler[3] = sampler[3] + 1  # the same order
    mask = torch.tensor([True, True, False, True, False])
    assert switch_rate(ROUTER, sampler, 2).item() == pytest.approx(1 / 5)
    assert switch_rate(ROUTER, sampler, 2, mask).item() == pytest.approx(1 / 3)
    assert switch_rate(ROUTER, sampler, 2, mask & False).item() == 0


def test_ties_fill_the_set_and_bad_counts_are_refused(without_shape_checks: None) -> None:
    assert (topk_set(torch.zeros(3, 4), 2).sum(1) == 2).all()
    with pytest.raises(ParameterError, match=r"k of topk_gates must be an int in 1\.\.6; got 7"):
        topk_gates(ROUTER, 7)
    with pytest.raises(ParameterError, match=r"k of switch_jump must be an int in 1\.\.5; got 6"):
        switch_jump(ROUTER, EXPERTS, 6)
    with pytest.raises(ParameterError, match="gate of topk_gates must be one of 'sigmoid', 'softmax'"):
        topk_gates(ROUTER, 2, gate="tanh")
    with pytest.raises(ParameterError, match="expert_outputs of topk_mixture must have shape"):
        topk_mixture(ROUTER, EXPERTS[:, :5], 2)
