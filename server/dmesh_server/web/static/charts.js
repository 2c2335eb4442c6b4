// Charts of the last 15 minutes, over one time axis: drawn by uPlot, from series that the server keeps.

import { colour } from "./canvas.js";
import { card, nothing } from "./card.js";
import { el, say, visible } from "./dom.js";
import { bytes, clock, number, precisely, span } from "./format.js";
import { linkTo, placeNow } from "./router.js";
import { lookOf } from "./states.js";
import uPlot from "./vendor/uplot.js";

/** @typedef {import("./model.js").Model} Model */
/** @typedef {{title: string, of: "cluster"|"server", field: string, says: (value: number) => string, height: number, heat?: boolean}} Shape */

/** @type {Record<string, Shape>} */
const SHAPES = {
  calls: { title: "Collectives a second", of: "cluster", field: "calls", says: (value) => `${value < 10 ? value.toFixed(1) : number(Math.round(value))}/s`, height: 110 },
  bytes: { title: "Bytes a second, all ranks", of: "cluster", field: "bytes", says: (value) => `${bytes(value)}/s`, height: 110 },
  wait: { title: "Time that each rank waits (strong: all of it)", of: "cluster", field: "wait", says: (value) => `${Math.round(value * 100)} %`, height: 170, heat: true },
  pace: { title: "Time of a step, slowest rank", of: "cluster", field: "pace", says: precisely, height: 110 },
  silence: { title: "Age of the oldest heartbeat", of: "cluster", field: "silence", says: span, height: 110 },
  cpu: { title: "Server: processor", of: "server", field: "cpu", says: (value) => `${(value * 100).toFixed(1)} %`, height: 110 },
  lag: { title: "Server: lateness of its event loop", of: "server", field: "lag", says: precisely, height: 110 },
  requests: { title: "Server: requests a second", of: "server", field: "requests", says: (value) => `${value.toFixed(1)}/s`, height: 110 },
};
const WIDE = 900;
const AXIS = 62;
const UNKNOWN = 255;

/**
 * A card of charts that share their time axis and cursor.
 * @param {Model} model
 * @param {string[]} names
 */
export function makeCharts(model, names) {
  const charts = names.map((name) => makeChart(model, SHAPES[name], name));
  const empty = nothing("Charts begin with the second report of the members; the server keeps 15 minutes.");
  const grid = el("div", { class: "charts" }, ...charts.map((chart) => chart.node));
  const node = card("Last 15 minutes", empty, grid);

  function update() {
    const any = charts.map((chart) => chart.update()).some(Boolean);
    node.hidden = !model.summary;
    empty.hidden = any;
  }

  return { node, update };
}

