// The conversation: what was said, the answer that is coming, and what may be done with them.

import { streamChat } from "./api.js";
import { byId } from "./dom.js";
import { MessageView } from "./message.js";
import { requestFields } from "./settings.js";

const STORED = "corespan-conversation";
const MAX_STORED = 2_000_000; // characters
const FRAME_MS = 50;

export class Chat {
  constructor(say) {
    this.say = say; // for screen readers
    this.messages = [];
    this.views = new Map();
    this.running = null; // the AbortController of the answer that is coming
    this.log = byId("log");
    this.actions = {
      retry: (message) => this.restart(this.messages.indexOf(message)),
      edit: (message, text) => { message.content = text; this.restart(this.messages.indexOf(message) + 1); },
      answerCalls: (message, results) => this.answerCalls(message, results),
    };
    for (const message of JSON.parse(localStorage.getItem(STORED) ?? "[]")) this.add(message);
  }

  add(message) {
    const view = new MessageView(message, this.actions);
    this.messages.push(message);
    this.views.set(message, view);
    this.log.append(view.node);
    this.log.scrollTop = this.log.scrollHeight;
    return view;
  }

  /** Forgets the messages from `index` on. */
  cut(index) {
    this.stop();
    for (const message of this.messages.splice(index)) {
      this.views.get(message).node.remove();
      this.views.delete(message);
    }
    this.store();
  }

  restart(index) {
    this.cut(index);
    return this.answer();
  }

  send(text) {
    this.add({ role: "user", content: text });
    return this.answer();
  }

  answerCalls(message, results) {
    message.answered = true;
    this.views.get(message).update();
    for (const [index, call] of message.calls.entries()) {
      this.add({ role: "tool", content: results[index], tool_call_id: call.id });
    }
    return this.answer();
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  async answer() {
    const message = { role: "assistant", content: "", reasoning: "", calls: [], running: true };
    const controller = new AbortController();
    const messages = spoken(this.messages);
    const view = this.add(message);
    this.running = controller;
    this.showRunning();
    this.say("The model is answering.");
    const clock = new Clock();
    const draw = throttled(() => this.redraw(view));
    try {
      const { body, system } = requestFields();
      body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
      if (byId("model").value) body.model = byId("model").value;
      for await (const chunk of streamChat(body, controller.signal)) {
        clock.see(chunk);
        if (chunk.choices[0]) extend(message, chunk.choices[0]);
        message.figures = clock.text();
        draw();
      }
    } catch (error) {
      if (controller.signal.aborted) message.stopped = true;
      else message.error = error.message;
    }
    message.running = false;
    message.figures = clock.text() + (message.stopped ? " · stopped" : message.finish === "length" ? " · cut at max tokens" : "");
    draw.cancel();
    this.redraw(view);
    if (this.running === controller) this.running = null;
    this.showRunning();
    this.store();
    this.say(message.error ? `Error: ${message.error}` : message.stopped ? "Stopped." : `Answer: ${message.content}`);
  }

  /** Follows the text's end, unless the reader has scrolled away from it. */
  redraw(view) {
    const { log } = this;
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
    view.update();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  showRunning() {
    byId("stop").hidden = !this.running;
    byId("send").hidden = Boolean(this.running);
  }

  store() {
    const text = JSON.stringify(this.messages.filter((message) => !message.running));
    if (text.length <= MAX_STORED) localStorage.setItem(STORED, text);
  }
}

/** The messages as the API takes them: failed answers and empty ones are left out. */
function spoken(messages) {
  return messages.filter((message) => message.role !== "assistant" || message.content || message.calls.length).map((message) => {
    const { role, content, tool_call_id, calls, reasoning } = message;
    return { role, content, ...(tool_call_id && { tool_call_id }), ...(reasoning && { reasoning }), ...(calls?.length && { tool_calls: calls }) };
  });
}

function extend(message, { delta, finish_reason }) {
  message.content += delta?.content ?? "";
  message.reasoning += delta?.reasoning ?? delta?.reasoning_content ?? "";
  for (const part of delta?.tool_calls ?? []) {
    const call = (message.calls[part.index] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  if (finish_reason) message.finish = finish_reason;
}

/** Time to the first token and the rate after it. Until the server has told the usage, a chunk counts as a token. */
class Clock {
  started = performance.now();
  chunks = 0;

  see(chunk) {
    const delta = chunk.choices[0]?.delta;
    if (delta && (delta.content || delta.reasoning || delta.reasoning_content || delta.tool_calls)) {
      this.last = performance.now();
      this.first ??= this.last;
      this.chunks += 1;
    }
    if (chunk.usage) this.usage = chunk.usage;
  }

  text() {
    if (this.first === undefined) return "";
    const tokens = this.usage?.completion_tokens ?? this.chunks;
    const seconds = (this.last - this.first) / 1000;
    const rate = seconds > 0 && tokens > 1 ? ` · ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    return `first token ${Math.round(this.first - this.started)} ms${rate} · ${tokens} tokens`;
  }
}

/** `action` at most once every frame of FRAME_MS. */
function throttled(action) {
  let timer = null;
  const run = () => { timer ??= setTimeout(() => { timer = null; action(); }, FRAME_MS); };
  run.cancel = () => { clearTimeout(timer); timer = null; };
  return run;
}
