// Overview: is it healthy? what is it waiting for?

import { SlotMap } from "../canvas.js";
import { card, nothing, tile } from "../card.js";
import { openMember } from "../details.js";
import { el, name, reconcile, say, visible } from "../dom.js";
import { bytes, clock, counted, number, precisely, rankOf, span } from "../format.js";
import { healthOf } from "../health.js";
import { countMembers, placeOf, taskAt } from "../model.js";
import { conditionOf, lookOf, ORDER } from "../states.js";

/** @typedef {import("../model.js").Model} Model */

export const title = "Overview";
export const needs = ["tasks", "why", "progress", "server"];

/** @param {Model} model */
export function create(model) {
  const sign = el("span", { class: "hero-sign", "aria-hidden": "true" });
  const word = el("strong", { class: "hero-word" });
  const why = el("p", { class: "hero-why" });
  const hero = el("section", { class: "hero", role: "status" }, el("p", { class: "hero-head" }, sign, word), why);
  const [members, barriers, collectives, store] = ["Members", "Barriers", "Collectives", "Server"].map(tile);
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  const legend = el("ul", { class: "legend" });
  const map = new SlotMap(
    (place) => describe(model, place),
    (place) => openMember(model.cluster, taskAt(model.read.tasks, place)),
  );
  const loops = el("tbody", {});
  const loopsCard = card("Progress", el("div", { class: "wide" }, el("table", {}, head(["loop", "done", "speed", "left", "ranks"]), loops)));
  const errors = el("ul", { class: "feed" });
  const clusters = el("tbody", {});
  const clustersCard = card("Clusters", el("div", { class: "wide" }, el("table", {}, head(["cluster", "members", "waits in", "keys"]), clusters)));
  const settings = el("tbody", {});
  const facts = el("p", { class: "quiet" });
  const node = el(
    "div",
    { class: "view" },
    hero,
    el("div", { class: "tiles" }, members.node, barriers.node, collectives.node, store.node),
    loopsCard,
    el("div", { class: "halves" }, card("Members by state", bar, legend, map.node), card("Latest trouble", errors)),
    clustersCard,
    el("details", { class: "card" }, el("summary", {}, "Server and settings"), facts, el("div", { class: "wide" }, el("table", {}, head(["setting", "value", "from"]), settings))),
  );

  function update() {
    const health = healthOf(model);
    hero.className = `hero tone-${health.tone}`;
    say(sign, health.sign);
    say(word, health.word);
    say(why, visible(health.text, 4000));
    const summary = model.summary;
    const counts = countMembers(model);
    const there = (counts.CONNECTED ?? 0) + (counts.REGISTERED ?? 0) + (counts.STUCK ?? 0) + (counts.BLOCKED ?? 0);
    say(members.value, summary ? `${number(there)} / ${number(summary.tasks)}` : "–");
    say(members.note, summary ? `there; epoch ${summary.epoch}` : "");
    say(barriers.value, summary ? number(summary.barriers) : "–");
    say(barriers.note, summary?.waits_in ? `oldest: ${counted(summary.waits_in.participants - summary.waits_in.arrived, "task")} missing` : "none under way");
    showCollectives(collectives, model.read.why);
    showServer(store, model.read.server);
    showLoops();
    showCounts(counts);
    showMap();
    showErrors();
    showClusters();
    showFacts();
  }

  /** @param {Record<string, number>} counts */
  function showCounts(counts) {
    const present = ORDER.filter((one) => counts[one]).map((one) => ({ one, many: counts[one] }));
    reconcile(bar, present, ({ one }) => one, ({ one }) => {
      const part = el("span", { class: `part ink-${lookOf(one).tone}` });
      return { node: part, update: ({ many }) => (part.style.flexGrow = String(many)) };
    });
    reconcile(legend, present, ({ one }) => one, ({ one }) => {
      const count = el("b", {});
      const item = el("li", { class: `tone-${lookOf(one).tone}`, title: lookOf(one).says }, el("span", { class: "sign", "aria-hidden": "true" }, lookOf(one).sign), count, ` ${one}`);
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
    map.marked = new Set((model.read.why?.suspects ?? []).map((/** @type {string} */ task) => placeOf(slots, task)));
    map.hint = `${map.marked.size ? "Framed: others wait for it. " : ""}Point at a task slot, or use the arrow keys; Enter opens it.`;
    const width = map.node.clientWidth || 320;
    const total = slots.conditions.length;
    const size = Math.max(5, Math.min(38, Math.floor(Math.sqrt((width * 200) / Math.max(1, total)))));
    const columns = Math.max(1, Math.floor(width / size));
    const cells = Array.from({ length: total }, (_, place) => ({ x: (place % columns) * size, y: Math.floor(place / columns) * size, place }));
    map.canvas.setAttribute("aria-label", `${counted(total, "task slot")} in the order of tasks`);
    map.draw(width, Math.ceil(total / columns) * size, size, cells, (place) => conditionOf(slots.conditions[place]), undefined, (place) => String(taskAt(slots, place).index));
  }

  function showErrors() {
    const bad = model.events.filter((one) => one.severity !== "info" && (one.cluster === "" || one.cluster === model.cluster)).slice(0, 6);
    reconcile(errors, bad.length ? bad : [null], (one) => one?.cursor ?? "none", (one) => {
      if (!one) return { node: el("li", {}, nothing("No trouble that the server remembers.")), update: () => {} };
      const item = el("li", { class: `tone-${one.severity === "error" ? "bad" : "warn"}` }, el("span", { class: "sign", "aria-hidden": "true" }, one.severity === "error" ? "✕" : "▲"), el("time", {}, clock(one.time)), el("span", { class: "words" }, visible(one.message, 300)));
      return { node: item, update: () => {} };
    });
  }

  function showClusters() {
    const all = [...model.clusters.values()].sort((a, b) => (a.name < b.name ? -1 : 1));
    clustersCard.hidden = all.length < 2;
    reconcile(clusters, all.slice(0, 50), (one) => one.name, (one) => {
      const link = el("button", { class: "link", onclick: () => model.look(one.name) }, name(one.name));
      const cells = ["", "number", "number"].map((kind) => el("td", { class: kind }));
      const row = el("tr", {}, el("td", {}, link), ...cells);
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

  function showFacts() {
    const server = model.read.server;
    if (!server) return;
    say(facts, `dmesh ${server.version}, pid ${server.pid}, up for ${span(server.uptime)}, gRPC at ${visible(server.grpc || "?")}, incarnation ${server.incarnation}, store: ${server.store.kind}`);
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

/** @param {{value: HTMLElement, note: HTMLElement}} tile @param {any} why */
function showCollectives({ value, note }, why) {
  const slow = why?.suspects ?? [];
  say(value, why?.latest ? `#${number(why.latest)}` : "–");
  if (!why?.latest) say(note, "none told of");
  else say(note, slow.length ? `${slow.slice(0, 3).map(rankOf).join(", ")}${slow.length > 3 ? " …" : ""} missing` : "nobody missing");
}

/** @param {{value: HTMLElement, note: HTMLElement}} tile @param {any} server */
function showServer({ value, note }, server) {
  if (!server) return;
  say(value, server.ready ? "Ready" : "Not ready");
  const commit = server.store.commit.count ? `commit p99 ${precisely(server.store.commit.p99)}, ` : "";
  say(note, server.ready ? `${commit}loop lag p99 ${precisely(server.loop_lag.p99)}` : visible(server.reason));
}

/** @param {Model} model @param {number} place */
function describe(model, place) {
  const slots = model.read.tasks;
  const host = slots.hosts[slots.host[place]];
  const condition = conditionOf(slots.conditions[place]);
  const where = host === undefined ? "" : `, host ${visible(host, 60)}, silent for ${span(slots.silence[place])}`;
  return `${taskAt(slots, place).task}: ${condition}${where}`;
}

/** @param {string[]} titles */
function head(titles) {
  return el("thead", {}, el("tr", {}, ...titles.map((one) => el("th", { scope: "col" }, one))));
}

export { describe as describeSlot, head };
