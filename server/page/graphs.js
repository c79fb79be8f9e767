// Live graphs out of the server's own /metrics.

import { call } from "./api.js";
import { byId, element } from "./dom.js";
import { parseMetrics, quantile, total } from "./metrics.js";

const PERIOD_MS = 1000;
const KEPT = 120; // samples
const WINDOW = 20; // samples over which latencies are taken
const WIDTH = 400;
const HEIGHT = 120;
const LEFT = 46;
const SVG = "http://www.w3.org/2000/svg";

const rate = (name) => (now, before) => Math.max(0, total(now, name) - total(before, name)) / ((now.time - before.time) / 1000);
const gauge = (name, scale = 1) => (now) => total(now, name) * scale;
const latency = (name, share) => (now, before, old) => (quantile(now, old, name, share) ?? NaN) * 1000;

/** A graph: its title, unit, and two lines at most, each a label and how it is computed from samples. */
const GRAPHS = [
  ["Throughput", "tokens/s", ["generated", rate("vllm:generation_tokens_total")], ["prompt", rate("vllm:prompt_tokens_total")]],
  ["Requests", "", ["running", gauge("vllm:num_requests_running")], ["waiting", gauge("vllm:num_requests_waiting")]],
  ["KV cache in use", "%", ["in use", gauge("vllm:kv_cache_usage_perc", 100)]],
  ["Time to first token", "ms", ["median", latency("vllm:time_to_first_token_seconds", 0.5)], ["95th percentile", latency("vllm:time_to_first_token_seconds", 0.95)]],
  ["Time between tokens", "ms", ["median", latency("vllm:inter_token_latency_seconds", 0.5)], ["95th percentile", latency("vllm:inter_token_latency_seconds", 0.95)]],
  ["HTTP requests", "/s", ["answered", rate("http_requests_total")]],
];

export class Graphs {
  constructor(notice) {
    this.notice = notice;
    this.samples = [];
    this.timer = null;
    this.graphs = GRAPHS.map(([title, unit, ...lines]) => new Graph(title, unit, lines));
    byId("graphs").append(...this.graphs.map((graph) => graph.node));
  }

  start() {
    this.timer ??= setInterval(() => this.sample(), PERIOD_MS);
    this.sample();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
  }

  async sample() {
    if (this.asking) return;
    this.asking = true;
    try {
      const sample = parseMetrics(await (await call("metrics")).text());
      sample.time = performance.now();
      this.samples = [...this.samples, sample].slice(-KEPT - WINDOW);
      for (const graph of this.graphs) graph.draw(this.samples);
      this.notice("");
    } catch (error) {
      this.notice(`No figures: ${error.message}`);
    } finally {
      this.asking = false;
    }
  }
}

class Graph {
  constructor(title, unit, lines) {
    Object.assign(this, { title, unit });
    this.lines = lines.map(([label, compute], index) => {
      const kind = index ? "second" : "first";
      const value = element("b", {}, "–");
      return { label, compute, value, path: shape("path", { class: kind }), item: element("li", { class: kind }, `${label} `, value) };
    });
    this.top = shape("text", { x: LEFT - 6, y: 12, "text-anchor": "end" });
    this.picture = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT + 20}`, role: "img" },
      shape("line", { x1: LEFT, x2: WIDTH, y1: 6, y2: 6 }), shape("line", { x1: LEFT, x2: WIDTH, y1: HEIGHT, y2: HEIGHT }),
      this.top, shape("text", { x: LEFT - 6, y: HEIGHT + 4, "text-anchor": "end" }, "0"),
      shape("text", { x: LEFT, y: HEIGHT + 17 }, `${KEPT * PERIOD_MS / 1000} s ago`),
      shape("text", { x: WIDTH, y: HEIGHT + 17, "text-anchor": "end" }, "now"), ...this.lines.map((line) => line.path));
    this.node = element("figure", {}, element("figcaption", {}, title), element("ul", {}, ...this.lines.map((line) => line.item)), this.picture);
  }

  draw(samples) {
    const series = this.lines.map((line) => seriesOf(line.compute, samples));
    const top = roundUp(Math.max(...series.flat().filter(Number.isFinite), 0));
    this.top.textContent = short(top);
    const said = [];
    for (const [index, line] of this.lines.entries()) {
      const last = series[index].at(-1);
      line.value.textContent = Number.isFinite(last) ? `${short(last)} ${this.unit}` : "–";
      line.path.setAttribute("d", pathOf(series[index], top));
      said.push(`${line.label} ${line.value.textContent}`);
    }
    this.picture.setAttribute("aria-label", `${this.title}: ${said.join(", ")}`);
  }
}

/** The line's values, a sample each; the first sample has nothing to compare with. */
function seriesOf(compute, samples) {
  const values = samples.slice(1).map((now, index) => compute(now, samples[index], samples[Math.max(0, index + 1 - WINDOW)]));
  return values.slice(-KEPT);
}

function pathOf(values, top) {
  const step = (WIDTH - LEFT) / (KEPT - 1);
  let drawn = false;
  return values.map((value, index) => {
    if (!Number.isFinite(value)) { drawn = false; return ""; }
    const x = WIDTH - (values.length - 1 - index) * step;
    const y = HEIGHT - (value / top) * (HEIGHT - 6);
    const command = drawn ? "L" : "M";
    drawn = true;
    return `${command}${x.toFixed(1)} ${y.toFixed(1)}`;
  }).join("");
}

/** 1, 2 or 5 times a power of ten, not below `value`. */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999);
}

function short(value) {
  if (value >= 1000) return value.toLocaleString("en", { maximumSignificantDigits: 3, notation: "compact" });
  return String(Number(value.toPrecision(value >= 100 ? 3 : 2)));
}

function shape(tag, properties, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
