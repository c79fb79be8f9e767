"""Rotary settings in every spelling and combination: transformers' frequencies, or a refusal that names the setting."""

import copy
import itertools
import re
from typing import Any

import pytest
import torch

from corespan.core.models.registry import resolve_model_spec
from corespan.core.models.rotary import inverse_frequencies
from corespan.shared.rope_config import override_config, read_rope_config, stretched_length

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
}
ABSENT = object()
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DICTS: list[Any] = [
    ABSENT,
    None,
    {"rope_theta": 5e5, "rope_type": "default"},
    {"type": "linear", "factor": 4.0},
    {"rope_type": "linear", "type": "linear", "factor": 2, "rope_theta": 5e5},
    {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 48},
    {"type": "llama3", **LLAMA3, "rope_theta": 1e4},
]
ODD_DICTS: list[Any] = [
    {"factor": 4.0},
    {"rope_type": "linear"},
    {"rope_type": "linear", "type": "default", "factor": 4.0},
    {"rope_type": "linear", "factor": "4"},
    {"rope_type": "linear", "factor": 4.0, "rope_theta": None},
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "default", "partial_rotary_factor": 0.0},
    {"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default", "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default"}},
    {"rope_type": "default", "mrope_section": [4, 2, 2]},
    {"rope_type": ["linear"]},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48},
    {"rope_type": "dynamic", "factor": 4.0},
    ["linear", 4.0],
]
FAMILIES = ["Llama", "Mistral", "Qwen2", "Qwen3"]
NAMES = re.compile("rope|rotary|type|factor|original_max_position_embeddings")


def settings(**given: Any) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in given.items() if value is not ABSENT}


def theirs(family: str, given: dict[str, Any]) -> torch.Tensor | None:
    """transformers' frequencies; None where it cannot build the rotary embedding."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = SHAPE if family != "Qwen2" else {key: value for key, value in SHAPE.items() if key != "head_dim"}
    try:
        embedding = LlamaRotaryEmbedding(getattr(transformers, f"{family}Config")(**shape, **copy.deepcopy(given)))
    except Exception:
        return None
    assert embedding.attention_scaling == 1.0 or embedding.rope_type == "yarn"
    return embedding.inv_freq


def ours(family: str, given: dict[str, Any]) -> torch.Tensor | None:
    """None where the settings are refused, by name."""
    try:
        spec = resolve_model_spec({**SHAPE, "architectures": [f"{family}ForCausalLM"], **given})
    except ValueError as error:
        assert NAMES.search(str(error)), error
        return None
    rotary = spec.layers[0].attention.rotary
    return None if rotary is None else inverse_frequencies(rotary)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_combination_gives_transformers_frequencies_or_is_refused(family: str) -> None:
    served = 0
    combinations = itertools.product([ABSENT, None, 5e5], DICTS, DICTS, [ABSENT, 1.0, 0.5], [ABSENT, 48, 64])
    for theta, scaling, parameters, partial, original in combinations:
        given = settings(
            rope_theta=theta,
            rope_scaling=scaling,
            rope_parameters=parameters,
            partial_rotary_factor=partial,
            original_max_position_embeddings=original,
        )
        if (frequencies := ours(family, given)) is not None:
            expected = theirs(family, given)
            assert expected is not None, given
            torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0, msg=str(given))
            served += 1
    assert served > 150  # no rule may refuse what is not ambiguous


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("odd", ODD_DICTS, ids=str)
def test_odd_settings_are_refused_by_name(family: str, name: str, odd: Any) -> None:
    assert ours(family, settings(**{name: odd})) is None


@pytest.mark.parametrize("scaling", DICTS[2:], ids=str)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_each_dict_by_itself_is_served(name: str, scaling: Any) -> None:
    given = settings(**{name: scaling})
    frequencies, expected = ours("Llama", given), theirs("Llama", given)
    assert frequencies is not None
    assert expected is not None
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 5e5}}, r"rope_theta=1000000\.0 and rope_parameters\."),
        ({"rotary_pct": 0.25}, r"rotary_pct is 0\.25"),
        ({"rope_parameters": {"rope_theta": 1e4, "rotary_pct": 0.5}}, r"rope_parameters\.rotary_pct is 0\.5"),
        ({"rotary_emb_base": 1e6}, r"rotary_emb_base is 1000000\.0"),
        ({"rope_interleave": True}, "rope_interleave is True"),
        ({"rope_theta": -1.0}, r"rope_theta is -1\.0"),
        ({"rope_theta": "1e6"}, "rope_theta is '1e6'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor is 0"),
    ],
)
def test_what_would_be_ignored_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope_config(given)


NEW = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
OLD = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "overrides", "theta", "kind"),
    [
        (NEW, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, 1e6, "linear"),
        (NEW, {"rope_parameters": None, "rope_theta": 1e6}, 1e6, "default"),
        (OLD, {"rope_theta": 1e6}, 1e6, "linear"),
        (OLD, {"rope_scaling": None}, 5e5, "default"),
        (OLD, {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 8.0}}, 5e5, "linear"),
    ],
)
def test_an_override_takes_effect(config: Any, overrides: Any, theta: float, kind: str) -> None:
    rope = read_rope_config(override_config(config, overrides))
    assert (rope.theta, rope.kind) == (theta, kind)


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (NEW, {"rope_theta": 1e6}, "rope_theta=1000000.0 and rope_parameters.rope_theta=500000.0"),
        (NEW, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "override rope_parameters instead"),
        (NEW, {"rope_scaling": None, "rope_parameters": {"type": "linear", "factor": 2.0}}, "rope_theta of 500000.0"),
        (NEW, {"rope_parameters": None}, "rope_theta of 500000.0"),
        (OLD, {"rope_parameters": {"rope_type": "default"}}, "override rope_scaling instead"),
        (OLD, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_an_override_that_would_be_lost_or_lose_something_is_refused(config: Any, overrides: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_rope_config(override_config(config, overrides))


LAYER_TYPES = ["sliding_attention", "full_attention"]
PLAIN, SCALED = {"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}
BY_LAYER_TYPE: dict[str, dict[str, Any]] = {
    "unstated": {},
    "older": {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": SCALED},
    "older_in_part": {"rope_local_base_freq": 2e4},
    "newer": {
        "rope_parameters": {
            "full_attention": {**SCALED, "rope_theta": 5e5},
            "sliding_attention": {**PLAIN, "rope_theta": 2e4},
        }
    },
    "newer_without_thetas": {"rope_parameters": {"full_attention": SCALED, "sliding_attention": PLAIN}},
    "both": {"rope_parameters": {"full_attention": {**PLAIN, "rope_theta": 3e5}}, "rope_local_base_freq": 2e4},
}


@pytest.mark.parametrize("name", BY_LAYER_TYPE)
def test_gemma3_turns_each_type_of_layer_as_transformers_does(name: str) -> None:
    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    given = {**SHAPE, "layer_types": LAYER_TYPES, **BY_LAYER_TYPE[name]}
    expected = Gemma3RotaryEmbedding(Gemma3TextConfig(**copy.deepcopy(given)))
    given |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    for layer, kind in zip(resolve_model_spec(given).layers, LAYER_TYPES, strict=True):
        rotary = layer.attention.rotary
        assert rotary is not None
        assert torch.equal(inverse_frequencies(rotary), getattr(expected, f"{kind}_inv_freq"))
    assert stretched_length(given, 96) == 96  # scaling is in the length that it states
