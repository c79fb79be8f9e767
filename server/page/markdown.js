// Markdown as DOM nodes. What a model writes is not trusted: no markup is parsed, links keep to safe schemes and
// images become links, so that nothing is fetched.

import { copyButton, element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12;

/** Renders `text` into `target`; blocks whose source did not change since the last call keep their nodes. */
export function renderMarkdown(target, text) {
  const blocks = splitBlocks(text.split("\n"));
  const known = target.renderedBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < known.length && known[same] === blocks[same].source) same += 1;
  while (target.childNodes.length > same) target.lastChild.remove();
  for (const block of blocks.slice(same)) target.append(block.build());
  target.renderedBlocks = blocks.map((block) => block.source);
}

/** The blocks of some lines: `source`, which identifies one, and `build`, which makes its node. */
function splitBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const [end, build] = blockAt(lines, at, depth);
    blocks.push({ source: lines.slice(at, end).join("\n"), build });
    at = end;
  }
  return blocks;
}

function blockAt(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return codeBlock(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2); // the page's own headings are h1 and h2
    return [at + 1, () => element(`h${level}`, {}, ...inline(heading[2]))];
  }
  if (RULE.test(line)) return [at + 1, () => element("hr")];
  if (depth < MAX_DEPTH && /^ {0,3}>/.test(line)) return quote(lines, at, depth);
  if (depth < MAX_DEPTH && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && TABLE_RULE.test(lines[at + 1])) {
    return table(lines, at);
  }
  return paragraph(lines, at);
}

function codeBlock(lines, at, [, mark, language]) {
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end += 1;
  const code = lines.slice(at + 1, end).join("\n");
  return [Math.min(end + 1, lines.length), () => element("div", { class: "code" },
    element("div", {}, element("span", {}, language || "text"), copyButton(() => code)),
    element("pre", { tabindex: "0" }, element("code", {}, code)))];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [end, () => element("blockquote", {}, ...splitBlocks(inner, depth + 1).map((block) => block.build()))];
}

function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1 && /\d/.test(item[2]) === ordered) items.push([item[3]]);
    else if (/^\s{2,}\S/.test(lines[end])) items.at(-1).push(lines[end].replace(/^( {4}| {2,3}|\t)/, ""));
    else if (!lines[end].trim() && end + 1 < lines.length && (ITEM.test(lines[end + 1]) || /^\s{2,}\S/.test(lines[end + 1]))) items.at(-1).push("");
    else break;
    end += 1;
  }
  const properties = ordered ? { start: Number.parseInt(mark, 10) } : {};
  return [end, () => element(ordered ? "ol" : "ul", properties, ...items.map((item) => listItem(item, depth)))];
}

function listItem(lines, depth) {
  const built = splitBlocks(lines, depth + 1).map((block) => block.build());
  if (built[0]?.tagName === "P") built.splice(0, 1, ...built[0].childNodes); // a tight list
  return element("li", {}, ...built);
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const row = (line, tag) => element("tr", {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  return [end, () => element("table", {}, element("thead", {}, row(lines[at], "th")),
    element("tbody", {}, ...lines.slice(at + 2, end).map((line) => row(line, "td"))))];
}

function paragraph(lines, at) {
  let end = at + 1;
  const begins = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^ {0,3}>/.test(line);
  while (end < lines.length && !begins(lines[end])) end += 1;
  return [end, () => element("p", {}, ...inline(lines.slice(at, end).join("\n")))];
}

// Each kind of span: where it may begin, and what it becomes. All patterns run in linear time: no nested repeats.
const SPAN = /(`+)|!?\[([^\][]{1,1000})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>()"'`*]{1,2000})|\\([!-/:-@[-`{-~])|(\*\*|__|~~|\*|_)|( {2,}\n)/g;
const MARKS = { "**": "strong", "__": "strong", "~~": "del", "*": "em", _: "em" };

/** The nodes of a line of text. */
export function inline(text, depth = 0) {
  const nodes = [];
  let at = 0;
  SPAN.lastIndex = 0;
  for (let match; (match = SPAN.exec(text)); ) {
    const [node, end] = span(text, match, depth);
    if (node !== null) {
      if (match.index > at) nodes.push(text.slice(at, match.index));
      nodes.push(node);
      at = end;
    }
    SPAN.lastIndex = node === null ? match.index + match[0].length : end;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function span(text, match, depth) {
  const [whole, ticks, label, target, address, escaped, mark, hardBreak] = match;
  const after = match.index + whole.length;
  if (ticks) return codeSpan(text, ticks, after);
  if (label) return [link(target, label) ?? whole, after];
  if (address) {
    const trimmed = address.replace(/[.,;:!?]+$/, "");
    return [link(trimmed, trimmed) ?? trimmed, match.index + trimmed.length];
  }
  if (escaped) return [escaped, after];
  if (hardBreak) return [element("br"), after];
  return depth < MAX_DEPTH ? marked(text, mark, match.index, after, depth) : [null, after];
}

function codeSpan(text, ticks, after) {
  const end = text.indexOf(ticks, after);
  if (end < 0) return [null, after];
  return [element("code", {}, text.slice(after, end).replace(/^ (.*) $/, "$1")), end + ticks.length];
}

function marked(text, mark, start, after, depth) {
  const end = text.indexOf(mark, after + 1);
  const inWord = mark[0] === "_" && (/\w/.test(text[start - 1] ?? "") || /\w/.test(text[end + mark.length] ?? ""));
  if (end < 0 || inWord || /\s/.test(text[after] ?? " ") || /\s/.test(text[end - 1])) return [null, after];
  const saved = SPAN.lastIndex;
  const node = element(MARKS[mark], {}, ...inline(text.slice(after, end), depth + 1));
  SPAN.lastIndex = saved;
  return [node, end + mark.length];
}

function link(target, label) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
