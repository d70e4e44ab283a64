"""Environments, one file per problem."""

from ensemblepp.envs.classification import ClassificationBandit
from ensemblepp.envs.datasets import DATASETS, ClassificationData, load_dataset
from ensemblepp.envs.deep_sea import DeepSea, DeepSeaEnv
from ensemblepp.envs.duels import PreferenceDuels
from ensemblepp.envs.gym import BanditEnv, register_environments
from ensemblepp.envs.gym_value import GymValue, VectorGymValue
from ensemblepp.envs.linear import LinearBandit
from ensemblepp.envs.moderation import ModerationBandit
from ensemblepp.envs.mushroom_lottery import MushroomLottery
from ensemblepp.envs.nonlinear import (
    NeuralClassificationBandit,
    NeuralRegressionBandit,
    PoolBandit,
    QuadraticBandit,
    VectorQuadraticBandit,
)
from ensemblepp.envs.posts import Posts, hashed_features, load_posts
from ensemblepp.envs.wheel import WheelBandit

__all__ = [
    "DATASETS",
    "BanditEnv",
    "ClassificationBandit",
    "ClassificationData",
    "DeepSea",
    "DeepSeaEnv",
    "GymValue",
    "LinearBandit",
    "ModerationBandit",
    "MushroomLottery",
    "NeuralClassificationBandit",
    "NeuralRegressionBandit",
    "PoolBandit",
    "Posts",
    "PreferenceDuels",
    "QuadraticBandit",
    "VectorGymValue",
    "VectorQuadraticBandit",
    "WheelBandit",
    "hashed_features",
    "load_dataset",
    "load_posts",
]

register_environments()

if __name__ != "ensemblepp.envs":
    raise ImportError(f"the folder envs is the package ensemblepp.envs: import ensemblepp.envs, not {__name__}")
