"""The engine's options about pictures. `EngineArgs` inherits them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..protocol.config import MultiModalConfig
from ..protocol.param_checks import int_at_least, reject
from .cli_args import option
from .multimodal.registry import make_processor, takes_pictures

_NO_LIMIT = 999


@dataclass(kw_only=True)
class PictureArgs:
    limit_mm_per_prompt: dict[str, Any] | None = option(None, 'most pictures a prompt may have, as {"image": 4} [999]')
    mm_processor_kwargs: dict[str, Any] | None = option(
        None, "how pictures are prepared, where a prompt does not say so"
    )
    mm_processor_cache_gb: float = option(4.0, "GiB of prepared pictures that are kept; 0: none")
    enable_mm_embeds: bool = option(False, "take ready embeddings in place of pictures")
    language_model_only: bool = option(False, "take text only, and do not load what sees")
    allowed_local_media_path: str = option("", "folder whose files a chat may name as file:///... [none]")
    allowed_media_domains: Sequence[str] | None = option(
        None, "hosts whose pictures a chat may name [those of the public internet]"
    )

    def _multimodal_config(
        self, hf_config: Mapping[str, Any], model: str, max_num_batched_tokens: int
    ) -> MultiModalConfig | None:
        """None where the model takes no pictures. `model`: its folder. Raises ValueError."""
        limit, cache_gb = _limit(self.limit_mm_per_prompt), self.mm_processor_cache_gb
        if isinstance(cache_gb, bool) or not isinstance(cache_gb, (int, float)) or not 0 <= cache_gb < 2**20:
            reject("mm_processor_cache_gb", cache_gb, "a number of GiB, at least 0")
        domains = self.allowed_media_domains
        if isinstance(domains, str) or not isinstance(domains, Sequence | None):
            reject("allowed_media_domains", domains, "None or a list of hosts")
        if not all(isinstance(each, str) for each in domains or ()):
            reject("allowed_media_domains", domains, "None or a list of hosts")
        path = self.allowed_local_media_path
        if not isinstance(path, str) or (path and not os.path.isdir(os.path.expanduser(path))):
            reject("allowed_local_media_path", path, "'' or a folder")
        if not takes_pictures(hf_config) or self.language_model_only:
            return None
        processor = make_processor(hf_config, model)
        processor.check_kwargs(self.mm_processor_kwargs or {})
        return MultiModalConfig(
            limit_per_prompt=limit,
            processor_kwargs=dict(self.mm_processor_kwargs or {}),
            cache_bytes=int(cache_gb * 2**30),
            encoder_capacity=max(max_num_batched_tokens, processor.max_embeds),
            enable_mm_embeds=self.enable_mm_embeds,
            allowed_local_media_path=os.path.abspath(os.path.expanduser(path)) if path else "",
            allowed_media_domains=None if domains is None else list(domains),
        )


def _limit(given: object) -> int:
    legal = "None or {'image': how many a prompt may have}"
    if given is None:
        return _NO_LIMIT
    if not isinstance(given, Mapping) or not set(given) <= {"image", "video", "audio"}:
        reject("limit_mm_per_prompt", given, legal)
    count = given.get("image", _NO_LIMIT)
    if isinstance(count, Mapping):
        if not set(count) <= {"count", "width", "height"}:
            reject("limit_mm_per_prompt", given, legal)
        count = count.get("count", _NO_LIMIT)
    return int_at_least("limit_mm_per_prompt", count, 0)
