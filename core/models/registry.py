"""Which `architectures` entry of a Hugging Face config means which family."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .encoder import EncoderSpec
from .families.bert import bert, roberta
from .families.gemma import gemma2, gemma3
from .families.idefics3 import idefics3
from .families.llama import llama, mistral
from .families.qwen import qwen2, qwen3
from .spec import ModelSpec

S = TypeVar("S", ModelSpec, EncoderSpec)

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Idefics3ForConditionalGeneration": idefics3,
    "SmolVLMForConditionalGeneration": idefics3,
    "LlamaForSequenceClassification": llama,  # from here on they pool, and come without a head
    "MistralForSequenceClassification": mistral,
    "Qwen2ForSequenceClassification": qwen2,
    "Qwen3ForSequenceClassification": qwen3,
    "Gemma2ForSequenceClassification": gemma2,
    "LlamaModel": llama,
    "MistralModel": mistral,
    "Qwen2Model": qwen2,
    "Qwen3Model": qwen3,
    "Gemma2Model": gemma2,
    "Gemma3TextModel": gemma3,
}


ENCODERS: dict[str, Callable[[Mapping[str, Any]], EncoderSpec]] = {
    "BertModel": bert,
    "BertForMaskedLM": bert,
    "BertForSequenceClassification": bert,
    "RobertaModel": roberta,
    "RobertaForMaskedLM": roberta,
    "RobertaForSequenceClassification": roberta,
    "XLMRobertaModel": roberta,
    "XLMRobertaForMaskedLM": roberta,
    "XLMRobertaForSequenceClassification": roberta,
}


def resolve_model_spec(hf_config: Mapping[str, Any]) -> ModelSpec:
    """Raises ValueError naming the architecture when none of its entries is known, or the key that is missing."""
    return _resolve(FAMILIES, hf_config)


def resolve_encoder_spec(hf_config: Mapping[str, Any]) -> EncoderSpec:
    """The same, of an encoder."""
    return _resolve(ENCODERS, hf_config)


def _resolve(known: Mapping[str, Callable[[Mapping[str, Any]], S]], hf_config: Mapping[str, Any]) -> S:
    architectures = hf_config.get("architectures") or []
    for architecture in architectures:
        if architecture in known:
            try:
                return known[architecture](hf_config)
            except KeyError as error:
                raise ValueError(f"the model's config has no {error.args[0]!r}, which {architecture} needs") from None
    raise ValueError(
        f"model architecture {', '.join(architectures) or '(none given)'} is not supported; "
        f"known are {', '.join((*FAMILIES, *ENCODERS))}"
    )
