"""A transformers model with the sampler head: one forward pass, any number of posterior samples of the reward."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import ModelOutput

from ensemblepp.errors import ParameterError, check_choice, check_int, check_real
from ensemblepp.heads import IndexedOutput
from ensemblepp.llm.features import find_trunk, hidden_states
from ensemblepp.llm.head import SamplerHead
from ensemblepp.llm.pooling import POOLINGS, infer_mask, pool

_OWNER = "EnsembleRewardModel"


class EnsembleRewardConfig(PreTrainedConfig):
    """Settings of an `EnsembleRewardModel`; see there."""

    model_type = "ensemblepp_reward"

    def __init__(
        self,
        backbone: dict[str, Any] | None = None,
        index_dim: int = 16,
        prior_scale: float = 1.0,
        pooling: str = "last",
        freeze_backbone: bool = True,
        **options: Any,
    ) -> None:
        self.backbone = backbone
        self.index_dim = check_int("index_dim", _OWNER, index_dim)
        self.prior_scale = check_real("prior_scale", _OWNER, prior_scale, at_least=0.0)
        self.pooling = check_choice("pooling", _OWNER, pooling, POOLINGS)
        self.freeze_backbone = bool(freeze_backbone)
        super().__init__(**{"num_labels": 1, **options})

    @property
    def backbone_config(self) -> Any:
        """The backbone's own configuration."""
        if self.backbone is None:
            raise ParameterError("backbone", _OWNER, "be given", None, "Use EnsembleRewardModel.from_backbone.")
        settings = dict(self.backbone)
        return AutoConfig.for_model(settings.pop("model_type"), **settings)


@dataclass
class EnsembleRewardOutput(ModelOutput):
    """What an `EnsembleRewardModel` returns.

    Attributes:
        logits: (batch, 1), the reward under the given index, or its mean without one.
        members: (batch, M); `mean + members @ index` is one posterior sample, of all texts jointly.
        mean: (batch,), the posterior mean.
        features: (batch, dim), normalised features, for heads that learn by themselves.
    """

    logits: Tensor | None = None
    members: Tensor | None = None
    mean: Tensor | None = None
    features: Tensor | None = None


