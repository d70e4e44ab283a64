"""The selector as a reward function of TRL's trainers: `GRPOTrainer(reward_funcs=EnsembleReward(selector), ...)`.

Nothing here imports TRL; `pip install ensemblepp[trl]` installs what the trainers need.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ensemblepp.errors import ParameterError, check_int
from ensemblepp.llm.selector import ResponseSelector
from ensemblepp.llm.texts import Prompt

_OWNER = "EnsembleReward"

Judge = Callable[[Prompt, str, str], float]


class EnsembleReward:
    """Rewards of completions by the posterior, with learning from a judge while the policy trains.

    With a judge, the completions of each prompt first become questions: the selector's acquisition picks pairs, the
    judge answers, the head learns. Then all completions get their reward: the posterior mean, or one posterior
    sample per prompt, whose index all completions of that prompt share, so that the policy is trained towards what may
    be good (Thompson sampling) rather than what is known to be.

    Args:
        selector: Holds model, posterior and acquisition.
        sample: Return posterior samples instead of the mean.
        judge: From prompt and two responses to the probability that the first is preferred, for example one of
            `ensemblepp.llm.oracles`; None: the posterior stays as it is.
        num_questions: Questions per prompt and step.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Ensemble++ (arXiv 2407.13195); online alignment by Thompson sampling as in arXiv 2411.01493.
    """

    __name__ = "ensemble_reward"  # trainers log the reward under this name

    def __init__(
        self, selector: ResponseSelector, *, sample: bool = False, judge: Judge | None = None, num_questions: int = 1
    ) -> None:
        if not isinstance(selector, ResponseSelector):
            raise ParameterError("selector", _OWNER, "be a ResponseSelector", type(selector).__name__)
        self.selector = selector
        self.sample = bool(sample)
        self.judge = judge
        self.num_questions = check_int("num_questions", _OWNER, num_questions)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Any], **columns: Any) -> list[float]:
        """Return the reward of every completion.

        Args:
            prompts: A prompt per completion: strings or chats. Equal prompts form one group.
            completions: Strings, or lists of messages whose contents are joined.
            **columns: What trainers pass besides: completion ids, trainer state, columns of the data set. Not used.

        Raises:
            ParameterError: Numbers that differ, or a completion of another type.
        """
        if len(prompts) != len(completions):
            rule = f"have one entry per prompt ({len(prompts)})"
            raise ParameterError("completions", _OWNER, rule, len(completions))
        texts = [completion_text(each) for each in completions]
        groups: dict[str, list[int]] = {}
        for place, prompt in enumerate(prompts):
            groups.setdefault(json.dumps(prompt), []).append(place)
        members = list(groups.values())
        asked = [prompts[group[0]] for group in members]
        responses = [[texts[place] for place in group] for group in members]
        if self.judge is not None:
            for _ in range(self.num_questions):
                self._ask(asked, responses, self.judge)
        rewards = [0.0] * len(texts)
        scores = self.selector.scores(asked, responses, num_samples=int(self.sample))
        for group, values in zip(members, scores, strict=True):
            for place, value in zip(group, values.flatten().tolist(), strict=True):
                rewards[place] = value
        return rewards

    def _ask(self, prompts: Sequence[Prompt], responses: Sequence[list[str]], judge: Judge) -> None:
        """Ask the judge about one pair of every prompt that has two different responses, and learn."""
        open_ = [place for place, group in enumerate(responses) if len(set(group)) > 1]
        if not open_:
            return
        prompts, responses = [prompts[place] for place in open_], [responses[place] for place in open_]
        pairs: Any = self.selector.select_pair(prompts, responses)
        first = [group[pair[0]] for group, pair in zip(responses, pairs, strict=True)]
        second = [group[pair[1]] for group, pair in zip(responses, pairs, strict=True)]
        label = [judge(*question) for question in zip(prompts, first, second, strict=True)]
        self.selector.learn(prompts, chosen=first, rejected=second, label=label)


def completion_text(completion: Any) -> str:
    """Return the text of a completion: a string, or messages.

    Raises:
        ParameterError: Neither.
    """
    if isinstance(completion, str):
        return completion
    contents: list[Any] = [each.get("content") for each in completion] if isinstance(completion, Sequence) else [None]
    if not all(isinstance(content, str) for content in contents):
        raise ParameterError("completions", _OWNER, "be strings or lists of messages", repr(completion)[:80])
    return "".join(contents)
