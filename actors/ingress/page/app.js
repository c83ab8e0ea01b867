/**
 * The page: one view at a time, chosen by the part of the address behind `#`, and the dialog for a key.
 */

import { get, hasKey, keys, setKey } from "./api.js";
import { add, fill, h, write } from "./dom.js";
import "./chat.js";
import "./requests.js";
import "./cluster.js";
import "./prefixes.js";
import "./doctor.js";
import "./savings.js";

/** Titles of the views by their names. @type {Record<string, string>} */
const VIEWS = { chat: "Chat", requests: "Requests", cluster: "Cluster", prefixes: "Prefixes", doctor: "Doctor", savings: "Savings" };

class App extends HTMLElement {
  connectedCallback() {
    this.main = h("main", { id: "main", tabindex: -1 });
    this.nav = h("nav", { "aria-label": "Views" }, Object.entries(VIEWS).map(([name, title]) => h("a", { href: `#${name}` }, title)));
    this.model = h("span", { class: "model" });
    this.keyButton = h("button", { type: "button", class: "link", hidden: true, onclick: () => setKey("") }, "Forget the key");
    this.asked = h("h2", {});
    this.dialog = keyDialog(this.asked);
    /** A dialog that was closed without a key stays away, though views go on asking, until the reader acts. */
    this.isDeclined = false;
    this.dialog.addEventListener("close", () => { this.isDeclined = true; });
    this.addEventListener("click", () => { this.isDeclined = false; });
    this.addEventListener("keydown", (event) => { if (event.key === "Enter") this.isDeclined = false; });
    /** The chat is kept while other views are shown. */
    this.chat = h("raydix-chat");
    add(this, h("header", {}, h("h1", { class: "brand" }, "raydix"), this.nav, this.model, this.keyButton), this.main, this.dialog);
    addEventListener("hashchange", () => this.route());
    keys.addEventListener("needed", () => this.ask());
    keys.addEventListener("changed", () => location.reload());
    this.route();
    this.greet();
  }

  /** Ask for a key, or for another one. */
  ask() {
    if (this.dialog.open || this.isDeclined) return;
    write(this.asked, hasKey() ? "The server refused this key" : "This server asks for a key");
    this.dialog.showModal();
  }

  route() {
    const wanted = location.hash.slice(1);
    if (wanted === "main" && this.main.firstChild) return this.main.focus(); // the link that skips the header
    const name = Object.hasOwn(VIEWS, wanted) ? wanted : "chat";
    for (const link of this.nav.children) {
      const isHere = link.getAttribute("href") === `#${name}`;
      if (isHere) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${VIEWS[name]} – raydix`;
    fill(this.main, name === "chat" ? this.chat : h(`raydix-${name}`));
  }

  async greet() {
    this.keyButton.hidden = !hasKey();
    try {
      const models = await get("v1/models");
      this.model.textContent = models.data[0].id;
    } catch {
      this.model.textContent = "";
    }
  }
}

/** @param {Element} title @returns {any} */
function keyDialog(title) {
  // A header takes no other characters.
  const input = h("input", { type: "password", name: "key", autocomplete: "off", required: true, pattern: "\\s*[\\x21-\\x7e]+\\s*", title: "letters, digits and signs of ASCII, without spaces" });
  return h("dialog", { "aria-label": "Key" }, h("form", { method: "dialog", onsubmit: () => setKey(input.value.trim()) },
    title,
    h("label", { class: "field" }, h("span", {}, "Your API key; it is kept until this tab is closed"), input),
    h("div", { class: "row" }, h("button", { class: "main" }, "Use it"))));
}

customElements.define("raydix-app", App);