class EnsembleRewardModel(PreTrainedModel):
    """Reward of a text, with uncertainty: a backbone, pooling by mask, and a `SamplerHead` in float32.

    `logits[:, 0]` is a scalar reward, as reward trainers and reward functions expect it. Save and load with
    `save_pretrained` and `from_pretrained`; `AutoModel` and `AutoModelForSequenceClassification` know it as soon as
    this module is imported.

    Source: Ensemble++ (arXiv 2407.13195); reward models with an epistemic head as in arXiv 2402.00396.
    """

    config_class = EnsembleRewardConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ("head",)
    backbone: Any

    def __init__(self, config: EnsembleRewardConfig, backbone: nn.Module | None = None) -> None:
        super().__init__(config)
        self.backbone = AutoModel.from_config(config.backbone_config) if backbone is None else backbone
        dim = self.backbone.config.get_text_config().hidden_size
        self.head = SamplerHead(dim, config.index_dim, config.prior_scale)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Leave every weight as its owner made it: the backbone is loaded, and the head starts at zero."""

    @classmethod
    def from_backbone(
        cls,
        backbone: str | Path | nn.Module,
        *,
        index_dim: int = 16,
        prior_scale: float = 1.0,
        pooling: str = "last",
        freeze_backbone: bool = True,
        seed: int = 0,
        **load_options: Any,
    ) -> EnsembleRewardModel:
        """Put a fresh head on a backbone.

        Args:
            backbone: Folder or hub name, or a transformers model; a model is used, not copied, and a causal language
                model gives its trunk.
            index_dim: M.
            prior_scale: See `SamplerHead`.
            pooling: "last" for decoders, "mean" for sentence encoders.
            freeze_backbone: Compute features without gradients. The backbone's parameters themselves are left as they
                are; pass False to train it, whole or through LoRA.
            seed: Root of the prior functions.
            **load_options: For `AutoModel.from_pretrained`, when a name is given.

        Raises:
            ParameterError: A value that breaks a rule, by name.
        """
        if isinstance(backbone, nn.Module):
            if load_options:
                rule = "be given only with the name of a backbone"
                raise ParameterError(", ".join(load_options), _OWNER, rule, type(backbone).__name__)
            if hasattr(backbone, "get_base_model"):
                remedy = "Put adapters on the reward model instead, with modules_to_save=['head']."
                raise ParameterError("backbone", _OWNER, "be a model without adapters", type(backbone).__name__, remedy)
            trunk = find_trunk(backbone)
        else:
            trunk = AutoModel.from_pretrained(backbone, **load_options)
        settings = {**trunk.config.to_dict(), "model_type": trunk.config.model_type}
        config = EnsembleRewardConfig(
            settings,
            index_dim=index_dim,
            prior_scale=prior_scale,
            pooling=pooling,
            freeze_backbone=freeze_backbone,
            pad_token_id=trunk.config.pad_token_id,
            eos_token_id=trunk.config.eos_token_id,
        )
        model = cls(config, backbone=trunk)
        model.head.draw_prior(seed)
        return model

    def features(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the pooled features (batch, dim) in float32, with gradients unless the backbone is frozen."""
        if attention_mask is None:
            attention_mask = infer_mask(input_ids, self.config.pad_token_id, self.config.eos_token_id)
        if self.training and self.config.freeze_backbone and self._has_adapters():
            raise ParameterError("freeze_backbone", _OWNER, "be False to train adapters", True)
        frozen = torch.no_grad() if self.config.freeze_backbone else contextlib.nullcontext()
        with frozen:
            return pool(hidden_states(self.backbone, input_ids, attention_mask), attention_mask, self.config.pooling)

    def _has_adapters(self) -> bool:
        return any(p.requires_grad for name, p in self.backbone.named_parameters() if ".lora_" in name)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        index: Tensor | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> EnsembleRewardOutput | tuple[Tensor, ...]:
        """Score texts.

        Args:
            input_ids: Token ids (batch, tokens).
            attention_mask: 1 for real tokens. Needed where padding cannot be told from text.
            index: One index (M,) for all texts, or one each (batch, M); None: the posterior mean.
            return_dict: False returns a tuple (logits, members, mean, features).
            **ignored: use_cache and num_items_in_batch, which trainers pass to every model and which mean nothing here.

        Raises:
            ParameterError: An index of another shape, an unknown argument, or padding that cannot be told from text.
        """
        if unknown := sorted(ignored.keys() - _PASSED_BY_TRAINERS):
            raise ParameterError(unknown[0], _OWNER, "be an argument of forward", "an unknown name")
        features = self.features(input_ids, attention_mask)
        scored = self.head(features)
        output = IndexedOutput(scored.mean.squeeze(-1), scored.members.squeeze(-2))
        logits = output.mean if index is None else self._sample(output, index)
        result = EnsembleRewardOutput(logits.unsqueeze(-1), output.members, output.mean, self.head.phi(features))
        return result if return_dict is not False else result.to_tuple()

    def _sample(self, output: IndexedOutput, index: Tensor) -> Tensor:
        shapes = ((self.config.index_dim,), tuple(output.members.shape))
        if tuple(index.shape) not in shapes:
            raise ParameterError("index", _OWNER, f"have shape {shapes[0]} or {shapes[1]}", tuple(index.shape))
        return output.mean + (output.members * index.to(output.members)).sum(-1)

    def get_input_embeddings(self) -> nn.Module:
        """Return the backbone's token embeddings."""
        embeddings: nn.Module = self.backbone.get_input_embeddings()
        return embeddings


_PASSED_BY_TRAINERS = frozenset({"use_cache", "num_items_in_batch"})

AutoConfig.register(EnsembleRewardConfig.model_type, EnsembleRewardConfig)
AutoModel.register(EnsembleRewardConfig, EnsembleRewardModel)
AutoModelForSequenceClassification.register(EnsembleRewardConfig, EnsembleRewardModel)
