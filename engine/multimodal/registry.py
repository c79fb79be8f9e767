"""Which `architectures` entry takes pictures, and how they are prepared for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...shared.json_files import read_json_if_there
from .idefics3 import Idefics3Processor
from .prepared import PictureProcessor

_PROCESSORS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], PictureProcessor]] = {
    "Idefics3ForConditionalGeneration": Idefics3Processor,
    "SmolVLMForConditionalGeneration": Idefics3Processor,
}


def takes_pictures(hf_config: Mapping[str, Any]) -> bool:
    return any(each in _PROCESSORS for each in hf_config.get("architectures") or ())


def make_processor(hf_config: Mapping[str, Any], model: str) -> PictureProcessor:
    """`model`: its folder. Raises ValueError where its files do not say how pictures are prepared."""
    folder = Path(model)
    settings = read_json_if_there(folder / "preprocessor_config.json")
    settings = settings or read_json_if_there(folder / "processor_config.json").get("image_processor") or {}
    if not settings:
        raise ValueError(f"{folder} has no preprocessor_config.json, which says how pictures are prepared")
    make = next(_PROCESSORS[each] for each in hf_config["architectures"] if each in _PROCESSORS)
    return make(hf_config, settings)
