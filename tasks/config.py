"""`params.yaml`: one section a stage, plus the settings that several stages share.

`load_params` reads and checks a file; its errors name the key, the bad value and what would be accepted.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from training.config import (
    ContaminationConfig,
    Count,
    DPOConfig,
    EvaluateConfig,
    Fraction,
    LanguageConfig,
    LeaksConfig,
    LengthsConfig,
    ModelConfig,
    NearDuplicatesConfig,
    PositiveReal,
    PreferencesConfig,
    PromptConfig,
    Real,
    RewardModelConfig,
    RewardsConfig,
    RLConfig,
    Section,
    SFTConfig,
    SourceConfig,
    SplitsConfig,
    UnicodeConfig,
)
from training.errors import BadInput

StageName = Literal[
    "model", "prepare", "validate", "sft", "preferences", "dpo", "reward_model", "rl", "evaluate", "report"
]
STAGES: tuple[StageName, ...] = get_args(StageName)
"""Every stage in a valid order of execution; `dvc.yaml` holds the graph."""


class ConfigError(BadInput):
    """A setting that can't be used; the message names the key, the value and what would be accepted."""


class PrepareConfig(Section):
    """From sources to data/prepared/{train,validation,test}.parquet."""

    sources: Annotated[list[SourceConfig], Field(min_length=1)] = [
        SourceConfig(
            kind="reasoning_gym",
            task="chain_sum",
            size=400,
            settings={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        )
    ]
    """Where the questions come from, in order."""
    splits: SplitsConfig = SplitsConfig()
    """How `split: auto` sources are divided."""
    mixture_rows: Count | None = None
    """Rows of a train split that is mixed by weights; null means as many as there are without repeating one."""
    near_duplicates: Annotated[Real, Field(gt=0, le=1)] | None = 0.9
    """Train questions this similar to a held-out or an earlier train one are left out (see validate.near_duplicates); null keeps them."""


class ValidateConfig(Section):
    """Great Expectations gate over the prepared splits."""

    max_completion_tokens: Count = 512
    """Longest reference completion, in tokens."""
    min_rows: dict[Literal["train", "validation", "test"], Annotated[int, Field(ge=0)]] = {
        "train": 1,
        "validation": 0,
        "test": 1,
    }
    """Fewest rows each split may have."""
    min_accepted_answers: Fraction = 1.0
    """Share of the answers that the task's own grader must accept as right."""
    near_duplicates: NearDuplicatesConfig = NearDuplicatesConfig()
    """Train questions that repeat others in almost the same words."""
    contamination: ContaminationConfig = ContaminationConfig()
    """Evaluation questions in the train split."""
    leaks: LeaksConfig = LeaksConfig()
    """Answers that stand in the question."""
    lengths: LengthsConfig = LengthsConfig()
    """Outliers of length."""
    language: LanguageConfig = LanguageConfig()
    """Questions in an unexpected script."""
    unicode: UnicodeConfig = UnicodeConfig()
    """Characters that hide something."""


class ReportConfig(Section):
    """The page that shows what the run bought."""

    title: str = "Gradeline run"
    """Title of the page."""
    examples: Count = 24
    """Completions shown per model."""


TIMEOUT_MINUTES: dict[StageName, float] = {
    "model": 60.0, "prepare": 60.0, "validate": 60.0, "sft": 1440.0, "preferences": 720.0, "dpo": 1440.0,
    "reward_model": 1440.0, "rl": 4320.0, "evaluate": 720.0, "report": 60.0
}  # fmt: skip


RL_MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reference": (("start", "base", "sft", "dpo"), ("causal",)),
    "value_model": (("policy", "trunk", "reward_model"), ("causal", "reward")),
    "reward_model": (("stage",), ("reward",)),
}
"""Keys of `rl` that choose a model: what they call the pipeline's own, and the kinds of model.more they take."""


class FlowConfig(Section):
    """How patient a flow is; nothing here changes what a stage computes, so no stage depends on it."""

    timeout_minutes: Annotated[
        dict[StageName, PositiveReal],
        AfterValidator(lambda given: TIMEOUT_MINUTES | given),
    ] = TIMEOUT_MINUTES
    """Minutes after which a stage's processes are ended; stages left out keep their default."""
    retries: Annotated[int, Field(ge=0)] = 2
    """Times a stage that failed for a passing reason is tried again; bad input and out of memory never are."""
    retry_delay_seconds: Annotated[Real, Field(ge=0)] = 10.0
    """Seconds before the first retry; doubled before each further one."""


