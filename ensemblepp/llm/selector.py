"""Choose responses by posterior samples of their reward, and learn from the answers in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ensemblepp import checkpoint
from ensemblepp.errors import ParameterError, check_choice, check_int, check_real
from ensemblepp.heads import IndexedOutput
from ensemblepp.llm.features import FeatureExtractor
from ensemblepp.llm.head import SamplerHead
from ensemblepp.llm.reward_model import EnsembleRewardModel
from ensemblepp.llm.texts import check_chat, join
from ensemblepp.pairs import PAIRS, SINGLES, select_pair, select_response
from ensemblepp.preferences import PreferenceLearner
from ensemblepp.seeding import Streams

_OWNER = "ResponseSelector"
_KIND = "response selector"

Answers: TypeAlias = str | Sequence[str]


class ResponseSelector:
    """Thompson sampling over the responses of a language model.

    The backbone turns prompt and response into features once; a `PreferenceLearner` on them holds the posterior. All
    responses of one prompt share an index, so a draw is joint, and equal responses score alike up to rounding. The last
    1,024 texts are remembered, so that `learn` after a choice takes no forward pass: it moves the head alone and writes
    it back into the model, which can be saved and used as a reward model at any time.

    Every method takes one prompt with its responses, or a list of prompts with a list of responses each, of any
    lengths. A prompt is a string or a chat (a list of messages).

    Args:
        model: An `EnsembleRewardModel`; its backbone is not trained here.
        tokenizer: The backbone's tokenizer; None loads it from where the backbone came from.
        acquisition: A rule of `ensemblepp.pairs`: "greedy", "thompson", "ucb", "double_thompson", "best_arm",
            "infomax", "information_gain", "delta_ucb", "uniform" or "passive". Which one is best depends on the goal:
            double_thompson shows good responses, infomax learns the reward with the fewest questions.
        exploration_scale: Multiplies posterior standard deviations in every rule. Raising it explores more.
        exact: Act on Laplace's exact posterior instead of the M members: d instead of M columns per response.
        max_length: Tokens kept per text, the last ones; None: what tokenizer and backbone can take.
        batch_size: Texts per forward pass.
        cache: A file that keeps features across processes; see `FeatureExtractor`.
        noise_scale: Standard deviation of scalar rewards given to `learn`.
        capacity: Answers kept; the oldest are forgotten.
        seed: Root of the random streams.

    Raises:
        ParameterError: A value that breaks a rule, by name.

    Source: Ensemble++ (arXiv 2407.13195); exploration for preferences as in arXiv 2402.00396 and 2411.01493.
    """

    def __init__(
        self,
        model: EnsembleRewardModel,
        tokenizer: Any = None,
        *,
        acquisition: str = "double_thompson",
        exploration_scale: float = 1.0,
        exact: bool = False,
        max_length: int | None = None,
        batch_size: int = 16,
        cache: str | Path | None = None,
        noise_scale: float = 1.0,
        capacity: int = 10_000,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, EnsembleRewardModel):
            remedy = "With adapters, pass model.get_base_model()." if hasattr(model, "get_base_model") else ""
            raise ParameterError("model", _OWNER, "be an EnsembleRewardModel", type(model).__name__, remedy)
        self.model = model
        self.tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        self.extractor = FeatureExtractor(
            model.backbone,
            self.tokenizer,
            pooling=model.config.pooling,
            batch_size=batch_size,
            max_length=max_length,
            cache=cache,
        )
        self.acquisition = check_choice("acquisition", _OWNER, acquisition, PAIRS)
        self.exploration_scale = check_real("exploration_scale", _OWNER, exploration_scale, at_least=0.0)
        self.exact = bool(exact)
        self._streams = Streams(seed, "act")
        self.learner = self._build_learner(noise_scale, check_int("capacity", _OWNER, capacity), seed)

    def _build_learner(self, noise_scale: float, capacity: int, seed: int) -> PreferenceLearner:
        """Return a learner whose prior is the head's: its mean and members as they are now."""
        head, config = self.model.head, self.model.config
        prior_scale = check_real("prior_scale", _OWNER, config.prior_scale, above=0.0)
        learner = PreferenceLearner(
            len(head.prior),
            index_dim=config.index_dim,
            prior_scale=prior_scale,
            noise_scale=noise_scale,
            capacity=capacity,
            seed=seed,
        )
        learner.start_from(head.mean.detach().cpu(), head.prior.cpu())
        return learner

    def scores(self, prompt: Any, responses: Any, *, num_samples: int = 0) -> Tensor | list[Tensor]:
        """Return the posterior mean of every response, or joint posterior samples of all of them.

        Args:
            prompt: One prompt, or a list of prompts.
            responses: Its responses, or a list of responses for each prompt.
            num_samples: S; 0 returns the mean (responses,), otherwise samples (S, responses) from the act stream. One
                forward pass serves any S.

        Returns:
            A tensor, or one per prompt.
        """
        sets, single = self._gather(prompt, responses)
        output, mask = self._output(sets)
        if check_int("num_samples", _OWNER, num_samples, minimum=0):
            size = (len(sets), num_samples, output.members.shape[-1])
            index = self.exploration_scale * torch.randn(size, generator=self._streams["act"])
            values = output.sample(index)
        else:
            values = output.mean
        each = [value[..., keep] for value, keep in zip(values, mask, strict=True)]
        return each[0] if single else each

    def select(self, prompt: Any, responses: Any) -> int | list[int]:
        """Return the position of the response to show: one per prompt.

        Raises:
            ParameterError: The acquisition is a rule for pairs alone, or there is no response.
        """
        sets, single = self._gather(prompt, responses)
        check_choice("acquisition", f"{_OWNER}.select", self.acquisition, SINGLES)
        output, mask = self._output(sets)
        chosen: list[int] = select_response(self.acquisition, output, mask, **self._options()).tolist()
        return chosen[0] if single else chosen

    def select_pair(self, prompt: Any, responses: Any) -> tuple[int, int] | list[tuple[int, int]]:
        """Return the positions of the two different responses to ask a judge about: one pair per prompt.

        Two copies of one text are never a pair, unless there is nothing else.

        Raises:
            ParameterError: Fewer than two responses.
        """
        sets, single = self._gather(prompt, responses)
        output, mask = self._output(sets)
        for row, group in zip(mask, sets, strict=True):
            originals = [text not in group[:place] for place, text in enumerate(group)]
            if sum(originals) > 1:
                row[: len(group)] = torch.tensor(originals)
        first, second = select_pair(self.acquisition, output, mask, **self._options())
        pairs = list(zip(first.tolist(), second.tolist(), strict=True))
        return pairs[0] if single else pairs

    def learn(
        self,
        prompt: Any,
        chosen: Answers | None = None,
        rejected: Answers | None = None,
        *,
        label: float | Sequence[float] | Tensor = 1.0,
        margin: float | Sequence[float] | Tensor = 0.0,
        response: Answers | None = None,
        reward: float | Sequence[float] | Tensor | None = None,
    ) -> None:
        """Learn from judged pairs, or from scalar rewards; either one or a list of each.

        Args:
            prompt: One prompt, or a list of prompts.
            chosen: The response that a judge preferred.
            rejected: The other one.
            label: Probability with which `chosen` is preferred: 1 is certain, 0.5 a tie.
            margin: By how much, in logits, a preferred response has to be better.
            response: A response with a scalar reward, instead of a pair.
            reward: Its reward.

        Raises:
            ParameterError: Neither or both forms, numbers of entries that differ, values out of range. Nothing has
                been learned.
        """
        pairs, rewards = (chosen, rejected), (response, reward)
        complete = [all(part is not None for part in form) for form in (pairs, rewards)]
        empty = [all(part is None for part in form) for form in (pairs, rewards)]
        if not (complete[0] and empty[1]) and not (complete[1] and empty[0]):
            rule = "be given as chosen and rejected, or as response and reward"
            parts = {"chosen": chosen, "rejected": rejected, "response": response, "reward": reward}
            given = ", ".join(name for name, part in parts.items() if part is not None)
            raise ParameterError("the answer", f"{_OWNER}.learn", rule, given or "nothing")
        single = is_single(prompt)
        prompts = [prompt] if single else list(prompt)
        if chosen is not None and rejected is not None:
            texts = [self._texts(prompts, part, name) for part, name in ((chosen, "chosen"), (rejected, "rejected"))]
            first, second = self._features(texts[0] + texts[1]).unsqueeze(0).chunk(2, dim=1)
            values = [self._numbers(v, len(prompts), n) for v, n in ((label, "label"), (margin, "margin"))]
            self.learner.learn(first, second, *values)
        elif response is not None and reward is not None:
            phi_one = self._features(self._texts(prompts, response, "response")).unsqueeze(0)
            self.learner.learn_scalar(phi_one, self._numbers(reward, len(prompts), "reward"))
        self._write_head()

    def _texts(self, prompts: list[Any], part: Answers, name: str) -> list[str]:
        parts = [part] if isinstance(part, str) else list(part)
        if len(parts) != len(prompts):
            raise ParameterError(name, f"{_OWNER}.learn", f"have one entry per prompt ({len(prompts)})", len(parts))
        return [join(self.tokenizer, prompt, each) for prompt, each in zip(prompts, parts, strict=True)]

    @staticmethod
    def _numbers(value: float | Sequence[float] | Tensor, count: int, name: str) -> Tensor:
        value = value.tolist() if hasattr(value, "tolist") else value  # tensors and arrays
        values = [value] * count if isinstance(value, (int, float)) else list(value)
        if len(values) != count:
            raise ParameterError(name, f"{_OWNER}.learn", f"have one entry per prompt ({count})", len(values))
        return torch.tensor([[check_real(name, f"{_OWNER}.learn", each) for each in values]], dtype=torch.float32)

    @torch.no_grad()
    def _write_head(self) -> None:
        head = self.model.head
        head.mean.copy_(self.learner.mean[0])
        head.members.copy_(self.learner.factor[0].to(head.prior) - head.prior_scale * head.prior)

    def _options(self) -> dict[str, Any]:
        return {"generator": self._streams["act"], "scale": self.exploration_scale}

    def _gather(self, prompt: Any, responses: Any) -> tuple[list[list[str]], bool]:
        """Return the texts of every prompt's responses, and whether one prompt stood alone."""
        single = is_single(prompt)
        prompts = [prompt] if single else list(prompt)
        groups = [responses] if single else list(responses)
        if len(groups) != len(prompts):
            rule = f"have one list per prompt ({len(prompts)})"
            raise ParameterError("responses", _OWNER, rule, len(groups))
        for group in groups:
            if isinstance(group, str) or not isinstance(group, Sequence) or not group:
                raise ParameterError("responses", _OWNER, "be a non-empty list of strings", repr(group)[:80])
        joined = [[join(self.tokenizer, p, each) for each in group] for p, group in zip(prompts, groups, strict=True)]
        return joined, single

    def _output(self, sets: list[list[str]]) -> tuple[IndexedOutput, Tensor]:
        """Return mean and members (prompts, responses, ...) of ragged sets, and which of them are real."""
        flat = self._features([text for group in sets for text in group])
        scored = self.learner.scores(flat.unsqueeze(0), exact=self.exact)
        counts = torch.tensor([len(group) for group in sets])
        mask = torch.arange(int(counts.max())) < counts.unsqueeze(-1)
        mean = torch.zeros(mask.shape).masked_scatter(mask, scored.mean[0])
        members = torch.zeros(*mask.shape, scored.members.shape[-1])
        members[mask] = scored.members[0]
        return IndexedOutput(mean, members), mask

    def _features(self, texts: list[str]) -> Tensor:
        """Return phi of every text, (texts, dim), whatever mode the model is in."""
        return SamplerHead.phi(self.extractor(texts))

    def save(self, path: str | Path) -> None:
        """Write head, stored answers and random streams; the backbone is saved by `model.save_pretrained`."""
        settings = {
            "acquisition": self.acquisition,
            "exploration_scale": self.exploration_scale,
            "exact": self.exact,
            "noise_scale": self.learner.noise_scale,
            "capacity": self.learner.replay.capacity,
            "max_length": self.extractor.max_length,
            "batch_size": self.extractor.batch_size,
        }
        state = {"settings": settings, "learner": self.learner.state_dict(), "streams": self._streams.state_dict()}
        checkpoint.save(path, state, kind=_KIND)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: EnsembleRewardModel,
        tokenizer: Any = None,
        *,
        cache: str | Path | None = None,
    ) -> ResponseSelector:
        """Return the saved selector on a model with the same backbone; its next choices are the uninterrupted one's.

        Raises:
            CheckpointError: The file is damaged or belongs to something else.
            ParameterError: The model has other sizes.
        """
        state = checkpoint.load(path, kind=_KIND)
        selector = cls(model, tokenizer, cache=cache, **state["settings"])
        selector.learner.load_state_dict(state["learner"])
        selector._streams.load_state_dict(state["streams"])
        selector._write_head()
        return selector


def is_single(prompt: Any) -> bool:
    """Return whether this is one prompt (a string or a chat) rather than a list of prompts.

    Raises:
        ParameterError: Neither.
    """
    if isinstance(prompt, str):
        return True
    if not isinstance(prompt, Sequence) or not prompt:
        raise ParameterError("prompt", _OWNER, "be a string, a chat, or a non-empty list of them", repr(prompt)[:80])
    if all(isinstance(each, dict) for each in prompt):
        check_chat(prompt)
        return True
    return False


def load_tokenizer(model: EnsembleRewardModel) -> Any:
    """Return the tokenizer of the folder or name that the backbone was loaded from.

    Raises:
        ParameterError: The model was built from a module and does not know one.
    """
    from transformers import AutoTokenizer

    name = getattr(model.backbone, "name_or_path", "") or model.name_or_path
    if not name:
        raise ParameterError("tokenizer", _OWNER, "be given for a backbone without a name", None)
    return AutoTokenizer.from_pretrained(name)
