"""Settings of everything that learns or is graded: the sections of `params.yaml` that `training/` reads.

Every model refuses keys it does not know and values of another type; `tasks.config` turns those refusals
into messages that name the key, the value and what would be accepted.
"""

from training.config.base import Count, Fraction, PositiveReal, Real, Section
from training.config.data import PromptConfig, SourceConfig, SplitsConfig
from training.config.learners import (
    DPOConfig,
    EvaluateConfig,
    IterativeConfig,
    LoraConfig,
    OptimizerConfig,
    PreferencesConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
)
from training.config.models import TAKEN_NAMES, CheckpointConfig, ModelConfig, ScratchModelConfig
from training.config.rewards import (
    CodeRewardConfig,
    FormatRewardConfig,
    JudgeRewardConfig,
    LanguageRewardConfig,
    MathRewardConfig,
    OverlongRewardConfig,
    ReasoningGymRewardConfig,
    RepetitionRewardConfig,
    RewardsConfig,
    StepsConfig,
)

__all__ = [
    "TAKEN_NAMES",
    "CheckpointConfig",
    "CodeRewardConfig",
    "Count",
    "DPOConfig",
    "EvaluateConfig",
    "FormatRewardConfig",
    "Fraction",
    "IterativeConfig",
    "JudgeRewardConfig",
    "LanguageRewardConfig",
    "LoraConfig",
    "MathRewardConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongRewardConfig",
    "PositiveReal",
    "PreferencesConfig",
    "PromptConfig",
    "RLConfig",
    "Real",
    "ReasoningGymRewardConfig",
    "RepetitionRewardConfig",
    "RewardModelConfig",
    "RewardsConfig",
    "SFTConfig",
    "ScratchModelConfig",
    "Section",
    "SourceConfig",
    "SplitsConfig",
    "StepsConfig",
]
