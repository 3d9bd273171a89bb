"""A causal language model of Hugging Face transformers, by name or folder: the extra `hf`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.huggingface import check_weights, commit_of, find_folder, sequence_of
from diloco_cli.config.models import BYTE_VOCABULARY, TEXT_DATA
from diloco_cli.config.settings import ModelSettings
from diloco_cli.errors import UsageError
from diloco_cli.paths import install_hint

SHOWN = 5  # names in an error


def misshapen(name: str, there: Iterable[int], here: Iterable[int]) -> str:
    """A name with its shape in the file, and in the model."""
    return f"{name} {list(there)}, not {list(here)}"


def refuse_other_model(
    where: str, missing: Iterable[str], unexpected: Iterable[str], of_another_shape: Iterable[str]
) -> None:
    """Raises UsageError if there are any, and names them."""
    found = {
        "missing": sorted(missing),
        "unexpected": sorted(unexpected),
        "of another shape": sorted(of_another_shape),
    }
    said = [f"{what}: {_some(names)}" for what, names in found.items() if names]
    if said:
        raise UsageError(
            f"the weights are not those of this model; {'; '.join(said)}",
            where=where,
            hint="the file and the model must have the same parameters, names and shapes",
        )


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


WHERE = "model.huggingface"
LOADED = frozenset({"auto_map", "custom_pipelines", "quantization_config", "_name_or_path", "_commit_hash"})
KERNELS = "_implementation"  # attn_implementation may name a repository of the Hub, with code
MAX_UNKNOWN = 1 << 20  # positions of a model that has no bound (recurrent ones)


class CausalModel(nn.Module):
    """Tokens [batch, length] int64 and their successors -> mean loss in nats per token.

    The parameters keep their names in transformers, so that an export loads there unchanged: the model's parts are
    registered here, and the model itself is kept out of the module tree.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, part in model.named_children():
            self.add_module(name, part)
        for name, parameter in model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._whole = (model,)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, length] int64 -> [batch, length, vocabulary] float32."""
        logits: Tensor = self._whole[0](input_ids=tokens, use_cache=False).logits
        return logits.float()

    def train(self, mode: bool = True) -> CausalModel:
        self._whole[0].train(mode)
        super().train(mode)
        return self


def build(settings: ModelSettings) -> nn.Module:
    """The architecture that the config describes, in float32, with transformers' own initial weights and no dropout,
    so that a repeated step is the same. Code from the Hub is never run."""
    config = _config_to_train(settings)
    try:
        auto = _transformers().AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:
        raise UsageError(
            f"transformers cannot build {settings.huggingface}: {type(error).__name__}: {error}",
            where=WHERE,
            hint="it must be a causal language model that transformers knows without code of its own",
        ) from error
    return CausalModel(model)


def pretrained(settings: ModelSettings) -> dict[str, Tensor]:
    """The parameters of the weights beside the config, and buffers of their own, by their names in transformers, in
    float32, tied ones once.
    Their files are read by transformers, which knows how it has named and stacked tensors over the years. Raises
    UsageError unless every parameter is there, with its shape, and nothing else."""
    name, folder = settings.huggingface or "", folder_of(settings)
    if folder is None:
        hint = f"hf download {name}, or give a folder with a config.json and weights"
        raise UsageError(f"no folder {name!r}, and no model of that name in the Hub's cache", where=WHERE, hint=hint)
    check_weights(settings, folder)
    model, found = _loaded(folder, _config_to_train(settings))
    other = [key if isinstance(key, str) else misshapen(*key) for key in found["mismatched_keys"]]  # 4.56 has no shapes
    refuse_other_model(str(folder), found["missing_keys"], found["unexpected_keys"], other)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return parameters | _other_buffers(model, settings)


def _loaded(folder: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """The model, and what transformers says of the names that it did not find, did not know, or found misshapen."""
    transformers = _transformers()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=config,
            dtype=torch.float32,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise UsageError(
            f"transformers cannot read these weights: {type(error).__name__}: {error}",
            where=str(folder),
            hint="copy or download them anew, or save them again: save_pretrained(FOLDER)",
        ) from error
    return model, found


def _other_buffers(model: nn.Module, settings: ModelSettings) -> dict[str, Tensor]:
    """Of the weights, those that are not what every learner's own code makes: they are part of the run's model."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    ours = dict(build(settings).named_buffers()) if buffers else {}
    return {name: buffer for name, buffer in buffers.items() if not torch.equal(buffer, ours[name])}


