/**
 * Chat, beside the explanation of each answer: which blocks of its prompt were cached, and what that saved.
 */

import { events, get, post } from "./api.js";
import { longestWait, parting, saved, strip, sums, timeline } from "./explain.js";
import { add, count, fill, h, note, percent, several, time, write } from "./dom.js";

/** @typedef {{token: string, logprob: number, top_logprobs: {token: string, logprob: number}[]}} Scored */
/** @typedef {{id: string, name: string, arguments: string}} Call */
/** @typedef {{role: string, content: string, reasoning?: string, calls?: Call[]}} Message */

const MAX_FILE_BYTES = 512 * 1024;
const ALTERNATIVES = 5;
/** Pixels from the end of the conversation within which it is followed. */
const AT_END_PX = 40;

class Chat extends HTMLElement {
  /** @type {Message[]} */
  messages = [];
  /** @type {AbortController | null} */
  running = null;
  /** The answer whose explanation was asked for last. @type {Answer | null} */
  explained = null;

  connectedCallback() {
    if (this.firstChild) return;
    this.log = h("div", { class: "log", role: "log", "aria-label": "Conversation" });
    this.input = h("textarea", { name: "message", rows: 3, placeholder: "Ask the model. Enter sends, Shift + Enter begins a line.", "aria-label": "Message", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event) });
    this.button = h("button", { class: "main", type: "submit" }, "Send");
    this.file = h("input", { type: "file", hidden: true, onchange: () => this.attach(this.file.files[0]) });
    this.settings = settings();
    this.side = h("aside", { class: "side", "aria-label": "Explanation of the answer" }, introduction());
    const form = h("form", { class: "composer", onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); this.submit(); } },
      this.input,
      h("div", { class: "row" }, this.button,
        h("button", { type: "button", onclick: () => this.file.click() }, "Add a text file"),
        h("button", { type: "button", onclick: () => this.clear() }, "New chat"),
        h("button", { type: "button", onclick: () => this.settings.showModal() }, "Settings")), this.file);
    form.addEventListener("dragover", (/** @type {DragEvent} */ event) => event.preventDefault());
    form.addEventListener("drop", (/** @type {DragEvent} */ event) => { event.preventDefault(); this.attach(event.dataTransfer?.files[0]); });
    add(this, h("div", { class: "conversation" }, this.log, form), this.side, this.settings);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  /** @param {File | undefined} file */
  async attach(file) {
    if (!file) return;
    if (file.size > MAX_FILE_BYTES) return this.say(`${file.name} is larger than 512 KiB.`);
    this.input.value += `${this.input.value ? "\n\n" : ""}${file.name}:\n${await file.text()}\n`;
    this.input.focus();
  }

  clear() {
    this.running?.abort();
    this.messages = [];
    this.explained = null;
    fill(this.log);
    fill(this.side, introduction());
    this.input.focus();
  }

  /** @param {string} text */
  say(text) {
    add(this.log, h("div", { class: "note error", role: "alert" }, text));
  }

  submit() {
    if (this.running) {
      this.running.abort();
      return;
    }
    const content = this.input.value.trim();
    if (!content) return;
    this.input.value = "";
    this.show({ role: "user", content });
    this.answer();
  }

  /** Put a message of the user's into the conversation. @param {Message} message */
  show(message) {
    const place = this.messages.push(message) - 1;
    add(this.log, h("div", { class: "user", "data-place": place }, h("div", { class: "text" }, message.content),
      h("div", { class: "row small" }, h("button", { type: "button", title: "Go on from here in another way", onclick: () => this.branch(place) }, "Edit"))));
  }

  /** Forget a message and all behind it, and write it anew. @param {number} place */
  branch(place) {
    this.input.value = this.messages[place].content;
    this.cut(place);
    this.input.focus();
  }

  /** @param {number} place The first message to forget. */
  cut(place) {
    this.running?.abort();
    this.explained = null;
    this.messages.length = place;
    for (const item of [...this.log.children]) if (!("place" in item.dataset) || Number(item.dataset.place) >= place) item.remove();
  }

  /** Ask for the next answer, and show it as it comes. */
  async answer() {
    const options = choices(this.settings);
    const prompt = [...(options.system ? [{ role: "system", content: options.system }] : []), ...this.messages.map(sent)];
    const place = this.messages.length;
    const answer = new Answer(place, () => { this.cut(place); this.answer(); });
    add(this.log, answer.item);
    this.log.scrollTop = this.log.scrollHeight;
    const running = (this.running = new AbortController());
    this.button.textContent = "Stop";
    const begun = performance.now();
    try {
      for await (const chunk of events("v1/chat/completions", { json: { messages: prompt, ...options.body }, signal: running.signal })) {
        // A reader who has scrolled up stays there.
        const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < AT_END_PX;
        answer.take(chunk, performance.now() - begun);
        if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (running.signal.aborted) answer.stopped();
      else answer.fail(/** @type {Error} */ (error).message);
    }
    answer.item.removeAttribute("aria-busy");
    if (this.running !== running) return; // another answer has begun, to which the button and the place belong
    this.button.textContent = "Send";
    this.running = null;
    if (place !== this.messages.length) return; // another branch has begun
    if (!answer.isKept) return;
    this.messages.push(answer.message);
    if (answer.id) await this.explain(answer, prompt, options.body);
  }

  /**
   * @param {Answer} answer
   * @param {unknown[]} prompt
   * @param {Record<string, unknown>} body
   */
  async explain(answer, prompt, body) {
    const show = async () => {
      this.explained = answer;
      let box;
      try {
        const explained = await explanation(answer, { messages: prompt, ...(body.tools ? { tools: body.tools } : {}) });
        answer.told(explained.attempt);
        box = explained.box;
      } catch (error) {
        box = note(/** @type {Error} */ (error).message, true);
      }
      if (this.explained === answer) fill(this.side, box);
    };
    add(answer.actions, h("button", { type: "button", onclick: show }, "Explain"));
    await show();
  }
}

