"""`get_metrics()`: an engine's Prometheus metrics as plain objects, for callers without a Prometheus server."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


@dataclass(slots=True)
class Metric:
    """`name` is the metric's own, without the `_total` that counters get where Prometheus shows them."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    value: int


@dataclass(slots=True)
class Gauge(Metric):
    value: float


@dataclass(slots=True)
class Histogram(Metric):
    """`buckets`: how many observations are at most the key; "+Inf" counts them all."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass(slots=True)
class Vector(Metric):
    """Figures by position: how many drafted tokens held at each place of a draft."""

    values: list[int]


def get_metrics_snapshot() -> list[Metric]:
    """The current values of all engines of this process, as they stand in Prometheus' registry."""
    from .prometheus import ENGINES

    return snapshot([ENGINES])


def snapshot(collectors: Iterable[MetricWrapperBase | Collector]) -> list[Metric]:
    """The current values of all `collectors`, one metric per combination of labels."""
    return [metric for collector in collectors for family in collector.collect() for metric in _read(family)]


def _read(family: object) -> Iterator[Metric]:
    name, kind, samples = family.name, family.type, family.samples  # type: ignore[attr-defined]
    if kind == "gauge":
        yield from (Gauge(name, dict(sample.labels), sample.value) for sample in samples)
    elif kind == "counter":
        totals = [sample for sample in samples if sample.name.endswith("_total")]
        if any("position" in sample.labels for sample in totals):
            yield from _read_vectors(name, totals)
            return
        yield from (Counter(name, dict(sample.labels), int(sample.value)) for sample in totals)
    elif kind == "histogram":
        yield from _read_histograms(name, samples)


def _read_vectors(name: str, samples: Iterable[Sample]) -> Iterator[Vector]:
    vectors: dict[tuple[tuple[str, str], ...], Vector] = {}
    for sample in sorted(samples, key=lambda sample: int(sample.labels["position"])):
        labels = {key: value for key, value in sample.labels.items() if key != "position"}
        vectors.setdefault(tuple(sorted(labels.items())), Vector(name, labels, [])).values.append(int(sample.value))
    yield from vectors.values()


def _read_histograms(name: str, samples: Iterable[Sample]) -> Iterator[Histogram]:
    histograms: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in samples:
        labels = {key: value for key, value in sample.labels.items() if key != "le"}
        histogram = histograms.setdefault(tuple(sorted(labels.items())), Histogram(name, labels, 0, 0.0, {}))
        if sample.name.endswith("_bucket"):
            histogram.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            histogram.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram.sum = sample.value
    yield from histograms.values()
