// Pictures of many task slots: one canvas, however many there are.

import { lookOf } from "./states.js";

/** @typedef {import("./states.js").Blame} Blame */

/** @typedef {{context: CanvasRenderingContext2D, width: number, height: number}} Sheet */

/** Size of a cell from which on it is written into. */
const LABELLED = 22;
/** What is drawn as a frame only. */
const HOLLOW = new Set(["VACANT", "REGISTERED", "LEFT", "UNKNOWN"]);

/** @type {Map<string, string>|null} */
let inks = null;
const INKS = ["ok", "warn", "bad", "idle", "gone", "line", "ground", "text", "quiet", "accent"];

/** Colours are those of the style sheet, whichever scheme is on. @param {string} ink */
export function colour(ink) {
  if (!inks) {
    inks = new Map();
    const probe = document.createElement("span");
    document.body.append(probe);
    for (const one of INKS) {
      probe.className = `ink-${one}`;
      inks.set(one, getComputedStyle(probe).color);
    }
    probe.remove();
  }
  return inks.get(ink) ?? "gray";
}

/** Another scheme is on. */
export function forgetColours() {
  inks = null;
}

/**
 * Makes a canvas sharp and clears it.
 * @param {HTMLCanvasElement} canvas
 * @param {number} width
 * @param {number} height
 * @returns {Sheet}
 */
export function sheet(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/**
 * Draws a task slot: a tone, and from some size on a shape of its own for each condition.
 * @param {CanvasRenderingContext2D} context
 * @param {number} x
 * @param {number} y
 * @param {number} size
 * @param {string} condition
 * @param {Blame} blame
 */
export function drawSlot(context, x, y, size, condition, blame) {
  const { tone } = lookOf(condition, blame);
  const inset = size >= 8 ? 1 : 0.5;
  const side = size - 2 * inset;
  const [left, top] = [x + inset, y + inset];
  const radius = Math.min(3, side / 4);
  context.fillStyle = context.strokeStyle = colour(tone);
  context.beginPath();
  context.roundRect(left, top, side, side, radius);
  if (HOLLOW.has(condition) && !blame) {
    context.lineWidth = 1.25;
    context.setLineDash(condition === "VACANT" || condition === "UNKNOWN" ? [2, 2] : []);
    context.stroke();
    context.setLineDash([]);
    if (condition === "LEFT" && side >= 5 && size < LABELLED) context.fillRect(left + side / 4, top + side / 2 - 0.75, side / 2, 1.5);
    return;
  }
  context.fill();
  if (side < 7 || (condition === "CONNECTED" && !blame)) return;
  context.strokeStyle = context.fillStyle = colour("ground");
  context.lineWidth = Math.max(1.5, side / 9);
  const [a, b] = [side * 0.28, side * 0.72];
  context.beginPath();
  if (tone === "bad") {
    context.moveTo(left + a, top + a);
    context.lineTo(left + b, top + b);
    context.moveTo(left + b, top + a);
    context.lineTo(left + a, top + b);
    context.stroke();
  } else if (blame === "late" || (condition === "STUCK" && !blame)) {
    context.moveTo(left + side / 2, top + a);
    context.lineTo(left + b, top + side / 2);
    context.lineTo(left + side / 2, top + b);
    context.lineTo(left + a, top + side / 2);
    context.fill();
  } else {
    context.moveTo(left + side / 2, top + a);
    context.lineTo(left + b, top + b);
    context.lineTo(left + a, top + b);
    context.fill();
  }
}

/** @typedef {{x: number, y: number, place: number}} Cell */

export class SlotMap {
  /**
   * A picture of task slots that one can point at, with the mouse or the arrow keys.
   * @param {(place: number) => string} describe
   * @param {(place: number) => void} open
   */
  constructor(describe, open) {
    this.describe = describe;
    this.open = open;
    this.node = document.createElement("div");
    this.node.className = "slotmap";
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.readout = document.createElement("p");
    this.readout.className = "readout";
    this.readout.setAttribute("aria-live", "polite");
    this.node.append(this.canvas, this.readout);
    /** @type {Cell[]} */
    this.cells = [];
    this.size = 0;
    this.cursor = -1;
    this.hint = "";
    /** @type {(place: number) => Blame} what a verdict makes of a place */
    this.blameAt = () => "";
    /** @type {(cell: number) => number[]} cells that are shown together with one that is pointed at */
    this.besideOf = () => [];
    this.canvas.addEventListener("pointermove", (event) => this.point(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("click", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.point(-1));
  }

  /** @param {MouseEvent} event */
  at(event) {
    return this.cells.findIndex(({ x, y }) => event.offsetX >= x && event.offsetX < x + this.size && event.offsetY >= y && event.offsetY < y + this.size);
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    const columns = Math.max(1, this.cells.filter(({ y }) => y === this.cells[0]?.y).length);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (event.key === "Enter") this.choose(this.cursor);
    if (step === undefined) return;
    event.preventDefault();
    this.point(Math.max(0, Math.min(this.cells.length - 1, this.cursor + step)));
  }

  /** @param {number} cell */
  choose(cell) {
    if (this.cells[cell]) this.open(this.cells[cell].place);
  }

  /** @param {number} cell */
  point(cell) {
    if (cell === this.cursor) return;
    this.cursor = cell;
    this.again?.();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {(place: number) => string} conditionAt
   * @param {(place: number) => string} labelOf
   */
  label(context, conditionAt, labelOf) {
    context.font = "600 11px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const { x, y, place } of this.cells) {
      const condition = conditionAt(place);
      if (this.blameAt(place) || (condition !== "CONNECTED" && !HOLLOW.has(condition))) continue; // it has a shape in its place
      context.fillStyle = colour(condition === "CONNECTED" ? "ground" : "quiet");
      context.fillText(labelOf(place), x + this.size / 2, y + this.size / 2, this.size - 4);
    }
    context.textAlign = "start";
    context.textBaseline = "alphabetic";
  }

  /**
   * @param {number} width
   * @param {number} height
   * @param {number} size of a cell
   * @param {Cell[]} cells
   * @param {(place: number) => string} conditionAt
   * @param {(context: CanvasRenderingContext2D) => void} [around] draws what is around them
   * @param {(place: number) => string} [labelOf] what is written into a cell that has room for it
   */
  draw(width, height, size, cells, conditionAt, around, labelOf) {
    this.cells = cells;
    this.size = size;
    this.again = () => {
      const { context } = sheet(this.canvas, width, height);
      around?.(context);
      for (const { x, y, place } of cells) drawSlot(context, x, y, size, conditionAt(place), this.blameAt(place));
      if (labelOf && size >= LABELLED) this.label(context, conditionAt, labelOf);
      const chosen = cells[this.cursor];
      if (chosen) {
        context.strokeStyle = colour("text");
        context.lineWidth = 2;
        context.strokeRect(chosen.x, chosen.y, size, size);
        context.setLineDash([3, 3]);
        for (const one of this.besideOf(this.cursor)) if (cells[one]) context.strokeRect(cells[one].x + 1, cells[one].y + 1, size - 2, size - 2);
        context.setLineDash([]);
      }
      this.readout.textContent = chosen ? this.describe(chosen.place) : this.hint;
    };
    this.again();
  }
}