/** One answer, while it comes and afterwards. */
class Answer {
  /**
   * @param {number} place
   * @param {() => void} again
   */
  constructor(place, again) {
    this.id = "";
    /** @type {Message} */
    this.message = { role: "assistant", content: "", reasoning: "", calls: [] };
    /** @type {{element: HTMLElement, scored: Scored[], after: string}[]} */
    this.tokens = [];
    /** The longest wait for a token behind the first one. @type {import("./explain.js").Wait | null} */
    this.longest = null;
    /** Since the delivery before the last one, until a token has taken it; null before the second delivery. @type {number | null} */
    this.gapMs = null;
    /** @type {Scored[]} Scores of tokens whose text has not come: parts of a character. */
    this.held = [];
    this.chosen = -1;
    this.hasFailed = false;
    this.firstMs = 0;
    this.lastMs = 0;
    this.text = h("div", { class: "text", tabindex: 0, "aria-label": "Answer; the arrow keys go through its tokens", onkeydown: (/** @type {KeyboardEvent} */ event) => this.key(event),
      onpointerover: (/** @type {Event} */ event) => this.point(/** @type {HTMLElement} */ (event.target)), onpointerleave: () => this.choose(-1) });
    this.reasoning = h("div", { class: "text" });
    this.thoughts = h("details", { class: "thoughts", hidden: true }, h("summary", {}, "Reasoning"), this.reasoning);
    this.calls = h("div", { class: "calls" });
    this.facts = h("p", { class: "facts", role: "status" }, "waiting for the first token");
    this.tip = h("div", { class: "tip", hidden: true, role: "tooltip" });
    this.actions = h("div", { class: "row small" }, h("button", { type: "button", onclick: again }, "Regenerate"));
    this.item = h("div", { class: "assistant", "data-place": place, "aria-busy": "true" }, this.thoughts, this.text, this.tip, this.calls, this.facts, this.actions);
  }

  /** False of an answer that failed, or was stopped before it had anything: it is no part of the conversation. */
  get isKept() {
    return !this.hasFailed && Boolean(this.said || this.message.content || this.message.reasoning || this.message.calls?.length);
  }

