"""Reads adapters from their files: PEFT's folders and llama.cpp's GGUF files.

Whatever cannot be applied is a ValueError that names it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...shared.gguf_file import is_gguf, read_gguf
from ...shared.json_files import read_json
from ..models.gguf import GGUFSource, gguf_module, llama_row_order
from ..models.spec import ModelSpec
from .adapter import Adapter, LowRank, digest_of, matrix_places

_CONFIG_FILE = "adapter_config.json"
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_UNSUPPORTED = {  # settings of PEFT that change more, or otherwise, than low-rank products do
    "use_dora": "DoRA",
    "modules_to_save": "modules that were trained whole (modules_to_save)",
    "lora_bias": "biases (lora_bias)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "layer_replication": "replicated layers (layer_replication)",
    "target_parameters": "parameters that are no linear layer's (target_parameters)",
    "trainable_token_indices": "trained embeddings (trainable_token_indices)",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activation by tokens (alora_invocation_tokens)",
    "arrow_config": "Arrow routing",
}
_CHANGES_THE_BASE = ("pissa", "olora", "corda")
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.[^.]+)?\.weight")
_MODULE = re.compile(r"(?:.*\.)?layers\.(?P<matrix>\d+\.(?:self_attn|mlp)\.\w+_proj)")
_GGUF_FACTOR = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<factor>[ab])")

_FLOATING = {torch.float32, torch.float16, torch.bfloat16}

Factors = dict[str, torch.Tensor]
"""By "A" and "B": [rank, columns] and [rows, rank]."""


def read_adapter(path: str, spec: ModelSpec, dtype: torch.dtype, max_rank: int) -> Adapter:
    """Raises ValueError naming what is missing, damaged, or not to be applied to this model."""
    try:
        modules = _read_gguf(Path(path), spec) if is_gguf(Path(path)) else _read_peft(Path(path))
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror or error}") from None
    if not modules:
        raise ValueError(f"{path} holds no LoRA weights: it applies to nothing")
    places = matrix_places(spec)
    if unknown := sorted(name for name in modules if _matrix(name) not in places):
        known = sorted({name.rpartition(".")[2] for name in places})
        raise ValueError(
            f"{path} changes {_some(unknown)}; of this model an adapter can change {', '.join(known)} "
            f"of the layers 0..{len(spec.layers) - 1}"
        )
    parts = {}
    for name, (factors, scale) in modules.items():
        place, shape = places[_matrix(name)]
        if place in parts:
            raise ValueError(f"{path} changes {name} twice")
        parts[place] = _low_rank(f"{path}: {name}", factors, scale, shape, dtype, max_rank)
    return Adapter(parts, digest_of(parts))


def _low_rank(
    name: str, factors: Factors, scale: float, shape: tuple[int, int], dtype: torch.dtype, max_rank: int
) -> LowRank:
    if len(factors) < 2:
        raise ValueError(f"{name} has lora_{min(factors)} alone")
    a, b = factors["A"], factors["B"]
    if not {a.dtype, b.dtype} <= _FLOATING:
        raise ValueError(f"{name} is of {a.dtype} and {b.dtype}; float32, float16 and bfloat16 can be read")
    rank = a.shape[0]
    if rank > max_rank:
        raise ValueError(f"{name} is of rank {rank}; max_lora_rank is {max_rank}: raise it to serve this adapter")
    if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
        raise ValueError(
            f"{name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, which do not fit this model's "
            f"{list(shape)}: was the adapter made for another model?"
        )
    a, b = a.to(dtype), (b.float() * scale).to(dtype)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ValueError(f"{name} holds values that are not finite")
    return LowRank(a, b)


def _matrix(module: str) -> str:
    """What `matrix_places` calls a module, whatever the model around the layers is called."""
    match = _MODULE.fullmatch(module)
    return module if match is None else match["matrix"]


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# PEFT


def _read_peft(folder: Path) -> dict[str, tuple[Factors, float]]:
    """Factors and scale by module."""
    if not folder.exists():
        raise ValueError(f"{folder} does not exist; it must be a folder with {_CONFIG_FILE}, or a GGUF file")
    if not (folder / _CONFIG_FILE).is_file():
        raise ValueError(f"{folder} lacks {_CONFIG_FILE}; it must be a folder of PEFT's, or a GGUF file")
    config = read_json(folder / _CONFIG_FILE)
    _check_config(config, folder / _CONFIG_FILE)
    modules: dict[str, Factors] = {}
    for name, tensor in _tensors(folder).items():
        if ".base_layer." in name:
            continue
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() != 2:
            raise ValueError(f"{folder} holds {name}, which is no lora_A or lora_B of a linear layer")
        module = match["module"].removeprefix("base_model.model.")
        modules.setdefault(module, {})[match["factor"]] = tensor
    return {module: (factors, _scale(config, module, factors, folder)) for module, factors in modules.items()}


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{path} describes {config['peft_type']}, not LORA")
    if missing := [key for key in ("r", "lora_alpha", "target_modules") if key not in config]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    reasons = [reason for key, reason in _UNSUPPORTED.items() if config.get(key)]
    if config.get("bias", "none") != "none":
        reasons.append(f"biases (bias is {config['bias']!r})")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        reasons.append(f"changed base weights (init_lora_weights is {start!r}; save it converted)")
    if reasons:
        raise ValueError(f"{path} asks for what adapters cannot do here: {'; '.join(reasons)}")
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            raise ValueError(f"{path}: {key} must be an object, not {config[key]!r}")
    for value in (config["r"], *(config.get("rank_pattern") or {}).values()):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{path}: a rank is {value!r}; it must be a whole number of at least 1")
    for value in (config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{path}: a lora_alpha is {value!r}; it must be a number")


def _tensors(folder: Path) -> Mapping[str, torch.Tensor]:
    file = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"{folder} holds no weights: it lacks {_WEIGHT_FILES[0]}")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file (truncated or damaged): {error}") from None
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{file} is not a whole file of tensors: {error}") from None
    except Exception as error:  # torch's unpickler refuses with a type of its own
        raise ValueError(f"{file} holds more than tensors: {error}") from None
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise ValueError(f"{file} does not hold tensors by name")
    return tensors


def _scale(config: Mapping[str, Any], module: str, factors: Factors, folder: Path) -> float:
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"], folder)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"], folder)
    if "A" in factors and factors["A"].shape[0] != rank:
        raise ValueError(f"{folder}: {module} is of rank {factors['A'].shape[0]}, by {_CONFIG_FILE} of rank {rank}")
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any, folder: Path) -> Any:
    """The value of the first pattern that fits the end of the module's name."""
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise ValueError(f"{folder / _CONFIG_FILE}: the pattern {pattern!r} is none: {error}") from None
    return default


