"""A tiny random SmolVLM in Hugging Face layout, and what transformers makes of it. Built once a test session."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_llama import BOS_TOKEN_ID, EOS_TOKEN_ID, VOCAB_SIZE, write_generation_config, write_tokenizer

TILE = 64
EMBEDS_A_TILE = 4
_MARKS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SETTINGS = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": TILE},
    "resample": 1,
    "rescale_factor": 1 / 255,
    "size": {"longest_edge": 2 * TILE},
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny_vlm(folder: Path, dtype: str = "float32", seed: int = 0) -> Path:
    """Writes config, weights, tokenizer and the settings of the picture processor into `folder`."""
    import torch
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    text = {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE + len(_MARKS) + len(_PLACES),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "pad_token_id": 0,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": 16,
    }
    config = SmolVLMConfig(
        text_config=text, vision_config=vision, scale_factor=2, image_token_id=VOCAB_SIZE, pad_token_id=0
    )
    torch.manual_seed(seed)
    model = SmolVLMForConditionalGeneration(config)
    for name, weight in model.named_parameters():  # wide enough that greedy text varies, and depends on the picture
        if name.startswith(("model.vision_model", "model.connector")):
            torch.nn.init.normal_(weight, std=0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder, _CHAT_TEMPLATE)
    _add_marks(folder)
    write_generation_config(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


def _add_marks(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in _MARKS])
    tokenizer.add_tokens([AddedToken(place, normalized=False) for place in _PLACES])
    tokenizer.save(str(folder / "tokenizer.json"))


def picture(width: int, height: int, seed: int = 0) -> Any:
    """Soft random colours."""
    from PIL import Image

    colours = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height), Image.Resampling.BICUBIC)


class VisionReference:
    """transformers' processor and model of such a folder, in float32."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoTokenizer, SmolVLMForConditionalGeneration
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        self._torch = torch
        self.model = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.image_processor = SmolVLMImageProcessorPil.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def inputs(self, prompt: str, pictures: Sequence[Any], **options: Any) -> dict[str, Any]:
        """What transformers' `SmolVLMProcessor` hands to the model."""
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        made = self.image_processor(list(pictures), return_row_col_info=True, return_tensors="pt", **options)
        pieces = prompt.split("<image>")
        marks = ("<fake_token_around_image>", "<image>", "<global-img>")
        rows, columns = (made[name][0] for name in ("rows", "cols"))
        texts = [get_image_prompt_string(r, c, EMBEDS_A_TILE, *marks) for r, c in zip(rows, columns, strict=True)]
        text = pieces[0] + "".join(own + piece for own, piece in zip(texts, pieces[1:], strict=True))
        ids = self.tokenizer(text, return_tensors="pt")
        return {
            "input_ids": ids["input_ids"],
            "attention_mask": ids["attention_mask"],
            "pixel_values": made["pixel_values"],
            "pixel_attention_mask": made["pixel_attention_mask"],
        }

    def greedy(self, prompt: str, pictures: Sequence[Any], max_tokens: int, **options: Any) -> list[int]:
        inputs = self.inputs(prompt, pictures, **options)
        with self._torch.inference_mode():
            made = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
        return [int(each) for each in made[0, inputs["input_ids"].shape[1] :]]

    def logprobs(self, prompt: str, pictures: Sequence[Any]) -> np.ndarray:
        """[num_prompt_tokens, vocab_size] float32: row i is the distribution after token i."""
        with self._torch.inference_mode():
            logits = self.model(**self.inputs(prompt, pictures)).logits[0]
        made: np.ndarray = logits.log_softmax(-1).numpy()
        return made
