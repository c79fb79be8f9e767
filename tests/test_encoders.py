"""Encoders: vectors and scores as transformers has them, the same bits in any company, and what they refuse."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import Runner
from pooling_models import build_pooling_model as build

from corespan import LLM, EngineArgs, PoolingParams, VLLMValidationError

TEXTS = ["The quick brown fox", "Paris", "Rivers run through both, " * 9, "Winter, spring and 日本", ""]
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {"max_position_embeddings": 512},
    "Roberta": {"type_vocab_size": 1, "max_position_embeddings": 514},
    "XLMRoberta": {"type_vocab_size": 1, "max_position_embeddings": 515, "pad_token_id": 2},
}
EMBED = PoolingParams(task="embed")


def states(folder: str, token_ids: list[int]) -> Any:
    """transformers' last states, [tokens, hidden_size]."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).last_hidden_state[0].numpy()


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector, axis=-1, keepdims=True)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("bert"), "Bert", **FAMILIES["Bert"])


def test_every_client_gives_transformers_vectors(make_runner: Callable[..., Runner], bert: str) -> None:
    runner = make_runner(model=bert)
    tokens = PoolingParams(task="token_embed")
    outputs = runner.encode(TEXTS * 2, [EMBED] * len(TEXTS) + [tokens] * len(TEXTS))
    for line, output in enumerate(outputs):
        wanted = unit(states(bert, output.prompt_token_ids))
        data = output.outputs.data
        np.testing.assert_allclose(data, wanted[0] if line < len(TEXTS) else wanted, atol=1e-5)
        assert not output.num_cached_tokens


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pooling", ["CLS", "MEAN"])
def test_families_and_poolings_equal_transformers(
    make_llm: Callable[..., LLM], tmp_path: Path, family: str, pooling: str
) -> None:
    folder = build(tmp_path, family, **FAMILIES[family])
    llm = make_llm(model=folder, pooler_config={"seq_pooling_type": pooling})
    prompts = [*TEXTS, [5, 2, 1, 7, 1, 9]]  # with the padding token's id inside
    for output in llm.embed(prompts, use_tqdm=False):
        wanted = states(folder, list(output.prompt_token_ids))
        wanted = unit(wanted[0] if pooling == "CLS" else wanted.mean(axis=0))
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "least"), [({}, 0.999999), ({"dtype": "bfloat16"}, 0.9995), ({"quantization": "int8"}, 0.995)]
)
def test_a_text_has_the_same_bits_alone_and_among_others(
    make_llm: Callable[..., LLM], bert: str, options: dict[str, Any], least: float
) -> None:
    llm = make_llm(model=bert, **({"dtype": "bfloat16"} if "quantization" in options else {}), **options)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(4, 512, size=length).tolist() for length in (1, 2, 3, 7, 16, 17, 33, 64, 200, 512)]
    together = llm.embed(prompts * 2, use_tqdm=False)
    for line, prompt in enumerate(prompts):
        (alone,) = llm.embed([prompt], use_tqdm=False)
        for each in (together[line], together[line + len(prompts)]):
            assert each.outputs.embedding == alone.outputs.embedding
        assert unit(states(bert, prompt)[0]) @ np.array(alone.outputs.embedding) > least


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_classifiers_and_cross_encoders_equal_transformers(
    make_llm: Callable[..., LLM], tmp_path: Path, family: str, num_labels: int
) -> None:
    import torch
    import transformers

    kind = "ForSequenceClassification"
    folder = build(tmp_path, family, kind, num_labels=num_labels, **FAMILIES[family])
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    llm = make_llm(model=folder)
    tokenizer = llm.get_tokenizer()
    bare = PoolingParams(use_activation=False)
    if num_labels == 1:
        pairs = [tokenizer(TEXTS[0], text, return_token_type_ids=True) for text in TEXTS]
        got = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS, pooling_params=bare, use_tqdm=False)]
    else:
        pairs = [tokenizer(text, return_token_type_ids=True) for text in TEXTS]
        got = [output.outputs.probs for output in llm.classify(TEXTS, pooling_params=bare, use_tqdm=False)]
    for pair, score in zip(pairs, got, strict=True):
        types = {"token_type_ids": torch.tensor([pair["token_type_ids"]])} if family == "Bert" else {}
        with torch.no_grad():
            logits = model(torch.tensor([pair["input_ids"]]), **types).logits[0].numpy()
        np.testing.assert_allclose(np.atleast_1d(score), logits, atol=1e-4)


def test_what_encoders_cannot_do_is_refused(make_llm: Callable[..., LLM], bert: str, tiny_llama_dir: str) -> None:
    llm = make_llm(model=bert)
    for types, reason in (
        ([0, 1, 0], "0 for each token of the first text, then 1"),
        ([0, 1], "3 in all"),
        ([0, 0, 2], "then 1"),
    ):
        with pytest.raises(VLLMValidationError, match=reason):
            llm.embed([{"prompt_token_ids": [5, 6, 7], "token_type_ids": types}])
    with pytest.raises(ValueError, match="it may have at most 512"):
        llm.embed([[5] * 513])
    with pytest.raises(VLLMValidationError, match="this model has no types of tokens"):
        make_llm().generate([{"prompt_token_ids": [5, 6], "token_type_ids": [0, 1]}])
    for options in ({"enable_lora": True}, {"enable_prompt_embeds": True}):
        with pytest.raises(VLLMValidationError, match="False where the model is an encoder"):
            EngineArgs(bert, **options).create_engine_config()
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        EngineArgs(bert, max_num_batched_tokens=64, max_num_seqs=4).create_engine_config()
    with pytest.raises(ValueError, match="'gguf' is not supported by encoders"):
        make_llm(model=bert, quantization="gguf")
    with pytest.raises(ValueError, match="hidden_act is 'silu'"):
        make_llm(model=bert, hf_overrides={"hidden_act": "silu"})


def test_an_encoder_sleeps_and_wakes(make_llm: Callable[..., LLM], bert: str) -> None:
    llm = make_llm(model=bert)
    before = llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding
    llm.sleep(level=2)
    llm.wake_up()
    assert llm.embed(TEXTS[0], use_tqdm=False)[0].outputs.embedding == before


def test_minilm_finds_what_is_meant_and_equals_transformers(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(model="all-minilm-l6-v2", max_model_len=None)
    assert llm.model_config.max_model_len == 256
    documents = ["London has nine million people", "Cats sleep most of the day", "The sea was calm that night"]
    scores = [output.outputs.score for output in llm.score("How big is London?", documents, use_tqdm=False)]
    assert int(np.argmax(scores)) == 0 and scores[0] > 0.5 > max(scores[1:])
    for output in llm.embed(documents, use_tqdm=False):
        mean = states(llm.model_config.model, list(output.prompt_token_ids)).mean(axis=0)
        np.testing.assert_allclose(output.outputs.embedding, unit(mean), atol=1e-5)
