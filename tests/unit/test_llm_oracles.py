"""Judges: probabilities against the formula, answers against their probability, and whom they come from."""

import math

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from transformers import LlamaConfig, LlamaForSequenceClassification

from ensemblepp.errors import ParameterError
from ensemblepp.llm import ResponseSelector
from ensemblepp.llm.oracles import BradleyTerryJudge, ModelReward, RuleJudge, rate
from tests.llm_cases import RESPONSES, encode, make_model, make_tokenizer

pytestmark = pytest.mark.llm

PROMPT = "hello "


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def test_probability_is_the_logistic_of_the_difference() -> None:
    judge = BradleyTerryJudge(length, scale=0.5)
    assert judge.probability(PROMPT, "abc", "a") == pytest.approx(1 / (1 + math.exp(-1.0)))
    assert judge.probability(PROMPT, "a", "abc") == pytest.approx(1 / (1 + math.exp(1.0)))
    assert BradleyTerryJudge(length, scale=0.0).probability(PROMPT, "abc", "a") == 0.5


@pytest.mark.statistical
def test_answers_have_their_probability_and_their_seed() -> None:
    judge, again, other = (BradleyTerryJudge(length, scale=0.5, seed=seed) for seed in (0, 0, 1))
    answers = [judge(PROMPT, "abc", "a") for _ in range(4000)]
    chance = judge.probability(PROMPT, "abc", "a")
    assert set(answers) == {0.0, 1.0}
    assert abs(sum(answers) / 4000 - chance) <= 4 * math.sqrt(chance * (1 - chance) / 4000)
    assert [again(PROMPT, "abc", "a") for _ in range(50)] == answers[:50]
    assert [other(PROMPT, "abc", "a") for _ in range(50)] != answers[:50]


def test_rules_know_ties() -> None:
    judge = RuleJudge(length, tie=1.0)
    assert [judge(PROMPT, first, "aaa") for first in ("aaaaa", "aaaa", "aaa", "aa", "a")] == [1.0, 0.5, 0.5, 0.5, 0.0]


def test_a_judges_taste_is_learned() -> None:
    chooser = ResponseSelector(make_model(prior_scale=10.0), make_tokenizer(), acquisition="infomax")
    judge = RuleJudge(length)
    answers = ["hello", "a", "hello world good", "bad"]
    for _ in range(30):
        first, second = chooser.select_pair(PROMPT, answers)
        label = judge(PROMPT, answers[first], answers[second])
        chooser.learn(PROMPT, chosen=answers[first], rejected=answers[second], label=label)
    assert chooser.scores(PROMPT, answers).argsort().tolist() == [1, 3, 0, 2]


def test_a_models_reward_is_its_logit() -> None:
    model = make_model()
    with torch.no_grad():
        model.head.mean.copy_(torch.linspace(-1, 1, 32))
    wanted = model(*encode([PROMPT + text for text in RESPONSES])).logits[:, 0]
    reward = ModelReward(model.train(), make_tokenizer(), batch_size=3)
    assert reward([PROMPT] * 4, RESPONSES) == pytest.approx(wanted.tolist(), abs=1e-5)
    assert model.training
    best = int(wanted.argmax())
    worst = int(wanted.argmin())
    assert RuleJudge(reward)(PROMPT, RESPONSES[best], RESPONSES[worst]) == 1.0


def classifier(labels: int) -> LlamaForSequenceClassification:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=24, pad_token_id=2, num_labels=labels, max_position_embeddings=64, **sizes)
    return LlamaForSequenceClassification(config).eval()


def test_any_model_with_one_logit_is_a_reward() -> None:
    model, tokenizer = classifier(1), make_tokenizer()
    rewards = ModelReward(model, tokenizer)([PROMPT] * 4, RESPONSES)
    ids, mask = encode([PROMPT + RESPONSES[0]])
    assert rewards[0] == pytest.approx(model(input_ids=ids, attention_mask=mask).logits.item(), abs=1e-5)
    with pytest.raises(
        ParameterError, match=r"model of ModelReward must return one logit per text; got shape \(1, 2\)"
    ):
        ModelReward(classifier(2), tokenizer)([PROMPT], ["good"])


@pytest.mark.usefixtures("without_shape_checks")
def test_what_is_refused() -> None:
    for value, rule in (([1.0], "return one value per response"), ([1.0, math.nan], "return finite values")):
        with pytest.raises(ParameterError, match=f"reward of a judge must {rule}"):
            rate(lambda prompts, responses, value=value: value, [PROMPT] * 2, ["a", "b"])
    with pytest.raises(ParameterError, match="scale of BradleyTerryJudge must be a finite number >= 0"):
        BradleyTerryJudge(length, scale=-1.0)
    with pytest.raises(ParameterError, match="tie of RuleJudge must be a finite number >= 0"):
        RuleJudge(length, tie=-1.0)
    with pytest.raises(ParameterError, match="model of ModelReward must be a transformers model; got str"):
        ModelReward("a name", make_tokenizer())
