import json

import pytest
import yaml

from tasks.config import (
    STAGES,
    ConfigError,
    Params,
    dump_params,
    json_schema,
    known_stage,
    load_params,
    parse_params,
)
from tests.shared import ROOT

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
ALGORITHMS = sorted((ROOT / "configs" / "algorithms").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_valid_and_round_trips(path):
    params = load_params(path)
    assert parse_params(yaml.safe_load(dump_params(params)), "dump") == params


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda p: p.stem)
def test_every_algorithm_goes_over_every_task(path):
    """It changes what makes the algorithm and leaves the task alone."""
    for task in RECIPES:
        below, above = load_params(task), load_params([task, path])
        for section in ("seed", "model", "prompt", "prepare", "validation", "rewards", "evaluate"):
            assert getattr(above, section) == getattr(below, section)


def test_a_later_file_stands_over_an_earlier_one(tmp_path):
    (tmp_path / "a.yaml").write_text("{seed: 3, rl: {beta: 0.1, num_steps: 4, reward_funcs: [math, format]}}")
    (tmp_path / "b.yaml").write_text("{rl: {beta: 0.2, reward_funcs: [math]}}")
    params = load_params([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["rl.num_steps=5"])
    assert (params.seed, params.rl.beta, params.rl.num_steps, params.rl.reward_funcs) == (3, 0.2, 5, ["math"])
    (tmp_path / "b.yaml").write_text("{rl: {betta: 0.2}}")
    with pytest.raises(ConfigError, match=r"a.yaml \+ .*b.yaml: unknown key 'rl.betta'; did you mean 'beta'"):
        load_params([tmp_path / "a.yaml", tmp_path / "b.yaml"])


def test_the_trees_params_are_the_default_recipe_spelled_out():
    """DVC sees changes of values, not of defaults, so the tree's file holds every value."""
    path = ROOT / "params.yaml"
    assert load_params(path) == load_params(ROOT / "configs" / "arithmetic-smollm2.yaml")
    assert yaml.safe_load(path.read_text()) == load_params(path).to_dict()


def test_stages_are_those_of_dvc_yaml():
    assert tuple(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]) == STAGES


def test_every_field_has_a_sentence():
    schema = json.loads(json_schema())
    for name, definition in [("Params", schema), *schema["$defs"].items()]:
        for key, field in definition.get("properties", {}).items():
            assert field.get("description", "").strip().endswith("."), f"{name}.{key} has no sentence"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rl.betta=1", "unknown key 'rl.betta'; did you mean 'beta'?"),
        ("vaildate.min_rows={}", "unknown key 'vaildate'; did you mean 'validate'?"),
        (
            "rl.num_generations=1",
            "num_generations 1 is no group for advantage_estimator group; give at least 2",
        ),
        ("rl.beta=much", "rl.beta = 'much': Input should be a valid number"),
        ("rl.beta=-1", "rl.beta = -1: Input should be greater than or equal to 0"),
        ("rl.num_steps=2.5", "rl.num_steps = 2.5: Input should be a valid integer"),
        ("sft.enabled=1", "sft.enabled = 1: Input should be a valid boolean"),
        ("rl.loss_type=ppo", "Input should be 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo' or 'sapo'"),
        ("rl.delta=1.1", "delta 1.1 is inside the clip range; expected at least 1 + epsilon_high = 1.2"),
        ("rl.kl_target=0.1", "kl_target adapts beta, which is 0"),
        ("evaluate.k=[64]", "k [64] exceeds num_samples"),
        ("rl.reward_weights=[1, 2]", "reward_weights has 2 entries, reward_funcs has 1"),
        (
            "rl={supervision: process, advantage_estimator: rloo}",
            "advantage_estimator rloo does not go with supervision process",
        ),
        ("rl={supervision: process, advantage_estimator: gae}", "set advantage_estimator: group"),
        ("rl={supervision: process, kl_in: reward}", "kl_in reward does not go with supervision process"),
        (
            "rl={supervision: process, importance_sampling_level: sequence}",
            "set importance_sampling_level: token",
        ),
        (
            "rewards.steps.separator=''",
            "rewards.steps.separator = '': String should have at least 1 character",
        ),
        ("prompt.template=no place", "must contain {question}"),
        ("reward_model.enabled=true", "reward_model.enabled = True needs the pairs of stage preferences"),
        ("dpo.enabled=true", "dpo.enabled = True needs the pairs of stage preferences"),
        ("rl.reward_funcs=[model]", "`model` is the reward model; set reward_model.enabled: true"),
        ("rl.iterative={iterations: 3}", "iterative.iterations 3 must divide num_steps 16"),
        ("rl.iterative={iterations: 2}", "would change nothing: beta 0 has no reference to reset"),
        (
            "rl.iterative={reward_model_steps: 5}",
            "iterative.reward_model_steps 5 are taken between iterations",
        ),
        (
            "rl.iterative={iterations: 2, reward_model_steps: 5}",
            "5 train the reward model, and reward_funcs ['math'] don't use it; add model",
        ),
        ("rl.iterative={replay: 0.98}", "replay 0.98 of batch_size 16 leaves no place for a new pair"),
        ("rl.curriculum={enabled: true}", "rl.curriculum.enabled = True needs solve rates; set preferences"),
        ("rl.curriculum={above: 0.5, below: 0.5}", "above 0.5 must be less than below 0.5"),
        ("validate.language={languages: [xx]}", "languages 'xx': unknown; accepted: af, am"),
        (
            "validate.contamination={ngrams: 3}",
            "unknown key 'validate.contamination.ngrams'; did you mean 'ngram'",
        ),
        ("rl", "expected key=value"),
        ("seed.x=1", "'seed' is a value, not a section"),
    ],
)
def test_bad_settings_are_named(override, message):
    with pytest.raises(ConfigError) as error:
        load_params(ROOT / "params.yaml", [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rl.beta=0.1", "rl.sync_ref_model=true", "rl.iterative={iterations: 2}"],
            "iterative.iterations 2 and sync_ref_model are two rules for one reference",
        ),
        (
            ["rl.reward_funcs=[model]", "rl.iterative={iterations: 2, reward_model_steps: 5}"],
            "`model` is the reward model; set reward_model.enabled: true",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(overrides, message):
    with pytest.raises(ConfigError) as error:
        load_params(ROOT / "params.yaml", overrides)
    assert message in str(error.value)


def test_numbers_written_without_a_dot_are_numbers():
    params = load_params(ROOT / "params.yaml", ["rl.optimizer.learning_rate=1e-6"])
    assert params.rl.optimizer.learning_rate == 1e-6


def test_a_missing_or_malformed_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such file"):
        load_params(tmp_path / "nowhere.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"bad.yaml: not valid YAML"):
        load_params(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("[1]")
    with pytest.raises(ConfigError, match="holds list, expected sections"):
        load_params(tmp_path / "list.yaml")


def test_unknown_stages_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown stage 'evalute'; did you mean 'evaluate'\?"):
        known_stage("evalute")


def test_defaults_are_valid():
    assert parse_params(Params().to_dict(), "defaults") == Params()
