"""A causal language model of Hugging Face transformers, by name or folder, with random weights: the extra `hf`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diloco_cli.config.huggingface import find_folder, sequence_of
from diloco_cli.config.presets import BYTE_VOCABULARY, TEXT_DATA
from diloco_cli.config.settings import ModelSettings
from diloco_cli.errors import UsageError
from diloco_cli.paths import install_hint

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
        logits = self._whole[0](input_ids=tokens, use_cache=False).logits.float()
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    def train(self, mode: bool = True) -> CausalModel:
        self._whole[0].train(mode)
        super().train(mode)
        return self


def build(settings: ModelSettings) -> nn.Module:
    """The architecture that the config describes, in float32, with transformers' own initial weights and no dropout,
    so that a repeated step is the same. Code from the Hub is never run."""
    config = _config(settings)
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "dropout"):
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
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
    name, transformers = settings.huggingface or "", _transformers()
    folder = find_folder(name, [Path.cwd(), *map(Path, sys.path)])
    try:
        found, _ = transformers.PretrainedConfig.get_config_dict(str(folder or name))
    except Exception as error:
        raise UsageError(
            f"transformers cannot read the config of {name}: {type(error).__name__}: {error}",
            where=WHERE,
            hint="give a folder with a config.json, or a name from the Hub while it can be reached",
        ) from error
    return cast("dict[str, Any]", _describing(found))


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
