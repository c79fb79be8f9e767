// Wires the page: views, model list, settings, theme, keys.

import { call, wireApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element } from "./dom.js";
import { Graphs } from "./graphs.js";
import { wireSettings } from "./settings.js";

const THEME = "corespan-theme";
const MODEL = "corespan-model";

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

const chat = new Chat((text) => { byId("status").textContent = text; });
const graphs = new Graphs(notice);

async function listModels() {
  const picker = byId("model");
  try {
    const { data } = await (await call("v1/models")).json();
    picker.replaceChildren(...data.map(({ id }) => element("option", { value: id }, id)));
    const last = localStorage.getItem(MODEL);
    if (data.some(({ id }) => id === last)) picker.value = last;
    notice("");
  } catch (error) {
    if (error.status === 401) showSettings(true);
    notice(error.status === 401 ? "This server asks for an API key: give it in the settings." : error.message);
    if (error.status === 503) setTimeout(listModels, 1000); // still loading
  }
}

function showSettings(shown) {
  byId("settings").hidden = !shown;
  byId("toggle-settings").setAttribute("aria-expanded", String(shown));
}

function showView() {
  const server = location.hash === "#server";
  byId("server-view").hidden = !server;
  byId("chat-view").hidden = server;
  byId(server ? "show-server" : "show-chat").setAttribute("aria-current", "page");
  byId(server ? "show-chat" : "show-server").removeAttribute("aria-current");
  if (server) graphs.start();
  else graphs.stop();
}

function showTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem(THEME, theme);
}

function send(event) {
  event?.preventDefault();
  const text = byId("prompt").value;
  if (!text.trim() || chat.running) return;
  byId("prompt").value = "";
  chat.send(text);
}

byId("composer").addEventListener("submit", send);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
byId("stop").addEventListener("click", () => { chat.stop(); byId("prompt").focus(); });
byId("new-chat").addEventListener("click", () => { chat.cut(0); byId("prompt").focus(); });
byId("toggle-settings").addEventListener("click", () => showSettings(byId("settings").hidden));
byId("model").addEventListener("change", () => localStorage.setItem(MODEL, byId("model").value));
byId("theme").addEventListener("click", () => {
  const themes = ["auto", "light", "dark"];
  showTheme(themes[(themes.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % 3]);
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (chat.running) chat.stop();
  else if (!byId("settings").hidden) { showSettings(false); byId("toggle-settings").focus(); }
});
window.addEventListener("hashchange", showView);

wireApiKey(listModels);
wireSettings();
showTheme(localStorage.getItem(THEME) ?? "auto");
showView();
listModels();
