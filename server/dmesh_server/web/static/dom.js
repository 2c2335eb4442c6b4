// Elements, made without markup: whatever is shown is text, and names are strangers' text.

/**
 * Makes an element. Properties are set as properties; `class`, `role`, `scope`, `for`, `aria-*` and `data-*` as
 * attributes; `on*` as listeners.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Node|string|number|null|undefined)} children
 * @returns {HTMLElement}
 */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (/^(class|role|scope|for|colspan|tabindex|aria-.*|data-.*)$/.test(name)) node.setAttribute(name, String(value));
    else /** @type {any} */ (node)[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

/**
 * Sets an element's text, if it is another one: what has not changed is not touched.
 * @param {Element} node
 * @param {string|number} text
 */
export function say(node, text) {
  const next = String(text);
  if (node.textContent !== next) node.textContent = next;
}

/**
 * A name that somebody chose, set apart so that it turns no text around it.
 * @param {string} text
 */
export function name(text) {
  return el("bdi", { class: "name" }, visible(text));
}

const LONGEST = 120;
const UNSEEN = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;

/**
 * Returns text that shows all that is in it, at a length that fits: control characters, line breaks and whatever
 * turns the direction of writing come out as escapes.
 * @param {string} text
 * @param {number} [longest]
 */
export function visible(text, longest = LONGEST) {
  const characters = [...text];
  const shown = characters.slice(0, longest).join("").replace(UNSEEN, escape);
  return characters.length <= longest ? shown : `${shown}… (${characters.length} characters)`;
}

/** @param {string} character */
function escape(character) {
  const code = /** @type {number} */ (character.codePointAt(0));
  if (character === "\n") return "\\n";
  if (character === "\r") return "\\r";
  if (character === "\t") return "\\t";
  const digits = code.toString(16);
  if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

/**
 * Brings the children of an element in line with some items; nodes of items that stay are kept.
 * @template T
 * @param {Element} parent
 * @param {T[]} items
 * @param {(item: T) => string} keyOf
 * @param {(item: T) => {node: HTMLElement, update: (item: T) => void}} make
 */
export function reconcile(parent, items, keyOf, make) {
  /** @type {Map<string, {node: HTMLElement, update: (item: T) => void}>} */
  const before = /** @type {any} */ (parent)._rows ?? new Map();
  const after = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue;
    const row = before.get(key) ?? make(item);
    before.delete(key);
    after.set(key, row);
    if (row.node === place) place = place.nextSibling;
    else parent.insertBefore(row.node, place);
    row.update(item); // in its place, where it has a width
  }
  for (const { node } of before.values()) node.remove();
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
  /** @type {any} */ (parent)._rows = after;
}
