/**
 * Building of elements, and figures as text. Nothing here takes markup: texts of prompts and answers become text nodes.
 */

/** @typedef {Node | string | number | null | undefined | false} Child */
/** @typedef {Record<string, unknown>} Props Listeners begin with `on`; the others are attributes. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * An HTML element.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function h(tag, props, ...children) {
  return filled(document.createElement(tag), props ?? {}, children);
}

/**
 * An SVG element.
 * @param {string} tag
 * @param {Props} [props]
 * @param {...(Child | Child[])} children
 * @returns {any}
 */
export function s(tag, props, ...children) {
  return filled(document.createElementNS(SVG, tag), props ?? {}, children);
}

/**
 * @param {Element} element
 * @param {Props} props
 * @param {(Child | Child[])[]} children
 */
function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, String(value));
  }
  add(element, ...children);
  return element;
}

/**
 * Append children; numbers become text, and nothing is left out but null, undefined and false.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function add(element, ...children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child instanceof Node ? child : String(child));
  }
}

/**
 * Have an element contain these children and no others.
 * @param {Element} element
 * @param {...(Child | Child[])} children
 */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, ...children);
}

/** @param {number} number */
export const count = (number) => number.toLocaleString("en");

/** @param {number | null | undefined} seconds */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 3600) return `${(seconds / 3600).toFixed(1)} h`;
  if (seconds >= 120) return `${(seconds / 60).toFixed(1)} min`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  const ms = seconds * 1000;
  return `${ms >= 10 || ms === 0 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

/** @param {number} share Between 0 and 1. */
export const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

/** @param {number} bytes */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${bytes.toFixed(bytes < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

/**
 * `2 blocks`, `1 block`.
 * @param {number} number
 * @param {string} noun
 */
export const several = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/**
 * A bar of parts, each with a class for its colour and a name; the numbers are said in its label.
 * @param {{name: string, value: number, kind: string}[]} parts
 * @param {number} total
 * @param {string} [label]
 */
export function bar(parts, total, label) {
  const said = parts.filter((part) => part.value > 0).map((part) => `${part.name} ${count(part.value)}`);
  const box = s("svg", { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img",
    "aria-label": `${label ?? ""} ${said.join(", ") || "empty"}`.trim() });
  let x = 0;
  for (const part of parts) {
    const width = total > 0 ? (100 * part.value) / total : 0;
    if (width > 0) add(box, s("rect", { x, y: 0, width, height: 10, class: part.kind }, s("title", {}, `${part.name}: ${count(part.value)}`)));
    x += width;
  }
  return box;
}

/**
 * A line in place of a view's content: an error, or that there is nothing yet.
 * @param {string} text
 * @param {boolean} [isError]
 */
export const note = (text, isError = false) => h("p", { class: isError ? "note error" : "note", role: isError ? "alert" : "status" }, text);

/**
 * Have an element contain a note and nothing else. The same note is not put in again: a screen reader would read it again.
 * @param {Element} element
 * @param {string} text
 * @param {boolean} [isError]
 */
export function showNote(element, text, isError = false) {
  const shown = element.firstElementChild;
  const wanted = note(text, isError);
  if (element.childElementCount !== 1 || !shown?.isEqualNode(wanted)) fill(element, wanted);
}

/**
 * Have an element contain a text, which is written where it changes only, for the same reason.
 * @param {Element} element
 * @param {string} text
 */
export function write(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
