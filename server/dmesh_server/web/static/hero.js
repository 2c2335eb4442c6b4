// The verdict: a headline, then what it did to the others and why, then the facts; the rest on demand.

import { el, name, reconcile, say, visible } from "./dom.js";
import { linkTo, placeNow } from "./router.js";
import { verdictOf } from "./verdict.js";

/** @typedef {import("./model.js").Model} Model */

const MOST_LINKS = 4;

/** @param {Model} model */
export function makeHero(model) {
  const sign = el("span", { class: "hero-sign", "aria-hidden": "true" });
  const headline = el("strong", { class: "hero-word" });
  const [consequence, reason] = ["hero-why", "hero-why quiet"].map((kind) => el("p", { class: kind }));
  const chips = el("ul", { class: "facts-brief", "aria-label": "Evidence" });
  const facts = el("dl", { class: "facts-list" });
  const details = el("details", {}, el("summary", {}, "Details"), facts);
  const start = makeStart(model);
  const node = el("section", { class: "hero", "aria-label": "Verdict" }, el("p", { class: "hero-head", role: "status" }, sign, headline), consequence, reason, chips, details, start.node);

  function update() {
    const verdict = verdictOf(model);
    node.className = `hero tone-${verdict.tone}`;
    node.dataset.kind = verdict.kind;
    say(sign, verdict.sign);
    say(headline, visible(verdict.headline, 200));
    show(consequence, visible(verdict.consequence, 300));
    show(reason, visible(verdict.reason, 300));
    const links = verdict.culprits.slice(0, MOST_LINKS).map((one) => ({ key: one.task, rank: one.rank }));
    /** @type {any[]} */
    const shown = [...verdict.chips.map((one, number) => ({ key: `${number}/${one.label}`, ...one })), ...links];
    chips.hidden = !shown.length;
    reconcile(chips, shown, (one) => one.key, (one) => ("rank" in one ? makeLink(model, one.key, one.rank) : makeChip(one)));
    details.hidden = !verdict.facts.length;
    reconcile(facts, verdict.facts.flatMap((one, number) => [{ key: `t${number}`, tag: "dt", text: one.label }, { key: `d${number}`, tag: "dd", text: one.text }]), (one) => one.key, (one) => {
      const part = el(one.tag, {});
      return { node: part, update: (now) => say(part, visible(now.text, 1500)) };
    });
    start.update(verdict.kind === "empty");
  }

  return { node, update };
}

/** @param {HTMLElement} node @param {string} text */
function show(node, text) {
  node.hidden = !text;
  say(node, text);
}

/** @param {{label: string, brief: string}} first */
function makeChip(first) {
  const node = el("li", { class: "fact", "data-label": first.label, title: first.label });
  return { node, update: (/** @type {any} */ one) => say(node, visible(one.brief, 120)) };
}

/** @param {Model} model @param {string} task @param {number} rank */
function makeLink(model, task, rank) {
  const match = /^\/job:(.*)\/task:(\d+)$/.exec(task);
  const link = el("a", { class: "fact", href: linkTo(placeNow().view || "overview", model.cluster, "member", match ? `${match[1]}:${match[2]}` : "") }, `Rank ${rank} and its stack`);
  return { node: el("li", {}, link), update: () => {} };
}

/** What to do with an empty server: the command that joins it. @param {Model} model */
function makeStart(model) {
  const command = el("code", {});
  const copied = el("span", { class: "quiet", role: "status" });
  const node = el("p", { class: "start", hidden: true }, "Clients appear here when they register. ", command, " ", el("button", { class: "quiet", onclick: copy }, "Copy"), " ", copied);

  async function copy() {
    try {
      await navigator.clipboard.writeText(command.textContent ?? "");
      say(copied, "copied");
    } catch {
      getSelection()?.selectAllChildren(command); // a page without encryption, from another machine
      say(copied, "selected; press Ctrl-C");
    }
  }

  return {
    node,
    /** @param {boolean} empty */
    update(empty) {
      node.hidden = !empty;
      say(command, `dmesh run --coordinator ${visible(model.read.server?.grpc || "HOST:PORT", 100)} -n 4 script.py`);
    },
  };
}

/** A link over a name. @param {string} href @param {string} text */
export function linked(href, text) {
  return el("a", { href }, name(text));
}