# llama.cpp


def _read_gguf(path: Path, spec: ModelSpec) -> dict[str, tuple[Factors, float]]:
    """The same of a GGUF file."""
    metadata = read_gguf(path, vocabulary=False).metadata
    kind, adapter_type = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != "adapter" or adapter_type != "lora":
        raise ValueError(f"{path} is no LoRA adapter: general.type is {kind!r}, adapter.type {adapter_type!r}")
    if "adapter.alora.invocation_tokens" in metadata:
        raise ValueError(f"{path} asks for what adapters cannot do here: {_UNSUPPORTED['alora_invocation_tokens']}")
    permuted = metadata.get("general.architecture") == "llama"
    modules: dict[str, Factors] = {}
    source = GGUFSource(str(path))
    try:
        for name, factor, tensor in _gguf_factors(source, path):
            module = gguf_module(name)
            if factor == "B" and permuted and name.endswith(("attn_q", "attn_k")):
                tensor = tensor[_llama_order(tensor.shape[0], name, module, spec)]
            modules.setdefault(module, {})[factor] = tensor
    finally:
        source.close()
    alpha = metadata.get("adapter.lora.alpha") or 0.0
    if not isinstance(alpha, float):
        raise ValueError(f"{path}: adapter.lora.alpha is {alpha!r}; it must be a float32")
    return {module: (factors, _gguf_scale(alpha, factors)) for module, factors in modules.items()}


def _gguf_factors(source: GGUFSource, path: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(name of the matrix, "A" or "B", the tensor)."""
    for name, shape in source.shapes.items():
        if name == "rope_freqs.weight" or name.endswith("norm.weight"):
            continue
        match = _GGUF_FACTOR.fullmatch(name)
        if match is None or len(shape) != 2:
            raise ValueError(f"{path} holds {name}, which is no lora_a or lora_b of a matrix")
        yield match["module"], match["factor"].upper(), source.read(name, torch.float32)


def _llama_order(rows: int, name: str, module: str, spec: ModelSpec) -> torch.Tensor:
    place = matrix_places(spec).get(_matrix(module))
    if place is None or place[1][0] != rows:
        return torch.arange(rows)  # refused below, by its name or shape
    attention = spec.layers[0].attention
    return llama_row_order(rows, attention.num_heads if name.endswith("_q") else attention.num_kv_heads)


def _gguf_scale(alpha: float, factors: Factors) -> float:
    return alpha / factors["B"].shape[1] if alpha and "B" in factors else 1.0
