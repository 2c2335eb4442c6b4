// What the page knows: the clusters, the one that is looked at, what the server said of it, and how fresh that is.

import { Columns } from "./columns.js";
import { conditionOf, CONDITIONS } from "./states.js";
import { Heartbeats } from "./heartbeats.js";

/** @typedef {"connecting"|"live"|"lost"|"logged-out"} Connection */

const MOST_EVENTS = 1000;

export class Model extends EventTarget {
  constructor() {
    super();
    /** @type {Map<string, any>} by name, as `GET clusters` shows them */
    this.clusters = new Map();
    this.known = false;
    /** @type {Set<string>} clusters that the stream has not told of since it was opened */
    this.untold = new Set();
    /** @type {string} the cluster that is looked at; empty if there is none */
    this.cluster = "";
    /** @type {Connection} */
    this.connection = "connecting";
    this.lostAt = 0;
    /** @type {Record<string, any>} what was read of the cluster, by resource */
    this.read = {};
    /** @type {any[]} newest first */
    this.events = [];
    /** @type {Set<string>} */
    this.eventIds = new Set();
    this.heartbeats = new Heartbeats();
    this.columns = new Columns();
    this.load = new Columns();
    /** @type {string} the cluster that the address names; empty for none */
    this.wanted = "";
    /** @type {{why: any, tasks: any, found: Map<number, import("./states.js").Blame>}} */
    this.judged = { why: null, tasks: null, found: new Map() };
  }

  /**
   * What the server's verdict makes of task slots, by place.
   * @returns {Map<number, import("./states.js").Blame>}
   */
  get blames() {
    const { why, tasks } = this.read;
    if (this.judged.why === why && this.judged.tasks === tasks) return this.judged.found;
    /** @type {Map<number, import("./states.js").Blame>} */
    const found = new Map();
    if (why && tasks) {
      const bad = why.severity === "bad";
      for (const [job, ranks] of Object.entries(bad ? why.victims : {})) {
        const start = placeOf(tasks, `/job:${job}/task:0`);
        if (start >= 0) for (const rank of ranks) found.set(start + rank, "victim");
      }
      for (const one of why.culprits) found.set(placeOf(tasks, one.task), bad ? "culprit" : "late");
    }
    this.judged = { why, tasks, found };
    return found;
  }

  /**
   * @param {string} task
   * @returns {import("./states.js").Blame}
   */
  blameOf(task) {
    return this.read.tasks ? this.blames.get(placeOf(this.read.tasks, task)) ?? "" : "";
  }

  /**
   * Returns the label of the machine of a task; its host name if the task is not among the slots that were read.
   * @param {{task: string, host: string}} member
   */
  machineOf({ task, host }) {
    const slots = this.read.tasks;
    return (slots && machineAt(slots, placeOf(slots, task))) ?? host;
  }

  /** Tells whoever shows it that something is new. */
  changed() {
    this.dispatchEvent(new Event("change"));
  }

  /** @returns {any} the summary of the cluster that is looked at */
  get summary() {
    return this.clusters.get(this.cluster) ?? null;
  }

  /**
   * @param {any[]} changed
   * @param {string[]} gone
   */
  setClusters(changed, gone) {
    this.known = true;
    for (const one of changed) {
      this.clusters.set(one.name, one);
      this.untold.delete(one.name);
    }
    for (const one of gone) this.clusters.delete(one);
    if (this.wanted && this.clusters.has(this.wanted)) this.look(this.wanted);
    else if (!this.clusters.has(this.cluster)) this.look(this.first());
    this.changed();
  }

  /** A stream was opened: it tells of all clusters first. */
  opened() {
    this.untold = new Set(this.clusters.keys());
  }

  /** The stream has told of all clusters: those that it left out are gone. */
  complete() {
    this.setClusters([], [...this.untold]);
    this.untold.clear();
  }

