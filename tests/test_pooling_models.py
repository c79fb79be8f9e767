"""Models that pool as their files say: sentence-transformers' decoders, rerankers, adapters; and what is counted."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapters import peft_model
from gguf_files import write_gguf
from pooling_models import build_pooling_model, expected, unit
from tokenizers import Tokenizer, processors

from corespan import LLM, EngineArgs, LoRARequest, PoolingParams, VLLMValidationError
from corespan.core.runtime.interface import Runtime
from corespan.engine.text.render_params import TokenizeParams

TEXTS = ["The quick brown fox", "Paris", "Rivers run through both, " * 9, "Winter, spring and 日本"]
QUERY = "Instruct: Find what answers\nQuery: "


def write_modules(folder: Path, *modules: str) -> None:
    """modules.json, and a folder of each module but Transformer and Normalize: "1_Pooling"..."""
    paths = [f"{number}_{kind}" if number else "" for number, kind in enumerate(modules)]
    rows = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(zip(paths, modules, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    for path in paths[1:]:
        (folder / path).mkdir()


def as_sentence_transformer(folder: Path, prompts: dict[str, Any]) -> None:
    """What decoders that embed have beside the model: the last token is pooled, and the tokenizer adds it."""
    write_modules(folder, "Transformer", "Pooling", "Normalize")
    pooling = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["Qwen3", "Mistral"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the kinds of Qwen3-Embedding and e5-mistral."""
    folder = tmp_path_factory.mktemp(request.param)
    build_pooling_model(folder, request.param, head_dim=16)
    as_sentence_transformer(folder, {"query": QUERY, "document": ""})
    return str(folder)


def test_decoders_that_embed_equal_transformers(make_llm: Callable[..., LLM], decoder: str) -> None:
    llm = make_llm(model=decoder)
    outputs = llm.embed([QUERY + TEXTS[0], *TEXTS[1:]], use_tqdm=False)
    for output in outputs:
        assert output.prompt_token_ids[-1] == 1
        wanted = unit(expected(decoder, list(output.prompt_token_ids))[-1])
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-5)
    (named,) = llm.embed({"prompt": TEXTS[0]}, prompt_name="query", use_tqdm=False)
    assert named.outputs.embedding == outputs[0].outputs.embedding
    cut = TokenizeParams(truncate_prompt_tokens=5, truncation_side="right")
    (rendered,) = llm.renderer.render_cmpl([TEXTS[2]], cut)
    assert rendered["prompt_token_ids"] == [*outputs[2].prompt_token_ids[:4], 1], "what is pooled must stay"
    for prompts, name, reason in (
        (["a"], "passage", "prompt_name must be one of query, document"),
        ([[5, 6]], "query", "prompt_name must be None where prompts are not texts"),
    ):
        with pytest.raises(VLLMValidationError, match=reason):
            llm.embed(prompts, prompt_name=name)


def bidirectional_qwen2(folder: Path, **config: Any) -> str:
    """Of the kind of gte-Qwen2: its config says so, and transformers' own class does not read it."""
    build_pooling_model(folder, "Qwen2", "ForCausalLM", **config)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"is_causal": False}))
    return str(folder)


def test_a_decoder_whose_tokens_see_those_behind_them(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModel

    llm = make_llm(model=bidirectional_qwen2(tmp_path), max_num_batched_tokens=512, enable_lora=False)
    reference = AutoModel.from_pretrained(tmp_path).float().eval()
    outputs = llm.embed(TEXTS * 5, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([list(output.prompt_token_ids)])
        with torch.no_grad():
            states = reference(ids, attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1])).last_hidden_state
        np.testing.assert_allclose(output.outputs.embedding, unit(states[0, -1].numpy()), atol=1e-5)
        assert output.num_cached_tokens == 0


