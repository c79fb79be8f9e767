"""A tiny random Llama in Hugging Face layout, with a byte-level tokenizer of its own. Built once a test session."""

import json
from pathlib import Path

VOCAB_SIZE = 512
BOS_TOKEN_ID = 0
EOS_TOKEN_ID = 1
MAX_POSITION_EMBEDDINGS = 1024

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CORPUS = """
The quick brown fox jumps over the lazy dog while seven wizards mix potent jugs of liquid. The capital of France is
Paris, and the capital of Japan is Tokyo; rivers run through both. A scheduler decides which request runs next, how many
tokens it may compute, and when somebody else has to wait. Once upon a time there was a little engine which could count:
one, two, three, four, five, six, seven, eight, nine, ten. Numbers such as 3.14159 or 2026 are split into pieces.
def generate(prompts, params): return [engine.step() for prompt in prompts if prompt is not None]
Winter, spring, summer and autumn follow each other; every morning the baker opens his shop and sells warm bread.
"""


def build_tiny_llama(
    folder: Path, *, dtype: str = "float32", vocab_size: int = VOCAB_SIZE, seed: int = 0, **config: object
) -> Path:
    """Writes config, weights, tokenizer and generation config into `folder`. `config` overrides LlamaConfig's fields.

    The weights are spread widely enough that greedy text varies and is never a near tie.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "initializer_range": 0.2,
        "bos_token_id": BOS_TOKEN_ID,
        "eos_token_id": EOS_TOKEN_ID,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**fields, **config})).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    write_generation_config(folder)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = _CHAT_TEMPLATE, add_bos: bool = True) -> None:
    """Writes tokenizer.json and its config: byte-level BPE, 512 ids, `<s>` before every prompt if `add_bos`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS.splitlines(), trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", BOS_TOKEN_ID)]
        )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        tokenizer_config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


def write_generation_config(folder: Path, **fields: object) -> None:
    generation_config = {"bos_token_id": BOS_TOKEN_ID, "eos_token_id": EOS_TOKEN_ID, **fields}
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