class Params(Section):
    """The whole of `params.yaml`."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    """Every random choice derives from this, the purpose, the step and the index."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where torch computes; auto takes CUDA when it is there."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of torch; 0 means one per physical core. The same number gives the same bytes."""
    model: ModelConfig = ModelConfig()
    """Stage `model`."""
    prompt: PromptConfig = PromptConfig()
    """How a question is shown to the model; shared by every stage that does so."""
    prepare: PrepareConfig = PrepareConfig()
    """Stage `prepare`."""
    validation: ValidateConfig = Field(default=ValidateConfig(), alias="validate")
    """Stage `validate`."""
    rewards: RewardsConfig = RewardsConfig()
    """How completions are graded; shared by validate, preferences, rl and evaluate."""
    sft: SFTConfig = SFTConfig()
    """Stage `sft`."""
    preferences: PreferencesConfig = PreferencesConfig()
    """Stage `preferences`."""
    dpo: DPOConfig = DPOConfig()
    """Stage `dpo`."""
    reward_model: RewardModelConfig = RewardModelConfig()
    """Stage `reward_model`."""
    rl: RLConfig = RLConfig()
    """Stage `rl`."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Stage `evaluate`."""
    report: ReportConfig = ReportConfig()
    """Stage `report`."""
    flow: FlowConfig = FlowConfig()
    """Time-outs and retries of a flow."""

    @model_validator(mode="after")
    def _stages_have_what_they_read(self) -> Params:
        for stage in ("dpo", "reward_model"):
            if self.section(stage).enabled and not self.preferences.enabled:  # type: ignore[attr-defined]
                raise ValueError(
                    f"{stage}.enabled = True needs the pairs of stage preferences; set preferences.enabled: true"
                )
        asked = "model" in self.rl.reward_funcs and self.rl.reward_model == "stage"
        if self.rl.enabled and asked and not self.reward_model.enabled:
            raise ValueError(
                f"rl.reward_funcs = {self.rl.reward_funcs}: `model` is the reward model; set reward_model.enabled: true"
            )
        curriculum = self.rl.curriculum
        if self.rl.enabled and curriculum.enabled and curriculum.path is None:
            sampled = self.preferences.enabled and self.preferences.source == "rollouts"
            if not sampled:
                raise ValueError(
                    "rl.curriculum.enabled = True needs solve rates; set preferences.enabled: true (with source rollouts), "
                    "whose samples give them, or rl.curriculum.path"
                )
        return self

    @model_validator(mode="after")
    def _rls_models_are_there(self) -> Params:
        for key, (own, kinds) in RL_MODELS.items():
            value = getattr(self.rl, key)
            further = self.model.more.get(value)
            if value not in own and (further is None or further.kind not in kinds):
                what = "unknown" if further is None else f"model.more.{value} is of kind {further.kind}"
                fitting = [name for name, given in self.model.more.items() if given.kind in kinds]
                raise ValueError(
                    f"rl.{key} = {value!r}: {what}; accepted: {', '.join([*own, *fitting])} "
                    f"(model.more may hold others of kind {' or '.join(kinds)})"
                )
        if self.rl.enabled and self.rl.value_model == "reward_model" and not self.reward_model.enabled:
            raise ValueError(
                "rl.value_model = 'reward_model': no reward model is trained; set reward_model.enabled: true"
            )
        return self

    def section(self, stage: str) -> Section:
        """The section of one stage, by the stage's name."""
        return self.validation if stage == "validate" else getattr(self, stage)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in `params.yaml`."""
        return self.model_dump(mode="json", by_alias=True)


def load_params(path: Path | Sequence[Path], overrides: list[str] | None = None) -> Params:
    """Read a file, or several laid over each other, apply `key=value` overrides (dotted keys, YAML values), check.

    A later file's value stands; sections are merged key by key, lists are taken whole.
    Raises ConfigError naming the file, key, value and what would be accepted.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    data: dict[str, Any] = {}
    for part in paths:
        data = merged(data, _read(part))
    for override in overrides or []:
        _apply(data, override)
    return parse_params(data, " + ".join(map(str, paths)))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`below` with the values of `above` in their place, section by section."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; a recipe is a YAML file such as those in configs/"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: holds {type(data).__name__}, expected sections such as {', '.join(STAGES)}"
        )
    return data


def parse_params(data: dict[str, Any], origin: str) -> Params:
    """Check plain values (as read from YAML); `origin` names them in errors."""
    try:
        return Params.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {_explain(item, data)}" for item in error.errors())) from None


def dump_params(params: Params) -> str:
    """`params.yaml` with every value spelled out, defaults included."""
    return yaml.safe_dump(params.to_dict(), sort_keys=False, allow_unicode=True)


def json_schema() -> str:
    """JSON Schema of `params.yaml`, for editors."""
    return json.dumps(Params.model_json_schema(by_alias=True), indent=2) + "\n"


def known_stage(name: str) -> str:
    """`name` if it is a stage; ConfigError with the nearest one otherwise."""
    if name not in STAGES:
        raise ConfigError(f"unknown stage {name!r}{_nearest(name, STAGES)}; stages are {', '.join(STAGES)}")
    return name


def flatten(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys and texts of nested values; lists are JSON."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append(
                (
                    f"{prefix}{key}",
                    json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value),
                )
            )
    return rows


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"override {override!r}: expected key=value, for example rl.beta=0.04")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
    *parents, leaf = key.split(".")
    node = data
    for name in parents:
        node = node.setdefault(name, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {name!r} is a value, not a section")
    node[leaf] = value


def _explain(item: Any, data: Any) -> str:
    location = [str(part) for part in item["loc"]]
    if item["type"] == "value_error" and not location:  # about several sections: the message names the keys
        return str(item["msg"]).removeprefix("Value error, ")
    key = ".".join(location) or "(top level)"
    if item["type"] == "extra_forbidden":
        siblings = _fields_at(item["loc"][:-1], data)
        return f"unknown key {key!r}{_nearest(location[-1], siblings)}; accepted here: {', '.join(siblings)}"
    whole = item["type"] == "missing" or isinstance(item["input"], dict)  # the message names the value itself
    shown = "" if whole else f" = {_short(item['input'])}"
    return f"{key}{shown}: {item['msg'].removeprefix('Value error, ')}"


def _fields_at(location: tuple[Any, ...], data: Any) -> list[str]:
    model: type[BaseModel] = Params
    for part in location:
        if isinstance(part, int):
            continue
        field = next((f for n, f in model.model_fields.items() if part in (n, f.alias)), None)
        found = None if field is None else _model_in(field.annotation)
        if found is None:
            return []
        model = found
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _model_in(argument)) is not None:
            return found
    return None


def _nearest(name: str, valid: list[str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
