"""How models learn, and how they are evaluated: a section for every learner."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from training.config.base import Count, Fraction, PositiveReal, Real, Section


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) instead of full weights."""

    enabled: bool = False
    """Train adapters only."""
    r: Count = 16
    """Rank of the adapters."""
    alpha: PositiveReal = 32.0
    """Scale: the update is multiplied by alpha / r."""
    dropout: Fraction = 0.0
    """Dropout on the adapter's input; only 0 is reproducible across batch layouts."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Names of the layers that get an adapter, or all-linear."""
    quantization: Literal["nf4"] | None = None
    """`nf4` holds the frozen weights in 4 bits (QLoRA, arXiv:2305.14314); needs a CUDA GPU and bitsandbytes."""
    output: Literal["merged", "adapter"] = "merged"
    """Publish a whole model with the adapters merged in, or the adapters alone, naming the model they belong to."""

    @model_validator(mode="after")
    def _something_to_apply_to(self) -> LoraConfig:
        for key, off in (("quantization", None), ("output", "merged")):
            if getattr(self, key) != off and not self.enabled:
                raise ValueError(f"{key} {getattr(self, key)!r} is about adapters; set enabled: true with it")
        return self


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101) and its schedule."""

    learning_rate: PositiveReal = 1e-5
    """Peak step size."""
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """Shape of the decay after warm-up, down to 0 at the last step (constant: none)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from 0."""
    betas: list[Fraction] = [0.9, 0.999]
    """Decay rates of the first and second moment."""
    eps: PositiveReal = 1e-8
    """Term added to the denominator."""
    weight_decay: Annotated[Real, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    max_grad_norm: PositiveReal = 1.0
    """Gradients are scaled down to this global 2-norm."""

    @model_validator(mode="after")
    def _two_betas(self) -> OptimizerConfig:
        if len(self.betas) != 2:
            raise ValueError(f"betas {self.betas} must be two numbers in [0, 1)")
        return self


class SFTConfig(Section):
    """Supervised fine-tuning on prompt + reference completion."""

    enabled: bool = True
    """False: the stage writes a reference to the base model instead of weights."""
    num_steps: Count = 20
    """Optimizer steps."""
    batch_size: Count = 16
    """Examples per optimizer step."""
    max_length: Count = 512
    """Longest prompt + completion, in tokens; longer examples are dropped and counted, never cut."""
    micro_batch_tokens: Count = 2048
    """Tokens in one forward pass; sequences are packed up to it without seeing each other."""
    checkpoint_every: Count = 50
    """Optimizer steps between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5)
    """Optimizer of SFT."""
    lora: LoraConfig = LoraConfig()
    """Adapters instead of full weights."""


