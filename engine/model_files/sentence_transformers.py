"""What a sentence-transformers folder says of how its model pools: modules.json and the folders that it names."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...protocol.pooling import DenseActivation, DenseLayer, SequencePooling
from ...shared.json_files import read_json

_MODES: dict[str, SequencePooling] = {"cls": "CLS", "lasttoken": "LAST", "mean": "MEAN"}
_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
}
_ACTIVATIONS: dict[str, DenseActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
}


@dataclass(frozen=True, slots=True)
class SentenceTransformer:
    """`normalize`: vectors are brought to length 1. `max_seq_length`: None where nothing is said. `prompts`: by name,
    such as "query", what goes in front of a text. A GGUF file that embeds says its pooling alone.
    """

    pooling: SequencePooling
    dense: list[DenseLayer] = field(default_factory=list)
    normalize: bool = True
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)


def read_sentence_transformer(folder: Path) -> SentenceTransformer | None:
    """None where the folder holds no modules.json. Raises ValueError naming what is not supported."""
    if not (folder / "modules.json").is_file():
        return None
    pooling: SequencePooling | None = None
    dense: list[DenseLayer] = []
    normalize = False
    for module in _modules(folder):
        kind, path = str(module.get("type")).rpartition(".")[2], folder / str(module.get("path") or "")
        if kind == "Pooling":
            pooling = _pooling(path)
        elif kind == "Dense":
            dense.append(_dense(path))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ValueError(
                f"{folder / 'modules.json'} names a module {kind!r}; supported are Transformer, Pooling, Dense and "
                "Normalize"
            )
    if pooling is None:
        raise ValueError(f"{folder / 'modules.json'} names no Pooling module")
    return SentenceTransformer(pooling, dense, normalize, _max_seq_length(folder), _prompts(folder))


def _modules(folder: Path) -> list[dict[str, Any]]:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'modules.json'} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ValueError(f"{folder / 'modules.json'} is not a list of modules")
    return modules


def _pooling(folder: Path) -> SequencePooling:
    config = read_json(folder / "config.json")
    if config.get("include_prompt") is False:
        raise ValueError(f"{folder / 'config.json'}: include_prompt=false, a mean without the prompt, is not supported")
    mode = config.get("pooling_mode")
    old = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    modes = [mode] if mode else old
    found = [_MODES.get(_OLD_MODES.get(str(each), str(each))) for each in modes]
    if len(found) != 1 or found[0] is None:
        raise ValueError(
            f"{folder / 'config.json'} pools by {', '.join(map(str, modes)) or 'nothing'}; supported is one of cls, "
            "mean and lasttoken"
        )
    return found[0]


def _dense(folder: Path) -> DenseLayer:
    config = read_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.linear.Identity"))
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.modules.") or name not in _ACTIVATIONS:
        raise ValueError(
            f"{folder / 'config.json'}: activation_function is {activation!r}; supported are torch.nn.modules' "
            f"{', '.join(_ACTIVATIONS)}"
        )
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder} holds no model.safetensors; other forms of weights are not read")
    rows, columns = (config.get(key) for key in ("out_features", "in_features"))
    if not isinstance(rows, int) or not isinstance(columns, int):
        raise ValueError(f"{folder / 'config.json'} does not say in_features and out_features")
    return DenseLayer("linear", rows, columns, config.get("bias", True) is True, _ACTIVATIONS[name], str(folder))


def _max_seq_length(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    length = read_json(file).get("max_seq_length") if file.is_file() else None
    return length if isinstance(length, int) and length > 0 else None


def _prompts(folder: Path) -> dict[str, str]:
    file = folder / "config_sentence_transformers.json"
    prompts = read_json(file).get("prompts") if file.is_file() else None
    if prompts is None:
        return {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"{file}: prompts is not an object of texts")
    return prompts
