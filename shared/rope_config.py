"""A model's rotary settings, read from its Hugging Face configuration: once here, for the engine and the core."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

_DEFAULT_THETA = 10000.0
_SCALING_NAMES = ("rope_scaling", "rope_parameters")  # the older and the newer name of one dict
_READ_BY_KIND: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_LAYER_THETAS = {"gemma3_text": {"full_attention": 1000000.0, "sliding_attention": 10000.0}}
"""Model types whose types of layers turn by settings of their own, with the thetas that go for what is not stated."""
_FOREIGN_THETAS = ("rotary_emb_base", "rotary_base", "rope_base")  # other families' names; nobody reads them in these
_PARTIAL_ROTARY = ("partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_emb_fraction")
_INTERLEAVED = ("rope_interleave", "rope_interleaved", "rotary_interleaved", "rotary_emb_interleaved")


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """Rotary embedding: `kind` is "default", "linear" or "llama3"; the last four matter only to the scaled kinds."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


def read_rope_config(hf_config: Mapping[str, Any]) -> RopeConfig:
    """Reads every spelling: `rope_parameters` as transformers 5 writes it, `rope_theta` and `rope_scaling` as before.

    Raises ValueError naming the setting: one that is not supported, one that `kind` does not read, a needed one that
    is missing, or two spellings of one setting that differ. What is read gives the frequencies that transformers gives.
    """
    where, parameters = _scaling_dict(hf_config)
    kind = _agreed({f"{where}.{name}": parameters.get(name) for name in ("rope_type", "type")}, "default")
    if not isinstance(kind, str) or kind not in _READ_BY_KIND:
        raise ValueError(f"rope_type is {kind!r}; supported are {', '.join(map(repr, _READ_BY_KIND))}")
    _check_unscaled(hf_config, where, parameters)
    theta = _theta(hf_config, where, parameters)
    known = {
        "rope_type",
        "type",
        "rope_theta",
        *_FOREIGN_THETAS,
        *_PARTIAL_ROTARY,
        *_INTERLEAVED,
        *_READ_BY_KIND[kind],
    }
    for name, value in parameters.items():
        if name not in known and value is not None:
            raise ValueError(f"{where}.{name} is {value!r}, which a rope_type of {kind!r} does not read")
    if kind == "default":
        return RopeConfig(theta)
    factor = _positive(f"{where}.factor", parameters.get("factor"))
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low = _positive(f"{where}.low_freq_factor", parameters.get("low_freq_factor"))
    high = _positive(f"{where}.high_freq_factor", parameters.get("high_freq_factor"))
    if low >= high:
        raise ValueError(f"{where}.low_freq_factor is {low}; it must be less than high_freq_factor ({high})")
    return RopeConfig(theta, kind, factor, low, high, _original_length(hf_config, where, parameters))


def read_layer_ropes(hf_config: Mapping[str, Any]) -> dict[str, RopeConfig]:
    """The settings of each type of layer, of a model type that has several. There are two spellings: `rope_parameters`
    with a dict to each type, and before that `rope_theta` and `rope_scaling` for the full layers and
    `rope_local_base_freq` for the sliding ones.

    Raises ValueError as `read_rope_config` does.
    """
    stated = hf_config.get("rope_parameters") or {}
    if not isinstance(stated, Mapping):
        raise ValueError(f"rope_parameters is {stated!r}; it must be an object")
    thetas = _LAYER_THETAS[hf_config["model_type"]]
    older: dict[str, tuple[str, Any]] = {
        "full_attention": ("rope_theta", hf_config.get("rope_scaling")),
        "sliding_attention": ("rope_local_base_freq", None),
    }
    ropes = {}
    for layer_type, (theta_name, scaling) in older.items():
        parameters = {**(stated.get(layer_type) or {}), **(scaling or {})}
        if parameters.get("rope_theta") is None:
            parameters["rope_theta"] = hf_config.get(theta_name) or thetas[layer_type]
        lengths = {name: hf_config[name] for name in hf_config if name.endswith("max_position_embeddings")}
        ropes[layer_type] = read_rope_config({**lengths, "rope_parameters": parameters})
    return ropes


