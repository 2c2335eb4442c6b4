// Meshes: devices laid out by the mesh's axes, coloured by the state of who has them; and by host.

import { SlotMap } from "../canvas.js";
import { card, nothing } from "../card.js";
import { el, name, reconcile, say, visible } from "../dom.js";
import { bytes, counted, number, precisely } from "../format.js";
import { beside, describePlace, drawGrid, layOut, locate, neighbours } from "../grid.js";
import { taskAt } from "../model.js";
import { goToMember } from "../router.js";
import { conditionOf, lookOf, ORDER } from "../states.js";
import { describeSlot } from "./overview.js";

/** @typedef {import("../model.js").Model} Model */
/** @typedef {import("../grid.js").Axis} Axis */
/** @typedef {import("../grid.js").Grid} Grid */

export const title = "Mesh";
export const needs = ["tasks", "topology"];

const MOST_HOSTS = 48;
const MOST_LINKS = 64;
const MOST_NODES = 8;

/** @param {Model} model */
export function create(model) {
  const meshes = el("div", { class: "stack-of-cards" });
  const unknown = el("p", { class: "quiet" });
  const hosts = el("div", { class: "hosts" });
  const moreHosts = el("p", { class: "quiet" });
  const links = el("ul", { class: "links" });
  const linked = card("Links between hosts", links);
  const node = el("div", { class: "view" }, meshes, unknown, card("Hosts", hosts, moreHosts), linked);

  function update() {
    const { tasks: slots, topology } = model.read;
    if (!slots || !topology) return;
    tellApart(topology.meshes);
    reconcile(meshes, topology.meshes.length ? topology.meshes : [null], keyOf, (mesh) => (mesh ? makeMesh(model, mesh) : { node: el("section", { class: "card" }, nothing("No program has announced a mesh yet.")), update: () => {} }));
    unknown.hidden = !(topology.meshes_unknown && topology.meshes.length);
    say(unknown, topology.meshes_unknown && topology.meshes.length ? `${counted(topology.meshes_unknown, "member")} announced no mesh; they may have some.` : "");
    showHosts(slots, topology);
    linked.hidden = !topology.links.length;
    reconcile(links, topology.links.slice(0, MOST_LINKS), (link) => JSON.stringify([link.hosts, link.boot_ids]), makeLink);
  }

  /** @param {any} slots @param {any} topology */
  function showHosts(slots, topology) {
    const found = membersByHost(slots);
    found.sort((a, b) => a.worst - b.worst || a.places[0] - b.places[0]);
    const nodes = new Map(topology.hosts.map((/** @type {any} */ one) => [keyOfMachine(one.host, one.boot_id), one]));
    for (const one of found.slice(0, MOST_HOSTS)) one.numa = describeNodes(nodes.get(one.key));
    reconcile(hosts, found.slice(0, MOST_HOSTS), (one) => one.key, (one) => makeHost(model, one));
    const rest = found.slice(MOST_HOSTS);
    say(moreHosts, rest.length ? `and ${counted(rest.length, "more host")}, ${rest.every((one) => one.worst >= ORDER.indexOf("CONNECTED")) ? "all well" : "the worst are above"}` : "");
  }

  return { node, update };
}

/** Numbers meshes that look the same. @param {any[]} meshes */
function tellApart(meshes) {
  /** @type {Map<string, number>} */
  const seen = new Map();
  for (const mesh of meshes) {
    mesh.same = 0;
    const key = keyOf(mesh);
    mesh.same = seen.get(key) ?? 0;
    seen.set(key, mesh.same + 1);
  }
}

/** Meshes are told apart by this; of equal ones (two jobs, or two orders of devices) the place in the list says which. @param {any} mesh */
function keyOf(mesh) {
  if (!mesh) return "none";
  return `${mesh.same ?? 0}|${mesh.name}|${mesh.device_type}|${mesh.axes.map((/** @type {Axis} */ axis) => `${axis.name}=${axis.size}`).join(",")}`;
}

/** A machine with its members. `worst`: the worst of their conditions, as a place in `ORDER`.
 * @typedef {{key: string, label: string, places: number[], worst: number, numa: string}} HostMembers */

/**
 * Groups the task slots that have been taken by machine: a host name may stand for several.
 * @param {any} slots
 * @returns {HostMembers[]}
 */
export function membersByHost(slots) {
  /** @type {Map<number, HostMembers>} */
  const found = new Map();
  slots.host.forEach((/** @type {number} */ host, /** @type {number} */ place) => {
    if (host < 0) return;
    const worst = ORDER.indexOf(conditionOf(slots.conditions[place]));
    const one = found.get(host);
    if (!one) {
      found.set(host, { key: keyOfMachine(slots.hosts[host], slots.boot_ids[host]), label: slots.machines[host], places: [place], worst, numa: "" });
      return;
    }
    one.places.push(place);
    one.worst = Math.min(one.worst, worst);
  });
  return [...found.values()];
}

/** @param {string} host @param {string} boot */
function keyOfMachine(host, boot) {
  return JSON.stringify([host, boot]);
}

/** @param {any} host as the topology has it; undefined if it is not on the page that was read */
function describeNodes(host) {
  const nodes = Object.entries(host?.numa_nodes ?? {});
  if (nodes.length < 2) return "";
  const rest = host.numa_nodes_total - Math.min(nodes.length, MOST_NODES);
  const named = nodes.slice(0, MOST_NODES).map(([node, count]) => `${count} on NUMA node ${node}`);
  return `; ${named.join(", ")}${rest > 0 ? ` and ${number(rest)} more` : ""}`;
}

