"""From a prompt and its pictures to token ids and `mm_features`. Called by the renderer, which has one."""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...protocol.config import ModelConfig, MultiModalConfig
from ...protocol.errors import VLLMValidationError
from ...protocol.multimodal import EMBEDS, PIXELS, MultiModalFeatureSpec, PlaceholderRange
from ...protocol.param_checks import is_encodable, is_plain_dict, reject, reject_type
from .images import as_rgb
from .prepared import PictureProcessor, Prepared
from .registry import make_processor

Encode = Callable[[str], list[int]]


class Items(NamedTuple):
    """A prompt's pictures as the caller gave them, each with a uuid or None; options for their preparation."""

    pictures: list[Any]
    uuids: list[str | None]
    kwargs: Mapping[str, Any]


class MultiModalInputs:
    """One model's pictures. Keeps what was prepared, the least recently used first to go. Safe to call from several
    threads."""

    def __init__(self, model_config: ModelConfig, config: MultiModalConfig) -> None:
        self.config = config
        self.hidden_size = int(model_config.hf_config["hidden_size"])
        self.processor: PictureProcessor = make_processor(model_config.hf_config, model_config.model)
        self._num_queries = self._num_hits = 0  # of the cache, since the last statistics
        self._cache: OrderedDict[str, Prepared] = OrderedDict()
        self._cache_bytes = 0
        self._lock = threading.Lock()

    def parse(self, data: object, uuids: object, kwargs: object) -> Items:
        """`multi_modal_data`, `multi_modal_uuids` and `mm_processor_kwargs` of a prompt, checked so far as that can be
        said before anything is decoded. Raises TypeError and VLLMValidationError."""
        if not isinstance(data, Mapping):
            reject_type("multi_modal_data", data, "a dict from 'image' to a picture or a list of pictures")
        if unknown := sorted(str(name) for name in data if name != "image"):
            reject("multi_modal_data", unknown, "of 'image' alone: this model takes no other kind")
        pictures = self._listed(data.get("image"))
        if len(pictures) > self.config.limit_per_prompt:
            legal = f"at most {self.config.limit_per_prompt} pictures a prompt (limit_mm_per_prompt)"
            reject("multi_modal_data", f"{len(pictures)} pictures", legal)
        if not isinstance(kwargs, dict | None) or not is_plain_dict(kwargs or {}):
            reject_type("mm_processor_kwargs", kwargs, "None or a dict from names to plain data")
        merged = {**self.config.processor_kwargs, **(kwargs or {})}
        self.processor.check_kwargs(merged)
        return Items(pictures, _listed_uuids(uuids, len(pictures)), merged)

    def render_text(self, text: str, items: Items, encode: Encode) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """The text with each picture's placeholder replaced by what stands for it, tokenised, and the pictures."""
        prepared = self._prepare(items)
        pieces = text.split(self.processor.image_token)
        if len(pieces) - 1 != sum(each.num_embeds for _, each in prepared) or not prepared:
            self._check_count("prompt", len(pieces) - 1, len(prepared))
            texts = [each.text for _, each in prepared]
            text = pieces[0] + "".join(own + piece for own, piece in zip(texts, pieces[1:], strict=True))
        token_ids = encode(text)
        return token_ids, self._features(token_ids, prepared)

    def render_ids(
        self, token_ids: list[int], items: Items, encode: Encode
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """The same for a prompt of token ids, of which one stands for each picture, or all that it comes to."""
        prepared = self._prepare(items)
        image = self.processor.image_token_id
        if token_ids.count(image) != sum(each.num_embeds for _, each in prepared):
            self._check_count("prompt_token_ids", token_ids.count(image), len(prepared))
            texts = iter([each.text for _, each in prepared])
            token_ids = [
                each for token_id in token_ids for each in (encode(next(texts)) if token_id == image else [token_id])
            ]
        return token_ids, self._features(token_ids, prepared)

    def reset_cache(self) -> None:
        with self._lock:
            self._cache.clear()
            self._cache_bytes = 0

    def take_counts(self) -> tuple[int, int]:
        """How many pictures were looked up in the cache since the last call, and how many of them were there."""
        with self._lock:
            counts = self._num_queries, self._num_hits
            self._num_queries = self._num_hits = 0
        return counts

    def _check_count(self, what: str, found: int, wanted: int) -> None:
        if found != wanted:
            raise VLLMValidationError(
                f"{what} has {found} placeholders ({self.processor.image_token}) for {wanted} pictures of "
                "multi_modal_data; there must be one for each",
                parameter=what,
                value=found,
            )

    def _features(
        self, token_ids: Sequence[int], prepared: Sequence[tuple[str, Prepared]]
    ) -> list[MultiModalFeatureSpec]:
        places = np.flatnonzero(np.array(token_ids) == self.processor.image_token_id)
        if len(places) != sum(each.num_embeds for _, each in prepared):
            raise ValueError(f"the tokenizer makes no token of its own of {self.processor.image_token}")
        features, done = [], 0
        for identifier, each in prepared:
            own = places[done : done + each.num_embeds]
            done += each.num_embeds
            offset, length = int(own[0]), int(own[-1] - own[0]) + 1
            mask = None
            if length > each.num_embeds:
                mask = np.zeros(length, dtype=bool)
                mask[own - offset] = True
            name = EMBEDS if each.pixels.ndim == 2 else PIXELS
            position = PlaceholderRange(offset, length, mask)
            features.append(MultiModalFeatureSpec("image", identifier, position, {name: each.pixels}))
        return features

    def _prepare(self, items: Items) -> list[tuple[str, Prepared]]:
        described = json.dumps(items.kwargs, sort_keys=True, default=str).encode()
        prepared = []
        for number, (picture, uuid) in enumerate(zip(items.pictures, items.uuids, strict=True)):
            where = f"multi_modal_data['image'][{number}]"
            identifier, each = self._prepared(picture, uuid, items.kwargs, described, where)
            if each.num_embeds > self.config.encoder_capacity:
                legal = f"a picture of at most {self.config.encoder_capacity} tokens (max_num_batched_tokens)"
                reject(where, f"a picture of {each.num_embeds} tokens", legal)
            prepared.append((identifier, each))
        return prepared

    def _prepared(
        self, picture: Any, uuid: str | None, kwargs: Mapping[str, Any], described: bytes, where: str
    ) -> tuple[str, Prepared]:
        digest = hashlib.sha256(len(described).to_bytes(8, "little") + described)
        if uuid is not None:
            digest.update(b"U" + uuid.encode())
            identifier = digest.hexdigest()
            if (known := self._find(identifier)) is not None:
                return identifier, known
            if picture is None:
                reject(where, None, f"a picture: there is none for the uuid {uuid!r} in the cache")
        if picture is None:
            reject(where, None, "a picture, or None with its uuid in multi_modal_uuids")
        if isinstance(picture, np.ndarray) and picture.dtype == np.float32:
            content, rgb = picture, None
        else:
            rgb = as_rgb(picture, where)
            content = np.asarray(rgb)
        if uuid is None:
            digest.update(f"C{content.dtype.str}{content.shape}".encode() + np.ascontiguousarray(content).tobytes())
            identifier = digest.hexdigest()
            if (known := self._find(identifier)) is not None:
                return identifier, known
        if rgb is None:
            made = Prepared(content, self.processor.text_of_embeds(len(content)), len(content))
        else:
            made = self.processor.prepare(rgb, kwargs)
        self._keep(identifier, made)
        return identifier, made

    def _listed(self, value: Any) -> list[Any]:
        """The pictures one by one; ready embeddings as [num_embeds, hidden_size] float32."""
        if isinstance(value, Mapping):
            value = value.get("image_embeds")
            if value is None:
                reject("multi_modal_data", "a dict", "a picture, a list of them, or {'image_embeds': an array}")
            return self._embeds(value)
        if value is None:
            return []
        if isinstance(value, (list, tuple)):
            return [each for item in value for each in self._of_list(item)]
        return self._embeds(value) if _is_float(value) else [value]

    def _of_list(self, item: Any) -> list[Any]:
        if isinstance(item, Mapping) or _is_float(item):
            return self._listed(item)
        return [item]

    def _embeds(self, value: Any) -> list[np.ndarray]:
        if isinstance(value, (list, tuple)):
            return [each for item in value for each in self._embeds(item)]
        if not self.config.enable_mm_embeds:
            raise ValueError("image embeddings need an engine with enable_mm_embeds=True")
        if callable(getattr(value, "detach", None)):
            value = value.detach().cpu().float().numpy()
        legal = f"an array of floats of [num_pictures, num_tokens, {self.hidden_size}] or [num_tokens, ...]"
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            reject_type("image_embeds", value, legal)
        if value.ndim not in (2, 3) or value.shape[-1] != self.hidden_size or 0 in value.shape:
            reject("image_embeds", f"an array of {list(value.shape)}", legal)
        if not np.isfinite(value).all():
            raise ValueError("image_embeds must be finite; they hold NaN or infinity")
        return list(np.ascontiguousarray(value.reshape(-1, *value.shape[-2:]), dtype=np.float32))

    def _find(self, identifier: str) -> Prepared | None:
        with self._lock:
            self._num_queries += 1
            known = self._cache.get(identifier)
            if known is not None:
                self._num_hits += 1
                self._cache.move_to_end(identifier)
            return known

    def _keep(self, identifier: str, made: Prepared) -> None:
        size = made.pixels.nbytes
        with self._lock:
            if identifier in self._cache or size > self.config.cache_bytes:
                return
            self._cache[identifier] = made
            self._cache_bytes += size
            while self._cache_bytes > self.config.cache_bytes:
                self._cache_bytes -= self._cache.popitem(last=False)[1].pixels.nbytes


def _is_float(value: object) -> bool:
    """Of an array or a tensor: whether it holds floats, as embeddings do and pictures do not."""
    dtype = str(getattr(value, "dtype", ""))
    return "float" in dtype


def _listed_uuids(uuids: object, count: int) -> list[str | None]:
    """One a picture."""
    legal = "None or {'image': a uuid, or a list with a uuid or None for each picture}"
    if uuids is None:
        return [None] * count
    if not isinstance(uuids, Mapping):
        reject_type("multi_modal_uuids", uuids, legal)
    if set(uuids) - {"image"}:
        reject("multi_modal_uuids", sorted(map(str, uuids)), legal)
    listed = uuids.get("image")
    if isinstance(listed, str) or listed is None:
        listed = [listed] * min(count, 1) if count < 2 else [listed]
    if not isinstance(listed, (list, tuple)) or len(listed) != count:
        reject("multi_modal_uuids", uuids, f"{legal}; there are {count} pictures")
    for each in listed:
        if each is not None and (not isinstance(each, str) or not each or not is_encodable(each)):
            reject("multi_modal_uuids", each, "a str that is not empty, or None")
    return list(listed)
