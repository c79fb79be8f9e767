"""Reads a GGUF file's header: its metadata, its tensors' shapes, and from these the model's Hugging Face configuration.

Called when a model is resolved. The `gguf` package's reader needs seconds for the vocabulary; this one needs a tenth.
"""

import mmap
import os
import struct
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32 = 0  # ggml's number for float32 tensors

_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}


class _Cursor:
    """A position in the mapped file; every read moves it on."""

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position

    def scalars(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self.buffer, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        buffer, position = self.buffer, self.position
        length_at = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = position + 8
            position = start + length_at(buffer, position)[0]
            texts.append(buffer[start:position].decode("utf-8", "replace"))
        self.position = position
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            element_kind, count = self.scalars("IQ")
            if element_kind == _STRING:
                return self.texts(count)
            if element_kind == _ARRAY:
                return [self.value(_ARRAY) for _ in range(count)]
            return list(self.scalars(f"{count}{_SCALARS[element_kind]}"))
        return self.scalars(_SCALARS[kind])[0]


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The file's key-value pairs, and three keys of our own.

    `GGUF.version`; `GGUF.tensor_shapes`, name -> shape in row-major order (rows first);
    `GGUF.rope_factors`, the float32 content of `rope_freqs.weight`, where the file has it.
    Raises FileNotFoundError, or ValueError naming the file where it is not a GGUF file or is cut short.
    """
    with open(path, "rb") as file:
        if file.read(4) != _MAGIC:
            raise ValueError(f"{os.fspath(path)} is not a GGUF file: it does not begin with the bytes 'GGUF'")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _read_header(_Cursor(buffer, len(_MAGIC)))
        except (struct.error, IndexError, KeyError, OverflowError, MemoryError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: the GGUF header is damaged or cut short ({error})") from error


def _read_header(cursor: _Cursor) -> dict[str, Any]:
    (version,) = cursor.scalars("I")
    if version not in _VERSIONS:
        raise ValueError(f"GGUF version {version} is not supported; versions {_VERSIONS} are")
    tensor_count, pair_count = cursor.scalars("QQ")
    metadata: dict[str, Any] = {"GGUF.version": version}
    for _ in range(pair_count):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalars("I")[0])
    shapes: dict[str, list[int]] = {}
    rope_factors: tuple[int, int] | None = None  # (count, offset) in the data section
    for _ in range(tensor_count):
        name = cursor.text()
        (rank,) = cursor.scalars("I")
        shapes[name] = list(reversed(cursor.scalars(f"{rank}Q")))
        kind, offset = cursor.scalars("IQ")
        if name == "rope_freqs.weight" and kind == _F32:
            rope_factors = (shapes[name][-1], offset)
    metadata["GGUF.tensor_shapes"] = shapes
    if rope_factors is not None:
        alignment = int(metadata.get("general.alignment", 32))
        cursor.position = -(-cursor.position // alignment) * alignment + rope_factors[1]
        metadata["GGUF.rope_factors"] = list(cursor.scalars(f"{rope_factors[0]}f"))
    return metadata


def hf_config_from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` that a Hugging Face folder of this model would hold.

    Raises ValueError for an architecture that is not built, or a figure that is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported: {sorted(_ARCHITECTURES)}")
    model_type, class_name = _ARCHITECTURES[architecture]
    if architecture == "llama" and "mistral" in str(metadata.get("general.name", "")).lower():
        model_type, class_name = _ARCHITECTURES["mistral"]
    figure = _Figures(metadata, architecture)
    shapes = metadata["GGUF.tensor_shapes"]
    heads = int(figure("attention.head_count"))
    hidden_size = int(figure("embedding_length"))
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": _vocab_size(metadata, architecture),
        "hidden_size": hidden_size,
        "intermediate_size": int(figure("feed_forward_length")),
        "num_hidden_layers": int(figure("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(figure("attention.head_count_kv", heads)),
        "head_dim": int(figure("attention.key_length", figure("rope.dimension_count", hidden_size // heads))),
        "max_position_embeddings": int(figure("context_length")),
        "rms_norm_eps": float(figure("attention.layer_norm_rms_epsilon")),
        "rope_theta": float(figure("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(metadata, figure),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "tie_word_embeddings": "output.weight" not in shapes,
        "torch_dtype": "bfloat16",
    }
    window = figure("attention.sliding_window", None)
    config["sliding_window"] = None if window is None else int(window)
    for name in ("bos", "eos"):
        if (token_id := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name}_token_id"] = int(token_id)
    return config


def generation_config_from_gguf(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a `generation_config.json` would hold: the begin token, and every token that ends a generation."""
    config: dict[str, Any] = {}
    if (bos := metadata.get("tokenizer.ggml.bos_token_id")) is not None:
        config["bos_token_id"] = int(bos)
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [int(metadata[f"tokenizer.ggml.{key}"]) for key in keys if f"tokenizer.ggml.{key}" in metadata]
    if ends:
        config["eos_token_id"] = list(dict.fromkeys(ends)) if len(set(ends)) > 1 else ends[0]
    return config


class _Figures:
    """Looks up `<architecture>.<name>`; without a default a missing figure is a ValueError."""

    _REQUIRED: object = object()

    def __init__(self, metadata: dict[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def __call__(self, name: str, default: Any = _REQUIRED) -> Any:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        if value is self._REQUIRED:
            raise ValueError(f"the GGUF metadata lacks {self.architecture}.{name}")
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self.architecture}.{name} differs from layer to layer, which is not supported")
            return value[0]
        return value


def _vocab_size(metadata: dict[str, Any], architecture: str) -> int:
    """The embedding's rows decide: some files state a vocabulary without the padding rows."""
    if (shape := metadata["GGUF.tensor_shapes"].get("token_embd.weight")) is not None:
        return int(shape[0])
    stated = metadata.get(f"{architecture}.vocab_size")
    return int(stated) if stated is not None else len(metadata["tokenizer.ggml.tokens"])


def _rope_scaling(metadata: dict[str, Any], figure: _Figures) -> dict[str, Any] | None:
    if (factors := metadata.get("GGUF.rope_factors")) is not None:
        return _llama3_scaling(factors, float(figure("rope.freq_base", 10000.0)))
    kind = figure("rope.scaling.type", "none")
    if kind == "none":
        # Files older than rope.scaling.type name a linear factor alone.
        factor = float(figure("rope.scale_linear", 1.0))
        return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(figure("rope.scaling.factor"))}
    if (original := figure("rope.scaling.original_context_length", None)) is not None:
        scaling["original_max_position_embeddings"] = int(original)
    return scaling


def _llama3_scaling(factors: list[float], theta: float) -> dict[str, Any] | None:
    """The llama3 parameters behind a table of per-frequency divisors, as llama.cpp's converter writes it.

    Every published llama3 model uses low 1, high 4 and 8192 original positions, so only the factor is unknown: it is
    the largest divisor. The table is computed again from these and must agree.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if scaling["factor"] == 1.0:
        return None
    for index, stored in enumerate(factors):
        wavelength = 2 * 3.141592653589793 * theta ** (index / len(factors))
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        ramp = min(max(smooth, 0.0), 1.0)
        expected = 1.0 / ((1.0 - ramp) / scaling["factor"] + ramp)
        if abs(stored - expected) > 1e-3 * expected:
            raise ValueError("rope_freqs.weight holds a rotary scaling other than llama3's, which is not supported")
    return scaling
