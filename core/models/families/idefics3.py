"""Idefics3 and SmolVLM: a Llama that sees pictures through a SigLIP tower. Each tile of a picture is so many tokens."""

from dataclasses import replace

from ..spec import ModelSpec
from ..vision import VisionSpec, read_siglip
from .config_fields import HfConfig
from .llama import llama


def idefics3(config: HfConfig) -> ModelSpec:
    text = llama(config)
    vision = VisionSpec(
        **read_siglip(config["vision_config"]),
        output_size=text.hidden_size,
        factor=int(config.get("scale_factor", 2)),
        tower="model.vision_model",
        connector="model.connector.modality_projection.proj",
        text=(("model.text_model.", "model."), ("lm_head.", "lm_head.")),
    )
    if vision.patches_per_side % vision.factor:
        raise ValueError(
            f"scale_factor ({vision.factor}) does not divide the {vision.patches_per_side} patches of a tile's side"
        )
    return replace(text, vision=vision)
