/**
 * What the cache saves: prompt tokens that were not computed, seconds, and money at the server's price or the reader's.
 */

import { get, poll } from "./api.js";
import { bar, count, fill, h, percent, several, showNote, time } from "./dom.js";

const LOOK_MS = 3000;
const PRICE = "raydix-price";

class Savings extends HTMLElement {
  connectedCallback() {
    this.ending = new AbortController();
    const { signal } = this.ending;
    this.figures = h("div", {});
    const price = h("input", { type: "number", min: 0, step: "any", value: localStorage.getItem(PRICE) ?? "", placeholder: "0.15",
      oninput: () => { if (price.value) localStorage.setItem(PRICE, price.value); else localStorage.removeItem(PRICE); this.show(); } });
    this.price = price;
    fill(this, this.figures, h("label", { class: "field short" }, h("span", {}, "Price of a million prompt tokens, for a sum of money (kept in this browser; empty: the server's, where one is configured)"), price));
    poll(() => this.look(signal), (message) => showNote(this.figures, message, true), LOOK_MS, signal);
  }

  disconnectedCallback() {
    this.ending?.abort();
  }

  /** @param {AbortSignal} signal */
  async look(signal) {
    this.cache = await get("v1/cache", signal);
    this.show();
  }

  show() {
    if (!this.cache) return;
    const tenants = Object.entries(this.cache.tenants);
    const sum = (/** @type {string} */ name) => tenants.reduce((all, [, use]) => all + /** @type {any} */ (use)[name], 0);
    const [prompt, hits] = [sum("prompt_tokens"), sum("hit_tokens")];
    if (prompt === 0) return showNote(this.figures, "No request yet.");
    const configured = this.cache.price_per_million_tokens;
    if (configured !== null) this.price.placeholder = String(configured);
    const price = Number(localStorage.getItem(PRICE) ?? configured ?? 0);
    const money = (/** @type {number} */ tokens) => ((tokens * price) / 1e6).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 4 });
    const tiles = [[percent(hits / prompt), "of the prompt tokens came from the cache"], [count(hits), `tokens were not computed, of ${count(prompt)}`],
      [time(sum("saved_s")), "of computing, as predicted at each request"], ...(price > 0 ? [[money(hits), "at this price"]] : [])];
    fill(this.figures, h("div", { class: "tiles" }, tiles.map(([figure, text]) => h("p", { class: "tile" }, h("strong", {}, figure), text))),
      bar([{ name: "cached", value: hits, kind: "local" }, { name: "computed", value: prompt - hits, kind: "computed" }], prompt, "Prompt tokens:"),
      tenants.length > 1 && h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", {}, h("thead", {}, h("tr", {}, ["tenant", "requests", "prompt tokens", "cached", "lately", "saved"].map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, tenants.map(([name, use]) => row(name, use))))),
      h("p", { class: "facts" }, `Since the manager started; ${several(sum("requests"), "request")}.`));
  }
}

/**
 * @param {string} name
 * @param {any} use
 */
function row(name, use) {
  const share = use.prompt_tokens ? use.hit_tokens / use.prompt_tokens : 0;
  return h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, count(use.requests)), h("td", {}, count(use.prompt_tokens)), h("td", {}, percent(share)),
    h("td", {}, use.hit_rate === null ? "–" : percent(use.hit_rate)), h("td", {}, time(use.saved_s)));
}

customElements.define("raydix-savings", Savings);