  /** Of several, one in which something goes on. */
  first() {
    const names = [...this.clusters.keys()].sort();
    return names.find((one) => !this.clusters.get(one).ended) ?? names[0] ?? "";
  }

  /** @param {string} cluster */
  look(cluster) {
    if (cluster === this.cluster) return;
    this.cluster = cluster;
    this.read = { server: this.read.server };
    this.heartbeats = new Heartbeats();
    this.columns = new Columns();
    this.dispatchEvent(new Event("cluster"));
    this.changed();
  }

  /**
   * @param {string} resource
   * @param {any} answer
   */
  took(resource, answer) {
    this.read[resource] = answer;
    if (resource === "tasks" && answer) this.heartbeats.note(answer);
    if (resource === "series" && answer) this.columns.add(answer);
    if (resource === "load" && answer) this.load.add(answer);
    this.changed();
  }

  /** @param {any[]} happened in order */
  note(happened) {
    for (const event of happened) {
      if (this.eventIds.has(event.cursor)) continue;
      this.eventIds.add(event.cursor);
      this.events.unshift(event);
      this._apply(event);
    }
    for (const dropped of this.events.splice(MOST_EVENTS)) this.eventIds.delete(dropped.cursor);
    this.changed();
  }

  /** A member's fate is shown when it is told of, not when the task slots are read again. */
  _apply(event) {
    const slots = this.read.tasks;
    if (!slots || event.cluster !== this.cluster || !event.task) return;
    const condition = { member_lost: "LOST", member_failed: "FAILED", member_left: "LEFT", member_stuck: "STUCK", member_blocked: "BLOCKED", member_live: "CONNECTED" }[event.kind];
    const place = condition ? placeOf(slots, event.task) : -1;
    if (place >= 0 && condition) {
      slots.conditions = slots.conditions.slice(0, place) + CONDITIONS[condition].letter + slots.conditions.slice(place + 1);
    }
  }

  /** @param {Connection} state */
  connect(state) {
    if (state === this.connection) return;
    if (state === "lost") this.lostAt = Date.now();
    this.connection = state;
    this.changed();
  }
}

/**
 * Returns the task at a place of the task slots.
 * @param {any} slots
 * @param {number} place
 */
export function taskAt(slots, place) {
  let rest = place;
  for (const job of slots.jobs) {
    if (rest < job.tasks) return { task: `/job:${job.name}/task:${rest}`, job: job.name, index: rest };
    rest -= job.tasks;
  }
  return { task: "", job: "", index: -1 };
}

/**
 * Returns the place of a task among the task slots; -1 if it has none.
 * @param {any} slots
 * @param {string} task
 */
export function placeOf(slots, task) {
  const match = /^\/job:(.*)\/task:(\d+)$/.exec(task);
  if (!match) return -1;
  let start = 0;
  for (const job of slots.jobs) {
    if (job.name === match[1]) return Number(match[2]) < job.tasks ? start + Number(match[2]) : -1;
    start += job.tasks;
  }
  return -1;
}

/**
 * Returns the label of the machine of a task slot's holder; undefined for a vacant slot.
 * @param {any} slots
 * @param {number} place
 * @returns {string|undefined}
 */
export function machineAt(slots, place) {
  return slots.machines[slots.host[place]];
}

/**
 * Counts the task slots by condition.
 * @param {any} slots
 * @returns {Record<string, number>}
 */
export function countSlots(slots) {
  /** @type {Record<string, number>} */
  const counts = {};
  for (const letter of slots.conditions) {
    const condition = conditionOf(letter);
    counts[condition] = (counts[condition] ?? 0) + 1;
  }
  return counts;
}

/**
 * Counts a cluster's members by condition, as the newest of what is known has it.
 * @param {Model} model
 * @returns {Record<string, number>}
 */
export function countMembers(model) {
  if (model.read.tasks) return countSlots(model.read.tasks);
  const summary = model.summary;
  if (!summary) return {};
  return summary.vacant ? { ...summary.members, VACANT: summary.vacant } : summary.members;
}
