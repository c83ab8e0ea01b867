/**
 * The requests of the replica that answers, live, each with its timeline and the strip of its blocks.
 */

import { events, get } from "./api.js";
import { parting, saved, strip, sums, timeline } from "./explain.js";
import { add, count, fill, h, note, percent, several, time, write } from "./dom.js";

/** @typedef {import("./explain.js").Row} Row */

const MAX_ROWS = 200;
const AGAIN_MS = 2000;

class Requests extends HTMLElement {
  /** @type {Map<number, Row>} */
  rows = new Map();

  connectedCallback() {
    this.ending = new AbortController();
    this.counts = h("p", { class: "counts", role: "status" });
    this.body = h("tbody", { onclick: (/** @type {Event} */ event) => this.open(event) });
    this.empty = note("No request yet. Ask something in the chat, or send one with curl.");
    this.dialog = h("dialog", { class: "request", "aria-label": "One request" });
    const columns = ["state", "request", "prompt", "cached", "answer", "first token", "tokens/s", "worker"];
    fill(this, this.counts, h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", { class: "requests" },
      h("thead", {}, h("tr", {}, columns.map((name) => h("th", { scope: "col" }, name)))), this.body)), this.empty, this.dialog);
    const seen = () => this.follow();
    document.addEventListener("visibilitychange", seen, { signal: this.ending.signal });
    this.follow();
  }

  disconnectedCallback() {
    this.ending?.abort();
    this.stream?.abort();
    this.rows.clear();
  }

  /** Follow the table while it is seen; a page in the background costs the server nothing. */
  async follow() {
    if (document.hidden) {
      this.stream?.abort();
      this.stream = undefined;
      return;
    }
    if (this.stream) return;
    const stream = (this.stream = new AbortController());
    while (!stream.signal.aborted) {
      try {
        for await (const event of events("v1/requests/events", { signal: stream.signal })) this.take(event);
      } catch (error) {
        if (!stream.signal.aborted) write(this.counts, /** @type {Error} */ (error).message);
      }
      this.rows.clear(); // another replica, or the same one begun anew, has other numbers
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  /** @param {any} event */
  take(event) {
    for (const row of event.requests) this.rows.set(row.number, row);
    const sorted = [...this.rows.values()].sort((a, b) => b.number - a.number);
    for (const row of sorted.splice(MAX_ROWS)) this.rows.delete(row.number);
    const { waiting, prefilling, decoding } = event.counts;
    write(this.counts, `${count(waiting)} waiting · ${count(prefilling)} prefilling · ${count(decoding)} decoding`);
    this.empty.hidden = sorted.length > 0;
    const focused = /** @type {HTMLElement | null} */ (document.activeElement)?.dataset.number;
    fill(this.body, sorted.map(line));
    if (focused) /** @type {HTMLElement | null} */ (this.body.querySelector(`button[data-number="${focused}"]`))?.focus();
  }

  /** @param {Event} event */
  async open(event) {
    const button = /** @type {HTMLElement} */ (event.target).closest("tr")?.querySelector("button");
    const row = this.rows.get(Number(button?.dataset.number));
    if (!row) return;
    const close = h("form", { method: "dialog" }, h("button", { class: "main" }, "Close"));
    fill(this.dialog, h("h2", {}, row.id), note("…"), close);
    this.dialog.showModal();
    this.opened = row; // an answer for a row opened before is not shown in this one's place
    try {
      const explained = await get(`v1/requests/${encodeURIComponent(row.id)}/explain`);
      if (this.opened !== row) return;
      fill(this.dialog, h("h2", {}, `${row.kind} ${row.id}`), facts(row), explained.choices.map((/** @type {any} */ choice) => explainedChoice(choice, row)), parting(explained.prefix), close);
    } catch (error) {
      if (this.opened !== row) return;
      fill(this.dialog, h("h2", {}, row.id), facts(row), timeline(row, undefined), note(/** @type {Error} */ (error).message), close);
    }
  }
}

/** @param {Row} row */
function line(row) {
  const share = row.prompt_tokens ? row.cached_tokens / row.prompt_tokens : 0;
  const isKnown = row.first_token_s !== null;
  const lasted = row.ended_s !== null && isKnown ? row.ended_s - row.first_token_s : 0;
  const workers = [...new Set([...row.prefill_workers, ...row.decode_workers])].join(" → ");
  return h("tr", { class: row.state },
    h("td", {}, h("span", { class: `state ${row.state}` }, row.state === "ended" ? row.outcome : row.state)),
    h("td", {}, h("button", { type: "button", class: "link", "data-number": row.number, title: row.id }, row.id.slice(0, 18)), row.attempts > 1 && h("small", {}, ` ${several(row.attempts, "attempt")}`)),
    h("td", {}, count(row.prompt_tokens)),
    h("td", {}, isKnown ? [h("meter", { value: share, min: 0, max: 1, "aria-hidden": "true" }), ` ${percent(share)}`] : "–"),
    h("td", {}, `${count(row.generated_tokens)} of ${count(row.max_tokens)}`),
    h("td", {}, time(row.first_token_s)),
    h("td", {}, lasted > 0 ? ((row.generated_tokens - row.choices) / lasted).toFixed(0) : "–"),
    h("td", {}, workers || "–"));
}

/** @param {Row} row */
function facts(row) {
  const said = [
    row.outcome ?? row.state, row.stream ? "streamed" : "as a whole", `priority ${row.priority}`,
    several(row.attempts, "attempt"), row.preemptions ? several(row.preemptions, "preemption") : null,
    row.accepted_tokens ? `${several(row.accepted_tokens, "token")} from drafts` : null, `tenant ${row.tenant}`,
    new Date(1000 * row.arrived_at).toLocaleTimeString(),
  ];
  return h("p", { class: "facts" }, said.filter(Boolean).join(" · "));
}

/**
 * @param {{id: string, attempts: any[]}} choice
 * @param {Row} row
 */
function explainedChoice(choice, row) {
  const last = choice.attempts.at(-1);
  const box = h("section", {});
  for (const attempt of choice.attempts) {
    add(box, choice.attempts.length > 1 && h("h3", {}, `Attempt ${attempt.attempt + 1} at ${attempt.prefill_worker}`), strip(attempt));
  }
  add(box, h("p", {}, saved(last)), h("h3", {}, "Where the time went"), timeline(row, choice.attempts[0]), sums(last));
  return box;
}

customElements.define("raydix-requests", Requests);
