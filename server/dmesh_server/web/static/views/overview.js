// Overview: is it healthy, and if not, who is to blame? Then members, progress and recent problems.

import { endCluster } from "../actions.js";
import { SlotMap } from "../canvas.js";
import { card, head, nothing, tile } from "../card.js";
import { makeCharts } from "../charts.js";
import { el, name, reconcile, say, visible } from "../dom.js";
import { bytes, clock, counted, number, precisely, span } from "../format.js";
import { linked, makeHero } from "../hero.js";
import { countMembers, machineAt, taskAt } from "../model.js";
import { goToMember, linkTo } from "../router.js";
import { BLAMES, conditionOf, lookOf, ORDER } from "../states.js";
import { toneOf } from "./events.js";

/** @typedef {import("../model.js").Model} Model */

export const title = "Overview";
export const needs = ["tasks", "why", "progress", "server", "series"];

/** @param {Model} model */
export function create(model) {
  const hero = makeHero(model);
  const [members, barriers, collectives] = ["Members", "Barriers", "Collectives"].map(tile);
  const tiles = el("div", { class: "tiles" }, members.node, barriers.node, collectives.node);
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  const legend = el("ul", { class: "legend" });
  const map = new SlotMap(
    (place) => describeSlot(model, place),
    (place) => goToMember(model.cluster, taskAt(model.read.tasks, place)),
  );
  map.blameAt = (place) => model.blames.get(place) ?? "";
  const membersCard = card("Members", bar, legend, map.node);
  const charts = makeCharts(model, ["calls", "wait"]);
  const loops = el("tbody", {});
  const loopsCard = card("Progress", el("div", { class: "wide" }, el("table", {}, head(["loop", "done", "speed", "left", "ranks"]), loops)));
  const errors = el("ul", { class: "feed" });
  const clusters = el("tbody", {});
  const clustersCard = card("Clusters", el("div", { class: "wide" }, el("table", {}, head(["cluster", "members", "waits in", "keys"]), clusters)));
  const settings = el("tbody", {});
  const facts = el("dl", { class: "facts-list" });
  const end = el("button", { class: "quiet", onclick: () => endCluster(model) }, "End this cluster …");
  const node = el(
    "div",
    { class: "view" },
    hero.node,
    tiles,
    loopsCard,
    el("div", { class: "halves" }, membersCard, card("Recent problems", errors)),
    charts.node,
    clustersCard,
    el("details", { class: "card" }, el("summary", {}, "Server"), facts, end, el("div", { class: "wide" }, el("table", {}, head(["setting", "value", "from"]), settings))),
  );

  function update() {
    hero.update();
    const summary = model.summary;
    const counts = countMembers(model);
    const there = (counts.CONNECTED ?? 0) + (counts.REGISTERED ?? 0) + (counts.STUCK ?? 0) + (counts.BLOCKED ?? 0);
    tiles.hidden = membersCard.hidden = !summary;
    end.hidden = !summary || summary.ended;
    if (summary) {
      say(members.value, `${number(there)} / ${number(summary.tasks)}`);
      say(members.note, `present; epoch ${summary.epoch}`);
      say(barriers.value, number(summary.barriers));
      say(barriers.note, summary.waits_in ? `${counted(summary.waits_in.participants - summary.waits_in.arrived, "task")} missing in the oldest` : "none under way");
      const latest = model.read.why?.latest;
      say(collectives.value, latest ? `#${number(latest)}` : "–");
      say(collectives.note, latest ? "the latest call" : "none reported");
    }
    showCounts();
    showMap();
    charts.update();
    showLoops();
    showErrors();
    showClusters();
    showServer();
  }

  function showCounts() {
    const present = tally(model);
    reconcile(bar, present, ({ key }) => key, ({ look }) => {
      const part = el("span", { class: `part ink-${look.tone}` });
      return { node: part, update: ({ many }) => (part.style.flexGrow = String(many)) };
    });
    reconcile(legend, present, ({ key }) => key, ({ look, word }) => {
      const count = el("b", {});
      const item = el("li", { class: `tone-${look.tone}`, title: look.says }, el("span", { class: "sign", "aria-hidden": "true" }, look.sign), count, ` ${word}`);
      return { node: item, update: ({ many }) => say(count, number(many)) };
    });
  }

  function showLoops() {
    const told = model.read.progress?.loops ?? [];
    loopsCard.hidden = !told.length;
    reconcile(loops, told, (one) => `${one.name}/${one.total}`, (one) => {
      const cells = ["", "number", "number", "number"].map((kind) => el("td", { class: kind }));
      return {
        node: el("tr", {}, el("td", {}, name(one.name || "loop")), ...cells),
        update(now) {
          const done = now.least === now.most ? number(now.least) : `${number(now.least)}–${number(now.most)}`;
          say(cells[0], `${done}${now.total ? ` / ${number(now.total)} (${Math.floor((100 * now.least) / now.total)}%)` : ""} ${visible(now.unit, 20)}`);
          say(cells[1], now.rate && !now.over ? `${now.rate.toFixed(1)}/s` : "–");
          say(cells[2], now.over ? "over" : now.left === null ? "–" : span(now.left));
          say(cells[3], number(now.ranks));
        },
      };
    });
  }

  function showMap() {
    const slots = model.read.tasks;
    map.node.hidden = !slots;
    if (!slots) return;
    map.hint = "Point at a task slot, or use the arrow keys; Enter opens it.";
    const width = map.node.clientWidth || 320;
    const total = slots.conditions.length;
    const size = Math.max(5, Math.min(38, Math.floor(Math.sqrt((width * 200) / Math.max(1, total)))));
    const columns = Math.max(1, Math.floor(width / size));
    const cells = Array.from({ length: total }, (_, place) => ({ x: (place % columns) * size, y: Math.floor(place / columns) * size, place }));
    map.canvas.setAttribute("aria-label", `${counted(total, "task slot")} in the order of tasks`);
    map.draw(width, Math.ceil(total / columns) * size, size, cells, (place) => conditionOf(slots.conditions[place]), undefined, (place) => String(taskAt(slots, place).index));
  }

  function showErrors() {
    const bad = model.events.filter((one) => one.severity !== "info" && (one.cluster === "" || one.cluster === model.cluster));
    // What follows from the culprit's end is said by the verdict already.
    const own = bad.filter((one) => !(one.severity === "error" && toneOf(model, one) === "warn")).slice(0, 6);
    reconcile(errors, own.length ? own : [null], (one) => (one ? `${one.cursor}/${toneOf(model, one)}` : "none"), (one) => {
      if (!one) return { node: el("li", {}, nothing(model.events.length && bad.length ? "None but those that follow from the verdict." : "No recent problems.")), update: () => {} };
      const tone = toneOf(model, one);
      const link = el("a", { class: "quiet", href: linkTo("events", one.cluster || model.cluster, "event", one.cursor) }, el("time", {}, clock(one.time)));
      const item = el("li", { class: `tone-${tone}` }, el("span", { class: "sign", "aria-hidden": "true" }, tone === "bad" ? "✖" : "▲"), link, el("span", { class: "words" }, visible(one.message, 160)));
      return { node: item, update: () => {} };
    });
  }

  function showClusters() {
    const all = [...model.clusters.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    clustersCard.hidden = all.length < 2;
    reconcile(clusters, all.slice(0, 50), (one) => one.name, (one) => {
      const cells = ["", "number", "number"].map((kind) => el("td", { class: kind }));
      const row = el("tr", {}, el("td", {}, linked(linkTo("overview", one.name), one.name)), ...cells);
      return {
        node: row,
        update(now) {
          say(cells[0], ORDER.filter((state) => now.members[state]).map((state) => `${lookOf(state).sign} ${now.members[state]} ${state}`).join(", ") || "nobody");
          say(cells[1], now.waits_in ? `${visible(now.waits_in.name, 40)} (${now.waits_in.arrived}/${now.waits_in.participants})` : "–");
          say(cells[2], `${number(now.keys)} (${bytes(now.key_bytes)})`);
        },
      };
    });
  }

  function showServer() {
    const server = model.read.server;
    if (!server) return;
    const commit = server.store.commit.count ? `; commits take ${precisely(server.store.commit.p99)} at most, 99 of 100` : "";
    const told = [
      ["state", server.ready ? "ready" : `not ready: ${server.reason}`],
      ["address", server.grpc || "unknown"],
      ["version", `dmesh ${server.version}, pid ${server.pid}, up for ${span(server.uptime)}`],
      ["store", `${server.store.kind}${commit}`],
      ["event loop", `${precisely(server.loop_lag.p99)} late at most, 99 of 100 times`],
      ["incarnation", server.incarnation],
    ];
    reconcile(facts, told.flatMap(([term, fact]) => [{ key: term, tag: "dt", text: term }, { key: `${term}=`, tag: "dd", text: fact }]), (one) => one.key, (one) => {
      const part = el(one.tag, {});
      return { node: part, update: (now) => say(part, visible(now.text, 300)) };
    });
    reconcile(settings, server.settings, (/** @type {any} */ one) => one.name, (one) => {
      const [value, origin] = [el("td", {}), el("td", {})];
      return {
        node: el("tr", {}, el("td", {}, name(one.name)), value, origin),
        update(now) {
          say(value, visible(now.value));
          say(origin, visible(now.origin));
        },
      };
    });
  }

  return { node, update };
}

/**
 * Counts the task slots by what they are and what the verdict makes of them, the worst first.
 * @param {Model} model
 */
function tally(model) {
  const slots = model.read.tasks;
  if (!slots) return [];
  /** @type {Map<string, {key: string, rank: number, many: number, word: string, look: import("../states.js").Look}>} */
  const found = new Map();
  const blames = model.blames;
  for (let place = 0; place < slots.conditions.length; place += 1) {
    const [condition, blame] = [conditionOf(slots.conditions[place]), blames.get(place) ?? ""];
    const key = `${blame}/${condition}`;
    const one = found.get(key);
    if (one) one.many += 1;
    else {
      const rank = ORDER.indexOf(condition) - (blame ? { culprit: 30, late: 20, victim: 10 }[blame] : 0);
      found.set(key, { key, rank, many: 1, word: blame ? `${BLAMES[blame].word} (${condition})` : condition, look: lookOf(condition, blame) });
    }
  }
  return [...found.values()].sort((a, b) => a.rank - b.rank);
}

/** @param {Model} model @param {number} place */
export function describeSlot(model, place) {
  const slots = model.read.tasks;
  const host = machineAt(slots, place);
  const blame = model.blames.get(place);
  const condition = conditionOf(slots.conditions[place]);
  const where = host === undefined ? "" : `, host ${visible(host)}, pid ${slots.pids[place]}, last seen ${span(slots.silence[place])} ago`;
  return `${taskAt(slots, place).task}: ${condition}${blame ? `, ${BLAMES[blame].word}` : ""}${where}`;
}
