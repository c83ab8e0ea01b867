/**
 * Why a prompt hit or missed: the strip of its blocks, its life as a timeline, and the sums by which a worker was chosen.
 */

import { add, count, fill, h, percent, s, several, time } from "./dom.js";

/** @typedef {{source: string, hit: boolean, count: number}} Run */
/** @typedef {Record<string, any>} Attempt As `/v1/requests/{id}/explain` has it. */
/** @typedef {Record<string, any>} Row As `/v1/requests` has it. */

/** Names of sources, and their colours. @type {Record<string, {name: string, kind: string}>} */
export const SOURCES = {
  local: { name: "cached here", kind: "local" },
  worker: { name: "from another worker", kind: "imported" },
  store: { name: "from the object store", kind: "imported" },
  disk: { name: "from disk", kind: "disk" },
  pending: { name: "waited for", kind: "pending" },
  never_seen: { name: "computed: new", kind: "computed" },
  evicted: { name: "computed: evicted", kind: "evicted" },
  lost: { name: "computed: lost", kind: "evicted" },
  diverged: { name: "computed: diverged", kind: "diverged" },
  reasoning_left_out: { name: "computed: reasoning left out", kind: "diverged" },
  recomputed: { name: "computed: quicker", kind: "recomputed" },
  no_state: { name: "computed: no snapshot", kind: "recomputed" },
};

/** @param {string} source */
const known = (source) => SOURCES[source] ?? { name: source, kind: "computed" };

/**
 * The strip of a prompt's blocks, with a legend and the reason at the first block that was computed.
 * @param {Attempt} attempt
 * @param {((block: number) => Promise<string>) | null} [textOf] A block's text, where the prompt is the reader's own.
 * @returns {HTMLElement}
 */
export function strip(attempt, textOf = null) {
  const size = attempt.block_size;
  /** @type {Run[]} */
  const runs = attempt.blocks;
  const total = Math.max(1, attempt.prompt_tokens / size);
  const picture = s("svg", { class: "strip", viewBox: "0 0 1000 36", preserveAspectRatio: "none", role: "img", tabindex: textOf ? 0 : null, "aria-label": said(attempt) });
  const box = h("div", { class: "strip-box" }, picture);
  /** @type {Map<string, {name: string, kind: string, blocks: number}>} */
  const sums = new Map();
  let at = 0;
  for (const run of runs) {
    const { name, kind } = known(run.source);
    const x = (1000 * at) / total;
    const width = (1000 * run.count) / total;
    const title = `${name}: ${several(run.count, "block")}, tokens ${count(at * size)} to ${count((at + run.count) * size - 1)}`;
    add(picture, s("rect", { x, y: 0, width, height: 28, class: kind }, s("title", {}, title)));
    const sum = sums.get(name) ?? { name, kind, blocks: 0 };
    sums.set(name, { ...sum, blocks: sum.blocks + run.count });
    at += run.count;
  }
  if (at < total) add(picture, s("rect", { x: (1000 * at) / total, y: 0, width: (1000 * (total - at)) / total, height: 28, class: "unhashed" },
    s("title", {}, `Shorter than a block: ${several(attempt.unhashed_tokens, "token")}, always computed`)));
  if (total <= 250) for (let line = 1; line < total; line++) add(picture, s("line", { x1: (1000 * line) / total, x2: (1000 * line) / total, y1: 0, y2: 28, class: "grid" }));

  const left = attempt.left_cache_at;
  if (left !== null) add(picture, s("path", { d: `M${(1000 * left) / size / total} 29 l-5 7 h10 z`, class: "mark" }));
  add(box, h("ul", { class: "legend" },
    [...sums.values()].map((sum) => h("li", {}, h("i", { class: sum.kind }), `${sum.name} ${count(sum.blocks)}`)),
    attempt.unhashed_tokens > 0 && h("li", {}, h("i", { class: "unhashed" }), `rest ${several(attempt.unhashed_tokens, "token")}`)));
  if (attempt.why) add(box, h("p", { class: "why" }, h("strong", {}, left === 0 ? "Why not cached: " : `The cached path ends at block ${count(left / size)}, token ${count(left)}: `), attempt.why));
  if (attempt.note) add(box, h("p", { class: "why" }, attempt.note));
  if (textOf) texts(box, picture, attempt, textOf);
  return box;
}

