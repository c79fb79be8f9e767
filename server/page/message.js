// How a message of the conversation is shown.

import { button, copyButton, element } from "./dom.js";
import { renderMarkdown } from "./markdown.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/** The view of a message: `node`, and `update()` to be called when the message has changed.
 *  `actions`: `retry(message)`, `edit(message, text)`, `answerCalls(message, results)`. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.text = element("div", { class: "text" });
    this.extras = element("div");
    this.figures = element("p", { class: "figures" });
    this.buttons = element("div", { class: "actions" });
    this.node = element("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] },
      element("h2", {}, NAMES[message.role]), this.extras, this.text, this.figures, this.buttons);
    this.update();
  }

  update() {
    const { message } = this;
    if (message.role === "assistant") {
      this.showReasoning();
      this.showCalls();
      renderMarkdown(this.text, message.content);
      if (message.error) this.text.append(element("p", { class: "error" }, message.error));
      this.text.renderedBlocks = message.error ? [] : this.text.renderedBlocks;
    } else {
      this.text.textContent = message.content;
    }
    this.figures.textContent = message.figures ?? "";
    this.figures.hidden = !message.figures;
    if (message.running) this.buttons.replaceChildren();
    else if (!this.buttons.hasChildNodes()) this.showButtons();
  }

  showReasoning() {
    const { reasoning, content } = this.message;
    if (!reasoning) return;
    if (!this.thoughts) {
      this.thoughts = element("pre");
      this.thinking = element("summary");
      this.extras.prepend(element("details", { class: "reasoning" }, this.thinking, this.thoughts));
    }
    this.thinking.textContent = this.message.running && !content ? "Reasoning…" : "Reasoning";
    this.thoughts.textContent = reasoning;
  }

  showCalls() {
    this.calls ??= [];
    for (const [index, call] of this.message.calls.entries()) {
      this.calls[index] ??= this.addCall();
      const { title, body } = this.calls[index];
      title.textContent = `Tool call: ${call.function.name}`;
      body.textContent = readable(call.function.arguments);
    }
    const asks = this.message.calls.length && !this.message.running && !this.message.answered;
    if (asks && !this.form) this.askResults();
    if (!asks) this.form?.remove();
  }

  addCall() {
    const made = { title: element("summary"), body: element("code") };
    this.extras.append(element("details", { class: "call" }, made.title, element("pre", {}, made.body)));
    return made;
  }

  /** A box per call for what the tool gave back. */
  askResults() {
    const boxes = this.message.calls.map((call) => element("textarea", { rows: "2", "data-call": call.id }));
    this.form = element("form", {
      onsubmit: (event) => {
        event.preventDefault();
        this.actions.answerCalls(this.message, boxes.map((box) => box.value));
      },
    }, ...boxes.map((box, index) => element("label", {}, `Result of ${this.message.calls[index].function.name}`, box)),
    element("button", {}, "Send results"));
    this.extras.append(element("details", { open: true }, element("summary", {}, "The model waits for results"), this.form));
    this.form = this.form.parentElement;
  }

  showButtons() {
    const { message, actions } = this;
    if (message.role === "user") this.buttons.append(button("Edit", () => this.edit()));
    if (message.role === "assistant") this.buttons.append(button("Retry", () => actions.retry(message)));
    this.buttons.append(copyButton(() => message.content));
  }

  edit() {
    const box = element("textarea", { class: "edit", rows: "3", "aria-label": "Edit the message" });
    box.value = this.message.content;
    const close = () => { this.text.hidden = false; editor.remove(); this.buttons.hidden = false; };
    const save = () => { close(); this.actions.edit(this.message, box.value); };
    const editor = element("div", {}, box,
      element("div", { class: "actions" }, button("Save and send", save), button("Cancel", close)));
    box.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); close(); } });
    this.text.hidden = this.buttons.hidden = true;
    this.text.after(editor);
    box.focus();
  }
}

function readable(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still coming
  }
}