  /**
   * @param {any} chunk
   * @param {number} ms Since the request was sent.
   */
  take(chunk, ms) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.id = chunk.id ?? this.id;
    const delta = chunk.choices?.[0]?.delta ?? {};
    const scored = chunk.choices?.[0]?.logprobs?.content ?? [];
    if (delta.content || delta.reasoning || delta.tool_calls || scored.length) {
      this.gapMs = this.firstMs ? ms - this.lastMs : null;
      this.firstMs ||= ms;
      this.lastMs = ms;
    }
    if (delta.reasoning) {
      this.message.reasoning += delta.reasoning;
      this.thoughts.hidden = false;
      add(this.reasoning, delta.reasoning);
    } else if (delta.content || scored.length) this.append(delta.content ?? "", scored);
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (chunk.usage) this.usage(chunk.usage);
    else if (this.firstMs) write(this.facts, `first token after ${time(this.firstMs / 1000)}`);
  }

  /**
   * @param {string} content
   * @param {Scored[]} scored
   */
  append(content, scored) {
    this.message.content += content;
    this.held.push(...scored);
    if (!content) return;
    const parts = this.held.map((each) => each.token);
    // Several tokens come together where drafts were right; each has a piece of the text, unless characters are divided.
    if (this.held.length > 1 && parts.join("") === content) this.held.forEach((each) => this.token(each.token, [each]));
    else this.token(content, this.held);
    this.held = [];
  }

  /**
   * @param {string} text
   * @param {Scored[]} scored
   */
  token(text, scored) {
    const probability = scored.length ? Math.exp(scored.reduce((sum, each) => sum + each.logprob, 0)) : 1;
    const doubt = probability > 0.9 ? 0 : probability > 0.6 ? 1 : probability > 0.3 ? 2 : 3;
    const element = h("span", { class: `token doubt-${doubt}`, "data-token": this.tokens.length }, text);
    const { gapMs } = this;
    const after = gapMs === null ? `${time(this.firstMs / 1000)} after the question` : gapMs > 0 ? `${time(gapMs / 1000)} after the one before` : "with the one before";
    this.tokens.push({ element, scored, after });
    if (gapMs !== null && gapMs > (this.longest?.ms ?? 0)) this.longest = { ms: gapMs, fromMs: this.lastMs - gapMs, text };
    this.gapMs = 0; // what else came with this delivery came at the same time
    add(this.text, element);
  }

  /** @param {any} part */
  call(part) {
    const calls = this.message.calls ?? [];
    const call = (calls[part.index] ??= { id: part.id ?? "", name: "", arguments: "" });
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
    fill(this.calls, calls.map((each) => h("figure", { class: "call" }, h("figcaption", {}, `calls ${each.name}`), h("pre", {}, pretty(each.arguments)))));
  }

  /** @param {any} usage */
  usage(usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const accepted = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
    const rate = this.lastMs > this.firstMs ? ((usage.completion_tokens - 1) * 1000) / (this.lastMs - this.firstMs) : null;
    this.said = [
      `${count(usage.prompt_tokens)} + ${several(usage.completion_tokens, "token")}`,
      `${count(cached)} cached (${percent(usage.prompt_tokens ? cached / usage.prompt_tokens : 0)})`,
      `first token after ${time(this.firstMs / 1000)}`,
      rate === null ? null : `${rate.toFixed(0)} tokens/s`,
      accepted ? `${count(accepted)} from drafts` : null,
    ].filter(Boolean);
    this.facts.textContent = this.said.join(" · ");
  }

  /** @param {Record<string, any>} attempt */
  told(attempt) {
    if (this.said && attempt.saved_s > 0) this.facts.textContent = [...this.said, `about ${time(attempt.saved_s)} saved by the cache`].join(" · ");
  }

  stopped() {
    this.facts.textContent = "stopped";
  }

  /** @param {string} message */
  fail(message) {
    add(this.item, h("p", { class: "note error", role: "alert" }, message));
    this.facts.textContent = "";
    this.hasFailed = true;
  }

  /** @param {HTMLElement} target */
  point(target) {
    if (target.dataset.token !== undefined) this.choose(Number(target.dataset.token));
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.choose(-1);
    if (step === undefined) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.tokens.length - 1, this.chosen + step)));
  }

  /** Show when a token came, its probability and alternatives. @param {number} number */
  choose(number) {
    this.tokens[this.chosen]?.element.classList.remove("chosen");
    this.chosen = number;
    const token = this.tokens[number];
    this.tip.hidden = !token;
    if (!token) return;
    token.element.classList.add("chosen");
    fill(this.tip, h("p", {}, token.after), token.scored.map((each) => h("table", {}, h("tbody", {}, alternatives(each).map((one) => h("tr", { class: one.token === each.token ? "chosen" : null },
      h("th", { scope: "row" }, visible(one.token)), h("td", {}, h("meter", { value: Math.exp(one.logprob), min: 0, max: 1 })), h("td", {}, percent(Math.exp(one.logprob)))))))));
    const area = this.item.getBoundingClientRect();
    const at = token.element.getBoundingClientRect();
    this.tip.style.top = `${at.bottom - area.top + 4}px`;
    this.tip.style.left = `${Math.max(0, Math.min(at.left - area.left, area.width - this.tip.offsetWidth - 8))}px`;
  }
}

