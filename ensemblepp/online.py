"""OnlineBandit: one decision at a time, rewards in any order and time, state that survives restarts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ensemblepp import checkpoint
from ensemblepp.acquisition import choice_shares
from ensemblepp.agents.linear import LinearEnsemblePP
from ensemblepp.agents.neural import NeuralEnsemblePP
from ensemblepp.errors import (
    CheckpointError,
    DivergenceError,
    ParameterError,
    check_choice,
    check_int,
    check_real,
)
from ensemblepp.linear import largest_target
from ensemblepp.types import Transition

_OWNER = "OnlineBandit"
_KIND = "online bandit"
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class OnlineDecision:
    """One decision.

    Attributes:
        token: Names the decision in `learn` and `discard`.
        arm: The chosen row of the features, or the chosen arm id with per-arm posteriors.
        scores: (arms,), the posterior sample that the choice maximised; -inf for masked arms.
        probability: Estimated chance of choosing this arm, for off-policy evaluation; None unless asked for.
    """

    token: int
    arm: int
    scores: NDArray[np.float64]
    probability: float | None = None


class OnlineBandit:
    """An Ensemble++ learner behind two verbs: `decide` now, `learn` when the reward is known.

    Build it with `OnlineBandit.linear` or `OnlineBandit.neural`. It takes and returns plain numbers and numpy arrays.
    Every decision's random perturbation is drawn with the decision and kept with its token, so a linear posterior after
    a set of rewards does not depend on the order in which they arrive (a network trains on them as they come); rewards
    that never arrive change nothing.

    Not thread-safe: guard one bandit with one lock.
    """

    def __init__(
        self, agent: LinearEnsemblePP | NeuralEnsemblePP, options: Mapping[str, Any], max_pending: int
    ) -> None:
        self._agent = agent
        self._options = dict(options)
        self._max_pending = check_int("max_pending", _OWNER, max_pending)
        self._pending: OrderedDict[int, tuple[int, Tensor, Tensor]] = OrderedDict()
        self._next_token = 0

    @classmethod
    def linear(
        cls,
        feature_dim: int,
        *,
        num_arms: int | None = None,
        index_dim: int | None = None,
        exploration_scale: float = 1.0,
        noise_scale: float = 1.0,
        prior_mean: float = 0.0,
        prior_covariance: float = 1.0,
        max_pending: int = 10_000,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
    ) -> OnlineBandit:
        """Return a bandit whose mean reward is linear in the features.

        Args:
            feature_dim: d, number of features of an arm (or of the context, with `num_arms`).
            num_arms: None: each call brings one row of features per arm, so arms come and go freely. A number K: each
                call brings one context, and every one of K arms has a posterior of its own.
            index_dim: M, number of ensemble members; None means max(16, ceil(1.3 d)).
            exploration_scale: 1 is Thompson sampling; smaller values explore less, 0 is greedy.
            noise_scale: Standard deviation of the rewards around their mean, in reward units.
            prior_mean: Prior mean of every weight.
            prior_covariance: Prior variance of every weight. Raising it explores more at the start.
            max_pending: Decisions kept while they wait for their reward; beyond it the oldest is forgotten.
            dtype: "float32" or "float64".
            device: Any torch device.
            seed: Root of all randomness.

        Raises:
            ParameterError: A value that breaks a rule, by name.
        """
        options: dict[str, Any] = {
            "feature_dim": feature_dim,
            "num_arms": num_arms,
            "index_dim": index_dim,
            "exploration_scale": exploration_scale,
            "noise_scale": noise_scale,
            "prior_mean": prior_mean,
            "prior_covariance": prior_covariance,
            "dtype": dtype,
            "device": device,
            "seed": seed,
        }
        return cls._build(LinearEnsemblePP, options, max_pending)

    @classmethod
    def neural(
        cls,
        feature_dim: int,
        *,
        num_arms: int | None = None,
        head: str = "exact",
        index_dim: int = 8,
        acquisition: str = "thompson",
        exploration_scale: float = 1.0,
        prior_scale: float | None = None,
        reward_scale: float | None = None,
        noise_scale: float | None = None,
        hidden_dims: Sequence[int] = (64, 64),
        learning_rate: float = 1e-3,
        updates_per_step: int = 4,
        batch_size: int = 128,
        replay_capacity: int = 10_000,
        max_pending: int = 10_000,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
    ) -> OnlineBandit:
        """Return a bandit whose mean reward is a network of the features; see `NeuralEnsemblePP`.

        Every `learn` trains on `updates_per_step` minibatches, so its time is bounded, whatever the number of data:
        with the exact head a rebuild on at most `replay_capacity` data comes on top every 20 rewards.

        Args:
            feature_dim: d, number of features of an arm (or of the context, with `num_arms`).
            num_arms: None: each call brings one row of features per arm, so arms come and go freely. A number K: each
                call brings one context, and every one of K arms has an output of its own.
            head: "exact" (closed form on learned features) or "sgd".
            index_dim: M, number of ensemble members.
            acquisition: "thompson", "ucb" or "greedy".
            exploration_scale: 1 is Thompson sampling; smaller values explore less. The width of "ucb" in posterior
                standard deviations.
            prior_scale: Prior standard deviation of the mean reward in standard deviations of the reward; None means
                the head's own default.
            reward_scale: Standard deviation of the rewards, in reward units; None measures it. Tell it where you can,
                1 for clicks for instance: what was measured so far cannot know of rarer, larger rewards.
            noise_scale: Standard deviation of the rewards around their mean, in reward units; None estimates it.
            hidden_dims: Widths of the network's ReLU layers.
            learning_rate: Adam's step size.
            updates_per_step: Minibatches per `learn`.
            batch_size: Data per minibatch.
            replay_capacity: Data kept; the oldest are overwritten.
            max_pending: Decisions kept while they wait for their reward; beyond it the oldest is forgotten.
            dtype: "float32" or "float64".
            device: Any torch device.
            seed: Root of all randomness.

        Raises:
            ParameterError: A value that breaks a rule, by name.
        """
        options: dict[str, Any] = {
            "feature_dim": feature_dim,
            "num_arms": num_arms,
            "head": head,
            "index_dim": index_dim,
            "acquisition": acquisition,
            "exploration_scale": exploration_scale,
            "prior_scale": prior_scale,
            "reward_scale": reward_scale,
            "noise_scale": noise_scale,
            "hidden_dims": list(hidden_dims),
            "learning_rate": learning_rate,
            "updates_per_step": updates_per_step,
            "batch_size": batch_size,
            "replay_capacity": replay_capacity,
            "dtype": dtype,
            "device": device,
            "seed": seed,
        }
        return cls._build(NeuralEnsemblePP, options, max_pending)

    @classmethod
    def _build(
        cls,
        kind: type[LinearEnsemblePP | NeuralEnsemblePP],
        options: Mapping[str, Any],
        max_pending: int,
    ) -> OnlineBandit:
        dtype = check_choice("dtype", _OWNER, options["dtype"], _DTYPES)
        return cls(kind(**{**options, "dtype": _DTYPES[dtype]}), options, max_pending)

    @property
    def num_pending(self) -> int:
        """Number of decisions that wait for their reward."""
        return len(self._pending)

    @property
    def num_arms(self) -> int | None:
        """Number of per-arm posteriors; None when features come with the arms."""
        return self._agent.num_arms

    def decide(
        self, features: ArrayLike, mask: ArrayLike | None = None, *, num_probability_samples: int = 0
    ) -> OnlineDecision:
        """Choose an arm.

        Args:
            features: (arms, feature_dim), one row per arm offered now; with per-arm posteriors (feature_dim,).
                Any real dtype.
            mask: (arms,) booleans, True where the arm may be chosen; None allows all.
            num_probability_samples: S posterior samples to estimate `probability` with: the share of samples, the
                decision's own among them, that choose its arm. It is never zero, and its standard error is about
                sqrt(p (1 - p) / S). 0 skips the estimate.

        Raises:
            ParameterError: Shapes that do not fit, non-finite features of an allowed arm, or a mask that allows none.
                Nothing has changed.
        """
        check_int("num_probability_samples", _OWNER, num_probability_samples, minimum=0)
        contexts = self._as_contexts(features)
        num_arms = self.num_arms if self.num_arms is not None else contexts.shape[2]
        allowed = None if mask is None else self._as_mask(mask, num_arms)
        agent = self._agent
        with agent.streams.rollback():
            decision = agent.act(contexts, allowed)
            assert decision.arm is not None
            assert decision.scores is not None
            scores = decision.scores if allowed is None else decision.scores.where(allowed, -torch.inf)
            arm = int(decision.arm)
            probability = None
            if num_probability_samples:
                probability = self._probability(contexts, allowed, scores[0], arm, num_probability_samples)
            perturbation = agent.draw_perturbation(1)
            assert perturbation is not None
        token = self._next_token
        self._next_token += 1
        self._pending[token] = (arm, decision.features[0, 0], perturbation[0, 0])
        if len(self._pending) > self._max_pending:
            self._pending.popitem(last=False)
        return OnlineDecision(token, arm, scores[0, 0].double().numpy(force=True), probability)

    def learn(self, token: int, reward: float) -> None:
        """Learn the reward of the decision that `token` names; each token is learned once, in any order.

        Raises:
            KeyError: The token is unknown, was learned or discarded before, or was forgotten (see `max_pending`).
            ParameterError: The reward is not a finite number; the token stays open.
            DivergenceError: Training became non-finite (neural bandits).
        """
        reward = check_real("reward", f"{_OWNER}.learn", reward)
        limit = largest_target(self._agent.dtype)
        reward = check_real("reward", f"{_OWNER}.learn", reward, at_least=-limit, at_most=limit)
        arm, features, perturbation = self._find(token)
        device = features.device
        self._agent.update(
            Transition(
                features=features.view(1, 1, -1),
                reward=torch.full((1, 1), reward, dtype=features.dtype, device=device),
                arm=torch.full((1, 1), arm, device=device),
                perturbation=perturbation.view(1, 1, -1),
            )
        )
        del self._pending[token]
        if isinstance(self._agent, NeuralEnsemblePP) and int(self._agent.stopped) >= 0:
            raise DivergenceError(
                f"training of {_OWNER} became non-finite after {int(self._agent.stopped)} rewards; from now on it "
                "chooses uniformly. Load an earlier save, or lower learning_rate"
            )

    def discard(self, token: int) -> None:
        """Give up on the reward of a decision, as if it had never been made.

        Raises:
            KeyError: As `learn`.
        """
        self._find(token)
        del self._pending[token]

    def discount(self, factor: float, *, keep_prior: bool = False) -> None:
        """Forget: weigh everything learned so far by `factor` in (0, 1]; late rewards count as arriving now.

        Args:
            factor: 1 keeps all; 0.99 once a day halves the weight of the past in 69 days.
            keep_prior: Put the forgotten share of the prior back, so that uncertainty never exceeds the prior's.
                Without it, uncertainty about what is no longer seen grows without bound. A neural bandit's prior
                stays in any case, so there it must be True.

        Raises:
            ParameterError: A factor outside (0, 1], or `keep_prior=False` with a neural bandit.
        """
        self._agent.discount(factor, keep_prior=keep_prior)

    def add_arms(self, count: int = 1) -> range:
        """Append arms that start from the prior and return their ids (per-arm posteriors only).

        Raises:
            ParameterError: Features come with the arms, so that new arms need no adding.
        """
        first = self.num_arms or 0
        self._agent.add_arms(count)
        return range(first, first + count)

    def save(self, path: str | Path) -> None:
        """Write posterior, open decisions and random streams to one file, atomically."""
        pending = list(self._pending.values())
        state: dict[str, Any] = {
            "model": "neural" if isinstance(self._agent, NeuralEnsemblePP) else "linear",
            "options": self._options | {"num_arms": self.num_arms},
            "max_pending": self._max_pending,
            "next_token": self._next_token,
            "tokens": list(self._pending),
            "arms": [arm for arm, _, _ in pending],
            "agent": self._agent.state_dict(),
        }
        if pending:
            state["features"] = torch.stack([features for _, features, _ in pending])
            state["perturbations"] = torch.stack([perturbation for _, _, perturbation in pending])
        checkpoint.save(path, state, kind=_KIND)

    @classmethod
    def load(cls, path: str | Path, *, device: str | None = None) -> OnlineBandit:
        """Return the bandit saved at `path`; on the saved device it continues identically.

        Args:
            path: File written by `save`.
            device: Where to continue; None means where it was saved.

        Raises:
            FileNotFoundError: No such file.
            CheckpointError: The file is damaged or holds something else.
        """
        state = checkpoint.load(path, kind=_KIND)
        try:
            options = state["options"] | ({} if device is None else {"device": device})
            build = cls.neural if state.get("model") == "neural" else cls.linear
            bandit = build(**options, max_pending=state["max_pending"])
            bandit._agent.load_state_dict(state["agent"])
            bandit._next_token = state["next_token"]
            target = bandit._agent.device
            rows = zip(
                state["tokens"],
                state["arms"],
                state.get("features", torch.empty(0)).to(target),
                state.get("perturbations", torch.empty(0)).to(target),
                strict=True,
            )
            bandit._pending.update((token, (arm, features, z)) for token, arm, features, z in rows)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} does not hold a complete bandit ({error})") from error
        return bandit

    def _find(self, token: int) -> tuple[int, Tensor, Tensor]:
        try:
            return self._pending[token]
        except KeyError:
            raise KeyError(
                f"token {token!r} of OnlineBandit is not open: unknown, learned or discarded before, "
                f"or older than the last {self._max_pending} open decisions (max_pending)"
            ) from None

    def _as_contexts(self, features: ArrayLike) -> Tensor:
        array = np.asarray(features)
        if array.dtype.kind not in "fiub":
            raise ParameterError("features", _OWNER, "be real numbers", array.dtype)
        axes = "(arms, feature_dim)" if self.num_arms is None else "(feature_dim,)"
        shape_fits = array.ndim == (2 if self.num_arms is None else 1) and array.shape[-1] == self._agent.feature_dim
        if not shape_fits or array.size == 0:
            raise ParameterError(
                "features", _OWNER, f"have shape {axes} with feature_dim = {self._agent.feature_dim}", array.shape
            )
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64 if array.dtype.kind in "iu" else None))
        return tensor.to(self._agent.device, self._agent.dtype)[None, None]

    def _as_mask(self, mask: ArrayLike, num_arms: int) -> Tensor:
        array = np.asarray(mask)
        if array.dtype != np.bool_ or array.shape != (num_arms,):
            raise ParameterError(
                "mask", _OWNER, f"be booleans of shape ({num_arms},)", f"{array.dtype} of shape {array.shape}"
            )
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._agent.device)[None, None]

    def _probability(self, contexts: Tensor, mask: Tensor | None, own: Tensor, arm: int, count: int) -> float:
        """Return the share of `count` posterior samples, the decision's own first, that choose `arm`."""
        index = self._agent.draw_index(count - 1) if count > 1 else None
        samples = own
        if index is not None:
            many = contexts.expand(-1, count - 1, *contexts.shape[2:])
            samples = torch.cat([own, self._agent.scores(many, index)[0]])
        shares = choice_shares(samples, None if mask is None else mask[0, 0])
        return float(shares[arm])
