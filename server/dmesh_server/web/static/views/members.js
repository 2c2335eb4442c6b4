// Members, those in trouble first, each with its heartbeat strip.

import { colour, sheet } from "../canvas.js";
import { el, reconcile, say, visible } from "../dom.js";
import { counted, number, span } from "../format.js";
import { ABSENT, LOOKS } from "../heartbeats.js";
import { countSlots, machineAt, taskAt } from "../model.js";
import { goToMember } from "../router.js";
import { Rows } from "../rows.js";
import { chip, conditionOf, lookOf, ORDER, setChip } from "../states.js";

/** @typedef {import("../model.js").Model} Model */
/** @typedef {{place: number, condition: string, task: string, job: string, index: number, host: string, pid: number, silence: number, devices: number, reason: string, label: string, blame: import("../states.js").Blame}} Item */

export const title = "Members";
export const needs = ["tasks", "troubles"];

const STRIP = { width: 160, height: 22 };
const LATE = 25;
const VERY_LATE = 50;

/** @param {Model} model */
export function create(model) {
  /** @type {Set<string>} */
  const wanted = new Set();
  const search = /** @type {HTMLInputElement} */ (el("input", { type: "search", placeholder: "task, host or pid", "aria-label": "Only members whose task, host or pid contains", oninput: update }));
  const chips = el("div", { class: "filters", role: "group", "aria-label": "Only members that are" });
  const shown = el("span", { class: "quiet" });
  const note = el("p", { class: "quiet key" }, "Heartbeats: a bar for each look, as high as the member was silent, full at half of the lease.", ink("ok", "under 25 %"), ink("warn", "25 to 50 %"), ink("bad", "over 50 % of the lease"));
  const rows = new Rows({
    label: "Members",
    columns: [
      { title: "state", class: "c-state" },
      { title: "rank", class: "c-task" },
      { title: "host", class: "c-host" },
      { title: "pid", class: "c-pid" },
      { title: "devices", class: "c-devices" },
      { title: "last seen", class: "c-seen" },
      { title: "heartbeats", class: "c-strip" },
      { title: "why", class: "c-why" },
    ],
    height: 38,
    make: () => makeRow(model),
  });
  const node = el("div", { class: "view" }, el("div", { class: "toolbar" }, search, chips, shown), rows.node, note);

  function update() {
    const slots = model.read.tasks;
    if (!slots) return;
    const counts = countSlots(slots);
    const present = ORDER.filter((one) => counts[one] || wanted.has(one));
    reconcile(chips, present.map((one) => ({ one, many: counts[one] ?? 0 })), ({ one }) => one, ({ one }) => {
      const count = el("b", {});
      const button = el("button", { class: `filter tone-${lookOf(one).tone}`, onclick: () => toggle(one) }, one, count);
      return {
        node: button,
        update({ many }) {
          say(count, number(many));
          button.setAttribute("aria-pressed", String(wanted.has(one)));
        },
      };
    });
    const items = itemsOf(model).filter((item) => (!wanted.size || wanted.has(item.condition)) && matches(item, search.value.trim().toLowerCase()));
    say(shown, items.length === slots.total ? counted(slots.total, "task slot") : `${number(items.length)} of ${counted(slots.total, "task slot")}`);
    rows.set(items);
  }

  /** @param {string} condition */
  function toggle(condition) {
    if (!wanted.delete(condition)) wanted.add(condition);
    update();
  }

  return { node, update };
}

/** @param {string} tone @param {string} text */
function ink(tone, text) {
  return el("span", { class: "ink-key" }, el("span", { class: `swatch ink-${tone}`, "aria-hidden": "true" }), text);
}

/**
 * @param {Model} model
 * @returns {Item[]}
 */
