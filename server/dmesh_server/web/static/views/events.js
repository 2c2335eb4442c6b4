// Events: what happened, the newest first.

import { el, reconcile, say, visible } from "../dom.js";
import { clock, counted, number } from "../format.js";
import { linkTo, showLinked } from "../router.js";

export const title = "Events";
export const needs = [];

const MOST = 200;
const SIGNS = { info: "•", warning: "▲", error: "✕" };
const TONES = { info: "idle", warning: "warn", error: "bad" };
/** Failures that follow from another one. */
const FOLLOW = new Set(["barrier_failed"]);

/** @param {import("../model.js").Model} model */
export function create(model) {
  const least = /** @type {HTMLSelectElement} */ (
    el("select", { "aria-label": "Only events as bad as", onchange: update }, ...["all", "warnings and errors", "errors"].map((text, value) => el("option", { value }, text)))
  );
  const search = /** @type {HTMLInputElement} */ (el("input", { type: "search", placeholder: "words", "aria-label": "Only events that contain", oninput: update }));
  const all = /** @type {HTMLInputElement} */ (el("input", { type: "checkbox", onchange: update }));
  const shown = el("span", { class: "quiet" });
  const list = el("ol", { class: "feed long" });
  const node = el("div", { class: "view" }, el("div", { class: "toolbar" }, least, search, el("label", {}, all, " of all clusters"), shown), el("section", { class: "card" }, list));

  function update() {
    const text = search.value.trim().toLowerCase();
    const severities = ["info", "warning", "error"].slice(Number(least.value));
    const found = model.events.filter(
      (one) => severities.includes(one.severity) && (all.checked || one.cluster === "" || one.cluster === model.cluster) && (!text || one.message.toLowerCase().includes(text) || one.kind.includes(text)),
    );
    say(shown, found.length > MOST ? `the newest ${MOST} of ${number(found.length)}` : counted(found.length, "event"));
    reconcile(list, found.slice(0, MOST), (one) => one.cursor, (one) => makeEvent(model, one));
    showLinked(list, "event");
  }

  return { node, update };
}

/**
 * The tone of an event: only what the trouble began with is red.
 * @param {import("../model.js").Model} model @param {any} event
 * @returns {import("../states.js").Tone}
 */
export function toneOf(model, event) {
  const follows = FOLLOW.has(event.kind) || (event.task && model.blameOf(event.task) === "victim");
  if (event.severity === "error" && follows) return "warn";
  return /** @type {import("../states.js").Tone} */ (TONES[/** @type {"info"|"warning"|"error"} */ (event.severity)] ?? "idle");
}

/** @param {import("../model.js").Model} model @param {any} event */
function makeEvent(model, event) {
  const severity = /** @type {"info"|"warning"|"error"} */ (event.severity);
  const node = el(
    "li",
    { "data-kind": visible(event.kind), "data-item": event.cursor },
    el("span", { class: "sign", "aria-label": severity, role: "img" }, SIGNS[severity] ?? "•"),
    el("a", { class: "quiet", href: linkTo("events", event.cluster || model.cluster, "event", event.cursor) }, el("time", { dateTime: new Date(event.time * 1000).toISOString() }, clock(event.time))),
    el("span", { class: "kind" }, visible(event.kind.replaceAll("_", " "))),
    el("span", { class: "words" }, visible(event.message, 500)),
  );
  return {
    node,
    update() {
      node.classList.remove("tone-idle", "tone-warn", "tone-bad");
      node.classList.add(`tone-${toneOf(model, event)}`);
    },
  };
}
