"""`StatLoggerManager` hands each step's figures to every logger. Built by the engines, only with statistics on."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...protocol import envs
from ...protocol.config import VllmConfig
from ...protocol.errors import may_be_ctrl_c
from ...protocol.outputs import SchedulerStats
from .loggers import LoggingStatLogger, StatLoggerBase, StatLoggerFactory
from .stats import IterationStats

if TYPE_CHECKING:
    from .prometheus import PrometheusStatLogger
    from .reader import Metric

logger = logging.getLogger("corespan.engine")

NO_STATISTICS = "there are no statistics: build the engine with disable_log_stats=False"


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
        take_picture_counts: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        """take_picture_counts: how many were looked up in the shell's cache since the last call, and how many found."""
        self._take_picture_counts = take_picture_counts
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
        if iteration_stats is not None:
            iteration_stats.mm_cache_queries, iteration_stats.mm_cache_hits = self._take_picture_counts()
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
