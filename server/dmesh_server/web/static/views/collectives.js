// Collectives: when each rank moved data and when it waited.

import { card, head, nothing } from "../card.js";
import { colour, sheet } from "../canvas.js";
import { el, reconcile, say, visible } from "../dom.js";
import { bytes, counted, number, precisely, rankOf, span } from "../format.js";
import { linkTo, showLinked } from "../router.js";
import { chip, lookOf, setChip } from "../states.js";
import { verdictOf } from "../verdict.js";

export const title = "Collectives";
export const needs = ["timeline"];

const OVER = new Set(["DONE", "FAILED", "UNKNOWN"]);
const COLUMNS = ["rank", "state", "at", "last call", "bytes", "wait / transfer", "main thread"];
const LANE = 20;
const LABEL = 74;
const SHARE = { width: 96, height: 10 };

/** @param {import("../model.js").Model} model */
export function create(model) {
  const list = el("div", { class: "stack-of-cards" });
  const more = el("p", { class: "quiet" });
  const node = el("div", { class: "view" }, list, more);

  function update() {
    const page = model.read.timeline;
    if (!page) return;
    reconcile(list, page.groups.length ? page.groups : [null], (/** @type {any} */ one) => (one ? `${one.id}/${one.generation}` : "none"), (one) => (one ? makeGroup(model) : { node: el("section", { class: "card" }, nothing("No collective has been reported yet. Members report with their heartbeats, every few seconds.")), update: () => {} }));
    showLinked(list, "collective");
    const parts = [];
    if (page.total > page.groups.length) parts.push(`${counted(page.total - page.groups.length, "smaller group")} not shown`);
    if (page.unknown) parts.push(`${counted(page.unknown, "member")} told nothing`);
    say(more, parts.join("; "));
  }

  return { node, update };
}

/** @param {import("../model.js").Model} model */
function makeGroup(model) {
  const [what, slow, scale, rest] = ["h2", "p", "p", "p"].map((tag) => el(tag, {}));
  const link = el("a", {});
  what.append(link);
  const canvas = /** @type {HTMLCanvasElement} */ (el("canvas", { role: "img", "aria-label": "when each rank worked and when it waited; the table below has the numbers" }));
  const key = el("p", { class: "quiet key" }, swatch("ok", "moves data"), swatch("warn", "waits for others (hatched)"), swatch("bad", "failed"));
  const body = el("tbody", {});
  const table = el("div", { class: "wide" }, el("table", { class: "ranks" }, head(COLUMNS), body));
  scale.className = rest.className = "quiet";
  const node = card("", slow, canvas, scale, key, table, rest);
  node.firstElementChild?.replaceWith(what);
  return {
    node,
    /** @param {any} group */
    update(group) {
      node.dataset.item = group.id;
      link.setAttribute("href", linkTo("collectives", model.cluster, "collective", group.id));
      say(link, `${visible(group.name || group.id)} · ${counted(group.size, "rank")} · call #${number(group.latest)}`);
      const verdict = verdictOf(model);
      const concerned = group.members.some((/** @type {any} */ one) => model.blameOf(one.task));
      slow.hidden = !concerned;
      slow.className = `stragglers tone-${verdict.tone}`;
      say(slow, concerned ? `${verdict.sign} ${visible(verdict.headline, 200)}` : "");
      drawTimeline(model, canvas, scale, group, node.clientWidth - 34);
      reconcile(body, group.members, (/** @type {any} */ one) => one.task, () => makeRank(model));
      say(rest, group.reported > group.members.length ? `and ${counted(group.reported - group.members.length, "rank")} further ahead` : "");
    },
  };
}

/** @param {string} tone @param {string} text */
function swatch(tone, text) {
  return el("span", { class: "ink-key" }, el("span", { class: `swatch ink-${tone}${tone === "warn" ? " hatched" : ""}`, "aria-hidden": "true" }), text);
}

