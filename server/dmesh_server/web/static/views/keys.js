// Keys: names and sizes. Values may be secrets of the job, and are not here.

import { deleteKey } from "../actions.js";
import { head, nothing } from "../card.js";
import { el, name, reconcile, say, visible } from "../dom.js";
import { bytes, counted, number } from "../format.js";

export const title = "Keys";
export const needs = ["keys"];

/** @param {import("../model.js").Model} model @param {() => void} again reads anew */
export function create(model, again) {
  let timer = 0;
  const prefix = /** @type {HTMLInputElement} */ (el("input", { type: "search", placeholder: "prefix", maxLength: 1024, "aria-label": "Only keys that begin with", oninput: type }));
  const total = el("span", { class: "quiet" });
  const body = el("tbody", {});
  const empty = nothing("No such key.");
  const more = el("button", { class: "quiet", onclick: () => ask({ mostKeys: Math.min(1000, (model.read.mostKeys ?? 100) * 4) }) }, "Show more");
  const node = el(
    "div",
    { class: "view" },
    el("div", { class: "toolbar" }, prefix, total),
    el("section", { class: "card" }, el("div", { class: "wide" }, el("table", { class: "keys" }, head(["key", "size", "revision", "made at", ""]), body)), empty, more),
    el("p", { class: "quiet" }, "Values are shown to admins only: dmesh kv get KEY."),
  );

  function type() {
    window.clearTimeout(timer);
    timer = window.setTimeout(() => ask({ prefix: prefix.value, mostKeys: 100 }), 200);
  }

  /** @param {Record<string, any>} wanted */
  function ask(wanted) {
    Object.assign(model.read, wanted);
    again();
  }

  function update() {
    const page = model.read.keys;
    if (!page) return;
    say(total, `${counted(page.total, "key")}, ${bytes(page.total_bytes)}, revision ${number(page.revision)}`);
    empty.hidden = page.keys.length > 0;
    more.hidden = page.next === null || page.keys.length >= 1000;
    reconcile(body, page.keys, (/** @type {any} */ one) => one.key, (one) => {
      let current = one;
      const cells = [0, 0, 0].map(() => el("td", { class: "number" }));
      return {
        node: el("tr", {}, el("td", {}, name(one.key)), ...cells, el("td", {}, el("button", { class: "quiet", "aria-label": `Delete ${visible(one.key)}`, onclick: () => deleteKey(model, current) }, "Delete …"))),
        update(now) {
          current = now;
          [bytes(now.size), number(now.revision), number(now.create_revision)].forEach((text, column) => say(cells[column], text));
        },
      };
    });
  }

  return { node, update };
}