def stretched_length(hf_config: Mapping[str, Any], length: int) -> int:
    """How far the positions of a model reach that states `length`: with linear scaling times its factor, but for the
    models that state what they are scaled to."""
    if hf_config.get("model_type") in _LAYER_THETAS:
        read_layer_ropes(hf_config)
        return length
    rope = read_rope_config(hf_config)
    return int(length * rope.factor) if rope.kind == "linear" else length


def override_config(hf_config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`hf_config` with the entries of `overrides` in place of its own.

    Raises ValueError where a rotary override would have no effect, or would drop the model's own theta with the dict
    that it replaces.
    """
    merged = {**hf_config, **overrides}
    for name, other in (_SCALING_NAMES, _SCALING_NAMES[::-1]):
        if name in overrides and other not in overrides and merged.get(other) and merged[other] != merged[name]:
            raise ValueError(
                f"hf_overrides has {name}={merged[name]!r}, but the model's configuration says "
                f"{other}={merged[other]!r}; override {other} instead"
            )
    if (theta := _stated_theta(hf_config)) is not None and _stated_theta(merged) is None:
        raise ValueError(f"hf_overrides replaces the dict with the model's rope_theta of {theta!r}; name it there too")
    return merged


def _stated_theta(hf_config: Mapping[str, Any]) -> Any:
    dicts = [hf_config, *(hf_config.get(name) for name in _SCALING_NAMES)]
    thetas = [each.get("rope_theta") for each in dicts if isinstance(each, Mapping)]
    return next((theta for theta in thetas if theta is not None), None)


def _scaling_dict(hf_config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The name it stands under and the dict itself; an empty one stands for none."""
    given = {name: hf_config[name] for name in _SCALING_NAMES if hf_config.get(name)}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {value!r}; it must be an object")
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        _refuse_difference(given)
    for name, value in given.items():
        for key, entry in value.items():
            if isinstance(entry, Mapping):
                raise ValueError(f"{name} has settings of its own for {key!r}; one setting for all layers is supported")
        return name, value
    return "rope_parameters", {}


def _check_unscaled(hf_config: Mapping[str, Any], where: str, parameters: Mapping[str, Any]) -> None:
    """Raises ValueError where a part of each head is to be rotated, or neighbouring channels and not its halves."""
    for prefix, settings in (("", hf_config), (f"{where}.", parameters)):
        for name in _PARTIAL_ROTARY:
            if (share := settings.get(name)) is not None and (isinstance(share, bool) or share != 1):
                raise ValueError(f"{prefix}{name} is {share!r}; only whole heads can be rotated")
        for name in _INTERLEAVED:
            if settings.get(name):
                raise ValueError(f"{prefix}{name} is {settings[name]!r}; only the halves of a head can be rotated")


def _theta(hf_config: Mapping[str, Any], where: str, parameters: Mapping[str, Any]) -> float:
    places = {"": hf_config, f"{where}.": parameters}
    stated = {f"{prefix}rope_theta": each["rope_theta"] for prefix, each in places.items() if "rope_theta" in each}
    for name, value in stated.items():
        _positive(name, value)
    theta = _positive("rope_theta", _agreed(stated, _DEFAULT_THETA))
    for prefix, each in places.items():
        for name in _FOREIGN_THETAS:
            if each.get(name, theta) not in (theta, None):
                raise ValueError(
                    f"{prefix}{name} is {each[name]!r}, but rope_theta, by which these models go, is {theta}"
                )
    return theta


def _original_length(hf_config: Mapping[str, Any], where: str, parameters: Mapping[str, Any]) -> int:
    name = "original_max_position_embeddings"
    stated = hf_config.get("max_position_embeddings")
    length = _agreed({f"{where}.{name}": parameters.get(name), name: hf_config.get(name)}, stated)
    return int(_positive(f"{where}.{name}", length))


def _agreed(spellings: Mapping[str, Any], default: Any) -> Any:
    """What the spellings that are there say. Raises ValueError where they differ."""
    given = {name: value for name, value in spellings.items() if value is not None}
    values = list(given.values())
    if any(value != values[0] for value in values):
        _refuse_difference(given)
    return values[0] if values else default


def _refuse_difference(given: Mapping[str, Any]) -> NoReturn:
    said = " and ".join(f"{name}={value!r}" for name, value in given.items())
    raise ValueError(f"the model's configuration says {said}; two names of one setting must agree")


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a number greater than 0")
    return float(value)
