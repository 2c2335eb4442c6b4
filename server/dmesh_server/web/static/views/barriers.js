// Barriers under way, with those who are missing on top.

import { nothing } from "../card.js";
import { el, name, reconcile, say, visible } from "../dom.js";
import { counted, span } from "../format.js";
import { cancelBarrier } from "../actions.js";
import { linkTo, showLinked } from "../router.js";
import { chip, setChip } from "../states.js";

export const title = "Barriers";
export const needs = ["barriers"];

/** @param {import("../model.js").Model} model */
export function create(model) {
  const list = el("div", { class: "stack-of-cards" });
  const more = el("p", { class: "quiet" });
  const node = el("div", { class: "view" }, list, more);

  function update() {
    const page = model.read.barriers;
    const items = page?.barriers ?? [];
    reconcile(list, items.length ? items : [null], (/** @type {any} */ one) => (one ? `${one.name}#${one.instance}` : "none"), (one) => makeBarrier(model, one));
    showLinked(list, "barrier");
    say(more, page && page.total > items.length ? `and ${counted(page.total - items.length, "younger barrier")}` : "");
  }

  return { node, update };
}

/** @param {import("../model.js").Model} model @param {any} first */
function makeBarrier(model, first) {
  if (!first) return { node: el("section", { class: "card" }, nothing("No barrier is under way.")), update: () => {} };
  const missing = el("ul", { class: "missing" });
  const head = el("p", { class: "missing-head" });
  const bar = el("progress", { class: "progress" });
  const [there, since, deadline] = ["", "", ""].map(() => el("span", {}));
  const node = el(
    "section",
    { class: "card barrier", "data-barrier": visible(first.name), "data-item": `${first.name}@${first.instance}` },
    el(
      "header",
      { class: "card-head" },
      el("h2", {}, el("a", { href: linkTo("barriers", model.cluster, "barrier", `${first.name}@${first.instance}`) }, name(first.name)), el("small", {}, ` use ${first.instance}`)),
      el("button", { class: "quiet", onclick: () => cancelBarrier(model, first) }, "Cancel …"),
    ),
    head,
    missing,
    el("div", { class: "progress-line" }, bar, there),
    el("p", { class: "quiet facts" }, since, deadline),
  );
  return {
    node,
    /** @param {any} barrier */
    update(barrier) {
      say(head, barrier.missing_count ? `${counted(barrier.missing_count, "task")} missing` : "All are there; it passes now.");
      const rest = barrier.missing_count - barrier.missing.length;
      reconcile(missing, rest > 0 ? [...barrier.missing, { task: "", rest }] : barrier.missing, (one) => one.task, (one) => makeMissing(model, one));
      bar.max = barrier.participants;
      bar.value = barrier.arrived;
      bar.setAttribute("aria-label", "arrived");
      say(there, `${barrier.arrived} of ${barrier.participants} there`);
      say(since, `waiting for ${span(barrier.age)}; the latest came ${span(barrier.latest_arrival_age)} ago`);
      say(deadline, barrier.remaining === null ? "no deadline" : `fails in ${span(barrier.remaining)}`);
    },
  };
}

/** @param {import("../model.js").Model} model @param {any} first */
function makeMissing(model, first) {
  if (!first.task) {
    const node = el("li", { class: "quiet" });
    return { node, update: (/** @type {any} */ one) => say(node, `and ${one.rest} more`) };
  }
  const state = chip("CONNECTED");
  const facts = el("span", { class: "quiet" });
  const why = el("span", { class: "reason" });
  const node = el("li", { "data-task": visible(first.task) }, state, el("a", { href: memberLink(model.cluster, first.task) }, name(first.task)), facts, why);
  return {
    node,
    /** @param {any} one */
    update(one) {
      setChip(state, one.condition, model.blameOf(one.task));
      const seen = one.last_seen_age === null ? "never registered" : `host ${visible(model.machineOf(one))}, pid ${one.pid}, last seen ${span(one.last_seen_age)} ago`;
      say(facts, seen);
      say(why, visible(one.reason, 300));
    },
  };
}

/** @param {string} cluster @param {string} task */
function memberLink(cluster, task) {
  const match = /^\/job:(.*)\/task:(\d+)$/.exec(task);
  return linkTo("barriers", cluster, "member", match ? `${match[1]}:${match[2]}` : "");
}
