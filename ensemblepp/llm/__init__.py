"""The sampler on language models: features, an ensemble reward model, and the choice of responses.

Needs `pip install ensemblepp[llm]` (transformers and peft). One forward pass of the backbone gives any number of
posterior samples; learning from an answer moves the head alone, in milliseconds.
"""

try:
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError("ensemblepp.llm needs transformers; install it with: pip install 'ensemblepp[llm]'") from error

from ensemblepp.llm.features import FeatureExtractor
from ensemblepp.llm.reward_model import EnsembleRewardConfig, EnsembleRewardModel, EnsembleRewardOutput
from ensemblepp.llm.selector import ResponseSelector

__all__ = [
    "EnsembleRewardConfig",
    "EnsembleRewardModel",
    "EnsembleRewardOutput",
    "FeatureExtractor",
    "ResponseSelector",
]
