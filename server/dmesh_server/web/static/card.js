// A part of a view: a heading, and what is under it.

import { el } from "./dom.js";

/**
 * @param {string} title
 * @param {...(Node|string)} children
 */
export function card(title, ...children) {
  return el("section", { class: "card" }, el("h2", {}, title), ...children);
}

/**
 * Says that there is nothing to show, and when there would be.
 * @param {string} text
 */
export function nothing(text) {
  return el("p", { class: "nothing" }, text);
}

/**
 * A number with what it is of.
 * @param {string} label
 */
export function tile(label) {
  const value = el("strong", { class: "tile-value" }, "–");
  const note = el("span", { class: "tile-note" });
  const node = el("div", { class: "tile" }, el("span", { class: "tile-label" }, label), value, note);
  return { node, value, note };
}

/**
 * The head of a table.
 * @param {string[]} titles
 */
export function head(titles) {
  return el("thead", {}, el("tr", {}, ...titles.map((one) => (one ? el("th", { scope: "col" }, one) : el("td", {})))));
}
