// What the settings panel holds, kept in this browser, and the fields of a request that it makes.

const STORED = "corespan-settings";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const fields = () => [...document.querySelectorAll("[data-setting]")];

export function wireSettings() {
  const stored = JSON.parse(localStorage.getItem(STORED) ?? "{}");
  for (const field of fields()) {
    field.value = stored[field.dataset.setting] ?? "";
    field.addEventListener("change", () => localStorage.setItem(STORED, JSON.stringify(values())));
  }
}

function values() {
  return Object.fromEntries(fields().map((field) => [field.dataset.setting, field.value]));
}

/** The request's fields without its messages, and the system prompt. Throws Error where one is not valid. */
export function requestFields() {
  const given = values();
  const invalid = fields().find((field) => !field.checkValidity());
  if (invalid) throw new Error(`${invalid.dataset.setting}: ${invalid.validationMessage}`);
  const body = {};
  for (const name of NUMBERS) if (given[name] !== "") body[name] = Number(given[name]);
  const stop = given.stop.split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (given.tools.trim()) body.tools = parsed("tools", given.tools);
  if (given.schema.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed("JSON schema", given.schema) } };
  }
  if (given.thinking) body.chat_template_kwargs = { enable_thinking: given.thinking === "on" };
  if (given.reasoning_effort) body.reasoning_effort = given.reasoning_effort;
  return { body, system: given.system.trim() };
}

function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not valid JSON: ${error.message}`);
  }
}
