/**
 * The processes: ingress, manager and workers by role, with their load and their pools of KV.
 */

import { get, poll } from "./api.js";
import { bar, count, fill, h, percent, several, showNote, size, time } from "./dom.js";

const LOOK_MS = 2000;
const MAX_MOVES = 20;
/** For how long a worker that is gone is shown. */
const REMEMBERED_MS = 60_000;

/** @typedef {{source: string, target: string, blocks: number, bytes: number}} Move */

class Cluster extends HTMLElement {
  /** @type {Map<string, {worker: any, seen: number}>} */
  workers = new Map();
  /** Blocks that had moved at the look before, by source and target; none before the first look. @type {Map<string, number> | undefined} */
  moved;

  connectedCallback() {
    this.ending = new AbortController();
    const { signal } = this.ending;
    poll(() => this.look(signal), (message) => showNote(this, message, true), LOOK_MS, signal);
  }

  disconnectedCallback() {
    this.ending?.abort();
  }

  /** @param {AbortSignal} signal */
  async look(signal) {
    const [cache, table] = await Promise.all([get("v1/cache", signal), get("v1/requests", signal)]);
    if (!cache.workers) return showNote(this, "The cluster is for administrators. Your own requests and prefixes are in the other views.");
    const now = Date.now();
    for (const worker of cache.workers) this.workers.set(worker.id, { worker, seen: now });
    for (const [id, { seen }] of this.workers) if (now - seen > REMEMBERED_MS) this.workers.delete(id);
    const shown = [...this.workers.values()].sort((a, b) => order(a.worker).localeCompare(order(b.worker)));
    fill(this, h("div", { class: "cards" }, ingress(table), manager(cache), shown.map(({ worker, seen }) => card(worker, cache, seen === now))),
      this.moves(cache.moved));
  }

  /**
   * KV that moved between workers, with what has moved since the look before.
   * @param {Move[]} moved
   */
  moves(moved) {
    const before = this.moved;
    this.moved = new Map(moved.map((move) => [`${move.source} ${move.target}`, move.blocks]));
    if (moved.length === 0) return null;
    const lately = (/** @type {Move} */ move) => (before === undefined ? 0 : Math.max(0, move.blocks - (before.get(`${move.source} ${move.target}`) ?? 0)));
    return h("section", {}, h("h2", {}, "KV between workers"), h("ul", { class: "moves" }, moved.slice(0, MAX_MOVES).map((move) => h("li", { class: lately(move) > 0 ? "now" : "" },
      h("span", { class: "way" }, move.source, h("span", { class: "arrow", role: "img", "aria-label": "to" }, "→"), move.target),
      h("span", { class: "facts" }, `${several(move.blocks, "block")}, ${size(move.bytes)}${lately(move) > 0 ? `; ${several(lately(move), "block")} just now` : ""}`)))));
  }
}

/** @param {any} worker */
const order = (worker) => `${["prefill", "mixed", "elastic", "decode"].indexOf(worker.role)} ${worker.id}`;

/** @param {any} table */
function ingress(table) {
  const { waiting, prefilling, decoding } = table.counts;
  return h("section", { class: "card" }, h("h2", {}, "Ingress"), h("p", {}, "the replica that answers this page"),
    rows([["waiting", count(waiting)], ["prefilling", count(prefilling)], ["decoding", count(decoding)]]));
}

/** @param {any} cache */
function manager(cache) {
  const { object_store: store, disk } = cache;
  return h("section", { class: "card" }, h("h2", {}, "KV cache manager"),
    rows([["known blocks", count(cache.known_blocks)], ["hit rate, last 1,000 requests", cache.hit_rate === null ? "–" : percent(cache.hit_rate)],
      ["object store", `${size(store.bytes)} of ${size(store.budget_bytes)}`], disk.budget_bytes > 0 && ["disk", `${size(disk.bytes)} of ${size(disk.budget_bytes)}`]]),
    bar([{ name: "object store bytes", value: store.bytes, kind: "imported" }], store.budget_bytes, "Object store:"));
}

/**
 * @param {any} worker
 * @param {any} cache
 * @param {boolean} isThere
 */
function card(worker, cache, isThere) {
  const total = worker.blocks ?? 0;
  const available = worker.available_blocks ?? 0;
  const empty = Math.min(worker.empty_blocks ?? available, available);
  const held = Math.max(0, total - available);
  const step = worker.costs.step_s + worker.decoding * worker.costs.decode_token_s;
  const state = !isThere ? "gone: its requests go on elsewhere" : worker.leaving ? "about to stop" : worker.requests ? "computing" : "idle";
  return h("section", { class: isThere ? "card" : "card gone" },
    h("h2", {}, worker.id, h("span", { class: "role" }, worker.duty ? `${worker.role}: ${worker.duty}` : worker.role)), h("p", {}, state),
    rows([["decoding", count(worker.decoding)], ["prompts queued", worker.queued ? `${count(worker.queued)}, ${time(worker.queued_s)}` : "0"],
      ["a step of these", time(step)], ["token budget", count(worker.token_budget)]]),
    bar([{ name: "held by requests", value: held, kind: "computed" }, { name: "cached", value: available - empty, kind: "local" }, { name: "empty", value: empty, kind: "empty" }], total, "KV pool, blocks:"),
    h("p", { class: "facts" }, total ? `${several(held, "block")} held, ${count(available - empty)} cached, of ${count(total)} (${size(total * cache.block_bytes)})` : "the pool is not known yet"));
}

/** @param {(false | [string, string])[]} pairs */
const rows = (pairs) => h("dl", {}, pairs.map((pair) => pair && [h("dt", {}, pair[0]), h("dd", {}, pair[1])]).filter(Boolean).flat());

customElements.define("raydix-cluster", Cluster);
