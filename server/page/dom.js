// Elements without markup: text only ever becomes text nodes.

export const byId = (id) => document.getElementById(id);

/** An element with properties (`class`, `on...` and attributes alike) and children, texts or nodes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function button(label, action, properties = {}) {
  return element("button", { type: "button", onclick: action, ...properties }, label);
}

/** A button that copies what `text()` gives. The clipboard is there on https and localhost only. */
export function copyButton(text) {
  const made = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Cannot copy";
    }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}