function itemsOf(model) {
  const slots = model.read.tasks;
  /** @type {Map<string, string>} */
  const reasons = new Map((model.read.troubles?.members ?? []).map((/** @type {any} */ one) => [one.task, one.reason]));
  const types = Object.values(slots.devices);
  const blames = model.blames;
  const items = [];
  for (let place = 0; place < slots.conditions.length; place += 1) {
    const slot = taskAt(slots, place);
    items.push({
      ...slot,
      place,
      condition: conditionOf(slots.conditions[place]),
      host: machineAt(slots, place) ?? "",
      pid: slots.pids[place],
      silence: slots.silence[place],
      label: slots.jobs.length > 1 ? `${slot.job} ${slot.index}` : String(slot.index),
      blame: blames.get(place) ?? "",
      devices: types.reduce((sum, counts) => sum + counts[place], 0),
      reason: reasons.get(slot.task) ?? "",
    });
  }
  const order = new Map(ORDER.map((one, number) => [one, number]));
  const rank = (/** @type {Item} */ one) => (one.blame === "culprit" || one.blame === "late" ? -1 : order.get(one.condition) ?? 0);
  return items.sort((a, b) => rank(a) - rank(b) || a.place - b.place);
}

/** @param {Item} item @param {string} text */
function matches(item, text) {
  return !text || item.task.toLowerCase().includes(text) || item.host.toLowerCase().includes(text) || String(item.pid) === text;
}

/** @param {Model} model */
function makeRow(model) {
  /** @type {Item|null} */
  let current = null;
  const state = chip("CONNECTED");
  const [rank, more] = [el("span", {}), el("span", { class: "narrow-only" })];
  const task = el("button", { class: "link", onclick: () => current && goToMember(model.cluster, current) }, rank, more);
  const [host, pid, devices, seen, why] = ["c-host", "c-pid", "c-devices", "c-seen", "c-why"].map((kind) => el("span", { class: kind, role: "cell" }));
  const strip = /** @type {HTMLCanvasElement} */ (el("canvas", { role: "img", "aria-label": "heartbeats" }));
  const node = el("div", { class: "row", role: "row" }, el("span", { class: "c-state", role: "cell" }, state), el("span", { class: "c-task", role: "cell" }, task), host, pid, devices, seen, el("span", { class: "c-strip", role: "cell" }, strip), why);
  return {
    node,
    /** @param {Item} item */
    show(item) {
      current = item;
      const vacant = item.condition === "VACANT";
      node.dataset.task = item.task;
      node.dataset.condition = item.condition;
      const look = lookOf(item.condition, item.blame);
      node.dataset.tone = item.blame || look.tone !== "ok" ? look.tone : "";
      setChip(state, item.condition, item.blame);
      say(rank, visible(item.label));
      say(more, vacant ? "" : ` · ${visible(item.host, 60)} · pid ${item.pid}`);
      task.setAttribute("aria-label", visible(item.task));
      say(host, visible(item.host) || "–");
      host.title = visible(item.host);
      say(pid, vacant ? "–" : item.pid);
      say(devices, vacant ? "–" : item.devices);
      say(seen, vacant ? "never" : `${span(item.silence)} ago`);
      say(why, visible(item.reason, 300));
      why.title = visible(item.reason, 1000);
      drawStrip(strip, model.heartbeats.of(item.place));
    },
  };
}

/** @param {HTMLCanvasElement} canvas @param {number[]} looks */
function drawStrip(canvas, looks) {
  const { context, width, height } = sheet(canvas, STRIP.width, STRIP.height);
  const step = width / LOOKS;
  context.fillStyle = colour("line");
  context.fillRect(0, height - 1, width, 1);
  looks.forEach((silence, number) => {
    const x = (LOOKS - looks.length + number) * step;
    if (silence === ABSENT) {
      context.fillStyle = colour("gone");
      context.fillRect(x, height - 4, step - 1, 1.5);
      return;
    }
    context.fillStyle = colour(silence < LATE ? "ok" : silence < VERY_LATE ? "warn" : "bad");
    const bar = Math.max(3, Math.min(1, silence / VERY_LATE) * (height - 2));
    context.fillRect(x, height - 1 - bar, step - 1, bar);
  });
}
