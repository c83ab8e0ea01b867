/**
 * The doctor: prompts of the last hour that almost match earlier ones, what each costs, and what to change.
 */

import { get, poll } from "./api.js";
import { bothTexts, reasonName } from "./explain.js";
import { count, fill, h, note, percent, several, showNote, time } from "./dom.js";

const LOOK_MS = 10_000;

/**
 * @typedef {{
 *   reason: string, part: string | null, prompts: number, lost_tokens: number, lost_s: number | null,
 *   lost_tokens_per_day: number, lost_s_per_day: number | null, advice: string, evicted_ago_s: number | null,
 *   more_blocks: number | null, example: any,
 * }} Finding
 */

class Doctor extends HTMLElement {
  /** What was drawn last. @type {string | undefined} */
  shown;

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
    this.shown = undefined;
    showNote(this, message, true);
  }

  /** @param {AbortSignal} signal */
  async look(signal) {
    const report = await get("v1/cache/doctor", signal);
    const state = JSON.stringify(report);
    if (state === this.shown) return;
    this.shown = state;
    fill(this, h("h2", {}, "What costs your prompts their hits"), summary(report),
      report.findings.length === 0 ? note("Nothing to change: no prompt of the last hour left an earlier one where it need not.") : report.findings.map(finding));
  }
}

/** @param {any} report */
function summary(report) {
  const cached = report.cached_tokens === null || !report.prompt_tokens ? "" : `, ${percent(report.cached_tokens / report.prompt_tokens)} of them cached`;
  return h("p", { class: "facts" }, `${several(report.prompts, "chat")} of yours in the last ${time(report.observed_s)} at this replica: ${count(report.prompt_tokens)} prompt tokens${cached}.`);
}

/** @param {Finding} each */
function finding(each) {
  const perDay = each.lost_s_per_day === null ? `${count(each.lost_tokens_per_day)} tokens a day` : `${count(each.lost_tokens_per_day)} tokens and ${time(each.lost_s_per_day)} of computing a day`;
  const room = each.more_blocks !== null && h("p", { class: "facts" }, `Evicted ${time(each.evicted_ago_s)} before; ${several(each.more_blocks, "more block")} of room would have kept it.`);
  const place = each.part ? `, in ${each.part}` : "";
  return h("section", { class: "card finding" }, h("h3", {}, `${reasonName(each.reason)}${place}`), h("p", {}, each.advice),
    h("p", { class: "facts" }, `${several(each.prompts, "prompt")}, ${several(each.lost_tokens, "token")} lost; at this rate ${perDay}.`), room, bothTexts(each.example));
}

customElements.define("raydix-doctor", Doctor);