/** @param {import("../model.js").Model} model */
function makeRank(model) {
  const state = chip("CONNECTED");
  const [rank, at, size, where] = ["", "number", "number", "where"].map((kind) => el("td", { class: kind }));
  const call = el("td", { class: "words" });
  const share = /** @type {HTMLCanvasElement} */ (el("canvas", { role: "img" }));
  const shareText = el("small", { class: "quiet" });
  const cells = [rank, el("td", {}, state), at, call, size, el("td", { class: "number" }, share, shareText), where];
  cells.forEach((cell, column) => (cell.dataset.column = COLUMNS[column]));
  const node = el("tr", {}, ...cells);
  return {
    node,
    /** @param {any} one */
    update(one) {
      node.dataset.task = one.task;
      const blame = model.blameOf(one.task);
      node.dataset.tone = blame ? lookOf(one.condition, blame).tone : "";
      setChip(state, one.condition, blame);
      say(rank, rankOf(visible(one.task)));
      rank.title = visible(one.task);
      say(at, `#${number(one.issued)}`);
      const last = one.last;
      say(call, last ? `${visible(last.call, 90)}: ${last.state.toLowerCase()}${last.error ? ` (${visible(last.error, 90)})` : ""}` : one.failure ? visible(one.failure, 90) : "–");
      say(size, last ? bytes(last.bytes) : "–");
      const all = one.waited + one.transferred;
      const { context, width, height } = sheet(share, SHARE.width, SHARE.height);
      context.fillStyle = colour("line");
      context.fillRect(0, 0, width, height);
      if (all) {
        const part = (one.waited / all) * width;
        hatch(context, 0, 0, part, height);
        context.fillStyle = colour("ok");
        context.fillRect(part, 0, width - part, height);
      }
      const percent = all ? `${Math.round((100 * one.waited) / all)} % waited` : "unknown";
      share.setAttribute("aria-label", percent);
      say(shareText, percent);
      say(where, one.where ? `${visible(one.where, 100)}; last progress ${span(one.idle)} ago` : "unknown");
    },
  };
}

/**
 * @param {import("../model.js").Model} model @param {HTMLCanvasElement} canvas @param {HTMLElement} scale @param {any} group
 * @param {number} wide
 */
function drawTimeline(model, canvas, scale, group, wide) {
  const width = Math.max(280, wide || 280);
  /** @type {any[]} */
  const ranks = [...group.members].sort((a, b) => indexOf(a.task) - indexOf(b.task));
  const oldest = Math.max(0.001, ...ranks.flatMap((one) => one.recent.map((/** @type {any} */ call) => call.age)));
  const youngest = Math.min(oldest, ...ranks.flatMap((one) => one.recent.map((/** @type {any} */ call) => Math.max(0, call.age - call.elapsed))));
  // A call under way has gone on since the report; those that are over are looked at closely.
  const running = ranks.some((one) => one.last && !OVER.has(one.last.state));
  const end = running ? 0 : youngest;
  const unit = (width - LABEL - 6) / Math.max(1e-6, oldest - end);
  const { context } = sheet(canvas, width, ranks.length * LANE + 4);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  ranks.forEach((one, lane) => {
    const y = lane * LANE + 2;
    const blame = model.blameOf(one.task);
    context.fillStyle = colour(blame ? "text" : "quiet");
    context.fillText(`${blame ? `${lookOf(one.condition, blame).sign} ` : ""}${rankOf(one.task)}`, 0, y + LANE / 2);
    context.fillStyle = colour("line");
    context.fillRect(LABEL, y + LANE - 1, width - LABEL, 1);
    for (const call of one.recent) {
      const going = !OVER.has(call.state);
      const elapsed = going ? call.age : call.elapsed;
      const x = LABEL + (oldest - call.age) * unit;
      const length = Math.max(2, Math.min(elapsed * unit, width - x));
      const wait = going ? length : Math.min(length, (call.waited ?? 0) * unit);
      context.fillStyle = colour(call.state === "FAILED" ? "bad" : "ok");
      context.fillRect(x, y + 3, length, LANE - 7);
      if (wait >= 1 && call.state !== "FAILED") hatch(context, x, y + 3, wait, LANE - 7);
      if (length > 34) {
        context.fillStyle = colour("text");
        context.fillText(`#${call.sequence}`, x + 4, y + LANE / 2);
      }
    }
  });
  say(scale, ranks.some((one) => one.recent.length) ? `from ${precisely(oldest)} ago to ${end ? `${precisely(end)} ago` : "now"}, as the members told; the last 16 calls of each` : "");
}

/** @param {string} task */
function indexOf(task) {
  return Number(/(\d+)$/.exec(task)?.[1] ?? 0);
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} width @param {number} height */
function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.fillStyle = colour("ground");
  context.fillRect(x, y, width, height);
  context.globalAlpha = 0.35;
  context.fillStyle = colour("warn");
  context.fillRect(x, y, width, height);
  context.globalAlpha = 1;
  context.strokeStyle = colour("warn");
  context.lineWidth = 1.5;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 6) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
