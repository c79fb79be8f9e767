// Prometheus' text format, as far as the graphs need it.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;

/** name -> [{ labels, value }] */
export function parseMetrics(text) {
  const sample = { series: new Map() };
  for (const line of text.split("\n")) {
    const match = line[0] === "#" ? null : LINE.exec(line);
    if (!match) continue;
    const [, name, labels = "", value] = match;
    if (!sample.series.has(name)) sample.series.set(name, []);
    sample.series.get(name).push({ labels, value: Number(value.replace("Inf", "Infinity")) });
  }
  return sample;
}

/** The sum over all labels; 0 where there is no such figure. */
export function total(sample, name) {
  return (sample.series.get(name) ?? []).reduce((sum, { value }) => sum + value, 0);
}

/** The value below which the `share` of a histogram's entries between two samples lies, undefined without entries. */
export function quantile(now, before, name, share) {
  const counts = difference(buckets(now, name), buckets(before, name));
  const all = counts.at(-1)?.[1] ?? 0;
  if (!all) return undefined;
  let [lowBound, lowCount] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= share * all) {
      return Number.isFinite(bound) ? lowBound + (bound - lowBound) * (share * all - lowCount) / (count - lowCount || 1) : lowBound;
    }
    [lowBound, lowCount] = [bound, count];
  }
  return undefined;
}

/** Upper bound -> entries at most that large, over all labels. */
function buckets(sample, name) {
  const sums = new Map();
  for (const { labels, value } of sample.series.get(`${name}_bucket`) ?? []) {
    const bound = Number(/(?:^|,)le="([^"]*)"/.exec(labels)[1].replace("+Inf", "Infinity"));
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return sums;
}

function difference(now, before) {
  return [...now].sort(([a], [b]) => a - b).map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]);
}