class PreferencesConfig(Section):
    """Pairs of completions of one prompt, one preferred to the other: what `dpo` and `reward_model` learn from."""

    enabled: bool = False
    """False: the stage writes a marker instead of pairs."""
    source: Literal["rollouts", "file", "hub"] = "rollouts"
    """`rollouts` samples from the SFT model and pairs completions by the grader's reward, `file` and `hub` read people's choices."""
    path: str | None = None
    """file: path (from the tree's root), glob or URL of .jsonl, .json, .csv (each also with .gz) or .parquet; hub: the id owner/name."""
    revision: str | None = None
    """hub: commit hash or tag; required, so that a rerun reads the same rows."""
    config: str | None = None
    """hub: name of the data set's configuration."""
    hub_split: str = "train"
    """hub: which of the data set's own splits to read."""
    format: Literal["columns", "hh"] = "columns"
    """file and hub: `columns` takes those named below; `hh` takes whole dialogues, `\\n\\nHuman: … \\n\\nAssistant: …`, without a prompt column."""
    skip_bad_rows: Annotated[int, Field(ge=0)] = 0
    """file and hub: rows that can't be used which may be left out, and are counted; one more ends the stage."""
    sha256: str | None = None
    """file: hex digest the file must have; null takes any. A changed file alone starts no rerun, a changed digest does."""
    prompt_column: str = "prompt"
    """file and hub: column with the prompt: a text, or chat messages of which the last is the user's."""
    chosen_column: str = "chosen"
    """file and hub: column with the preferred completion: a text, a chat message, or messages that end with it."""
    rejected_column: str = "rejected"
    """file and hub: column with the other completion, in any of the same forms."""
    margin_column: str | None = None
    """file and hub: column with a number that says how much better chosen is; null means 0 for every pair."""
    num_problems: Count | None = 256
    """rollouts: problems sampled, the first of the train split (which is in hash order); null means all."""
    num_samples: Annotated[int, Field(ge=2)] = 8
    """rollouts: completions per problem."""
    temperature: PositiveReal = 1.0
    """rollouts: sampling temperature."""
    max_completion_length: Count = 64
    """rollouts: longest completion, in tokens; one cut off there is not paired."""
    batch_size: Count = 128
    """rollouts: completions generated at once; bounds memory, never changes the samples' seeds."""
    max_pairs_per_problem: Count = 4
    """rollouts: most pairs made of one problem's completions, chosen at random where there are more."""
    validation: Annotated[Real, Field(gt=0, lt=1)] = 0.1
    """Share of the prompts, by a hash of their text, whose pairs are held out."""

    @model_validator(mode="after")
    def _complete(self) -> PreferencesConfig:
        if self.source in ("file", "hub") and self.path is None:
            raise ValueError(f"source {self.source} needs path")
        if self.source == "hub" and self.revision is None:
            raise ValueError(
                f"source hub {self.path!r} needs revision (a commit hash or tag), so that reruns read the same rows"
            )
        return self