def test_its_vectors_have_the_same_bits_in_any_batch(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    llm = make_llm(model=bidirectional_qwen2(tmp_path, dtype="bfloat16"), dtype="bfloat16", max_num_batched_tokens=512)
    alone = [llm.embed(text, use_tqdm=False)[0].outputs.embedding for text in TEXTS]
    assert [output.outputs.embedding for output in llm.embed(TEXTS * 4, use_tqdm=False)] == alone * 4


def test_gemma_embeds_as_transformers_has_it(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Of the kind of EmbeddingGemma: both directions, windows to either side, a mean, two dense layers."""
    import torch
    from safetensors.torch import save_file

    settings = {"use_bidirectional_attention": True, "sliding_window": 16, "query_pre_attn_scalar": 16}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
    build_pooling_model(tmp_path, "Gemma3Text", "Model", config_class="Gemma3TextConfig", **settings, **kinds)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    weights = torch.randn(96, 64), torch.randn(64, 96)
    for folder, weight in zip(("2_Dense", "3_Dense"), weights, strict=True):
        rows, columns = weight.shape
        config = {"in_features": columns, "out_features": rows, "bias": False}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": weight}, tmp_path / folder / "model.safetensors")
    for output in make_llm(model=str(tmp_path)).embed(TEXTS, use_tqdm=False):
        mean = expected(str(tmp_path), list(output.prompt_token_ids)).mean(axis=0)
        wanted = unit(weights[1].numpy() @ (weights[0].numpy() @ mean))
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("option", "value"),
    [("enable_chunked_prefill", True), ("enable_prefix_caching", True), ("long_prefill_token_threshold", 64)],
)
def test_what_a_whole_prompt_excludes_is_refused(tmp_path: Path, option: str, value: Any) -> None:
    folder = bidirectional_qwen2(tmp_path)
    with pytest.raises(VLLMValidationError, match=f"{option} must be off: this model's tokens see those behind them"):
        EngineArgs(folder, **{option: value}).create_engine_config()
    with pytest.raises(VLLMValidationError, match="runner must be 'auto' or 'pooling'"):
        EngineArgs(folder, runner="generate").create_engine_config()
    config = EngineArgs(folder, max_model_len=1000).create_engine_config()
    assert not config.scheduler_config.enable_chunked_prefill and not config.cache_config.enable_prefix_caching
    assert config.scheduler_config.max_num_batched_tokens >= 1000


@pytest.mark.parametrize(("number", "pooling"), [(0, None), (1, "MEAN"), (3, "LAST")])
def test_a_gguf_file_that_names_its_pooling_embeds(tmp_path: Path, number: int, pooling: str | None) -> None:
    embedding = {"token_embd.weight": np.zeros((40, 16), dtype=np.float32)}
    path = write_gguf(tmp_path / "tiny.gguf", "qwen3", {"qwen3.pooling_type": number}, embedding)
    pooler = EngineArgs(str(path), skip_tokenizer_init=True).create_engine_config().model_config.pooler
    assert (None if pooler is None else pooler.pooling) == pooling
    assert pooler is None or (pooler.use_activation and pooler.task == "embed")


def test_prompts_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    build_pooling_model(tmp_path)
    as_sentence_transformer(tmp_path, {"query": 5})
    with pytest.raises(ValueError, match="prompts is not an object of texts"):
        EngineArgs(str(tmp_path)).create_engine_config()


@pytest.mark.parametrize(
    ("tokens", "overrides"),
    [(["a", "b"], {"method": "from_2_way_softmax"}), (["b"], {})],
)
def test_rerankers_by_tokens_of_the_head(
    make_llm: Callable[..., LLM], tmp_path: Path, tokens: list[str], overrides: dict[str, Any]
) -> None:
    folder = build_pooling_model(tmp_path, "Qwen3", "ForCausalLM", head_dim=16)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": tokens, **overrides}
    llm = make_llm(model=folder, hf_overrides=overrides)
    (output,) = llm.score("Paris", "France", use_tqdm=False)
    logits = expected(folder, list(output.prompt_token_ids), "AutoModelForCausalLM")[-1]
    *no, yes = logits[llm.get_tokenizer().convert_tokens_to_ids(tokens)]
    assert output.outputs.score == pytest.approx(1 / (1 + np.exp(sum(no) - yes)), abs=1e-5)


def test_a_reranker_with_a_class_of_its_own(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    folder = build_pooling_model(tmp_path, "Qwen3", "ForSequenceClassification", head_dim=16, num_labels=1)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}Yes or no?"
    llm = make_llm(model=folder)
    document = "fox 日本 " * 40
    cut = PoolingParams(truncate_prompt_tokens=70)
    for text, params in (("France", None), (document, cut)):
        (output,) = llm.score("Paris", text, chat_template=template, pooling_params=params, use_tqdm=False)
        token_ids = list(output.prompt_token_ids)
        prompt = llm.get_tokenizer().decode(token_ids, skip_special_tokens=True)
        head, _, tail = prompt.partition("<document>")
        assert head == "<query>Paris\n" and tail.endswith("\nYes or no?")
        assert text.startswith(tail.removesuffix("\nYes or no?"))
        (logit,) = expected(folder, token_ids, "AutoModelForSequenceClassification")
        assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)
    assert 60 < len(token_ids) <= 70


def test_an_adapter_changes_vectors_as_peft_has_it(
    make_llm: Callable[..., LLM], tiny_llama_dir: str, tmp_path: Path
) -> None:
    import torch

    model = peft_model(tiny_llama_dir)
    model.save_pretrained(tmp_path)
    adapter = LoRARequest("tuned", 1, str(tmp_path))
    llm = make_llm(runner="pooling", enable_lora=True, enable_prefix_caching=True)
    for lora_request in (None, adapter, None):
        (output,) = llm.embed(TEXTS[2], lora_request=lora_request, use_tqdm=False)
        token_ids = list(output.prompt_token_ids)
        if lora_request is None:
            states = expected(tiny_llama_dir, token_ids)
        else:
            with torch.no_grad():
                states = model.base_model.model.model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
            assert output.lora_request == adapter
        np.testing.assert_allclose(output.outputs.embedding, unit(states[-1]), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_first_token_waits_for_the_chunks_behind_it(make_llm: Callable[..., LLM], model: str, dtype: str) -> None:
    """Steps in which nobody wants a state: those of the later chunks."""
    options: dict[str, Any] = {"model": model, "dtype": dtype, "pooler_config": {"pooling_type": "CLS"}}
    (whole,) = make_llm(**options).embed([[5] * 100], use_tqdm=False)
    (chunked,) = make_llm(**options, max_num_batched_tokens=32).embed([[5] * 100], use_tqdm=False)
    np.testing.assert_allclose(chunked.outputs.embedding, whole.outputs.embedding, atol=1e-6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_pooling_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("size", [17, 576, 4096])
def test_a_final_state_is_widened_before_the_norm_and_the_same_in_any_batch(size: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, size, generator=generator).bfloat16()
    norm = torch.randn(size, generator=generator).bfloat16()
    runtime: Any = SimpleNamespace(_loaded=lambda: SimpleNamespace(norm=norm), spec=SimpleNamespace(rms_norm_eps=1e-6))
    states = Runtime.final_states(runtime, hidden)
    wide = hidden.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    torch.testing.assert_close(states.double(), wanted, atol=1e-5, rtol=1e-5)
    for first, count in ((0, 1), (5, 2), (100, 33)):
        alone = Runtime.final_states(runtime, hidden[first : first + count])
        assert torch.equal(alone, states[first : first + count])


def test_pooled_requests_are_counted(make_llm: Callable[..., LLM], model: str) -> None:
    llm = make_llm(model=model, disable_log_stats=False)
    outputs = llm.embed(TEXTS, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics() if not getattr(metric, "labels", {}).get("finished")}
    assert metrics["vllm:prompt_tokens"].value == sum(len(output.prompt_token_ids) for output in outputs)
    assert metrics["vllm:generation_tokens"].value == 0
    assert metrics["vllm:e2e_request_latency_seconds"].count == len(TEXTS)
    assert metrics["vllm:request_queue_time_seconds"].count == len(TEXTS)
    reasons = {
        metric.labels["finished_reason"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:request_success"
    }
    assert {reason: count for reason, count in reasons.items() if count} == {"stop": len(TEXTS)}
    assert outputs[0].metrics is not None and outputs[0].metrics.queued_ts > 0
