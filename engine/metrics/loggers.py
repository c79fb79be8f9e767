"""What a logger of statistics is, and the one that writes a line of them to the log."""

import logging
import time
from collections import deque
from collections.abc import Callable

from ...protocol.config import VllmConfig
from ...protocol.outputs import PrefixCacheStats, SchedulerStats
from .stats import IterationStats

logger = logging.getLogger("corespan.engine")

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