/** The strip in words. @param {Attempt} attempt */
function said(attempt) {
  const runs = attempt.blocks.map((/** @type {Run} */ run) => `${several(run.count, "block")} ${known(run.source).name}`);
  return `Prompt of ${several(attempt.prompt_tokens, "token")}: ${runs.join(", then ") || "shorter than a block"}`;
}

/**
 * Show the text of the block under the pointer, or of the one that the arrow keys choose.
 * @param {Element} box
 * @param {SVGElement} picture
 * @param {Attempt} attempt
 * @param {(block: number) => Promise<string>} textOf
 */
function texts(box, picture, attempt, textOf) {
  const shown = h("p", { class: "block-text", "aria-live": "polite" }, "Point at a block, or use the arrow keys, to read its text.");
  add(box, shown);
  const cursor = s("rect", { class: "cursor", y: 0, height: 28, width: 0 });
  add(picture, cursor);
  const total = attempt.prompt_tokens / attempt.block_size;
  let chosen = -1;
  /** @param {number} block */
  const show = async (block) => {
    block = Math.max(0, Math.min(Math.ceil(total) - 1, block));
    if (block === chosen) return;
    chosen = block;
    cursor.setAttribute("x", String((1000 * block) / total));
    cursor.setAttribute("width", String((1000 * Math.min(1, total - block)) / total));
    let text;
    try {
      text = h("q", {}, await textOf(block));
    } catch (error) {
      text = h("span", { class: "error" }, /** @type {Error} */ (error).message);
    }
    if (block === chosen) fill(shown, h("b", {}, `Block ${count(block)}: `), text);
  };
  picture.addEventListener("pointermove", (event) => {
    const area = picture.getBoundingClientRect();
    show(Math.floor(((event.clientX - area.left) / area.width) * total));
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show(chosen + step);
  });
}

/** What is to be done about a reason, for people. @type {Record<string, [string, string]>} */
const ADVICE = {
  volatile: ["A date, a counter or an id", "Move what changes behind everything that stays, into the last message."],
  system_changed: ["Another system prompt", "Keep it for the whole session; say what is new in a message at the end."],
  tools_changed: ["Other tools", "Keep them for the whole session."],
  tools_reordered: ["The same tools in another order", "Sort them."],
  message_edited: ["An earlier message was changed or taken away", "Append a correction instead."],
  branch: ["Another question, or another conversation with the same beginning", "Nothing needs to change."],
  keys_reordered: ["The same JSON with its keys in another order", "Write it with sorted keys."],
  white_space: ["The same words with other white space", "Send back texts as they came."],
  reasoning_left_out: ["Reasoning was left out", "Most chat templates do this to earlier answers; nothing needs to change."],
  template: ["The same parts, written otherwise", "Keep the options of the chat template and the choice of tools."],
  another_salt: ["Another cache_salt", "Nothing is shared between salts."],
  shorter_than_a_block: ["Shorter than a block", "Nothing can be shared."],
  not_found: ["The prompts agree, and the KV was not found", "The sources of the blocks say why."],
};

/**
 * The place where a prompt left the earlier one that it shares most with: the two texts, with the difference marked.
 * @param {Record<string, any> | null | undefined} prefix As `/v1/requests/{id}/explain` has it of a chat.
 */
export function parting(prefix) {
  if (!prefix?.reason) return null;
  const [name, advice] = ADVICE[prefix.reason] ?? [prefix.reason, ""];
  const place = [prefix.part && `in ${prefix.part}`, prefix.token_index !== null && `at token ${count(prefix.token_index)}`].filter(Boolean).join(", ");
  const lost = prefix.lost_tokens > 0 ? `${several(prefix.lost_tokens, "token")} behind it ${prefix.lost_s ? `and about ${time(prefix.lost_s)} ` : ""}were lost. ` : "";
  return h("section", { class: "parting" }, h("h2", {}, "Where it left the prompt before"),
    h("p", { class: "why" }, h("strong", {}, `${name}${place && `, ${place}`}. `), lost, advice), bothTexts(prefix));
}

