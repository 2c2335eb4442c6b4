// The dashboard: puts the parts together. Everything that it shows is text of the server, of members, of people.

import { wallLink } from "./actions.js";
import { read, LoggedOut } from "./api.js";
import { forgetColours } from "./canvas.js";
import { openMember } from "./details.js";
import { el, reconcile, say, visible } from "./dom.js";
import { Model } from "./model.js";
import { Reading } from "./reading.js";
import { linkTo, placeNow } from "./router.js";
import { Stream } from "./stream.js";
import { startTheme } from "./theme.js";
import { verdictOf } from "./verdict.js";
import * as barriers from "./views/barriers.js";
import * as collectives from "./views/collectives.js";
import * as events from "./views/events.js";
import * as keys from "./views/keys.js";
import * as members from "./views/members.js";
import * as mesh from "./views/mesh.js";
import * as overview from "./views/overview.js";
import * as time from "./views/time.js";
import * as wall from "./views/wall.js";

/** @type {Record<string, {title: string, needs: string[], create: (model: Model, again: () => void) => {node: HTMLElement, update: () => void}}>} */
const VIEWS = { overview, time, members, collectives, barriers, mesh, events, keys };
/** Views without a tab. */
const HIDDEN = { wall };
const ALL = { ...VIEWS, ...HIDDEN };
const PAST = 1000;
const MEASURES = 200;

const model = new Model();
/** @type {Map<string, {node: HTMLElement, update: () => void}>} */
const made = new Map();
const open = () => (placeNow().view in ALL ? placeNow().view : "overview");

const reading = new Reading(model, () => [...new Set([...ALL[open()].needs, "why", "tasks", "server"])], () => stream.open());
const stream = new Stream({
  clusters: (told) => model.setClusters(told.clusters, told.gone),
  complete: () => model.complete(),
  happened: (event) => {
    model.note([event]);
    if (event.cluster === model.cluster) reading.soon();
  },
  gap: () => reading.soon(),
  state: (state) => {
    model.connect(state);
    if (state !== "live") return;
    model.opened();
    reading.soon();
  },
});

const banner = el("p", { class: "banner", role: "alert", hidden: true });
const light = el("span", { class: "light", role: "status" });
const picker = /** @type {HTMLSelectElement} */ (el("select", { id: "cluster", "aria-label": "Cluster", onchange: () => (location.hash = linkTo(open(), picker.value)) }));
const tabs = el(
  "nav",
  { class: "tabs", "aria-label": "Views", onscroll: showMore },
  ...Object.entries(VIEWS).map(([path, view]) => el("a", { href: `#/${path}`, "data-view": path }, view.title, el("span", { class: "badge", hidden: true }))),
);
const main = el("main", { id: "view", tabindex: -1 });

/** Shows what is known, in the next frame; however much is new until then. */
let due = false;
function show() {
  if (due) return;
  due = true;
  const began = performance.now();
  requestAnimationFrame(() => {
    due = false;
    update();
    // What was changed is on the screen after this frame: a message comes behind it.
    const channel = new MessageChannel();
    channel.port1.onmessage = () => {
      performance.measure("dmesh-update", { start: began });
      if (performance.getEntriesByName("dmesh-update").length > MEASURES) performance.clearMeasures("dmesh-update");
    };
    channel.port2.postMessage(0);
  });
}

function update() {
  const path = open();
  let view = made.get(path);
  if (!view) {
    view = ALL[path].create(model, () => reading.soon());
    made.set(path, view);
  }
  if (view.node.parentNode !== main) main.replaceChildren(view.node);
  showConnection();
  showTabs(path);
  const names = [...model.clusters.keys()].sort();
  reconcile(picker, names, (one) => one, (one) => ({ node: el("option", { value: one }, visible(one, 60)), update: () => {} }));
  picker.value = model.cluster;
  picker.hidden = names.length === 0;
  const verdict = verdictOf(model);
  document.title = `${verdict.sign} ${model.cluster ? `${visible(model.cluster, 40)}: ${visible(verdict.headline, 80)}` : "dmesh"}`;
  document.body.classList.toggle("wall", path === "wall");
  view.update();
  showMember();
}

/** Opens the member that the address names, once; closing it leads back. */
let shown = "";
function showMember() {
  const place = placeNow();
  const wanted = place.kind === "member" && model.cluster ? `${model.cluster}/${place.value}` : "";
  if (wanted === shown) return;
  shown = wanted;
  for (const sheet of /** @type {NodeListOf<HTMLDialogElement>} */ (document.querySelectorAll("dialog.member"))) sheet.close();
  const match = /^(.*):(\d+)$/.exec(place.value);
  if (!wanted || !match) return;
  const slot = { task: `/job:${match[1]}/task:${match[2]}`, job: match[1], index: Number(match[2]) };
  void openMember(model, slot, () => {
    if (shown === wanted) location.hash = linkTo(open(), model.cluster);
  });
}

