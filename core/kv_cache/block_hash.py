"""The content hash of a full KV-cache block: what it holds and all that stands before it.

A request's hashes are extended here as its tokens grow; the block pool finds blocks by them.
"""

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np

from ...protocol.multimodal import MultiModalFeatureSpec

ROOT_HASH = hashlib.sha256(b"corespan kv cache root").digest()
"""The parent of a request's first block."""


class BlockHasher:
    """Chained sha256 over an encoding in which no two different blocks read the same.

    A block is encoded as: its parent's hash (32 bytes), its token ids (8 bytes each, so the width is fixed), then each
    extra key as a tag byte, its length (8 bytes) and its bytes. Extra keys: the cache salt and the digest of the LoRA
    adapter's weights, in the first block only since the chain carries them on; the digest of the block's slice of the
    prompt embeddings; and each picture that the block holds a token of, with where in the picture the block begins.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def extend(
        self,
        block_hashes: list[bytes],
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        prompt_embeds: np.ndarray | None = None,
        adapter_digest: str | None = None,
        mm_features: Sequence[MultiModalFeatureSpec] = (),
    ) -> None:
        """Append the hashes of the full blocks of `token_ids` that `block_hashes` lacks.

        prompt_embeds: [num_prompt_tokens, hidden_size], what the first positions hold in place of token ids.
        Raises OverflowError for a token id that does not fit 64 bits.
        """
        size = self.block_size
        start, end = len(block_hashes) * size, len(token_ids) // size * size
        if start >= end:
            return
        new_ids = array("q", token_ids[start:end]).tobytes()
        num_embeds = 0 if prompt_embeds is None else len(prompt_embeds)
        parent = block_hashes[-1] if block_hashes else ROOT_HASH
        for position in range(start, end, size):
            offset = (position - start) * 8
            encoded = parent + new_ids[offset : offset + size * 8]
            if position == 0 and cache_salt is not None:
                encoded += _extra_key(b"S", cache_salt.encode("utf-8", "surrogatepass"))
            if position == 0 and adapter_digest is not None:
                encoded += _extra_key(b"L", adapter_digest.encode())
            if prompt_embeds is not None and position < num_embeds:
                encoded += _extra_key(b"E", _embeds_digest(prompt_embeds[position : position + size]))
            for feature in mm_features:
                place = feature.mm_position
                if place.offset < position + size and position < place.end:
                    encoded += _extra_key(b"M", f"{position - place.offset}:{feature.identifier}".encode())
            parent = hashlib.sha256(encoded).digest()
            block_hashes.append(parent)


def _extra_key(tag: bytes, key: bytes) -> bytes:
    return tag + len(key).to_bytes(8, "little") + key


def _embeds_digest(embeds: np.ndarray) -> bytes:
    """embeds: [num_positions, hidden_size]."""
    described = f"{embeds.dtype.str}{embeds.shape}".encode()
    return hashlib.sha256(described + np.ascontiguousarray(embeds).tobytes()).digest()
