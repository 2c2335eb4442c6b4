// Reads what the view that is open shows, again and again, and at once when something happened.

import { inCluster, LoggedOut, read } from "./api.js";

/** @typedef {import("./model.js").Model} Model */

const PERIOD = 2000;
/** Task slots of a cluster from which on it is read half as often. */
const LARGE = 500;
/** Milliseconds between two readings at least. */
const PACE = 250;

/** @type {Record<string, {every: number, read: (model: Model) => Promise<any>}>} */
const RESOURCES = {
  tasks: { every: 1, read: (model) => read(inCluster(model.cluster, "tasks")) },
  why: { every: 1, read: (model) => read(inCluster(model.cluster, "why")) },
  barriers: { every: 1, read: (model) => read(inCluster(model.cluster, "barriers"), { limit: 20, missing: 20 }) },
  timeline: { every: 1, read: (model) => read(inCluster(model.cluster, "collectives"), { members: 32, recent: 16, limit: 4 }) },
  troubles: {
    every: 1,
    read: (model) => read(inCluster(model.cluster, "members"), { condition: ["FAILED", "LOST", "STUCK", "BLOCKED"], limit: 200 }),
  },
  progress: { every: 1, read: (model) => read(inCluster(model.cluster, "progress")) },
  topology: { every: 3, read: (model) => read(inCluster(model.cluster, "topology"), { limit: 200 }) },
  keys: { every: 3, read: (model) => read(inCluster(model.cluster, "keys"), { prefix: model.read.prefix ?? "", limit: model.read.mostKeys ?? 100 }) },
  series: { every: 2, read: (model) => read(inCluster(model.cluster, "series"), { after: model.columns.last }) },
  load: { every: 2, read: (model) => read("series", { after: model.load.last }) },
  server: { every: 3, read: () => read("server") },
};

/** What is read of the server, also while it has no cluster. */
const SERVERS = new Set(["server", "load"]);

export class Reading {
  /**
   * @param {Model} model
   * @param {() => string[]} needs what the open view shows
   * @param {() => void} answered the server answers, after it did not
   */
  constructor(model, needs, answered) {
    this.model = model;
    this.needs = needs;
    this.answered = answered;
    this.turn = 0;
    this.timer = 0;
    this.soonTimer = 0;
    this.lastAt = 0;
    this.busy = false;
    this.wanted = false;
  }

  start() {
    document.addEventListener("visibilitychange", () => !document.hidden && this.soon());
    this.timer = window.setInterval(() => {
      if (document.hidden) return;
      this.turn += 1;
      const pace = (this.model.summary?.tasks ?? 0) > LARGE ? 2 : 1;
      this.run((resource) => this.turn % (RESOURCES[resource].every * pace) === 0);
    }, PERIOD);
    this.soon();
  }

  /** Something happened: reads all, soon, and not too often. */
  soon() {
    if (this.soonTimer) return;
    const wait = Math.max(0, this.lastAt + PACE - performance.now());
    this.soonTimer = window.setTimeout(() => {
      this.soonTimer = 0;
      this.run(() => true);
    }, wait);
  }

  /** @param {(resource: string) => boolean} due */
  async run(due) {
    if (this.busy) {
      this.wanted = true;
      return;
    }
    this.busy = true;
    this.lastAt = performance.now();
    const cluster = this.model.cluster;
    const resources = this.needs().filter((one) => (cluster || SERVERS.has(one)) && (due(one) || this.model.read[one] === undefined));
    try {
      const answers = await Promise.all(resources.map((one) => RESOURCES[one].read(this.model)));
      if (cluster === this.model.cluster) {
        resources.forEach((one, place) => this.model.took(one, answers[place]));
      }
      if (resources.length && ["lost", "logged-out"].includes(this.model.connection)) this.answered();
    } catch (problem) {
      this.model.connect(problem instanceof LoggedOut ? "logged-out" : "lost");
    } finally {
      this.busy = false;
    }
    if (this.wanted) {
      this.wanted = false;
      this.soon();
    }
  }
}