/** The likeliest tokens in a place, the chosen one among them. @param {Scored} scored */
function alternatives(scored) {
  const others = scored.top_logprobs ?? [];
  return others.some((each) => each.token === scored.token) ? others : [...others, scored];
}

/** @param {string} token */
const visible = (token) => token.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "(nothing)";

/** A message as the API takes it. @param {Message} message */
function sent(message) {
  if (!message.calls?.length) return { role: message.role, content: message.content };
  return { role: message.role, content: message.content, tool_calls: message.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) };
}

/** @param {string} json */
function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // still on its way
  }
}

/**
 * The explanation of an answer, with texts of the blocks, since the prompt is the reader's own.
 * @param {Answer} answer
 * @param {Record<string, unknown>} chat As it was sent.
 */
async function explanation({ id, longest }, chat) {
  const [explained, table] = await Promise.all([get(`v1/requests/${encodeURIComponent(id)}/explain`), get("v1/requests")]);
  const attempt = explained.choices[0].attempts.at(-1);
  const row = table.requests.find((/** @type {any} */ each) => each.id === id);
  /** @type {Promise<number[]> | null} */
  let ids = null;
  /** @type {Map<number, Promise<string>>} */
  const texts = new Map();
  // A token may be a part of a character, so the server writes a block's tokens as one text.
  const read = async (/** @type {number} */ block) => {
    const tokens = await (ids ??= post("tokenize", chat).then((/** @type {any} */ answer) => answer.tokens));
    return (await post("detokenize", { tokens: tokens.slice(block * attempt.block_size, (block + 1) * attempt.block_size) })).prompt;
  };
  const textOf = async (/** @type {number} */ block) => {
    const text = texts.get(block) ?? read(block);
    texts.set(block, text);
    try {
      return await text;
    } catch (error) {
      ids = null; // asked for again with the next block
      texts.delete(block);
      throw error;
    }
  };
  const box = h("div", {}, h("h2", {}, "Where the prompt came from"), h("p", {}, saved(attempt)), strip(attempt, textOf), parting(explained.prefix),
    row && [h("h2", {}, "Where the time went"), timeline(row, explained.choices[0].attempts[0]), longest && longestWait(longest, row, table.requests)],
    h("h2", {}, "Why this worker"), sums(attempt), h("p", { class: "id" }, id));
  return { box, attempt };
}

const introduction = () => h("div", {}, h("h2", {}, "Where the prompt came from"),
  h("p", {}, "The beginning of a prompt that was computed before is not computed again. Ask something, then ask again or go on: this side shows for each answer which blocks of its prompt were cached, what had to be computed, and why."));

/** The dialog with options of the next request. @returns {any} */
function settings() {
  return h("dialog", { class: "settings", "aria-label": "Settings" }, h("form", { method: "dialog" },
    h("h2", {}, "Settings"),
    field("System prompt", h("textarea", { name: "system", rows: 3 })),
    field("Temperature", h("input", { name: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: 0 })),
    field("Tokens of an answer, at most", h("input", { name: "max_tokens", type: "number", min: 1, step: 1, value: 300 })),
    field("JSON schema of the answer", h("textarea", { name: "schema", rows: 3, spellcheck: "false" })),
    field("Tools, as a JSON list", h("textarea", { name: "tools", rows: 3, spellcheck: "false" })),
    h("label", { class: "check" }, h("input", { name: "logprobs", type: "checkbox", checked: true }), " Probabilities of tokens"),
    h("div", { class: "row" }, h("button", { class: "main" }, "Done"))));
}

/**
 * @param {string} name
 * @param {Element} control
 */
const field = (name, control) => h("label", { class: "field" }, h("span", {}, name), control);

/** What the settings say, as fields of a body. @param {any} dialog */
function choices(dialog) {
  const form = new FormData(dialog.querySelector("form"));
  /** @param {string} name */
  const text = (name) => String(form.get(name) ?? "").trim();
  /** @type {Record<string, unknown>} */
  const body = { stream: true, stream_options: { include_usage: true }, temperature: Number(text("temperature") || 0), max_tokens: Number(text("max_tokens") || 300) };
  if (form.has("logprobs")) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
  if (text("schema")) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(text("schema")) } };
  if (text("tools")) body.tools = parsed(text("tools"));
  return { system: text("system"), body };
}

/** JSON, or the text itself, which the server then refuses with its reason. @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

customElements.define("raydix-chat", Chat);