/**
 * The two texts side by side where two prompts part, with the difference marked; nothing where a text is not known.
 * @param {{previous_text?: unknown, text?: unknown, text_before?: string | null}} pair
 * @returns {any}
 */
export function bothTexts(pair) {
  const { previous_text: before, text: now } = pair;
  if (typeof before !== "string" || typeof now !== "string") return null;
  const shared = pair.text_before ?? "";
  return h("div", { class: "two" }, side("the prompt before", shared, before, now), side("this prompt", shared, now, before));
}

/** A reason of a parting for people. @param {string} reason */
export const reasonName = (reason) => ADVICE[reason]?.[0] ?? reason.replaceAll("_", " ");

/**
 * @param {string} title
 * @param {string} shared What stands before both texts.
 * @param {string} text
 * @param {string} other
 */
function side(title, shared, text, other) {
  let start = 0;
  while (start < text.length && text[start] === other[start]) start++;
  const end = start + met(text.slice(start), other.slice(start));
  return h("figure", {}, h("figcaption", {}, title), h("pre", { tabindex: 0 }, shared, text.slice(0, start), h("mark", {}, text.slice(start, end)), text.slice(end)));
}

/**
 * How far a text goes before it is the other text again, for a dozen characters; all of it where it never is.
 * @param {string} text
 * @param {string} other
 */
function met(text, other) {
  for (let reach = 0; reach < 80; reach++) {
    for (let step = 0; step <= reach; step++) {
      for (const [i, j] of [[step, reach], [reach, step]]) {
        const piece = text.slice(i, i + 12);
        if (piece.length === 12 && piece === other.slice(j, j + 12)) return i;
      }
    }
  }
  return text.length;
}

/**
 * A request's life beside what was expected of it.
 * @param {Row} row
 * @param {Attempt | undefined} attempt The first one, of which the prompt was expected.
 */
export function timeline(row, attempt) {
  const end = row.ended_s ?? row.moved_s ?? row.first_token_s ?? row.placed_s ?? 0;
  const chosen = attempt?.candidates.find((/** @type {any} */ each) => each.worker === attempt.prefill_worker);
  const placed = row.placed_s ?? 0;
  const expected = chosen ? placed + chosen.wait_s + chosen.import_s + chosen.compute_s : 0;
  const longest = Math.max(end, expected, 1e-6);
  const lanes = [
    { name: "took", y: 0, parts: [
      { name: "read, tokenised and placed", kind: "waiting", from: 0, to: row.placed_s },
      { name: "prompt", kind: "computed", from: row.placed_s, to: row.first_token_s },
      { name: `answer, ${several(row.generated_tokens, "token")}`, kind: "local", from: row.first_token_s, to: row.ended_s },
    ] },
  ];
  if (chosen) {
    const imported = placed + chosen.wait_s + chosen.import_s;
    lanes.push({ name: "expected", y: 22, parts: [
      { name: "wait for others", kind: "pending", from: placed, to: placed + chosen.wait_s },
      { name: "import of KV", kind: "imported", from: placed + chosen.wait_s, to: imported },
      { name: "prompt", kind: "computed", from: imported, to: imported + chosen.compute_s },
    ] });
  }
  const picture = s("svg", { class: "timeline", viewBox: `0 0 1000 ${lanes.length * 22}`, preserveAspectRatio: "none", role: "img", "aria-label": "Timeline" });
  const list = h("ul", { class: "legend" });
  for (const lane of lanes) {
    for (const part of lane.parts) {
      if (part.from === null || part.to === null || part.to <= part.from) continue;
      const label = `${lane.name}: ${part.name} ${time(part.to - part.from)}`;
      add(picture, s("rect", { x: (1000 * part.from) / longest, width: Math.max(2, (1000 * (part.to - part.from)) / longest), y: lane.y, height: 18, class: part.kind }, s("title", {}, label)));
      add(list, h("li", {}, h("i", { class: part.kind }), label));
    }
  }
  if (row.moved_s !== null) {
    const x = (1000 * row.moved_s) / longest;
    add(picture, s("line", { x1: x, x2: x, y1: 0, y2: 18, class: "moved" }));
    add(list, h("li", {}, `went on elsewhere at ${time(row.moved_s)}, after a failover`));
  }
  return h("div", { class: "strip-box" }, picture, list);
}

