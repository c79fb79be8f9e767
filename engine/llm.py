"""`LLM`: the offline entry point. Batches of prompts in, lists of outputs in the same order out."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ..client.base import EngineCoreClient
from ..protocol.config import ModelConfig
from ..protocol.lora import LoRARequest
from ..protocol.param_checks import reject_type
from ..protocol.params import BeamSearchParams, RequestOutputKind, SamplingParams
from ..protocol.pausing import PauseMode
from ..protocol.pooling import PoolingParams, PoolingTask
from .beam_search import BeamSearchOutput, beam_search
from .controls import EngineControls
from .engine_args import EngineArgs, UsageContext
from .engine_options import LLMArgs, refuse_unknown_options, takes_options_of
from .llm_engine import LLMEngine
from .llm_pooling import LLMPooling, PoolingParamsEach
from .outputs.output_collector import EngineOutput
from .outputs.pooling_output import PoolingOutput, PoolingRequestOutput
from .outputs.request_output import RequestOutput
from .ownership import takes_turns
from .progress import CompletionBar, UseTqdm, progress
from .requests.adapters import LoRARequests
from .requests.pooling_resolver import for_task
from .text.conversation import to_conversation_list
from .text.prompts import PromptType, to_prompt_list, with_mm_kwargs
from .text.render_params import ChatParams
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .metrics.reader import Metric

Output = TypeVar("Output", RequestOutput, PoolingRequestOutput[PoolingOutput])


class LLM(EngineControls, LLMPooling):
    """One model and its engine; also a context manager, which shuts the engine down.

    Calls from several threads take turns: each `generate`, `chat` and so on runs alone, from its first prompt to its
    last output. `shutdown`, `get_metrics` and the controls that go straight to the core do not wait for their turn.

    `options` are the fields of `EngineArgs`, and `stat_loggers`. The core runs in a process of its own unless
    VLLM_ENABLE_V1_MULTIPROCESSING=0. Statistics are off unless `disable_log_stats=False` or `stat_loggers` are given.
    """

    @takes_options_of(LLMArgs)
    def __init__(self, model: str | PathLike[str], **options: Any) -> None:
        super().__init__()
        refuse_unknown_options(options)
        args = LLMArgs(model, **options)
        self.llm_engine = LLMEngine.from_engine_args(args, UsageContext.LLM_CLASS, stat_loggers=args.stat_loggers)
        self.turns = self.llm_engine.turns
        self.renderer, self.input_processor = self.llm_engine.renderer, self.llm_engine.input_processor
        self.request_counter = itertools.count()
        self._enqueued: dict[str, EngineOutput | None] = {}  # with the outputs of those that have ended

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> "LLM":
        return cls(**vars(engine_args))

    @property
    def engine_core(self) -> EngineCoreClient:  # type: ignore[override]
        return self.llm_engine.engine_core

    @property
    def model_config(self) -> ModelConfig:
        return self.llm_engine.model_config

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many workers there are: one."""
        return self.llm_engine.vllm_config.parallel_config.world_size

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for an engine that runs on token ids alone."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` stands for: the model's generation config over vLLM's defaults."""
        return self.llm_engine.get_default_sampling_params()

    @takes_turns
    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output a prompt, in the prompts' order. A list of ints is one prompt; any other list is a batch.

        `sampling_params`, `priority` and `lora_request` are one for all, or a sequence with one a prompt. Raises
        ValueError or TypeError for the first prompt or parameter that cannot be served, and then none of the batch
        stays queued.
        """
        batch = [with_mm_kwargs(each, mm_processor_kwargs) for each in to_prompt_list(prompts)]
        all_params = self._params_each(sampling_params, len(batch))
        request_ids, _ = self._add_batch(
            batch, len(batch), all_params, priority, tokenization_kwargs, use_tqdm, lora_request
        )
        return self._complete(request_ids, use_tqdm, RequestOutput)

    @takes_turns
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for conversations, one (a list of messages) or several, put into text by the chat template.

        Raises ValueError where neither the model nor the call has a template, or the template refuses the messages.
        """
        template_kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
        options = (add_generation_prompt, continue_final_message, tools, template_kwargs, mm_processor_kwargs)
        chat_params = ChatParams(chat_template, chat_template_content_format, *options)
        request_ids, _ = self._add_chats(
            messages, chat_params, sampling_params, None, tokenization_kwargs, use_tqdm, lora_request
        )
        return self._complete(request_ids, use_tqdm, RequestOutput)

    @takes_turns
    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: UseTqdm = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queues prompts for `wait_for_completion`; returns their internal request ids. Arguments as for `generate`."""
        batch = to_prompt_list(prompts)
        all_params = self._params_each(sampling_params, len(batch))
        return self._keep(
            self._add_batch(batch, len(batch), all_params, priority, tokenization_kwargs, use_tqdm, lora_request)
        )

    @takes_turns
    def enqueue_chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: UseTqdm = True,
        lora_request: LoRARequests = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """`enqueue` for conversations, given and put into text as for `chat`; returns their internal request ids."""
        template_kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
        options = (add_generation_prompt, continue_final_message, tools, template_kwargs)
        chat_params = ChatParams(chat_template, chat_template_content_format, *options)
        return self._keep(
            self._add_chats(
                messages, chat_params, sampling_params, priority, tokenization_kwargs, use_tqdm, lora_request
            )
        )

    @takes_turns
    def wait_for_completion(self, *, use_tqdm: UseTqdm = True) -> list[RequestOutput]:
        """The outputs of everything enqueued since the last call, in the order of enqueueing."""
        return self._complete(list(self._enqueued), use_tqdm, RequestOutput)

    @takes_turns
    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The best `params.beam_width` continuations of each prompt; at most `concurrency_limit` prompts at once."""
        batch = to_prompt_list(prompts)
        lora_requests = self._one_adapter_each(lora_request, len(batch))

        def generate(
            prompts: Sequence[PromptType],
            params: SamplingParams,
            lora_requests: Sequence[LoRARequest | None],
            beam_lengths: Sequence[int] | None,
        ) -> list[RequestOutput]:
            request_ids, _ = self._add_batch(
                prompts, len(prompts), [params] * len(prompts), None, None, False, lora_requests, beam_lengths
            )
            return self._complete(request_ids, False, RequestOutput)

        return beam_search(self.llm_engine, generate, batch, params, lora_requests, use_tqdm, concurrency_limit)

    def pause_generation(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stops scheduling; what is enqueued is aborted, waited for or kept, and new prompts queue."""
        self.llm_engine.pause_generation(mode, clear_cache)

    def resume_generation(self) -> None:
        self.llm_engine.resume_generation()

    def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Runs what is enqueued to its end; `wait_for_completion` hands it out. Raises TimeoutError."""
        self.llm_engine.wait_for_requests_to_drain(drain_timeout)

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Pauses, then gives memory back: level 0 none, 1 the KV cache's, 2 the weights' too."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Takes memory back, all of it or what `tags` names, and goes on once it is complete."""
        self.llm_engine.wake_up(tags)

    def get_metrics(self) -> "list[Metric]":
        """A snapshot of every figure, under Prometheus' names. Needs `disable_log_stats=False`."""
        return self.llm_engine.get_metrics()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine. Repeated calls do nothing; an LLM that is dropped does it by itself."""
        self.llm_engine.shutdown(timeout)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_fork:
            self.shutdown()

    def _keep(self, ids: tuple[list[str], list[str]]) -> list[str]:
        """Leaves what was added to `wait_for_completion`; the internal ids of it."""
        request_ids, internal_ids = ids
        self._enqueued |= dict.fromkeys(request_ids)
        return internal_ids

    def _add_chats(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        chat_params: ChatParams,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        use_tqdm: UseTqdm,
        lora_request: LoRARequests,
    ) -> tuple[list[str], list[str]]:
        """`_add_batch` for one conversation or several."""
        conversations = to_conversation_list(messages)
        all_params = self._params_each(sampling_params, len(conversations))
        prompts = self._render_chats(conversations, chat_params, all_params, tokenization_kwargs)
        return self._add_batch(prompts, len(conversations), all_params, priority, None, use_tqdm, lora_request)

    def _render_chats(
        self,
        conversations: Iterable[Sequence[Any]],
        chat_params: ChatParams,
        all_params: Iterable[SamplingParams],
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> Iterator[PromptType]:
        """Each conversation's prompt, rendered when it is asked for."""
        renderer = self.llm_engine.renderer
        tok_params = renderer.default_chat_tok_params.with_kwargs(tokenization_kwargs)
        for conversation, params in zip(conversations, all_params, strict=True):
            own_params = tok_params.with_kwargs({"truncate_prompt_tokens": params.truncate_prompt_tokens})
            yield from renderer.render_chat([conversation], chat_params, own_params)[1]

    def _add_batch(
        self,
        prompts: Iterable[PromptType],
        count: int,
        all_params: Sequence[SamplingParams | PoolingParams],
        priority: int | Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        use_tqdm: UseTqdm,
        lora_request: LoRARequests,
        beam_lengths: Sequence[int] | None = None,
    ) -> tuple[list[str], list[str]]:
        """Queues `count` prompts, all or none of them. Returns their ids: the outputs', and the internal ones."""
        priorities = _one_each("priority", 0 if priority is None else priority, int, count)
        lora_requests = self._one_adapter_each(lora_request, count)
        lengths: Sequence[int | None] = beam_lengths or [None] * count
        request_ids: list[str] = []
        internal_ids: list[str] = []
        try:
            for prompt, params, each_priority, lora, beam_length in zip(
                progress(prompts, count, use_tqdm, "Adding requests"),
                all_params,
                priorities,
                lora_requests,
                lengths,
                strict=True,
            ):
                request_ids.append(str(next(self.request_counter)))
                prepared = self.input_processor.process_inputs(
                    request_ids[-1],
                    prompt,
                    params,
                    tokenization_kwargs=tokenization_kwargs,
                    priority=each_priority,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    beam_length=beam_length,
                )
                self.llm_engine.use_adapter(prepared, lora)
                internal_ids.append(self.llm_engine.add_prepared(prepared))
        except BaseException:
            self.llm_engine.abort_request(request_ids)
            raise
        return request_ids, internal_ids

    def _params_each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        return _one_each("sampling_params", sampling_params, SamplingParams, count)

    def _one_adapter_each(self, lora_request: LoRARequests, count: int) -> list[LoRARequest | None]:
        self.llm_engine.adapters.require_enabled(lora_request)
        return _one_each("lora_request", lora_request, LoRARequest | None, count)

    def _pool(
        self,
        prompts: Sequence[PromptType],
        pooling_params: PoolingParamsEach,
        task: PoolingTask | None,
        use_tqdm: UseTqdm,
        lora_request: LoRARequests,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        given = PoolingParams() if pooling_params is None else pooling_params
        all_params = [for_task(each, task) for each in _one_each("pooling_params", given, PoolingParams, len(prompts))]
        request_ids, _ = self._add_batch(
            prompts, len(prompts), all_params, None, tokenization_kwargs, use_tqdm, lora_request
        )
        return self._complete(request_ids, use_tqdm, PoolingRequestOutput)

    def _complete(self, request_ids: list[str], use_tqdm: UseTqdm, kind: type[Output]) -> list[Output]:
        """Steps until all of `request_ids` have ended; their outputs in that order. On an exception aborts them."""
        outputs = {request_id: self._enqueued.pop(request_id, None) for request_id in request_ids}
        unfinished = {request_id for request_id, output in outputs.items() if output is None}
        bar: CompletionBar | None = None
        try:
            if use_tqdm:
                bar = CompletionBar(len(unfinished), use_tqdm)
            while unfinished and self.llm_engine.has_unfinished_requests():
                self._ensure_progress()
                for output in self.llm_engine.step():
                    if not output.finished:
                        continue
                    if output.request_id in unfinished:
                        outputs[output.request_id] = output
                        unfinished.remove(output.request_id)
                        if bar is not None:
                            bar.finish(output)
                    elif output.request_id in self._enqueued:
                        self._enqueued[output.request_id] = output
                if bar is not None:
                    bar.tick(self.llm_engine.output_processor.request_states.values())
        except BaseException:
            self.llm_engine.abort_request(list(unfinished))
            raise
        finally:
            if bar is not None:
                bar.close()
        return [output for output in outputs.values() if isinstance(output, kind)]

    def _ensure_progress(self) -> None:
        """Raises RuntimeError where the engine is paused or asleep and so nothing would ever come."""
        if self.llm_engine.is_stalled():
            raise RuntimeError("the engine is paused or asleep: call resume_generation() or wake_up() first")


def _one_each(name: str, given: Any, kind: Any, count: int) -> list[Any]:
    """`given` for each of `count` prompts. Raises ValueError where it is a sequence of another length, TypeError."""
    if isinstance(given, kind):
        return [given] * count
    if isinstance(given, str) or not isinstance(given, Sequence):
        reject_type(name, given, f"one {_called(kind)} or a sequence of them")
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} prompts")
    for each in given:
        if not isinstance(each, kind):
            reject_type(f"each entry of {name}", each, f"of type {_called(kind)}")
    return list(given)


def _called(kind: Any) -> str:
    return str(kind.__name__) if isinstance(kind, type) else " or ".join(_called(each) for each in get_args(kind))
