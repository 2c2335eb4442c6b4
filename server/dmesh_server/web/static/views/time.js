// Time: what happened in the last 15 minutes, over one axis.

import { makeCharts } from "../charts.js";
import { el } from "../dom.js";

export const title = "Time";
export const needs = ["tasks", "why", "series", "load"];

/** @param {import("../model.js").Model} model */
export function create(model) {
  const charts = makeCharts(model, ["calls", "bytes", "wait", "pace", "silence", "cpu", "lag", "requests"]);
  const hint = el("p", { class: "quiet" }, "Point at a chart: all of them show the same moment. A click makes a link of it.");
  return { node: el("div", { class: "view" }, charts.node, hint), update: () => charts.update() };
}
