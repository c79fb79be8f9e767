"""Where statistics go: `StatLoggerManager` hands each step's figures to every logger. Built by the engines, only with
statistics on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...protocol import envs
from ...protocol.config import VllmConfig
from ...protocol.errors import may_be_ctrl_c
from ...protocol.outputs import PrefixCacheStats, SchedulerStats
from .stats import IterationStats

if TYPE_CHECKING:
    from .prometheus import PrometheusStatLogger
    from .reader import Metric

logger = logging.getLogger("corespan.engine")

NO_STATISTICS = "there are no statistics: build the engine with disable_log_stats=False"
HIT_RATE_WINDOW = 1000
"""Over how many of the latest requests the prefix-cache hit rate is taken."""


class StatLoggerBase:
    """What a custom logger derives from, overriding what it needs."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index

    def log_engine_initialized(self) -> None:
        """Called once, when the engine is up."""

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        """Called for every batch of outputs, and when requests are aborted or fail."""

    def log(self) -> None:
        """Called every VLLM_LOG_STATS_INTERVAL seconds while there is work, and by `do_log_stats()`."""

    def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
        """`sleep` 1: falls asleep at this `level`; 0: wakes up."""


StatLoggerFactory = Callable[[VllmConfig, int], StatLoggerBase]
"""Makes a logger for an engine index; a subclass of StatLoggerBase is one."""


class StatLoggerManager:
    """The caller's own loggers, then the default ones: log lines if INFO is on, Prometheus if its client is installed.

    A subclass of the Prometheus logger among the caller's takes the place of the default one. A logger that raises is
    left out from then on: nobody's request depends on it.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        factories: Sequence[StatLoggerFactory] = (),
        enable_default_loggers: bool = True,
    ) -> None:
        self.loggers = [factory(vllm_config, 0) for factory in factories]
        self.prometheus: PrometheusStatLogger | None = None
        if enable_default_loggers:
            if logger.isEnabledFor(logging.INFO):
                self.loggers.append(LoggingStatLogger(vllm_config))
            self.prometheus = self._prometheus_logger(vllm_config)
        self._default_loggers = enable_default_loggers
        self._interval = max(envs.VLLM_LOG_STATS_INTERVAL, 0.0) or 10.0
        self._last_log = time.monotonic()
        self._each(lambda stat_logger: stat_logger.log_engine_initialized())

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        self._each(
            lambda stat_logger: stat_logger.record(scheduler_stats=scheduler_stats, iteration_stats=iteration_stats)
        )

    def log_if_due(self) -> None:
        if time.monotonic() - self._last_log >= self._interval:
            self.log()

    def log(self) -> None:
        self._last_log = time.monotonic()
        self._each(lambda stat_logger: stat_logger.log())

    def record_sleep_state(self, sleep: int, level: int) -> None:
        self._each(lambda stat_logger: stat_logger.record_sleep_state(sleep, level))

    def get_metrics(self) -> "list[Metric]":
        """This engine's metrics. Raises RuntimeError where there is no Prometheus logger."""
        if not self._default_loggers:
            raise RuntimeError(NO_STATISTICS)
        if self.prometheus is None:
            raise RuntimeError("metrics need prometheus_client: pip install 'corespan[metrics]'")
        from .reader import snapshot

        return snapshot(self.prometheus.collectors)

    def _each(self, tell: Callable[[StatLoggerBase], None]) -> None:
        for stat_logger in tuple(self.loggers):
            try:
                tell(stat_logger)
            except BaseException as error:  # a logger of the user's can raise anything
                if may_be_ctrl_c(error):
                    raise
                logger.exception("%s failed and is told nothing more", type(stat_logger).__name__)
                self.loggers.remove(stat_logger)

    def _prometheus_logger(self, vllm_config: VllmConfig) -> "PrometheusStatLogger | None":
        try:
            import prometheus_client  # noqa: F401
        except ImportError:
            logger.debug("prometheus_client is not installed: statistics go to the log alone")
            return None
        from .prometheus import PrometheusStatLogger

        for stat_logger in self.loggers:
            if isinstance(stat_logger, PrometheusStatLogger):
                return stat_logger
        default = PrometheusStatLogger(vllm_config)
        self.loggers.append(default)
        return default


class LoggingStatLogger(StatLoggerBase):
    """One line an interval: throughput, queue lengths, cache use. At DEBUG level once nothing happens any more."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self._scheduler_stats = SchedulerStats()
        self._hit_rate = PrefixCacheHitRate()
        self._was_idle = False
        self._start_interval()

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None) -> None:
        if iteration_stats is not None:
            self._num_prompt_tokens += iteration_stats.prompt_token_stats.computed
            self._num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self._scheduler_stats = scheduler_stats
            self._num_preemptions += scheduler_stats.num_preemptions
            self._hit_rate.observe(scheduler_stats.prefix_cache_stats)

    def log(self) -> None:
        elapsed = max(time.monotonic() - self._interval_start, 1e-9)
        stats = self._scheduler_stats
        idle = not (self._num_prompt_tokens or self._num_generation_tokens or stats.num_running_reqs)
        line = (
            f"Engine {self.engine_index:03d}: "
            f"Avg prompt throughput: {self._num_prompt_tokens / elapsed:.1f} tokens/s, "
            f"Avg generation throughput: {self._num_generation_tokens / elapsed:.1f} tokens/s, "
            f"Running: {stats.num_running_reqs} reqs, Waiting: {stats.num_waiting_reqs} reqs, "
        )
        if self._num_preemptions:
            line += f"Preemptions: {self._num_preemptions}, "
        line += (
            f"KV cache usage: {stats.kv_cache_usage * 100:.1f}%, "
            f"Prefix cache hit rate: {self._hit_rate.value * 100:.1f}%"
        )
        logger.log(logging.DEBUG if idle and self._was_idle else logging.INFO, line)
        self._was_idle = idle
        self._start_interval()

    def _start_interval(self) -> None:
        self._interval_start = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._num_preemptions = 0


class PrefixCacheHitRate:
    """Hits per queried token over the last `HIT_RATE_WINDOW` requests; emptied when the cache is."""

    def __init__(self) -> None:
        self._clear()

    @property
    def value(self) -> float:
        """0..1; 0 before the first query."""
        return self._hits / self._queries if self._queries else 0.0

    def observe(self, stats: PrefixCacheStats) -> None:
        if stats.reset:
            self._clear()
        if stats.requests == 0:
            return
        self._window.append(stats)
        self._requests += stats.requests
        self._queries += stats.queries
        self._hits += stats.hits
        while len(self._window) > 1 and self._requests - self._window[0].requests >= HIT_RATE_WINDOW:
            oldest = self._window.popleft()
            self._requests -= oldest.requests
            self._queries -= oldest.queries
            self._hits -= oldest.hits

    def _clear(self) -> None:
        self._window: deque[PrefixCacheStats] = deque()
        self._requests = self._queries = self._hits = 0
