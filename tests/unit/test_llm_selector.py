"""The response selector: choices, learning, ragged sets, saving, and inputs that broke comparable libraries."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from ensemblepp.errors import CheckpointError, ParameterError
from ensemblepp.llm.reward_model import EnsembleRewardModel
from ensemblepp.llm.selector import ResponseSelector
from ensemblepp.pairs import PAIRS, SINGLES
from ensemblepp.testing_common import require_same_state
from tests.llm_cases import RESPONSES, encode, make_backbone, make_model, make_tokenizer

pytestmark = pytest.mark.llm

PROMPT = "hello "
CHAT = [{"role": "user", "content": "hello"}]


def selector(**options) -> ResponseSelector:
    return ResponseSelector(make_model(), make_tokenizer(), **{"seed": 5, **options})


def test_learning_moves_the_scores_and_the_models_own_head():
    chooser = selector()
    before = chooser.scores(PROMPT, RESPONSES)
    assert torch.equal(before, torch.zeros(4))
    for _ in range(20):
        chooser.learn(PROMPT, chosen=RESPONSES[2], rejected=RESPONSES[0])
    after = chooser.scores(PROMPT, RESPONSES)
    assert int(after.argmax()) == 2
    assert after[2] > 0.5 > -0.5 > after[0] - after[2]
    logits = chooser.model(*encode([PROMPT + text for text in RESPONSES])).logits[:, 0]
    torch.testing.assert_close(logits, after, rtol=0, atol=1e-5)


def test_swapped_answers_turn_the_scores():
    one, other = selector(), selector()
    one.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    other.learn(PROMPT, chosen=RESPONSES[1], rejected=RESPONSES[0])
    scores = [each.scores(PROMPT, RESPONSES[:2]) for each in (one, other)]
    assert scores[0][0] > scores[0][1]
    torch.testing.assert_close(scores[0], -scores[1])


@pytest.mark.parametrize("acquisition", PAIRS)
@pytest.mark.parametrize("exact", [False, True])
def test_every_rule_shows_two_different_responses(acquisition, exact):
    chooser = selector(acquisition=acquisition, exact=exact)
    chooser.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    for _ in range(30):
        first, second = chooser.select_pair(PROMPT, RESPONSES)
        assert {first, second} <= set(range(4))
        assert first != second


def test_a_settled_posterior_does_not_repeat_a_response():
    """Others repeat one response in most duels once both draws agree."""
    chooser = selector(acquisition="double_thompson")
    first, second = chooser._features([PROMPT + text for text in RESPONSES[:2]]).split(1)
    chooser.learner.learn(first.expand(1, 3000, -1), second.expand(1, 3000, -1))
    chooser.learner.refit(20)
    pairs = [chooser.select_pair(PROMPT, RESPONSES) for _ in range(50)]
    assert all(first != second for first, second in pairs)


def test_one_prompt_and_ragged_sets_agree_with_single_calls():
    chooser = selector(acquisition="greedy")
    chooser.learn([PROMPT, "yes "], chosen=RESPONSES[:2], rejected=RESPONSES[2:])
    prompts, groups = [PROMPT, "yes ", "no "], [RESPONSES, RESPONSES[:2], RESPONSES[1:]]
    scores = chooser.scores(prompts, groups)
    assert [len(each) for each in scores] == [4, 2, 3]
    for prompt, group, each in zip(prompts, groups, scores, strict=True):
        torch.testing.assert_close(chooser.scores(prompt, group), each, rtol=0, atol=1e-5)
        assert chooser.select(prompt, group) == int(each.argmax())
    assert chooser.select(prompts, groups) == [int(each.argmax()) for each in scores]
    assert [len(set(pair)) for pair in chooser.select_pair(prompts, groups)] == [2, 2, 2]
    assert chooser.select([PROMPT], [RESPONSES]) == [int(scores[0].argmax())]


def test_identical_responses_score_alike_in_every_draw():
    chooser = selector()
    samples = chooser.scores(PROMPT, ["good", "bad", "good"], num_samples=7)
    assert samples.shape == (7, 3)
    torch.testing.assert_close(samples[:, 0], samples[:, 2])
    assert samples.std() > 0
    first, second = chooser.select_pair(PROMPT, ["good", "good"])
    assert {first, second} == {0, 1}


@pytest.mark.statistical
def test_samples_have_mean_and_spread_of_the_posterior():
    chooser = selector()
    chooser.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    output = chooser.learner.scores(chooser._features([PROMPT + text for text in RESPONSES]).unsqueeze(0))
    samples = chooser.scores(PROMPT, RESPONSES, num_samples=20_000)
    error = output.standard_deviation()[0] / 20_000**0.5
    assert bool(((samples.mean(0) - output.mean[0]).abs() <= 4.5 * error).all())
    torch.testing.assert_close(samples.std(0), output.standard_deviation()[0], rtol=0.03, atol=0)


@pytest.mark.parametrize("acquisition", SINGLES)
def test_one_response_is_a_choice_and_no_pair(acquisition):
    chooser = selector(acquisition=acquisition)
    assert chooser.select(PROMPT, ["good"]) == 0
    with pytest.raises(ParameterError, match="responses of the choice of responses must be at least 2"):
        chooser.select_pair(PROMPT, ["good"])


def test_rules_for_pairs_refuse_to_choose_one():
    with pytest.raises(
        ParameterError, match=r"acquisition of ResponseSelector.select must be one of .*; got 'infomax'"
    ):
        selector(acquisition="infomax").select(PROMPT, RESPONSES)


def test_chats_go_through_the_template():
    chooser = selector()
    chooser.learn(CHAT, chosen="good", rejected="bad")
    text = chooser.scores("user : hello . assistant : ", ["good . ", "bad . "])
    torch.testing.assert_close(chooser.scores(CHAT, ["good", "bad"]), text)
    assert len(chooser.scores([CHAT, PROMPT], [["good"], ["good", "bad"]])) == 2


def test_scalar_rewards_ties_and_margins():
    chooser = selector(noise_scale=0.1)
    for _ in range(5):
        chooser.learn([PROMPT, PROMPT], response=RESPONSES[:2], reward=[0.8, -0.8])
    scores = chooser.scores(PROMPT, RESPONSES[:2])
    assert scores[0] - scores[1] > 0.8
    tie = selector()
    tie.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1], label=0.5)
    assert torch.equal(tie.scores(PROMPT, RESPONSES), torch.zeros(4))
    plain, margin = selector(), selector()
    plain.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    margin.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1], margin=2.0)
    assert margin.scores(PROMPT, RESPONSES)[0] > plain.scores(PROMPT, RESPONSES)[0] > 0


def test_saved_and_continued_equals_uninterrupted(tmp_path):
    chooser = selector(acquisition="thompson", exploration_scale=0.5, capacity=50)
    chooser.learn([PROMPT, "yes "], chosen=RESPONSES[:2], rejected=RESPONSES[2:])
    chooser.select_pair(PROMPT, RESPONSES)
    chooser.save(tmp_path / "selector.ckpt")
    other = make_model(seed=77)
    loaded = ResponseSelector.load(tmp_path / "selector.ckpt", other, make_tokenizer())
    for each in (chooser, loaded):
        each.learn("no ", chosen=RESPONSES[3], rejected=RESPONSES[1])
    choices = [[each.select_pair(PROMPT, RESPONSES) for _ in range(20)] for each in (chooser, loaded)]
    assert choices[0] == choices[1]
    require_same_state(chooser.learner.state_dict(), loaded.learner.state_dict(), "a loaded selector must go on alike")
    texts = encode([PROMPT + text for text in RESPONSES])
    torch.testing.assert_close(other(*texts).members, chooser.model(*texts).members, rtol=0, atol=1e-5)
    (tmp_path / "selector.ckpt").write_bytes(b"broken")
    with pytest.raises(CheckpointError):
        ResponseSelector.load(tmp_path / "selector.ckpt", other, make_tokenizer())


def test_labels_may_be_tensors():
    plain, tensor = selector(), selector()
    answers = {"chosen": RESPONSES[:2], "rejected": RESPONSES[2:]}
    plain.learn([PROMPT, "yes "], **answers, label=[1.0, 0.25])
    tensor.learn([PROMPT, "yes "], **answers, label=torch.tensor([1.0, 0.25]))
    assert torch.equal(plain.learner.mean, tensor.learner.mean)


def test_a_trained_head_is_where_learning_starts():
    model = make_model()
    with torch.no_grad():
        model.head.mean.copy_(torch.linspace(-3, 3, 32))
    chooser = ResponseSelector(model, make_tokenizer(), seed=0)
    logits = model(*encode([PROMPT + text for text in RESPONSES])).logits[:, 0]
    torch.testing.assert_close(chooser.scores(PROMPT, RESPONSES), logits, rtol=0, atol=1e-5)


def test_the_backbones_mode_and_weights_stay():
    chooser = selector()
    chooser.model.train()
    before = {name: tensor.clone() for name, tensor in chooser.model.backbone.state_dict().items()}
    chooser.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    chooser.select_pair(PROMPT, RESPONSES)
    assert chooser.model.training
    require_same_state(before, chooser.model.backbone.state_dict(), "the backbone must not move")


def test_two_selectors_of_one_seed_are_independent_of_each_other_and_of_global_randomness():
    one, two, three = selector(), selector(), selector(seed=6)  # building a backbone draws from the global stream
    state = torch.get_rng_state()
    choices = [one.select_pair(PROMPT, RESPONSES) for _ in range(10)]
    mixed = []
    for _ in range(10):
        three.select_pair(PROMPT, RESPONSES)
        mixed.append(two.select_pair(PROMPT, RESPONSES))
    assert mixed == choices
    assert torch.equal(torch.get_rng_state(), state)


REFUSED = {
    "responses of ResponseSelector must be a non-empty list of strings": lambda s: s.select(PROMPT, []),
    "responses of ResponseSelector must be a non-empty list of strings; got 'good'": lambda s: s.select(PROMPT, "good"),
    r"responses of ResponseSelector must have one list per prompt \(2\)": lambda s: s.select([PROMPT] * 2, [["good"]]),
    "prompt of ResponseSelector must be a string, a chat": lambda s: s.select([], []),
    "response of a reward model must be a string; got 3": lambda s: s.select(PROMPT, ["good", 3]),
    "the answer of ResponseSelector.learn must be given as chosen and rejected": lambda s: s.learn(PROMPT, chosen="a"),
    "must be given as chosen and rejected, or as response and reward; got chosen, rejected, reward": (
        lambda s: s.learn(PROMPT, chosen="a", rejected="b", reward=1.0)
    ),
    r"rejected of ResponseSelector.learn must have one entry per prompt \(1\); got 2": (
        lambda s: s.learn(PROMPT, chosen="a", rejected=["b", "c"])
    ),
    "label of PreferenceLearner must be in": lambda s: s.learn(PROMPT, chosen="a", rejected="b", label=2.0),
    "label of ResponseSelector.learn must be a finite number": (
        lambda s: s.learn(PROMPT, chosen="a", rejected="b", label=float("nan"))
    ),
    "reward of ResponseSelector.learn must have one entry": (
        lambda s: s.learn(PROMPT, response="a", reward=[1.0, 2.0])
    ),
}


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_named_and_changes_nothing(message):
    chooser = selector()
    chooser.learn(PROMPT, chosen=RESPONSES[0], rejected=RESPONSES[1])
    before, streams = chooser.learner.state_dict(), chooser._streams.state_dict()
    with pytest.raises(ParameterError, match=message):
        REFUSED[message](chooser)
    require_same_state(before, chooser.learner.state_dict(), "a refused call must change nothing")
    require_same_state(streams, chooser._streams.state_dict(), "a refused call must draw nothing")


def test_bad_options_are_named():
    for option, value in (("acquisition", "best"), ("exploration_scale", -1.0), ("capacity", 0), ("max_length", 0)):
        with pytest.raises(ParameterError, match=f"{option} of "):
            selector(**{option: value})
    model = EnsembleRewardModel.from_backbone(make_backbone(), index_dim=4)
    with pytest.raises(ParameterError, match="tokenizer of ResponseSelector must be given for a backbone without a"):
        ResponseSelector(model)
