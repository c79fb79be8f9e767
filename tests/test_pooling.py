"""Models that pool, over every client: vectors, classes and scores as transformers has them, alone and among others."""

import asyncio
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients import IN_PROCESS, SMALL_ENGINE, Runner
from deadlines import DEADLINE
from pooling_models import build_pooling_model as build
from pooling_models import expected, unit
from safetensors.torch import load_file, save_file

from corespan import (
    LLM,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolerConfig,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    VLLMValidationError,
)
from corespan.core.worker.input_batch import InputBatch
from corespan.engine.text.loading import load_tokenizer
from corespan.engine.text.render_params import TokenizeParams

TEXTS = ["The quick brown fox", "Paris", "Rivers run through both, " * 9, "Winter, spring and 日本"]
EMBED = PoolingParams(task="embed")
TOKENS = PoolingParams(task="token_embed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def pooling_runners() -> Any:
    runners: dict[str, Runner] = {}
    yield runners
    for runner in runners.values():
        runner.shutdown()


@pytest.fixture
def pooling_runner(client_kind: Any, pooling_runners: dict[str, Runner], model: str) -> Runner:
    if client_kind not in pooling_runners:
        pooling_runners[client_kind] = Runner(client_kind, model=model, **SMALL_ENGINE)
    return pooling_runners[client_kind]


def test_vectors_equal_transformers_whatever_runs_beside_them(pooling_runner: Runner, model: str) -> None:
    assert list(pooling_runner.call("get_supported_tasks")) == ["embed", "token_embed"]
    bare = PoolingParams(task="embed", use_activation=False)

    outputs = pooling_runner.encode(TEXTS * 3, [EMBED] * 4 + [bare] * 4 + [TOKENS] * 4)

    for line, output in enumerate(outputs):
        states = expected(model, output.prompt_token_ids)
        wanted = (unit(states[-1]), states[-1], unit(states))[line // 4]
        assert output.outputs.data.shape == wanted.shape and output.outputs.data.dtype == np.float32
        np.testing.assert_allclose(output.outputs.data, wanted, atol=1e-5 if line // 4 != 1 else 1e-4)
        assert output.finished and output.finish_reason == "stop"


def test_what_is_wrong_is_refused_at_the_caller_and_nobody_notices(pooling_runner: Runner) -> None:
    (before,) = pooling_runner.encode(["Paris"], EMBED)
    for prompt, params, reason in (
        ("Paris", PoolingParams(task="classify"), "task must be one of embed, token_embed"),
        ("Paris", PoolingParams(task="embed", dimensions=8), "was not made for shorter vectors"),
        ("Paris", PoolingParams(task="token_embed", skip_reading_prefix_cache=False), "needs every token's state"),
        ([1] * 513, EMBED, "the prompt has 513 tokens; with max_model_len 512 it may have at most 512"),
        ([1, 512], EMBED, "holds the token id 512"),
        ([], EMBED, "empty"),
    ):
        with pytest.raises(ValueError, match=reason):
            pooling_runner.encode([prompt], [params])
    with pytest.raises(ValueError, match="pools and does not generate"):
        pooling_runner.generate("Paris", SamplingParams())
    (after,) = pooling_runner.encode([[1] * 512], EMBED)
    assert len(after.prompt_token_ids) == 512
    np.testing.assert_array_equal(pooling_runner.encode(["Paris"], EMBED)[0].outputs.data, before.outputs.data)


def test_a_model_that_generates_does_not_pool(runner: Runner) -> None:
    assert list(runner.call("get_supported_tasks")) == ["generate"]
    with pytest.raises(ValueError, match="start the engine with runner='pooling'"):
        runner.encode(["Paris"], EMBED)


def test_truncation_keeps_one_end_and_what_the_tokenizer_adds(pooling_runner: Runner) -> None:
    params = PoolingParams(task="embed", truncate_prompt_tokens=7)
    (cut, whole) = pooling_runner.encode([TEXTS[2]] * 2, [params, EMBED])
    bos, *text = whole.prompt_token_ids
    assert cut.prompt_token_ids == [bos, *text[-6:]]
    for side, kept in (("left", text[-3:]), ("right", text[:3])):
        options = TokenizeParams(truncate_prompt_tokens=4, truncation_side=side)  # type: ignore[arg-type]
        (rendered,) = pooling_runner.engine.renderer.render_cmpl([TEXTS[2]], options)
        assert rendered["prompt_token_ids"] == [bos, *kept]
    (longest,) = pooling_runner.encode([[5] * 600], PoolingParams(task="embed", truncate_prompt_tokens=-1))
    assert len(longest.prompt_token_ids) == 512


@IN_PROCESS
def test_requests_of_one_engine_are_aborted_and_stepped_through(client_kind: Any, model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model, **SMALL_ENGINE))
    engine.add_request("a", TEXTS[0], EMBED)
    engine.add_request("b", TEXTS[1], PoolingParams())
    engine.abort_request("a")
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.request_id for output in outputs] == ["b"] and engine.step() == []
    engine.shutdown()


@IN_PROCESS
def test_a_request_that_fails_in_the_core_fails_alone(
    make_llm: Callable[..., LLM], client_kind: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(model=model)
    add = InputBatch.add

    def adding(batch: InputBatch, request: Any, adapter: Any) -> None:
        if request.num_prompt_tokens == 7:
            raise ValueError("seven is too many")
        add(batch, request, adapter)

    monkeypatch.setattr(InputBatch, "add", adding)
    good, bad, other = llm.encode([[5] * 6, [5] * 7, [5] * 8], EMBED, use_tqdm=False)
    assert (bad.finish_reason, bad.stop_reason, bad.outputs.data.size) == ("error", "seven is too many", 0)
    assert good.outputs.data.shape == other.outputs.data.shape == (64,)
    with pytest.raises(RuntimeError, match="ended with error: seven is too many"):
        llm.embed([[5] * 7], use_tqdm=False)


def test_leaving_early_aborts_in_the_core(pooling_runner: Runner) -> None:
    if pooling_runner.kind != "async_mp":
        pytest.skip("the others wait for their outputs")
    engine = pooling_runner.async_llm

    async def leave() -> int:
        tasks = [
            asyncio.ensure_future(anext(engine.encode([5] * 500, EMBED, f"left-{number}"))) for number in range(20)
        ]
        while engine.output_processor.get_num_unfinished_requests() < 20:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return engine.output_processor.get_num_unfinished_requests()

    assert pooling_runner._loop.run(leave()) == 0
    (output,) = pooling_runner.encode(["Paris"], EMBED)
    assert output.finish_reason == "stop"


def test_a_new_core_pools_what_the_old_one_was_asked(
    make_runner: Callable[..., Runner], client_kind: Any, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client_kind == "inproc":
        pytest.skip("in process there is no core to lose")
    runner = make_runner(model=model, engine_restart=2)
    before = runner.encode(TEXTS, EMBED)
    engine = runner.engine if client_kind == "async_mp" else runner.engine.llm_engine
    core = engine.engine_core._connection.current.process.ready.pid
    processor, all_run = engine.output_processor, threading.Event()
    add = processor.add_request

    def adding(*args: Any) -> Any:
        requests = add(*args)
        if processor.get_num_unfinished_requests() == len(TEXTS):
            all_run.set()
        return requests

    monkeypatch.setattr(processor, "add_request", adding)
    os.kill(core, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        answers = thread.submit(runner.encode, TEXTS, EMBED)
        assert all_run.wait(DEADLINE)
        os.kill(core, signal.SIGKILL)
        for after, wanted in zip(answers.result(DEADLINE), before, strict=True):
            np.testing.assert_array_equal(after.outputs.data, wanted.outputs.data)


@IN_PROCESS
@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_a_request_that_is_preempted_between_chunks_begins_anew(client_kind: Any, model: str, pooling: str) -> None:
    options = {**SMALL_ENGINE, "max_num_batched_tokens": 32, "pooler_config": {"pooling_type": pooling}}
    engine = LLMEngine.from_engine_args(EngineArgs(model, **options))
    vectors = []
    for preempted in (False, True):
        engine.add_request("a", [5] * 90, EMBED)
        assert engine.step() == []
        if preempted:
            assert engine.reset_prefix_cache(reset_running_requests=True)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        (output,) = outputs
        vectors.append(output.outputs.data)
        engine.reset_prefix_cache()
    np.testing.assert_array_equal(*vectors)
    engine.shutdown()


def test_vectors_are_the_same_after_sleep(pooling_runner: Runner) -> None:
    before = pooling_runner.encode(TEXTS, TOKENS)
    for level in (1, 2):
        pooling_runner.call("sleep", level)
        pooling_runner.call("wake_up")
        for output, wanted in zip(pooling_runner.encode(TEXTS, TOKENS), before, strict=True):
            np.testing.assert_array_equal(output.outputs.data, wanted.outputs.data)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In bfloat16, with shapes that the native kernels take."""
    return build(tmp_path_factory.mktemp("half"), dtype="bfloat16")


@pytest.mark.parametrize(("pooling", "quantization"), [("CLS", None), ("LAST", None), ("MEAN", None), ("LAST", "int8")])
def test_a_text_has_the_same_bits_alone_in_a_batch_in_chunks_and_from_the_cache(
    make_llm: Callable[..., LLM], half: str, pooling: str, quantization: str | None
) -> None:
    options: dict[str, Any] = {"model": half, "dtype": "bfloat16", "pooler_config": {"seq_pooling_type": pooling}}
    options["quantization"] = quantization
    whole, chunked = make_llm(**options), make_llm(**options, max_num_batched_tokens=32)
    texts = [*TEXTS, TEXTS[2] + TEXTS[0]]
    for params in (EMBED, TOKENS):
        alone = [whole.encode([text], params, use_tqdm=False)[0].outputs.data for text in texts]
        for llm in (whole, chunked):
            for _ in range(2):
                for output, wanted in zip(llm.encode(texts, params, use_tqdm=False), alone, strict=True):
                    np.testing.assert_array_equal(output.outputs.data, wanted)
    (again,) = whole.encode([texts[-1]], EMBED, use_tqdm=False)
    assert bool(again.num_cached_tokens) == (pooling == "LAST")


@pytest.mark.parametrize("pooling", ["CLS", "MEAN"])
def test_other_poolings_equal_transformers(make_llm: Callable[..., LLM], model: str, pooling: str) -> None:
    llm = make_llm(model=model, pooler_config=PoolerConfig(pooling_type=pooling, use_activation=False))  # type: ignore[arg-type]
    for output in llm.embed(TEXTS, use_tqdm=False):
        states = expected(model, list(output.prompt_token_ids))
        wanted = states[0] if pooling == "CLS" else states.mean(axis=0)
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-4)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Mistral", "Gemma2"])
def test_models_of_each_family_come_without_a_head(make_llm: Callable[..., LLM], tmp_path: Path, family: str) -> None:
    folder = build(tmp_path, family, head_dim=16)
    (output,) = make_llm(model=folder).embed(TEXTS[0], use_tqdm=False)
    states = expected(folder, list(output.prompt_token_ids))
    np.testing.assert_allclose(output.outputs.embedding, unit(states[-1]), atol=1e-5)


def test_a_model_with_a_head_pools_where_it_is_told_to(make_llm: Callable[..., LLM], tiny_llama_dir: str) -> None:
    (output,) = make_llm(runner="pooling").embed(TEXTS[0], use_tqdm=False)
    states = expected(tiny_llama_dir, list(output.prompt_token_ids))
    np.testing.assert_allclose(output.outputs.embedding, unit(states[-1]), atol=1e-5)


def test_a_checkpoint_that_has_a_tensor_under_two_names_is_refused(
    make_llm: Callable[..., LLM], model: str, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.norm.weight": tensors["norm.weight"].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds model\.norm\.weight twice"):
        make_llm(model=str(tmp_path))


def test_shorter_vectors_are_cut_before_they_are_normalised(make_llm: Callable[..., LLM], model: str) -> None:
    llm = make_llm(model=model, hf_overrides={"matryoshka_dimensions": [8, 16]}, pooler_config={"dimensions": 16})
    bare = llm.embed(TEXTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.embedding
    cut = llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=8), use_tqdm=False)[0].outputs
    assert cut.hidden_size == 8 and len(bare) == 16
    np.testing.assert_allclose(cut.embedding, unit(np.array(bare)[:8]), atol=1e-6)
    with pytest.raises(VLLMValidationError, match=r"dimensions must be one of 8, 16"):
        llm.embed(TEXTS[0], pooling_params=PoolingParams(dimensions=9), use_tqdm=False)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("classifier"), kind="ForSequenceClassification", num_labels=3)


def test_class_scores_equal_transformers(make_llm: Callable[..., LLM], classifier: str) -> None:
    llm = make_llm(model=classifier)
    assert llm.get_supported_tasks() == ["classify", "token_classify"]
    bare = PoolingParams(use_activation=False)
    rewards = llm.reward(TEXTS, use_tqdm=False, pooling_params=bare)
    for output, logits, reward in zip(
        llm.classify(TEXTS, use_tqdm=False),
        llm.classify(TEXTS, pooling_params=bare, use_tqdm=False),
        rewards,
        strict=True,
    ):
        wanted = expected(classifier, list(output.prompt_token_ids), "AutoModelForSequenceClassification")
        np.testing.assert_allclose(logits.outputs.probs, wanted, atol=1e-4)
        np.testing.assert_allclose(output.outputs.probs, np.exp(wanted) / np.exp(wanted).sum(), atol=1e-5)
        assert output.outputs.num_classes == 3
        assert reward.outputs.data.shape == (len(output.prompt_token_ids), 3)
        np.testing.assert_allclose(reward.outputs.data[-1], wanted, atol=1e-4)
    for call in (lambda: llm.embed("a"), lambda: llm.score("a", "b")):
        with pytest.raises(ValueError, match="task must be one of classify|need a model with one class"):
            call()


def test_pairs_are_scored_by_a_model_with_one_class(make_llm: Callable[..., LLM], tmp_path: Path) -> None:
    folder = build(tmp_path, kind="ForSequenceClassification", num_labels=1)
    llm = make_llm(model=folder, pooler_config={"logit_mean": 0.5, "logit_sigma": 2.0})
    outputs = llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for output, document in zip(outputs, TEXTS[1:], strict=True):
        token_ids = tokenizer(TEXTS[0], document)["input_ids"]
        assert output.prompt_token_ids == token_ids
        (logit,) = expected(folder, token_ids, "AutoModelForSequenceClassification")
        assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-(logit - 0.5) / 2)), abs=1e-5)
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (templated,) = llm.score("a", "b", chat_template=template, use_tqdm=False)
    assert tokenizer.decode(templated.prompt_token_ids, skip_special_tokens=True) == "query: a\ndocument: b\n"
    cut = PoolingParams(truncate_prompt_tokens=12)
    (shortened,) = llm.score("Paris", TEXTS[2], pooling_params=cut, use_tqdm=False)
    assert len(shortened.prompt_token_ids) == 12
    assert tokenizer.decode(shortened.prompt_token_ids, skip_special_tokens=True).startswith("Paris")


def test_scores_of_vectors_are_cosines_or_sums_of_the_nearest_tokens(make_llm: Callable[..., LLM], model: str) -> None:
    llm = make_llm(model=model)
    vectors = {text: output.outputs.embedding for text, output in zip(TEXTS, llm.embed(TEXTS), strict=True)}
    for output, document in zip(llm.score(TEXTS[0], TEXTS, use_tqdm=False), TEXTS, strict=True):
        assert output.outputs.score == pytest.approx(np.dot(vectors[TEXTS[0]], vectors[document]), abs=1e-5)
    one, other = (output.outputs.data for output in llm.encode(TEXTS[:2], pooling_task="token_embed", use_tqdm=False))
    (late,) = llm.score(TEXTS[0], TEXTS[1], pooling_params=TOKENS, use_tqdm=False)
    assert late.outputs.score == pytest.approx((one @ other.T).max(axis=1).sum(), abs=1e-4)
    for first, second in (([], ["a"]), (["a", "b"], ["a", "b", "c"])):
        with pytest.raises(ValueError, match="data_1"):
            llm.score(first, second)
    with pytest.raises(TypeError, match="data_2 must be a text or a list of texts"):
        llm.score("a", [1])  # type: ignore[list-item]


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_scores_by_two_rows_of_its_head(make_llm: Callable[..., LLM], tmp_path: Path, tied: bool) -> None:
    folder = build(tmp_path, "Qwen3", "ForCausalLM", head_dim=16, tie_word_embeddings=tied)
    llm = make_llm(
        model=folder,
        hf_overrides={
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["a", "b"],
            "is_original_qwen3_reranker": True,
        },
    )
    tokenizer = llm.get_tokenizer()
    no, yes = tokenizer.convert_tokens_to_ids(["a", "b"])
    (output,) = llm.score("Paris", "France", use_tqdm=False)
    logits = expected(folder, list(output.prompt_token_ids), "AutoModelForCausalLM")[-1]
    assert output.outputs.score == pytest.approx(1 / (1 + np.exp(logits[no] - logits[yes])), abs=1e-5)


def sentence_transformer(folder: Path, pooling: dict[str, Any], modules: list[str], **dense: Any) -> None:
    """What sentence-transformers writes beside a model."""
    rows = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, kind in enumerate(modules, 1):
        path = f"{number}_{kind}"
        rows.append({"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(pooling if kind == "Pooling" else dense))
    (folder / "modules.json").write_text(json.dumps(rows))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 100, "do_lower_case": False}))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_sentence_transformers_folder_is_read_whole(
    make_llm: Callable[..., LLM], model: str, tmp_path: Path, normalize: bool
) -> None:
    import torch

    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    old_form = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    dense = {"in_features": 64, "out_features": 24, "bias": True}
    sentence_transformer(
        tmp_path,
        old_form if normalize else {"pooling_mode": "mean", "include_prompt": True},
        ["Pooling", "Dense", *(["Normalize"] if normalize else [])],
        activation_function="torch.nn.modules.activation.Tanh",
        **dense,
    )
    weight, bias = torch.randn(24, 64), torch.randn(24)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")

    llm = make_llm(model=str(tmp_path), max_model_len=None)

    assert llm.model_config.max_model_len == 100
    for output in llm.embed(TEXTS, use_tqdm=False):
        mean = expected(model, list(output.prompt_token_ids)).mean(axis=0)
        wanted = np.tanh(weight.numpy() @ mean + bias.numpy())
        np.testing.assert_allclose(output.outputs.embedding, unit(wanted) if normalize else wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "modules", "reason"),
    [
        ({"pooling_mode": "max"}, ["Pooling"], "pools by max; supported is one of cls, mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, ["Pooling"], "pooling_mode_cls_token, p"),
        ({"pooling_mode": "mean", "include_prompt": False}, ["Pooling"], "include_prompt=false"),
        ({"pooling_mode": "mean"}, ["Pooling", "CNN"], "names a module 'CNN'"),
        ({"pooling_mode": "mean"}, [], "names no Pooling module"),
        ({"pooling_mode": "mean"}, ["Pooling", "Dense"], "activation_function is 'os.system'"),
    ],
)
def test_what_a_sentence_transformers_folder_asks_in_vain_is_refused_by_name(
    model: str, tmp_path: Path, pooling: dict[str, Any], modules: list[str], reason: str
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    sentence_transformer(tmp_path, pooling, modules, activation_function="os.system")
    with pytest.raises(ValueError, match=reason):
        EngineArgs(str(tmp_path)).create_engine_config()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"runner": "generate"}, "runner must be 'auto' or 'pooling': LlamaModel has no head"),
        ({"runner": "draw"}, "runner must be one of"),
        ({"convert": "draw"}, "convert must be one of"),
        ({"pooler_config": {"pooling": "MEAN"}}, "pooler_config must be a PoolerConfig, or a dict with entries among"),
        ({"pooler_config": {"seq_pooling_type": "MAX"}}, "seq_pooling_type must be None or one of CLS, LAST, MEAN"),
        ({"pooler_config": {"logit_sigma": 0}}, "logit_sigma"),
        ({"pooler_config": {"dimensions": True}}, "dimensions must be None or at least 1"),
        ({"convert": "classify", "pooler_config": {"dimensions": 3}}, "pooler_config.dimensions"),
        ({"logits_processors": ["a:B"]}, "logits_processors must be None where the engine pools"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config must be None where the engine pools"),
        ({"hf_overrides": {"architectures": ["LlamaForCausalLM"]}, "convert": "embed"}, "convert must be 'auto' or 'n"),
        ({"hf_overrides": {"architectures": ["LlamaForCausalLM"]}, "pooler_config": {}}, "pooler_config must be None"),
    ],
)
def test_options_that_the_model_does_not_allow_are_refused(model: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        EngineArgs(model, **options).create_engine_config()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dimensions": 0}, "dimensions must be None or at least 1"),
        ({"dimensions": True}, "dimensions"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens must be None, -1"),
        ({"use_activation": 1}, "use_activation"),
        ({"skip_reading_prefix_cache": 0}, "skip_reading_prefix_cache"),
        ({"task": "generate"}, "task must be None or one of embed, classify"),
        ({"output_kind": 1}, "output_kind"),
    ],
)
def test_params_are_checked_when_they_are_made(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(VLLMValidationError, match=reason):
        PoolingParams(**fields)


def test_methods_refuse_what_they_cannot_do(make_llm: Callable[..., LLM], model: str) -> None:
    llm = make_llm(model=model)
    with pytest.raises(VLLMValidationError, match="pooling_task must be 'embed', 'classify'"):
        llm.encode("a")
    with pytest.raises(VLLMValidationError, match="task must be None or 'embed'"):
        llm.embed("a", pooling_params=TOKENS)
    with pytest.raises(ValueError, match="pooling_params has 1 entries for 2 prompts"):
        llm.embed(["a", "b"], pooling_params=[EMBED])
    with pytest.raises(VLLMValidationError, match="chat_template must be None"):
        llm.score("a", "b", chat_template="x")
    with pytest.raises(ValueError, match="no LoRA adapters"):
        llm.embed("a", lora_request=LoRARequest("a", 1, "/nowhere"))
    assert not isinstance(llm.embed("a", use_tqdm=False)[0], RequestOutput)


def test_a_model_that_generates_says_what_to_do(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    for call in (lambda: llm.embed("a"), lambda: llm.score("a", "b"), lambda: llm.classify("a")):
        with pytest.raises(ValueError, match="runner='pooling'"):
            call()


def test_the_pages_example_runs(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = (Path(__file__).parent.parent / "docs" / "pooling.md").read_text(encoding="utf-8")
    example = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    (tmp_path / "notes").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "notes" / f"{number}.txt").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    exec(compile(example.replace("all-minilm-l6-v2", model), "example", "exec"), {})

    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[1] for line in lines) == [f"{number}.txt" for number in range(len(TEXTS))]


def test_the_pages_template_ends_as_the_reranker_was_trained(model: str) -> None:
    page = (Path(__file__).parent.parent / "docs" / "pooling.md").read_text(encoding="utf-8")
    (template,) = re.findall(r"```jinja\n(.*?)```", page, re.DOTALL)
    messages = [{"role": "query", "content": "Who?"}, {"role": "document", "content": "Me."}]
    text = str(load_tokenizer(model).apply_chat_template(messages, chat_template=template, tokenize=False))
    assert (
        text.startswith("<|im_start|>system\nJudge whether") and "\n<Query>: Who?\n<Document>: Me.<|im_end|>\n" in text
    )
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n")
