"""The speed of the preference head: both peers train the same members, and the tables follow from the numbers."""

import pytest
import torch

from benchmarks import common
from benchmarks.preference import head_speed
from benchmarks.preference.independent_members import IndependentMembers, StackedMembers

CONTENT = common.read_json(head_speed.FOLDER / "head_speed.json")


def test_results_say_where_they_come_from_and_judge_themselves() -> None:
    assert set(common.REQUIRED_FIELDS) <= CONTENT.keys()
    assert CONTENT["settings"] == head_speed.SETTINGS
    assert CONTENT["ratios"] == common.round_floats(head_speed.judge(CONTENT["update_ms"], CONTENT["seed"]))
    assert CONTENT["ratios"]["independent"]["met"] is (CONTENT["ratios"]["independent"]["high"] <= 0.05)
    assert head_speed.table(CONTENT) in (head_speed.FOLDER / "README.md").read_text()


def test_printed_figures_are_the_measured_ones(repository) -> None:
    ratio = CONTENT["ratios"]["independent"]
    figure = f"1/{1 / ratio['ratio']:.1f} [1/{1 / ratio['low']:.1f}, 1/{1 / ratio['high']:.1f}]"
    for page in ("README.md", "docs/llm.md"):
        assert figure in (repository / page).read_text(), page


def test_every_timed_action_works_on_the_stated_sizes() -> None:
    settings = {**head_speed.SETTINGS, "members": 3, "width": 8, "blocks": 2, "calls": 1}
    actions, learner, features = head_speed.build(settings)
    for action in actions.values():
        action()
    assert learner.replay.size == settings["pairs"] == features.shape[1]
    measured = head_speed.measure(settings)
    assert {len(times) for times in measured["update_ms"].values()} == {2}


@torch.no_grad()
def gap_of(peer: IndependentMembers, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """By how much each member prefers the first."""
    return torch.stack([(member(first) - member(second)).mean() for member in peer.members])


def test_stacked_members_are_the_independent_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(16, 5, generator=generator) for _ in range(2))
    peers = [
        kind(5, 7, 3, pull=1e-2, generator=torch.Generator().manual_seed(1))
        for kind in (IndependentMembers, StackedMembers)
    ]
    gaps = [gap_of(peers[0], first, second)]
    for _ in range(10):
        for peer in peers:
            peer.update(first, second)
    gaps.append(gap_of(peers[0], first, second))
    with torch.no_grad():
        alone = torch.stack([member(first).squeeze(-1) for member in peers[0].members])
        torch.testing.assert_close(peers[1].score(first), alone, rtol=1e-3, atol=1e-4)
    assert bool((gaps[1] > gaps[0]).all())  # the first was preferred


@pytest.mark.parametrize("met", [True, False])
def test_the_bar_is_held_against_the_upper_end(met: bool) -> None:
    times = {"head": [1.0, 1.1, 0.9], "independent": [30.0 if met else 15.0] * 3, "stacked": [10.0] * 3}
    assert head_speed.judge(times, 0)["independent"]["met"] is met
