"""The selector as a reward function: groups, samples, learning from a judge, and inside TRL's own trainers."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra [llm]")

from ensemblepp.errors import ParameterError
from ensemblepp.llm import ResponseSelector
from ensemblepp.llm.oracles import RuleJudge
from ensemblepp.llm.trl import EnsembleReward, completion_text
from tests.llm_cases import make_backbone, make_model, make_tokenizer

pytestmark = pytest.mark.llm

PROMPTS = ["hello ", "hello ", "yes ", "hello ", "yes "]
COMPLETIONS = ["good", "bad", "good", "good", "a b"]


def selector(**options) -> ResponseSelector:
    chooser = ResponseSelector(make_model(), make_tokenizer(), **{"seed": 3, **options})
    chooser.learn("hello ", chosen="good", rejected="bad")
    return chooser


def length(prompts, responses):
    return [float(len(response)) for response in responses]


def test_rewards_are_the_selectors_means_in_the_order_given() -> None:
    chooser = selector()
    rewards = EnsembleReward(chooser)(PROMPTS, COMPLETIONS, completion_ids=[[1]] * 5, trainer_state=None)
    wanted = [float(chooser.scores(p, [c])[0]) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    assert rewards == pytest.approx(wanted, abs=1e-5)
    assert all(type(reward) is float for reward in rewards)
    assert EnsembleReward(chooser).__name__ == "ensemble_reward"


def test_completions_of_a_prompt_share_an_index() -> None:
    reward = EnsembleReward(selector(), sample=True)
    one, two = reward(PROMPTS, COMPLETIONS), reward(PROMPTS, COMPLETIONS)
    assert one[0] == pytest.approx(one[3], abs=1e-5)
    assert two[0] == pytest.approx(two[3], abs=1e-5)
    assert abs(one[0] - two[0]) > 1e-3
    alike = reward(["hello ", "hello  "], ["good", "good"])  # other prompts, other indices, almost equal features
    assert abs(alike[0] - alike[1]) > 1e-3


def test_a_judge_is_asked_once_per_prompt_and_learned_from() -> None:
    asked = []

    def judge(prompt, first, second):
        asked.append((prompt, first, second))
        return RuleJudge(length)(prompt, first, second)

    chooser = selector()
    before = chooser.learner.replay.size
    reward = EnsembleReward(chooser, judge=judge, num_questions=2)
    reward(PROMPTS, COMPLETIONS)
    assert [prompt for prompt, *_ in asked] == ["hello ", "yes "] * 2
    assert all(first != second for _, first, second in asked)
    assert chooser.learner.replay.size == before + 4
    reward(["no ", "no "], ["good", "good"])  # nothing to ask about
    assert chooser.learner.replay.size == before + 4
    for _ in range(20):
        rewards = reward(["yes ", "yes "], ["good", "a b"])
    assert rewards[0] > rewards[1]


def test_chats_are_read_as_trainers_write_them() -> None:
    chooser = selector()
    chat = [{"role": "user", "content": "hello"}]
    rewards = EnsembleReward(chooser)(
        [chat] * 2, [[{"role": "assistant", "content": text}] for text in ("good", "bad")]
    )
    torch.testing.assert_close(torch.tensor(rewards), chooser.scores(chat, ["good", "bad"]))
    assert completion_text([{"role": "assistant", "content": "a"}, {"role": "tool", "content": "b"}]) == "ab"


@pytest.mark.usefixtures("without_shape_checks")
def test_what_is_refused() -> None:
    reward = EnsembleReward(selector())
    with pytest.raises(
        ParameterError, match=r"completions of EnsembleReward must have one entry per prompt \(2\); got 1"
    ):
        reward(PROMPTS[:2], ["good"])
    for bad in (3, [{"role": "assistant"}]):
        with pytest.raises(ParameterError, match="completions of EnsembleReward must be strings or lists of messages"):
            reward(["hello "], [bad])
    with pytest.raises(ParameterError, match="selector of EnsembleReward must be a ResponseSelector; got int"):
        EnsembleReward(3)
    with pytest.raises(ParameterError, match="num_questions of EnsembleReward must be an int >= 1"):
        EnsembleReward(selector(), num_questions=0)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_reward_model_trains_in_the_reward_trainer(tmp_path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra [trl]")
    datasets = pytest.importorskip("datasets", reason="needs the extra [trl]")
    model, tokenizer = make_model(freeze_backbone=False), make_tokenizer()
    prior = model.head.prior.clone()
    pairs = datasets.Dataset.from_dict({"chosen": ["hello good yes"] * 8, "rejected": ["hello bad"] * 8})
    settings = trl.RewardConfig(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    trl.RewardTrainer(model=model, args=settings, train_dataset=pairs, processing_class=tokenizer).train()
    good, bad = (
        model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, 0]
        for text in ("hello good yes", "hello bad")
    )
    assert good > bad
    assert torch.equal(model.head.prior.cpu(), prior)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_reward_model_itself_is_a_reward_in_grpo(tmp_path) -> None:
    trl = pytest.importorskip("trl", reason="needs the extra [trl]")
    datasets = pytest.importorskip("datasets", reason="needs the extra [trl]")
    tokenizer = make_tokenizer(padding_side="left")
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = trl.GRPOTrainer(
        model=make_backbone(causal=True),
        reward_funcs=make_model(),
        reward_processing_classes=make_tokenizer(),
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["hello", "yes"]}),
        processing_class=tokenizer,
    )
    trainer.train()
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert logged == [0.0]  # before any answer, every reward has mean 0
