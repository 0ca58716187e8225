"""Settings of everything that learns or is graded: the sections of `params.yaml` that `training/` reads.

Every model refuses keys it does not know and values of another type; `tasks.config` turns those refusals
into messages that name the key, the value and what would be accepted.
"""

from training.config.base import Count, Fraction, PositiveReal, Real, Section
from training.config.data import PromptConfig, SourceConfig, SplitsConfig
from training.config.hygiene import (
    ContaminationConfig,
    LanguageConfig,
    LeaksConfig,
    LengthsConfig,
    NearDuplicatesConfig,
    UnicodeConfig,
)
from training.config.learners import (
    CurriculumConfig,
    DPOConfig,
    EvaluateConfig,
    IterativeConfig,
    LoraConfig,
    OptimizerConfig,
    PreferencesConfig,
    RewardModelConfig,
    RLConfig,
    SFTConfig,
    VLLMConfig,
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
    "ContaminationConfig",
    "Count",
    "CurriculumConfig",
    "DPOConfig",
    "EvaluateConfig",
    "FormatRewardConfig",
    "Fraction",
    "IterativeConfig",
    "JudgeRewardConfig",
    "LanguageConfig",
    "LanguageRewardConfig",
    "LeaksConfig",
    "LengthsConfig",
    "LoraConfig",
    "MathRewardConfig",
    "ModelConfig",
    "NearDuplicatesConfig",
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
    "UnicodeConfig",
    "VLLMConfig",
]
