"""What `LLMEngine` and `AsyncLLM` share: everything between a caller's text and the core but how they wait for it."""

from collections.abc import Callable, Sequence
from typing import Any

from ..client.base import EngineCoreClient
from ..protocol.config import ModelConfig, VllmConfig
from ..protocol.param_checks import reject_type
from ..protocol.params import SamplingParams
from ..protocol.user_classes import end_script_at_engine
from .controls import EngineControls
from .log import configure_logging
from .metrics.loggers import StatLoggerFactory
from .metrics.manager import StatLoggerManager
from .multimodal.inputs import MultiModalInputs
from .outputs.output_processor import OutputProcessor
from .outputs.tracing import make_tracer
from .requests.adapters import AdapterBook
from .requests.generation_defaults import default_sampling_params
from .requests.input_processor import InputProcessor
from .text.loading import get_tokenizer
from .text.renderer import Renderer
from .text.tokenizer import Tokenizer


class EngineBase(EngineControls):
    """The parts of an engine, built around the client of its core."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        log_stats: bool,
        stat_loggers: Sequence[StatLoggerFactory],
        connect: Callable[[bool], EngineCoreClient],
        client_index: int = 0,
    ) -> None:
        """`connect` starts or joins the core; its argument says whether the core is to send statistics.
        `client_index`: which of the engines that share it this is.

        `stat_loggers` get statistics even with `log_stats` off, which stands for the default loggers then.
        """
        super().__init__()
        end_script_at_engine()
        if not isinstance(stat_loggers, Sequence) or not all(map(callable, stat_loggers)):
            reject_type("stat_loggers", stat_loggers, "a sequence of classes, each a StatLoggerBase")
        configure_logging()
        self.tokenizer = get_tokenizer(vllm_config.model_config)
        self.log_stats = log_stats or bool(stat_loggers)
        self.tracer = make_tracer(vllm_config)
        self.engine_core = connect(self.log_stats or self.tracer is not None)
        self.vllm_config = self.engine_core.vllm_config
        mm_config = self.vllm_config.mm_config
        multimodal = None if mm_config is None else MultiModalInputs(self.vllm_config.model_config, mm_config)
        self.renderer = Renderer(self.vllm_config.model_config, self.tokenizer, multimodal)
        self.input_processor = InputProcessor(self.vllm_config, self.tokenizer, self.renderer, client_index)
        self.adapters = AdapterBook(self.vllm_config.lora_config)
        self.output_processor = OutputProcessor(
            self.tokenizer, self.log_stats, self.vllm_config.scheduler_config.stream_interval, self.tracer
        )
        self.logger_manager: StatLoggerManager | None = None
        if self.log_stats:
            counts = () if multimodal is None else (multimodal.take_counts,)
            self.logger_manager = StatLoggerManager(self.vllm_config, stat_loggers, log_stats, *counts)

    @property
    def model_config(self) -> ModelConfig:
        return self.vllm_config.model_config

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError for an engine that runs on token ids alone."""
        if self.tokenizer is None:
            raise ValueError("the engine has no tokenizer (skip_tokenizer_init, or the model comes without one)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's generation config over vLLM's defaults."""
        return default_sampling_params(self.model_config)

    def remove_lora(self, lora_int_id: int) -> Any:
        """Whether the adapter was in memory; requests under way go on with it."""
        self.adapters.forget(lora_int_id)
        return self.engine_core.remove_lora(lora_int_id)

    def pin_lora(self, lora_int_id: int) -> Any:
        """Keeps the adapter in memory until it is removed. Raises ValueError for one that is not there."""
        return self.engine_core.pin_lora(lora_int_id)

    def _record_sleep_state(self, sleep: int, level: int) -> None:
        if self.logger_manager is not None:
            self.logger_manager.record_sleep_state(sleep, level)