/** @param {Model} model @param {any} mesh */
function makeMesh(model, mesh) {
  /** @type {Grid|null} */
  let grid = null;
  const map = new SlotMap(
    (cell) => (grid ? describeCell(model, grid, cell) : ""),
    (cell) => grid && grid.owners[grid.cells[cell].shows] >= 0 && goToMember(model.cluster, taskAt(model.read.tasks, grid.owners[grid.cells[cell].shows])),
  );
  map.blameAt = (cell) => (grid ? model.blames.get(grid.owners[grid.cells[cell].shows]) ?? "" : "");
  map.besideOf = (cell) => (grid && grid.cells.length === grid.owners.length ? beside(grid, grid.cells[cell].shows).flatMap(({ devices }) => devices) : []);
  const axes = mesh.axes.map((/** @type {Axis} */ axis) => `${visible(axis.name, 40)} ${axis.size}`).join(" × ");
  const said = el("p", { class: "quiet" });
  const node = el("section", { class: "card mesh" }, el("h2", {}, mesh.name ? name(mesh.name) : "unnamed mesh", el("small", {}, ` ${axes}, ${mesh.device_type}`)), said, map.node);
  return {
    node,
    update() {
      const slots = model.read.tasks;
      const now = model.read.topology.meshes.find((/** @type {any} */ one) => keyOf(one) === keyOf(mesh)) ?? mesh;
      const found = locate(now, slots);
      say(said, `announced by ${counted(now.announced_by, "member")}; ${found.says}`);
      map.node.hidden = !found.owners;
      if (!found.owners) return;
      grid = layOut(now.axes, { owners: found.owners, devices: found.devices }, slots, (map.node.clientWidth || 320) - 2);
      drawGrid(map, grid, slots);
    },
  };
}

/** @param {Model} model @param {Grid} grid @param {number} number */
function describeCell(model, grid, number) {
  const cell = grid.cells[number];
  const place = `${describePlace(grid, cell)}: `;
  const owner = grid.owners[cell.shows];
  if (cell.count === 1) {
    if (owner < 0) return `${place}nobody has told whose device this is`;
    const device = grid.devices[cell.shows];
    return `${place}${device < 0 ? "a device" : `device ${device}`} of ${describeSlot(model, owner)}; neighbours ${neighbours(grid, cell.shows, model.read.tasks)}`;
  }
  const worst = owner < 0 ? "" : `; the worst is of ${describeSlot(model, owner)}`;
  return `${place}${counted(cell.count, "device")}${worst}`;
}

function makeLink() {
  const ends = [el("bdi", { class: "name" }), el("bdi", { class: "name" })];
  const said = el("span", { class: "quiet" });
  return {
    node: el("li", {}, el("span", {}, ends[0], " ↔ ", ends[1]), " ", said),
    /** @param {any} link */
    update(link) {
      ends.forEach((end, place) => say(end, visible(link.machines[place])));
      const rate = link.bytes_per_second ? `${bytes(link.bytes_per_second)}/s` : "nothing sent yet";
      say(said, `${rate}, round trip ${precisely(link.round_trip_us / 1e6)}`);
    },
  };
}

/** @param {Model} model @param {HostMembers} first */
function makeHost(model, first) {
  const map = new SlotMap(
    (place) => describeSlot(model, place),
    (place) => goToMember(model.cluster, taskAt(model.read.tasks, place)),
  );
  map.blameAt = (place) => model.blames.get(place) ?? "";
  const worst = el("span", { class: "sign", "aria-hidden": "true" });
  const what = el("span", { class: "quiet" });
  const label = el("bdi", { class: "name" });
  const node = el("section", { class: "host" }, el("h3", {}, worst, label), what, map.node);
  return {
    node,
    /** @param {HostMembers} one */
    update(one) {
      const slots = model.read.tasks;
      const blames = one.places.map((place) => model.blames.get(place) ?? "");
      const look = lookOf(ORDER[one.worst], blames.find((blame) => blame === "culprit" || blame === "late") ?? blames.find(Boolean) ?? "");
      worst.className = `sign tone-${look.tone}`;
      say(worst, look.sign);
      const devices = Object.entries(slots.devices).map(([type, counts]) => [type, one.places.reduce((sum, place) => sum + /** @type {number[]} */ (counts)[place], 0)]);
      say(label, visible(one.label) || "unknown host");
      say(what, `${counted(one.places.length, "member")}, ${devices.map(([type, count]) => `${count} ${type}`).join(", ") || "no devices"}${one.numa}`);
      const width = map.node.clientWidth || 180;
      const size = Math.max(6, Math.min(24, Math.floor(Math.sqrt((width * 60) / one.places.length))));
      const columns = Math.max(1, Math.floor(width / size));
      const cells = one.places.map((place, number) => ({ x: (number % columns) * size, y: Math.floor(number / columns) * size, place }));
      map.canvas.setAttribute("aria-label", `members on ${visible(one.label)}`);
      map.draw(width, Math.ceil(one.places.length / columns) * size, size, cells, (place) => conditionOf(slots.conditions[place]), undefined, (place) => String(taskAt(slots, place).index));
    },
  };
}