class DPOConfig(Section):
    """Direct preference optimisation on pairs of completions (Rafailov et al. 2023, arXiv:2305.18290)."""

    enabled: bool = False
    """False: the stage writes a reference to the SFT model instead of weights."""
    beta: PositiveReal = 0.1
    """How strongly the policy is held to the reference (larger: closer); with ipo, the paper's tau."""
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    """`sigmoid` is DPO's own loss; `ipo` pulls the margin of mean log-ratios to 1 / (2 beta)."""
    label_smoothing: Annotated[Real, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs whose label is taken to be the wrong way round (conservative DPO); 0 with ipo."""
    num_steps: Count = 20
    """Optimizer steps."""
    batch_size: Count = 16
    """Pairs per optimizer step."""
    max_length: Count = 512
    """Longest prompt + completion, in tokens; a pair with a longer side is dropped and counted, never cut."""
    micro_batch_tokens: Count = 2048
    """Tokens in one forward pass (a pair's prompt once); pairs are packed without seeing each other."""
    checkpoint_every: Count = 50
    """Optimizer steps between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
    """Optimizer of DPO."""
    lora: LoraConfig = LoraConfig()
    """Adapters instead of full weights; the reference is then the same model with the adapters off."""

    @model_validator(mode="after")
    def _smoothing_has_a_loss(self) -> DPOConfig:
        if self.loss_type == "ipo" and self.label_smoothing:
            raise ValueError(
                f"label_smoothing {self.label_smoothing} goes with loss_type sigmoid; set it to 0 for ipo"
            )
        return self


class RewardModelConfig(Section):
    """A scalar reward learnt from preference pairs (InstructGPT: Ouyang et al. 2022, arXiv:2203.02155)."""

    enabled: bool = False
    """False: the stage writes a marker instead of weights."""
    init: Literal["sft", "base"] = "sft"
    """Model whose transformer the reward model starts from; its head is new."""
    supervision: Literal["outcome", "process"] = "outcome"
    """Where a pair is compared: at its end, or after each step (rewards.steps), for a reward model that judges steps."""
    num_steps: Count = 50
    """Optimizer steps."""
    batch_size: Count = 16
    """Pairs per optimizer step."""
    max_length: Count = 512
    """Longest prompt + completion, in tokens; a pair with a longer one is dropped and counted, never cut."""
    micro_batch_tokens: Count = 4096
    """Padded tokens in one forward pass; bounds memory, never changes the gradient."""
    margin: bool = False
    """Ask each pair's rewards to differ by the pair's margin (Llama 2: arXiv:2307.09288, eq. 2)."""
    center_rewards_coefficient: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the term that keeps rewards around 0 (Eisenstein et al. 2023, arXiv:2312.09244); 0.01 is usual."""
    checkpoint_every: Count = 50
    """Optimizer steps between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """Optimizer of the reward model."""
    lora: LoraConfig = LoraConfig()
    """Adapters in the transformer instead of full weights; the head is trained whole."""


class IterativeConfig(Section):
    """Iterative GRPO: outer iterations around the RL loop (Shao et al. 2024, arXiv:2402.03300, algorithm 1, §4.1.4)."""

    iterations: Count = 1
    """Outer iterations of num_steps / iterations steps; before each but the first the reference becomes the policy."""
    reward_model_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps of the reward model between iterations, on pairs of the last one's completions; 0 leaves it as it is."""
    replay: Fraction = 0.1
    """Share of a batch of the reward model, rounded to whole pairs, that are earlier ones: those it was first trained on and earlier iterations'."""
    batch_size: Count = 16
    """Pairs per optimizer step of the reward model, earlier ones included."""
    max_pairs_per_problem: Count = 4
    """Most pairs made of one group of completions, chosen at random where there are more."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="constant")
    """Optimizer of the reward model, one for all iterations; its loss is that of section reward_model."""

    @model_validator(mode="after")
    def _learns_something_new(self) -> IterativeConfig:
        if round(self.replay * self.batch_size) == self.batch_size:
            raise ValueError(
                f"replay {self.replay} of batch_size {self.batch_size} leaves no place for a new pair; lower replay"
            )
        return self


class CurriculumConfig(Section):
    """Which train problems RL sees, and in which order, by how often a model solved them."""

    enabled: bool = False
    """Filter and order the train problems by their solve rates."""
    path: str | None = None
    """File (.jsonl, .json, .csv or .parquet; path from the tree's root or URL) with columns id, solved and samples; null takes the rates of stage preferences."""
    sha256: str | None = None
    """Hex digest that the file must have; null takes any. A changed file alone starts no rerun, a changed digest does."""
    above: Fraction | None = 0.0
    """Keep problems solved in more than this share of their samples; 0 drops those never solved, null sets no bound."""
    below: Fraction | None = 1.0
    """Keep problems solved in less than this share of their samples; 1 drops those always solved, null sets no bound."""
    unrated: Literal["drop", "keep"] = "drop"
    """What becomes of problems without a rate; kept ones count as solved half the time in the order."""
    order: Literal["none", "easy_first", "hard_first"] = "none"
    """`none` draws in random order, epoch by epoch; the others go through the problems by rate over the run's steps."""

    @model_validator(mode="after")
    def _leaves_something(self) -> CurriculumConfig:
        if self.above is not None and self.below is not None and self.above >= self.below:
            raise ValueError(f"above {self.above} must be less than below {self.below}")
        return self


class VLLMConfig(Section):
    """The engines `vllm` and `vllm-server`, which sample with vLLM."""

    kv_cache_gib: PositiveReal = 1.0
    """vllm: memory for the keys and values of tokens, in GiB; a small one samples fewer completions at once."""
    servers: list[str] = []
    """vllm-server: addresses of the servers that share every rollout, as http://127.0.0.1:8001; each is started by
    `python -m training.rollout.serve`."""
    timeout: PositiveReal = 600.0
    """Seconds in which an engine must take new weights or sample a rollout; one that doesn't has hung and is replaced."""

    @model_validator(mode="after")
    def _addresses(self) -> VLLMConfig:
        for server in self.servers:
            if not re.fullmatch(r"https?://[^/\s]+", server):
                raise ValueError(f"servers: {server!r} is no address; expected http://HOST:PORT")
        if len(set(self.servers)) < len(self.servers):
            raise ValueError(f"servers {self.servers} names one twice; name each once")
        return self


class RLConfig(Section):
    """Reinforcement learning from graded completions; an algorithm is a choice on these switches.

    GRPO (Shao et al. 2024, arXiv:2402.03300) is the default; docs/algorithms.md lists the others' rows.
    """

    enabled: bool = True
    """False: the stage writes a reference to the model it would start from instead of weights."""
    num_steps: Count = 20
    """Rollout steps; each samples prompts_per_step x num_generations completions."""
    prompts_per_step: Count = 8
    """Distinct prompts in a rollout."""
    num_generations: Count = 8
    """Completions per prompt: the group whose mean is the baseline (at least 2, unless a value model is)."""
    max_prompt_length: Count = 256
    """Longest rendered prompt, in tokens; a longer one is refused by validate."""
    max_completion_length: Count = 64
    """Longest completion, in tokens; one cut off there is called truncated."""
    temperature: PositiveReal = 1.0
    """Sampling temperature; log-probabilities are those of the tempered distribution."""
    engine: Literal["native", "vllm", "vllm-server"] = "native"
    """What samples: torch in this process, vLLM on this machine (in a process of its own), or vLLM servers."""
    vllm: VLLMConfig = VLLMConfig()
    """Settings of the engines `vllm` and `vllm-server`."""

    reward_funcs: Annotated[list[str], Field(min_length=1)] = ["math"]
    """Rewards to add up: `math`, `format`, `overlong`, `equations` (does the arithmetic written down hold?), `model`
    (the reward model), or your own `package.module:function`."""
    reward_weights: list[Real] | None = None
    """One weight for each of reward_funcs; null means 1.0 each."""
    supervision: Literal["outcome", "process"] = "outcome"
    """What is rewarded: the completion, or each of its steps (DeepSeekMath §4.1.3; needs advantage_estimator group)."""
    reward_model: str = "stage"
    """Which model the reward `model` is: the one that stage reward_model trained, or a name from model.more, of kind reward."""
    missing_eos_penalty: Annotated[Real, Field(ge=0)] = 0.0
    """Taken off the reward of a completion that was truncated; with process supervision, of its last step."""
    dynamic_sampling_rounds: Annotated[int, Field(ge=0)] = 0
    """Further prompts sampled, in rounds of prompts_per_step, to replace groups without spread (DAPO); 0 keeps them."""

    advantage_estimator: Literal["group", "rloo", "reinforce_plus_plus", "gae"] = "group"
    """Baseline and scale: the group's mean and std (GRPO), leave-one-out, batch-whitened, or a value model (PPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """group: what the advantage is divided by: the group's std, the batch's std, or nothing."""
    gamma: Fraction = 1.0
    """gae: discount per token."""
    lam: Fraction = 0.95
    """gae: λ, from one-step errors (0) to whole returns (1)."""
    whiten_rewards: bool = False
    """gae: scale the per-token rewards to unit variance first."""

    beta: Annotated[Real, Field(ge=0)] = 0.0
    """Coefficient of the KL penalty against the reference; 0 loads no reference."""
    reference: str = "start"
    """`start` (the model that RL starts from), `base`, `sft`, `dpo`, or a name from model.more, of kind causal."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty sits: in the loss (GRPO) or in the reward, per token with gae (PPO)."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """How KL is estimated from samples; null means k3 in the loss and k1 in the reward."""
    kl_target: PositiveReal | None = None
    """KL (nats a token) that PPO's controller adapts beta towards; null keeps beta fixed."""
    sync_ref_model: bool = False
    """Move the reference towards the policy every ref_model_sync_steps steps."""
    ref_model_sync_steps: Count = 64
    """Steps between moves of the reference."""
    ref_model_mixup_alpha: Fraction = 0.6
    """Share of the policy in the moved reference; the rest stays the reference's."""

    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"] = "dapo"
    """Average of the clipped loss: per completion (grpo), over the batch's tokens (bnpo, dapo), over a constant
    (dr_grpo); or another surrogate: cispo (over tokens), sapo (per completion)."""
    epsilon: PositiveReal = 0.2
    """Lower clip range of the probability ratio."""
    epsilon_high: PositiveReal | None = None
    """Upper clip range (DAPO's clip-higher), null means epsilon; cispo: the largest weight, 5 in the paper's spirit."""
    delta: PositiveReal | None = None
    """Bound of the ratio where the advantage is negative (dual clip, two-sided GRPO); null sets none."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio of each token, or of the whole completion (GSPO)."""
    sapo_temperature_pos: PositiveReal = 1.0
    """sapo: sharpness of the gate for positive advantages."""
    sapo_temperature_neg: PositiveReal = 1.05
    """sapo: sharpness of the gate for negative advantages."""
    entropy_coef: Annotated[Real, Field(ge=0)] = 0.0
    """Weight of the entropy bonus."""
    importance_sampling_cap: PositiveReal | None = None
    """Cap of the correction for a sampler whose log-probabilities differ from the trainer's; null corrects nothing."""
    one_step_off: bool = False
    """Sample the next step's completions while this step's update runs, by a copy of the policy one update behind;
    needs importance_sampling_cap (2 is usual), which corrects for it."""
    mask_truncated_completions: bool = False
    """Leave truncated completions out of the loss, as if they were not there."""

    value_model: str = "policy"
    """gae: the value model starts as `policy` (a copy of the start), `reward_model` (of stage reward_model, its head too),
    a name from model.more, or is a head on the policy's own `trunk`."""
    vf_coef: PositiveReal = 0.5
    """gae: weight of the value loss; it matters where the trunk is shared."""
    cliprange_value: PositiveReal = 0.2
    """gae: the new value stays this near the rollout's in the clipped value loss."""
    critic_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-5, schedule="constant")
    """gae: optimizer of the value model."""
    critic_lora: LoraConfig = LoraConfig()
    """gae: adapters in the value model instead of full weights; its head is trained whole."""

    curriculum: CurriculumConfig = CurriculumConfig()
    """Train problems chosen by evidence: how often a model solved them."""
    iterative: IterativeConfig = IterativeConfig()
    """Outer iterations that reset the reference and go on training the reward model."""

    num_iterations: Count = 1
    """Passes over one rollout (mu in the paper)."""
    num_minibatches: Count = 1
    """Optimizer steps in one pass over a rollout."""
    micro_batch_tokens: Count = 4096
    """Padded tokens in one forward-backward pass; bounds memory, never changes the gradient."""
    checkpoint_every: Count = 5
    """Steps between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5, schedule="constant")
    """Optimizer of the policy."""
    lora: LoraConfig = LoraConfig()
    """Adapters instead of full weights."""

    @property
    def kl_in_force(self) -> Literal["k1", "k2", "k3"]:
        """The estimator that kl_estimator and kl_in mean."""
        return self.kl_estimator or ("k3" if self.kl_in == "loss" else "k1")

    @model_validator(mode="after")
    def _consistent(self) -> RLConfig:
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"reward_weights has {len(self.reward_weights)} entries, reward_funcs has {len(self.reward_funcs)}; "
                "give one weight for each function"
            )
        if self.prompts_per_step % self.num_minibatches:
            raise ValueError(
                f"num_minibatches {self.num_minibatches} must divide prompts_per_step {self.prompts_per_step}"
            )
        if self.num_generations == 1 and self.advantage_estimator != "gae":
            raise ValueError(
                f"num_generations 1 is no group for advantage_estimator {self.advantage_estimator}; "
                "give at least 2, or use gae, whose baseline is a value model"
            )
        if self.advantage_estimator == "gae" and self.importance_sampling_level == "sequence":
            raise ValueError(
                "importance_sampling_level sequence needs one advantage a completion; gae has one a token"
            )
        if self.supervision == "process":
            self._consistent_steps()
        if self.one_step_off and self.importance_sampling_cap is None:
            raise ValueError(
                "one_step_off samples from a policy one update behind, and importance_sampling_cap null corrects "
                "nothing; give a cap, 2 for example"
            )
        if self.one_step_off and self.iterative.reward_model_steps:
            raise ValueError(
                f"one_step_off grades the next rollout before iterative.reward_model_steps "
                f"{self.iterative.reward_model_steps} have changed the reward model; give 0 steps, or set "
                "one_step_off to false"
            )
        if self.num_generations == 1 and self.dynamic_sampling_rounds:
            raise ValueError(
                "dynamic_sampling_rounds replaces groups without spread; num_generations 1 has no groups"
            )
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        if self.delta is not None and self.delta < 1 + high:
            raise ValueError(
                f"delta {self.delta} is inside the clip range; expected at least 1 + epsilon_high = {1 + high}"
            )
        if self.kl_target is not None and not self.beta:
            raise ValueError("kl_target adapts beta, which is 0; give the value to start from")
        if self.critic_lora.enabled and self.value_model == "trunk":
            raise ValueError(
                "critic_lora.enabled: value_model trunk has no weights of its own to adapt; use another value_model"
            )
        return self

    @model_validator(mode="after")
    def _iterations_do_something(self) -> RLConfig:
        iterations, steps = self.iterative.iterations, self.iterative.reward_model_steps
        if self.num_steps % iterations:
            raise ValueError(f"iterative.iterations {iterations} must divide num_steps {self.num_steps}")
        if steps and iterations == 1:
            raise ValueError(
                f"iterative.reward_model_steps {steps} are taken between iterations, and iterative.iterations is 1; "
                "give at least 2, or 0 steps"
            )
        if steps and "model" not in self.reward_funcs:
            raise ValueError(
                f"iterative.reward_model_steps {steps} train the reward model, and reward_funcs {self.reward_funcs} "
                "don't use it; add model, or give 0 steps"
            )
        if iterations > 1 and not self.beta and not steps:
            raise ValueError(
                f"iterative.iterations {iterations} would change nothing: beta 0 has no reference to reset and "
                "iterative.reward_model_steps is 0; give one of them"
            )
        if iterations > 1 and self.sync_ref_model:
            raise ValueError(
                f"iterative.iterations {iterations} and sync_ref_model are two rules for one reference; "
                "set iterations to 1 or sync_ref_model to false"
            )
        return self

    @model_validator(mode="after")
    def _engine_can_sample(self) -> RLConfig:
        if self.engine == "vllm-server" and not self.vllm.servers:
            raise ValueError("engine vllm-server needs addresses in vllm.servers; it has none")
        if self.engine != "vllm-server" and self.vllm.servers:
            raise ValueError(
                f"vllm.servers {self.vllm.servers} are for engine vllm-server, and engine is {self.engine}"
            )
        if self.engine != "native" and self.lora.quantization is not None:
            raise ValueError(
                f"engine {self.engine} would sample from other weights than lora.quantization "
                f"{self.lora.quantization} trains on; use engine native, or quantization null"
            )
        return self

    def _consistent_steps(self) -> None:
        for key, accepted in (
            ("advantage_estimator", "group"),
            ("kl_in", "loss"),
            ("importance_sampling_level", "token"),
        ):
            if getattr(self, key) != accepted:
                raise ValueError(
                    f"{key} {getattr(self, key)} does not go with supervision process, whose advantages are sums "
                    f"over the steps that follow a token, normalised in the group; set {key}: {accepted}"
                )


class EvaluateConfig(Section):
    """Sampling of held-out problems for Pass@K and Maj@K."""

    num_problems: Count = 64
    """Held-out problems (the first of the test split, which is in hash order)."""
    num_samples: Count = 16
    """Completions per problem (n of the unbiased estimators)."""
    k: Annotated[list[Count], Field(min_length=1)] = [1, 2, 4, 8, 16]
    """Values of K; none may exceed num_samples."""
    temperature: PositiveReal = 1.0
    """Sampling temperature."""
    top_p: Annotated[Real, Field(gt=0, le=1)] = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches this is sampled from."""
    max_completion_length: Count = 64
    """Longest completion, in tokens."""
    batch_size: Count = 128
    """Completions generated at once; bounds memory, never changes the samples' seeds."""
    bootstrap: Count = 2000
    """Bootstrap resamples of the problems behind each 95 % interval."""

    @model_validator(mode="after")
    def _k_within_n(self) -> EvaluateConfig:
        too_large = [k for k in self.k if k > self.num_samples]
        if too_large:
            raise ValueError(
                f"k {too_large} exceeds num_samples {self.num_samples}; each K needs at least K samples"
            )
        return self