/** Shows at its edges that there are more tabs than fit. */
function showMore() {
  tabs.classList.toggle("more-left", tabs.scrollLeft > 4);
  tabs.classList.toggle("more-right", tabs.scrollLeft + tabs.clientWidth < tabs.scrollWidth - 4);
}

/** Looks at the cluster that the address names, as soon as there is one of that name. */
function follows() {
  model.wanted = placeNow().cluster;
  if (model.clusters.has(model.wanted)) model.look(model.wanted);
}

function showConnection() {
  const state = model.connection;
  light.dataset.state = state;
  say(light, { connecting: "○ connecting", live: "● live", lost: "✕ connection lost", "logged-out": "✕ logged out" }[state]);
  document.body.classList.toggle("stale", state === "lost" || state === "logged-out");
  banner.hidden = state === "live" || state === "connecting";
  if (state === "lost") {
    const since = new Date(model.lostAt).toLocaleTimeString("en-GB");
    say(banner, `Connection lost at ${since}. What is shown here is as old as that; it goes on by itself when the server is back.`);
  } else if (state === "logged-out" && !banner.querySelector("a")) {
    banner.replaceChildren("You are logged out, or your token is not accepted any more. ", el("a", { href: "/login" }, "Log in"));
  }
}

/** @param {string} path */
function showTabs(path) {
  /** @type {Record<string, number>} */
  const badges = { barriers: model.summary?.barriers ?? 0 };
  for (const tab of /** @type {NodeListOf<HTMLElement>} */ (tabs.querySelectorAll("a"))) {
    const view = tab.dataset.view ?? "";
    const href = linkTo(view, model.cluster);
    if (tab.getAttribute("href") !== href) tab.setAttribute("href", href);
    if (view === path) {
      if (!tab.hasAttribute("aria-current")) tabs.scrollTo({ left: tab.offsetLeft - tabs.offsetLeft - 40 });
      tab.setAttribute("aria-current", "page");
    } else tab.removeAttribute("aria-current");
    const badge = /** @type {HTMLElement} */ (tab.lastElementChild);
    badge.hidden = !badges[view];
    say(badge, badges[view] || "");
  }
  showMore();
}

/** Reads what happened before the page was opened, and then follows. */
async function follow() {
  try {
    const server = await read("server");
    model.took("server", server);
    const [start, last] = server.last_event.split("-");
    const kinds = ["cluster_formed", "cluster_ended", "member_joined", "member_rejoined", "member_left", "member_lost", "member_failed", "member_blocked", "member_stuck", "member_live", "barrier_failed", "preemption_announced", "admin_action", "server_started", "store_failed", "store_recovered"];
    const past = await read("events", { after: `${start}-${Math.max(0, Number(last) - PAST)}`, limit: PAST, kind: kinds });
    model.note(past.events);
    stream.open(past.next);
  } catch (problem) {
    model.connect(problem instanceof LoggedOut ? "logged-out" : "lost");
    window.setTimeout(follow, 2000);
  }
}

function start() {
  const header = document.getElementById("top");
  const tools = document.getElementById("tools");
  const menu = document.getElementById("menu");
  if (!header || !tools || !menu) return;
  startTheme(menu, () => {
    forgetColours();
    show();
  });
  tools.prepend(picker, light);
  const box = /** @type {HTMLDetailsElement} */ (menu.parentElement);
  document.addEventListener("click", (event) => !box.contains(/** @type {Node} */ (event.target)) && box.removeAttribute("open"));
  document.addEventListener("keydown", (event) => event.key === "Escape" && box.removeAttribute("open"));
  const secured = menu.querySelector("form") !== null;
  menu.prepend(el("a", { href: linkTo("wall", "") }, "Wall screen"), ...(secured ? [el("button", { class: "quiet", onclick: wallLink }, "Link for a wall screen …")] : []));
  header.after(banner, tabs, main);
  follows();
  model.addEventListener("change", show);
  model.addEventListener("cluster", () => reading.soon());
  let before = open();
  window.addEventListener("hashchange", () => {
    follows();
    reading.soon();
    show();
    if (open() !== before) main.focus({ preventScroll: true });
    before = open();
  });
  window.addEventListener("resize", show);
  window.addEventListener("pagehide", () => stream.close());
  window.addEventListener("pageshow", (event) => event.persisted && stream.open());
  show();
  reading.start();
  void follow();
}

start();