/** @param {Model} model @param {Shape} shape @param {string} name */
function makeChart(model, shape, name) {
  const value = el("b", { class: "number" });
  const holder = el("div", { class: "plot", role: "img" });
  const node = el("figure", { class: "chart", "data-chart": name }, el("figcaption", {}, el("span", {}, shape.title), value), holder);
  /** @type {any} */
  let plot = null;
  let drawn = "";
  /** @type {any[]} */
  let columns = [];

  /** What is under the cursor, or the latest. */
  function tell() {
    const at = plot?.cursor.idx ?? columns.length - 1;
    const column = columns[at];
    const over = plot?.cursor.idx !== null && plot?.cursor.idx !== undefined;
    let text = "–";
    if (column && shape.heat) text = over ? underCursor(column) : worst(column);
    else if (column && column[shape.field] !== null) text = shape.says(column[shape.field]);
    if (column && shape.field === "pace" && column.done !== null) text += ` · ${visible(model.read.series?.loop ?? "", 24)} ${number(column.done)} done`;
    if (over && column) text = `${clock(column.t)} · ${text}`;
    say(value, text);
    holder.setAttribute("aria-label", `${shape.title}: ${text}`);
  }

  /** @param {any} column */
  function underCursor(column) {
    const row = Math.floor(plot.posToVal(plot.cursor.top, "y"));
    const share = shareAt(column, row);
    return `${ranksOf(row)} ${share === null ? "unknown" : `waited ${shape.says(share)}`}`;
  }

  /** @param {any} column */
  function worst(column) {
    const shares = Array.from({ length: column.wait.length / 2 }, (_, row) => shareAt(column, row)).filter((share) => share !== null);
    return shares.length ? `up to ${shape.says(Math.max(...shares))}` : "–";
  }

  /** @param {number} row */
  function ranksOf(row) {
    const band = model.read.series?.band ?? 1;
    return band === 1 ? `rank ${row}` : `ranks ${row * band}–${row * band + band - 1}`;
  }

  function make() {
    const ink = (/** @type {string} */ one) => () => colour(one);
    const rows = shape.heat ? Math.max(1, ...columns.map((one) => one.wait.length / 2)) : 0;
    const axis = { stroke: ink("quiet"), grid: { stroke: ink("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    plot = new uPlot(
      {
        width: holder.clientWidth || 300,
        height: shape.height,
        cursor: { sync: { key: "dmesh" }, drag: { x: false, y: false }, points: { show: !shape.heat } },
        legend: { show: false },
        scales: { x: { time: true }, y: shape.heat ? { range: [0, rows], dir: -1 } : { range: (/** @type {any} */ _, /** @type {number} */ __, /** @type {number} */ most) => [0, most > 0 ? most * 1.1 : 1] } },
        axes: [
          { ...axis, values: (/** @type {any} */ _, /** @type {number[]} */ times) => times.map((one) => clock(one).slice(0, 5)), size: 24, space: 60 },
          { ...axis, ...(shape.heat ? { grid: { show: false }, splits: () => middles(rows) } : {}), size: AXIS, values: (/** @type {any} */ _, /** @type {number[]} */ splits) => splits.map((one) => (shape.heat ? ranksOf(Math.floor(one)).replace(/^ranks? /, "") : shape.says(one))), space: 28 },
        ],
        series: [{}, { stroke: ink("ok"), width: 1.5, spanGaps: false, points: { show: false } }],
        hooks: {
          setCursor: [tell],
          draw: [(/** @type {any} */ u) => (shape.heat ? drawHeat(u, rows) : undefined), drawMoment],
        },
      },
      [[], []],
      holder,
    );
    plot.over.addEventListener("click", () => {
      const column = columns[plot.cursor.idx];
      if (column) location.hash = linkTo(placeNow().view || "overview", model.cluster, "at", Math.round(column.t));
    });
  }

  /** @param {any} u @param {number} rows */
  function drawHeat(u, rows) {
    const slots = model.read.tasks;
    const { ctx } = u;
    const [wide, high] = [Math.max(1, u.bbox.width / (WIDE / (model.read.series?.step ?? 5))), u.bbox.height / rows];
    for (const column of columns) {
      const end = Math.round(u.valToPos(column.t, "x", true));
      const x = Math.max(u.bbox.left, Math.round(u.valToPos(column.t, "x", true) - wide));
      if (end <= u.bbox.left) continue;
      for (let row = 0; row < rows; row += 1) {
        const share = shareAt(column, row);
        ctx.globalAlpha = share === null ? 0.25 : 0.1 + 0.9 * share;
        ctx.fillStyle = colour(share === null ? "line" : share > 0 ? "warn" : "ok");
        ctx.fillRect(x, u.bbox.top + row * high, end - x, Math.max(1, high - (high > 4 ? 1 : 0)));
      }
    }
    ctx.globalAlpha = 1;
    if (!slots || (model.read.series?.band ?? 1) > 1) return;
    for (const [place, blame] of model.blames) {
      if (blame === "victim" || place >= rows || place < 0) continue;
      ctx.fillStyle = colour(lookOf("CONNECTED", blame).tone);
      ctx.fillRect(u.bbox.left - 5 * devicePixelRatio, u.bbox.top + place * high, 4 * devicePixelRatio, high);
    }
  }

  /** Marks the moment that the address names. @param {any} u */
  function drawMoment(u) {
    const place = placeNow();
    if (place.kind !== "at" || !Number(place.value)) return;
    const x = u.valToPos(Number(place.value), "x", true);
    if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
    u.ctx.fillStyle = colour("text");
    u.ctx.fillRect(x, u.bbox.top, devicePixelRatio, u.bbox.height);
  }

  /** @returns {boolean} whether there is something to be seen */
  function update() {
    columns = (shape.of === "server" ? model.load : model.columns).columns;
    const shown = columns.filter((one) => (shape.heat ? one.wait.replaceAll("ff", "") : one[shape.field] !== null));
    node.hidden = shown.length < 1;
    if (node.hidden || !holder.clientWidth) return !node.hidden;
    const width = holder.clientWidth;
    const rows = shape.heat ? columns[columns.length - 1].wait.length : 0;
    const last = columns[columns.length - 1];
    const key = [last.n, columns.length, width, rows, colour("text"), location.hash, shape.heat ? model.read.why?.headline : ""].join("|");
    if (key === drawn) return true;
    const remade = shape.heat && plot && plot.rows !== rows;
    drawn = key;
    if (remade) {
      plot.destroy();
      plot = null;
    }
    if (!plot) {
      make();
      plot.rows = rows;
    }
    if (plot.width !== width) plot.setSize({ width, height: shape.height });
    const end = last.t;
    plot.batch(() => {
      plot.setData([columns.map((one) => one.t), columns.map((one) => (shape.heat ? null : one[shape.field]))], false);
      plot.setScale("x", { min: end - WIDE, max: end });
    });
    plot.redraw(false);
    tell();
    return true;
  }

  return { node, update };
}

/** Rows that are labelled, at their middles: some eight of them. @param {number} rows */
function middles(rows) {
  const step = Math.ceil(rows / 8);
  return Array.from({ length: Math.ceil(rows / step) }, (_, number) => number * step + 0.5);
}

/** @param {any} column @param {number} row */
function shareAt(column, row) {
  const byte = Number.parseInt(column.wait.slice(2 * row, 2 * row + 2), 16);
  return Number.isNaN(byte) || byte === UNKNOWN ? null : byte / 254;
}
