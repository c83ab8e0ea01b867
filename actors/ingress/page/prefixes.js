/**
 * The reader's hottest prefixes as an icicle, and where blocks came from, were missed and were evicted.
 */

import { get, poll } from "./api.js";
import { SOURCES } from "./explain.js";
import { add, bar, count, fill, h, note, several, showNote } from "./dom.js";

const LOOK_MS = 3000;
const ROW = 34;
const MAX_DEPTH = 6;

/** @typedef {{preview: string, requests: number, hit_tokens: number}} Prefix */
/** @typedef {{text: string, requests: number, hits: number, children: Branch[]}} Branch */

class Prefixes extends HTMLElement {
  connectedCallback() {
    this.ending = new AbortController();
    const { signal } = this.ending;
    poll(() => this.look(signal), (message) => this.fail(message), LOOK_MS, signal);
  }

  disconnectedCallback() {
    this.ending?.abort();
  }

  /** @param {string} message */
  fail(message) {
    this.shown = undefined; // the next look draws in place of the message, though nothing may have changed
    showNote(this, message, true);
  }

  /** @param {AbortSignal} signal */
  async look(signal) {
    const cache = await get("v1/cache", signal);
    const state = JSON.stringify([cache.hottest_prefixes, cache.hit_blocks, cache.missed_blocks, cache.evicted_blocks]);
    if (state === this.shown) return;
    this.shown = state;
    /** @type {Prefix[]} */
    const prefixes = cache.hottest_prefixes;
    if (!cache.prefix_caching) return fill(this, note("cache.prefix_caching is false: nothing is kept for later requests."));
    if (prefixes.length === 0) return fill(this, note("No prompt of a block or more yet."));
    fill(this, h("h2", {}, "Hottest prefixes"), h("p", {}, "Width: tokens that the cache saved; what stands below a text goes on from it."), icicle(branches(prefixes, 0)), table(prefixes),
      cache.hit_blocks && figures("Blocks of prompts, by source", { ...cache.hit_blocks, ...cache.missed_blocks }, (name) => SOURCES[name]?.name ?? name, (name) => SOURCES[name]?.kind ?? "computed"),
      cache.evicted_blocks && figures("Evicted blocks, by reason", cache.evicted_blocks, (name) => name, () => "evicted"));
  }
}

/**
 * Prefixes that begin alike, together.
 * @param {Prefix[]} prefixes
 * @param {number} depth
 * @returns {Branch[]}
 */
function branches(prefixes, depth) {
  /** @type {Map<string, Prefix[]>} */
  const groups = new Map();
  for (const prefix of prefixes) {
    const first = prefix.preview.slice(0, 1);
    groups.set(first, [...(groups.get(first) ?? []), prefix]);
  }
  return [...groups.values()].map((group) => {
    const text = depth < MAX_DEPTH ? common(group.map((prefix) => prefix.preview)) : group[0].preview;
    const rest = group.map((prefix) => ({ ...prefix, preview: prefix.preview.slice(text.length) })).filter((prefix) => prefix.preview);
    return {
      text, requests: group.reduce((sum, prefix) => sum + prefix.requests, 0), hits: group.reduce((sum, prefix) => sum + prefix.hit_tokens, 0),
      children: group.length > 1 && text && depth < MAX_DEPTH ? branches(rest, depth + 1) : [],
    };
  });
}

/** What all texts begin with. @param {string[]} texts */
function common(texts) {
  let end = 0;
  while (texts.every((text) => end < text.length && text[end] === texts[0][end])) end++;
  return texts[0].slice(0, end);
}

/** @param {Branch} branch @returns {number} */
const depthOf = (branch) => 1 + Math.max(0, ...branch.children.map(depthOf));

/** @param {Branch[]} roots */
function icicle(roots) {
  const depth = Math.max(...roots.map(depthOf));
  const box = h("div", { class: "icicle", role: "img", "aria-label": "Prefixes by the tokens that they saved" });
  box.style.height = `${depth * ROW}px`;
  const most = Math.max(1, ...roots.map((root) => root.hits));
  /**
   * @param {Branch[]} level
   * @param {number} from Between 0 and 1.
   * @param {number} width
   * @param {number} row
   */
  const draw = (level, from, width, row) => {
    // A branch without hits is visible, too.
    const total = level.reduce((sum, branch) => sum + branch.hits + most / 50, 0);
    for (const branch of level) {
      const share = (width * (branch.hits + most / 50)) / total;
      const cell = h("div", { class: "cell", title: `${branch.text}\n${several(branch.requests, "request")}, ${count(branch.hits)} tokens saved` }, branch.text.trim() || "…");
      Object.assign(cell.style, { left: `${100 * from}%`, width: `${100 * share}%`, top: `${row * ROW}px`, height: `${ROW - 2}px` });
      cell.style.setProperty("--heat", `${Math.round((45 * branch.hits) / most)}%`);
      add(box, cell);
      draw(branch.children, from, share, row + 1);
      from += share;
    }
  };
  draw(roots, 0, 1, 0);
  return box;
}

/** @param {Prefix[]} prefixes */
function table(prefixes) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", {}, h("thead", {}, h("tr", {}, ["tokens saved", "requests", "begins with"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, prefixes.map((prefix) => h("tr", {}, h("td", {}, count(prefix.hit_tokens)), h("td", {}, count(prefix.requests)), h("td", { class: "preview" }, prefix.preview))))));
}

/**
 * @param {string} title
 * @param {Record<string, number>} counts
 * @param {(name: string) => string} nameOf
 * @param {(name: string) => string} kindOf
 */
function figures(title, counts, nameOf, kindOf) {
  const parts = Object.entries(counts).map(([name, value]) => ({ name: nameOf(name), value, kind: kindOf(name) }));
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return h("section", {}, h("h2", {}, title), bar(parts, total, `${title}:`),
    h("ul", { class: "legend" }, parts.length ? parts.map((part) => h("li", {}, h("i", { class: part.kind }), `${part.name} ${count(part.value)}`)) : h("li", {}, "none")));
}

customElements.define("raydix-prefixes", Prefixes);