/** @typedef {{ms: number, fromMs: number, text: string}} Wait A wait for a token, from so long after the request on. */

/**
 * The longest wait for a token behind the first one, and what fell into it, of what the reader may see.
 * @param {Wait} wait
 * @param {Row} row
 * @param {Row[]} rows All of the table.
 */
export function longestWait(wait, row, rows) {
  const from = row.arrived_at + wait.fromMs / 1000;
  const to = from + wait.ms / 1000;
  const causes = [];
  if (row.moved_s !== null && row.moved_s * 1000 >= wait.fromMs && row.moved_s * 1000 <= wait.fromMs + wait.ms) causes.push("it went on at another worker, after a failover");
  if (row.preemptions > 0) causes.push(`its blocks were taken away to make room (${several(row.preemptions, "time")} in all)`);
  const prompts = rows.filter((other) => other.id !== row.id && other.placed_s !== null && other.prefill_workers.some((/** @type {string} */ each) => row.decode_workers.includes(each))
    && other.arrived_at + other.placed_s < to && other.arrived_at + (other.first_token_s ?? other.ended_s ?? Infinity) > from);
  for (const other of prompts.slice(0, 3)) causes.push(`the prompt of ${other.id} (${several(other.prompt_tokens, "token")}, ${count(other.cached_tokens)} cached) was computed at its worker`);
  if (prompts.length > 3) causes.push(`so were those of ${several(prompts.length - 3, "other request")}`);
  return h("p", {}, `The longest wait for a later token took ${time(wait.ms / 1000)}, before `, h("q", {}, wait.text),
    causes.length > 0 ? `: ${causes.join("; ")}.` : ". Nothing that you may see here fell into it; a trace of the workers' steps (raydix trace) has the rest.");
}

/**
 * The workers that were compared, and their sums.
 * @param {Attempt} attempt
 */
export function sums(attempt) {
  const columns = [["wait_s", "wait"], ["import_s", "import"], ["compute_s", "compute"], ["others_s", "others' delay"], ["room_s", "evictions"], ["transfer_s", "transfer"], ["cost_s", "cost"]];
  const rows = attempt.candidates.map((/** @type {any} */ each) => h("tr", { class: each.worker === attempt.prefill_worker ? "chosen" : null },
    h("th", { scope: "row" }, each.worker, each.worker === attempt.prefill_worker && " ✓"),
    h("td", {}, `${count(each.local_blocks)} + ${count(each.imported_blocks)}`),
    columns.map(([name]) => h("td", {}, time(each[name])))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table" }, h("table", {}, h("caption", {}, "Workers compared: the least cost is chosen"),
    h("thead", {}, h("tr", {}, ["worker", "blocks here + imported", ...columns.map(([, name]) => name)].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, rows)));
}

/** What the cache gave a request, in a sentence. @param {Attempt} attempt */
export function saved(attempt) {
  const hits = attempt.blocks.filter((/** @type {Run} */ run) => run.hit).reduce((/** @type {number} */ sum, /** @type {Run} */ run) => sum + run.count, 0);
  if (attempt.actual_ttft_s === null) return hits === 0 ? "Nothing of the prompt is cached, and no token has come yet." : `${several(hits, "block")} of the prompt are cached, and no token has come yet.`;
  if (hits === 0) return `Nothing was cached: the whole prompt was computed, in ${time(attempt.actual_ttft_s)} to the first token.`;
  const tokens = Math.min(hits * attempt.block_size, attempt.prompt_tokens);
  return `${percent(tokens / attempt.prompt_tokens)} of the prompt came from the cache; computing all of it was predicted to take ${time(attempt.uncached_s)}, and the first token came after ${time(attempt.actual_ttft_s)}.`;
}
