/**
 * The reader's hottest prefixes as an icicle, and where blocks came from, were missed and were evicted.
 */

import { get, poll, post } from "./api.js";
import { SOURCES } from "./explain.js";
import { add, bar, count, fill, h, note, several, showNote, write } from "./dom.js";

const LOOK_MS = 3000;
const ROW = 34;
const MAX_DEPTH = 6;
/** Time over which evictions are counted for a rate. */
const RATE_MS = 60_000;
/** Evictions by reason at earlier looks, also while another view was shown. @type {{at: number, evicted: Record<string, number>}[]} */
const looks = [];

/** @typedef {{preview: string, requests: number, hit_tokens: number}} Prefix */
/** @typedef {{text: string, requests: number, hits: number, children: Branch[]}} Branch */

class Prefixes extends HTMLElement {
  /** What was drawn last. @type {string | undefined} */
  shown;

  connectedCallback() {
    this.ending = new AbortController();
    const { signal } = this.ending;
    this.figures = h("div", {});
    // Beside what is drawn anew: a dialog that is open stays open.
    this.resetting = resetting();
    fill(this, this.figures, this.resetting);
    poll(() => this.look(signal), (message) => this.fail(message), LOOK_MS, signal);
  }

  disconnectedCallback() {
    this.ending?.abort();
  }

  /** @param {string} message */
  fail(message) {
    this.shown = undefined; // the next look draws in place of the message, though nothing may have changed
    showNote(this.figures, message, true);
  }

  /** @param {AbortSignal} signal */
  async look(signal) {
    const cache = await get("v1/cache", signal);
    const rates = cache.evicted_blocks && perMinute(cache.evicted_blocks);
    const state = JSON.stringify([cache.hottest_prefixes, cache.hit_blocks, cache.missed_blocks, cache.evicted_blocks, rates]);
    if (state === this.shown) return;
    this.shown = state;
    /** @type {Prefix[]} */
    const prefixes = cache.hottest_prefixes;
    this.resetting.hidden = !cache.evicted_blocks; // which administrators alone are told
    if (!cache.prefix_caching) return fill(this.figures, note("cache.prefix_caching is false: nothing is kept for later requests."));
    if (prefixes.length === 0 && !cache.hit_blocks) return fill(this.figures, note("No prompt of a block or more yet."));
    fill(this.figures, h("h2", {}, "Hottest prefixes"),
      prefixes.length === 0 ? note("No prompt of a block or more of yours yet.") : [h("p", {}, "Width: tokens that the cache saved; what stands below a text goes on from it."), icicle(branches(prefixes, 0)), table(prefixes)],
      cache.hit_blocks && figures("Blocks of prompts, by source", { ...cache.hit_blocks, ...cache.missed_blocks }, (name) => SOURCES[name]?.name ?? name, (name) => SOURCES[name]?.kind ?? "computed"),
      cache.missed_blocks?.evicted > 0 && note("What was evicted and asked for again: the doctor, and each request, say how many more blocks of room would have kept it."),
      cache.evicted_blocks && figures("Evicted blocks, by reason", cache.evicted_blocks, (name) => name, () => "evicted", rates));
  }
}

/** The button that forgets all KV, for administrators; it asks first. @returns {any} */
function resetting() {
  const said = h("p", { role: "status", class: "facts" });
  const reset = async () => {
    try {
      const counts = await post("v1/cache/reset", {});
      write(said, `Forgotten: ${several(counts.pool_blocks, "block")} of pools, ${several(counts.store_blocks, "block")} of the object store and the disk.`);
    } catch (error) {
      write(said, /** @type {Error} */ (error).message);
    }
  };
  const dialog = h("dialog", { "aria-label": "Reset the cache" }, h("form", { method: "dialog" }, h("h2", {}, "Reset the cache?"),
    h("p", {}, "All KV that no request uses is forgotten, in pools, the object store and on disk. The next prompts are computed from their beginning."),
    h("div", { class: "row" }, h("button", { class: "main", onclick: reset }, "Reset"), h("button", {}, "Keep it"))));
  return h("section", { hidden: true, class: "reset" }, h("button", { type: "button", onclick: () => dialog.showModal() }, "Reset the cache …"), said, dialog);
}

/**
 * Evictions per minute by reason, from the looks of the last minute.
 * @param {Record<string, number>} evicted
 * @returns {Record<string, number> | undefined} None before the second look.
 */
function perMinute(evicted) {
  const at = Date.now();
  const total = (/** @type {Record<string, number>} */ counts) => Object.values(counts).reduce((sum, each) => sum + each, 0);
  // A manager that has begun anew counts from 0 again.
  if (looks.length && total(looks[looks.length - 1].evicted) > total(evicted)) looks.length = 0;
  while (looks.length > 1 && at - looks[1].at >= RATE_MS) looks.shift();
  looks.push({ at, evicted });
  const first = looks[0];
  if (first.at === at) return undefined;
  return Object.fromEntries(Object.entries(evicted).map(([reason, number]) => [reason, Math.round(((number - (first.evicted[reason] ?? 0)) * 60_000) / (at - first.at))]));
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
 * @param {Record<string, number>} [rates] Per minute.
 */
function figures(title, counts, nameOf, kindOf, rates = {}) {
  const parts = Object.entries(counts).map(([name, value]) => ({ name: nameOf(name), value, kind: kindOf(name), rate: rates[name] }));
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  return h("section", {}, h("h2", {}, title), bar(parts, total, `${title}:`),
    h("ul", { class: "legend" }, parts.length ? parts.map((part) => h("li", {}, h("i", { class: part.kind }), `${part.name} ${count(part.value)}`, part.rate !== undefined && `, ${count(part.rate)} a minute`)) : h("li", {}, "none")));
}

customElements.define("raydix-prefixes", Prefixes);
