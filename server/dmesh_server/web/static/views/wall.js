// Wall screen: the verdict, the task slots and the charts, large; nothing to be pressed.

import { makeCharts } from "../charts.js";
import { el, say, visible } from "../dom.js";
import { makeHero } from "../hero.js";
import { SlotMap } from "../canvas.js";
import { conditionOf } from "../states.js";

export const title = "Wall";
export const needs = ["tasks", "why", "series", "load"];

/** @param {import("../model.js").Model} model */
export function create(model) {
  const what = el("h2", {});
  const hero = makeHero(model);
  const map = new SlotMap(() => "", () => {});
  map.blameAt = (place) => model.blames.get(place) ?? "";
  const charts = makeCharts(model, ["calls", "wait", "silence", "cpu"]);
  const node = el("div", { class: "view" }, what, hero.node, map.node, charts.node);

  function update() {
    say(what, visible(model.cluster || "dmesh", 60));
    hero.update();
    const slots = model.read.tasks;
    map.node.hidden = !slots;
    if (slots) {
      const width = map.node.clientWidth || 320;
      const total = slots.conditions.length;
      const size = Math.max(5, Math.min(48, Math.floor(Math.sqrt((width * 220) / Math.max(1, total)))));
      const columns = Math.max(1, Math.floor(width / size));
      const cells = Array.from({ length: total }, (_, place) => ({ x: (place % columns) * size, y: Math.floor(place / columns) * size, place }));
      map.canvas.setAttribute("aria-label", `${total} task slots`);
      map.draw(width, Math.ceil(total / columns) * size, size, cells, (place) => conditionOf(slots.conditions[place]), undefined, String);
    }
    charts.update();
  }

  return { node, update };
}
