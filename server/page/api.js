// The server's API as the page needs it. Addresses are relative, so a proxy may serve the page under any path.

import { byId } from "./dom.js";

const KEY = "corespan-api-key";

export function wireApiKey(changed) {
  const field = byId("api-key");
  const remember = byId("remember-key");
  remember.checked = localStorage.getItem(KEY) !== null;
  field.value = localStorage.getItem(KEY) ?? sessionStorage.getItem(KEY) ?? "";
  const store = () => {
    localStorage.removeItem(KEY);
    sessionStorage.removeItem(KEY);
    if (field.value) (remember.checked ? localStorage : sessionStorage).setItem(KEY, field.value);
  };
  field.addEventListener("change", () => { store(); changed(); });
  remember.addEventListener("change", store);
}

/** The answer to a request. Throws Error with the server's own words, `status` beside them. */
export async function call(path, options = {}) {
  const key = byId("api-key").value.trim();
  const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `${path}: ${response.status} ${response.statusText}`);
  error.status = response.status;
  throw error;
}

/** The chunks of a streamed chat completion, until [DONE]. Throws Error for an error event and for an early end. */
export async function* streamChat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST", signal, body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message ?? "the server failed");
    yield chunk;
  }
  throw new Error("the answer broke off: the connection was closed");
}

/** The data of each server-sent event. Comments are passed over. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (pending + value).split(/\r?\n\r?\n/);
      pending = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
