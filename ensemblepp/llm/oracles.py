"""Judges to measure against: who says which of two responses is better, by a reward that is known.

A reward is any callable from prompts and completions of equal number to as many floats, the signature of TRL's reward
functions. A judge is a callable from a prompt and two responses to the probability, or the answer, that the first is
preferred: what `ResponseSelector.learn` takes as `label`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ensemblepp.errors import ParameterError, check_int, check_real
from ensemblepp.llm.features import tokenize, usable_length
from ensemblepp.llm.texts import Prompt, join
from ensemblepp.seeding import make_generator

Reward: TypeAlias = Callable[[Sequence[Prompt], Sequence[str]], Sequence[float]]


def rate(reward: Reward, prompts: Sequence[Prompt], responses: Sequence[str]) -> Tensor:
    """Return the rewards (responses,) in float64.

    Raises:
        ParameterError: The callable returns another number of values, or values that are not finite.
    """
    values = torch.as_tensor(list(reward(prompts, responses)), dtype=torch.float64)
    if values.shape != (len(responses),):
        rule = f"return one value per response ({len(responses)})"
        raise ParameterError("reward", "a judge", rule, f"shape {tuple(values.shape)}")
    if not bool(torch.isfinite(values).all()):
        raise ParameterError("reward", "a judge", "return finite values", values.tolist())
    return values


class BradleyTerryJudge:
    """Answers at random: the first is preferred with probability sigmoid(scale * (r(first) - r(second))).

    Args:
        reward: r, see the module.
        scale: Multiplies the reward. Raising it makes the judge surer.
        seed: Root of the answers' random stream.

    Source: Bradley and Terry (1952), Rank analysis of incomplete block designs.
    """

    def __init__(self, reward: Reward, *, scale: float = 1.0, seed: int = 0) -> None:
        self._reward = reward
        self._scale = check_real("scale", "BradleyTerryJudge", scale, at_least=0.0)
        self._generator = make_generator(seed, "judge")

    def probability(self, prompt: Prompt, first: str, second: str) -> float:
        """Return the probability that `first` is preferred."""
        rewards = rate(self._reward, [prompt, prompt], [first, second])
        return float(torch.sigmoid(self._scale * (rewards[0] - rewards[1])))

    def __call__(self, prompt: Prompt, first: str, second: str) -> float:
        """Return 1.0 where `first` is preferred, else 0.0."""
        chance = self.probability(prompt, first, second)
        return float(torch.rand((), generator=self._generator, dtype=torch.float64) < chance)


class RuleJudge:
    """Answers without noise: 1.0 for the higher reward, 0.5 where the two differ by at most `tie`.

    Args:
        reward: A rule or script, see the module.
        tie: Largest difference that counts as none, in reward units.
    """

    def __init__(self, reward: Reward, *, tie: float = 0.0) -> None:
        self._reward = reward
        self._tie = check_real("tie", "RuleJudge", tie, at_least=0.0)

    def __call__(self, prompt: Prompt, first: str, second: str) -> float:
        """Return 1.0, 0.0 or 0.5: is `first` preferred?"""
        rewards = rate(self._reward, [prompt, prompt], [first, second])
        gap = float(rewards[0] - rewards[1])
        return 0.5 if abs(gap) <= self._tie else float(gap > 0)


class ModelReward:
    """The reward of a reward model: any transformers model with one logit per text, ours among them.

    Args:
        model: Returns `.logits` (texts, 1).
        tokenizer: Its tokenizer.
        batch_size: Texts per forward pass.
        max_length: Tokens kept per text, the last ones.
    """

    def __init__(self, model: Any, tokenizer: Any, *, batch_size: int = 16, max_length: int | None = None) -> None:
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise ParameterError("model", "ModelReward", "be a transformers model", type(model).__name__)
        self._model, self._tokenizer = model, tokenizer
        self._batch_size = check_int("batch_size", "ModelReward", batch_size)
        owner: Any = model
        backbone = getattr(owner, owner.base_model_prefix, owner)  # whose settings hold the length
        self._max_length = usable_length(tokenizer, backbone, max_length)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> list[float]:
        """Return the reward of every response."""
        texts = [join(self._tokenizer, prompt, each) for prompt, each in zip(prompts, responses, strict=True)]
        device, was_training = next(self._model.parameters()).device, self._model.training
        rewards: list[float] = []
        self._model.eval()
        try:
            for start in range(0, len(texts), self._batch_size):
                ids, mask = tokenize(self._tokenizer, texts[start : start + self._batch_size], self._max_length)
                logits = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
                if logits.shape != (len(ids), 1):
                    rule = "return one logit per text"
                    raise ParameterError("model", "ModelReward", rule, f"shape {tuple(logits.shape)}")
                rewards += logits[:, 0].float().tolist()
        finally:
            self._model.train(was_training)
        return rewards