def reads(settings: ModelSettings) -> tuple[int, int]:
    """How long the sequences of its text are, in tokens; and the model's vocabulary."""
    text = _config(settings).get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or MAX_UNKNOWN
    return sequence_of(int(longest), settings.sequence, WHERE), int(text.vocab_size)


def refuse_few_symbols(settings: ModelSettings, vocabulary: int) -> None:
    """Raises UsageError if the preset text's bytes do not fit the model's vocabulary."""
    if vocabulary < BYTE_VOCABULARY:
        raise UsageError(
            f"data.preset: {TEXT_DATA} has {BYTE_VOCABULARY} symbols, {settings.huggingface} only {vocabulary}",
            where="data.preset",
            hint="set data.tokens or data.text to data of your own, or data.entrypoint to a function",
        )


def read_config_of(settings: ModelSettings) -> dict[str, Any]:
    """The content of the config.json of a folder, or of a name from the Hub, as far as it describes the model: no names
    of code, of kernels, or of files."""
    name, transformers, folder = settings.huggingface or "", _transformers(), folder_of(settings)
    try:
        found, _ = transformers.PretrainedConfig.get_config_dict(str(folder or name), revision=settings.revision)
    except Exception as error:
        raise UsageError(
            f"transformers cannot read the config of {name}: {type(error).__name__}: {error}",
            where=WHERE,
            hint="give a folder with a config.json, or a name from the Hub while it can be reached",
        ) from error
    return cast("dict[str, Any]", _describing(found))


def folder_of(settings: ModelSettings) -> Path | None:
    """The model's folder, or its snapshot in the Hub's cache."""
    return find_folder(settings.huggingface or "", [Path.cwd(), *map(Path, sys.path)], settings.revision)


def revision_of(settings: ModelSettings) -> str | None:
    """The commit of the snapshot that the model's files are taken from; None for a folder."""
    folder = folder_of(settings)
    return None if folder is None else commit_of(folder)


def _config_to_train(settings: ModelSettings) -> Any:
    """Without dropout."""
    config = _config(settings)
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout"):
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
    return config


def _config(settings: ModelSettings) -> Any:
    """The config that the settings carry, or else the one that they name."""
    plain, kinds = _describing(settings.args or read_config_of(settings)), _transformers().CONFIG_MAPPING
    kind = plain.get("model_type")
    try:
        return kinds[kind].from_dict(plain)
    except Exception as error:
        raise UsageError(
            f"transformers cannot read the config of {settings.huggingface}: {type(error).__name__}: {error}",
            where=WHERE,
            hint=f"its model_type, {kind!r}, must be one that transformers knows without code of its own",
        ) from error


def _describing(config: Any) -> Any:
    """Without keys that would have transformers load something."""
    if not isinstance(config, dict):
        return config
    return {key: _describing(value) for key, value in config.items() if key not in LOADED and KERNELS not in key}


def exported_configs(settings: ModelSettings, dtype: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of config.json and generation_config.json beside weights of this type."""
    config, transformers = _config(settings), _transformers()
    config.dtype = dtype
    if not config.architectures:
        config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    return config.to_diff_dict(), transformers.GenerationConfig.from_model_config(config).to_diff_dict()


def longest_context(settings: ModelSettings) -> int:
    """The number of positions that the model has."""
    return int(getattr(_config(settings).get_text_config(), "max_position_embeddings", None) or MAX_UNKNOWN)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "a Hugging Face model needs transformers, which is not installed here",
            where=WHERE,
            hint=install_hint("hf"),
        ) from error
    return transformers
