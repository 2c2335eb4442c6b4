// Devices of a mesh laid out by its axes: one cell for each, or for as many as it takes to keep cells few.

import { colour } from "./canvas.js";
import { visible } from "./dom.js";
import { counted, number } from "./format.js";
import { taskAt } from "./model.js";
import { conditionOf, ORDER } from "./states.js";

/** @typedef {{name: string, size: number}} Axis */
/** @typedef {import("./canvas.js").SlotMap} SlotMap */
/** A rectangle of devices of one panel, or devices of several panels. `shows`: the device in the worst state.
 * @typedef {{x: number, y: number, place: number, panel: number, panels: number, row: number, rows: number,
 *   column: number, columns: number, count: number, shows: number, condition: string, host: number}} MeshCell */
/** @typedef {{axes: Axis[], rows: number, columns: number, owners: number[], devices: number[], cells: MeshCell[],
 *   size: number, width: number, height: number, across: number}} Grid */

const GAP = 14;
const MARGIN = 18;
/** Cells of one mesh; where there are more devices, a cell stands for several. */
const MOST_CELLS = 4096;
/** Cells of a panel from top to bottom. */
const MOST_DOWN = 80;
/** Pixels from top to bottom, of many panels. */
const TALLEST = 1200;
const SMALLEST = 6;
const LARGEST = 44;
const MIXED = -2;
/** A device of which nobody told whose it is. */
const UNKNOWN = "UNKNOWN";

/**
 * Finds out which task slot has each device of a mesh.
 * @param {any} mesh @param {any} slots
 * @returns {{owners: number[]|null, devices: number[], says: string}} by device: place of the task slot, -1 for unknown
 */
export function locate(mesh, slots) {
  const size = mesh.axes.reduce((/** @type {number} */ all, /** @type {Axis} */ axis) => all * axis.size, 1);
  const placement = mesh.placement;
  if (!placement) {
    const all = ownersOf(slots, mesh.device_type);
    if (size === all.length) return { owners: all, devices: all.map(() => -1), says: "devices in the order of tasks, which is how meshes over all devices are filled" };
    return { owners: null, devices: [], says: `it has ${counted(size, "device")}, and which ones is not announced, or they are too many to be shown` };
  }
  const first = startOf(slots, placement.job);
  const [owners, devices] = [new Array(size).fill(-1), new Array(size).fill(-1)];
  let at = 0;
  placement.counts.forEach((/** @type {number} */ count, /** @type {number} */ run) => {
    const [task, device] = [placement.tasks[run], placement.devices[run]];
    for (let one = 0; one < count && at < size; one += 1, at += 1) {
      // A task slot beyond those that were read is nobody's here.
      if (task >= 0 && first + task < slots.conditions.length) owners[at] = first + task;
      if (device >= 0) devices[at] = device + one;
    }
  });
  const members = new Set(owners.filter((place) => place >= 0)).size;
  const unknown = owners.filter((place) => place < 0).length;
  const says = `${counted(size, "device")} of ${counted(members, "member")}`;
  return { owners, devices, says: unknown ? `${says}; nobody has told whose ${number(unknown)} of them are` : says };
}

/** @param {any} slots @param {string} job */
function startOf(slots, job) {
  let start = 0;
  for (const one of slots.jobs) {
    if (one.name === job) return start;
    start += one.tasks;
  }
  return slots.conditions.length; // nobody's: the cluster has another job list by now
}

/** @param {any} slots @param {string} type */
function ownersOf(slots, type) {
  /** @type {number[]} */
  const owners = [];
  (slots.devices[type] ?? []).forEach((/** @type {number} */ count, /** @type {number} */ place) => {
    for (let device = 0; device < count; device += 1) owners.push(place);
  });
  return owners;
}

/**
 * Lays devices out: the last two axes are rows and columns of a panel; there is a panel for each place along the
 * axes before. Of a single axis each device is a panel of its own.
 * @param {Axis[]} axes @param {{owners: number[], devices: number[]}} found @param {any} slots @param {number} width
 * @returns {Grid}
 */
export function layOut(axes, found, slots, width) {
  const count = found.owners.length;
  const fits = Math.max(4, Math.floor((width - 2 * MARGIN) / SMALLEST));
  const [rows, columns] = axes.length > 1 ? [axes[axes.length - 2].size, axes[axes.length - 1].size] : [1, 1];
  const panels = Math.max(1, Math.ceil(count / (rows * columns)));
  const tile = { panels: 1, rows: Math.ceil(rows / MOST_DOWN), columns: Math.ceil(columns / fits) };
  let sizes = measure(tile, panels, rows, columns, width);
  while (sizes.groups * sizes.down * sizes.right > MOST_CELLS || (sizes.height > TALLEST && sizes.groups > 1)) {
    if (sizes.down * sizes.right === 1) tile.panels *= 2;
    else if (sizes.down >= sizes.right) tile.rows *= 2;
    else tile.columns *= 2;
    sizes = measure(tile, panels, rows, columns, width);
  }
  const { groups, size, across, panelWidth, panelHeight, height } = sizes;
  /** @type {MeshCell[]} */
  const cells = [];
  for (let group = 0; group < groups; group += 1) {
    for (let down = 0; down < sizes.down; down += 1) {
      for (let right = 0; right < sizes.right; right += 1) {
        const cell = {
          x: MARGIN + (group % across) * panelWidth + right * size, y: MARGIN + Math.floor(group / across) * panelHeight + down * size,
          place: cells.length, panel: group * tile.panels, panels: Math.min(tile.panels, panels - group * tile.panels),
          row: down * tile.rows, rows: Math.min(tile.rows, rows - down * tile.rows),
          column: right * tile.columns, columns: Math.min(tile.columns, columns - right * tile.columns),
          count: 0, shows: -1, condition: UNKNOWN, host: MIXED,
        };
        fill(cell, found.owners, rows, columns, slots);
        cells.push(cell);
      }
    }
  }
  return { axes, rows, columns, ...found, cells, size, width, height, across: sizes.single ? across : sizes.right };
}

/**
 * Measures a picture in which a cell stands for so many rows and columns of a panel, or for several panels.
 * @param {{panels: number, rows: number, columns: number}} tile
 * @param {number} panels @param {number} rows @param {number} columns @param {number} width
 */
function measure(tile, panels, rows, columns, width) {
  const [groups, down, right] = [Math.ceil(panels / tile.panels), Math.ceil(rows / tile.rows), Math.ceil(columns / tile.columns)];
  const single = down * right === 1;
  const wish = Math.floor(Math.sqrt((width * 360) / Math.max(1, groups * down * right)));
  const size = Math.max(SMALLEST, Math.min(LARGEST, wish, Math.floor((width - 2 * MARGIN) / right)));
  const panelWidth = right * size + (single ? 0 : GAP);
  const panelHeight = down * size + (single ? 0 : GAP + (groups > 1 ? 12 : 0));
  const across = Math.max(1, Math.min(groups, Math.floor((width - MARGIN) / panelWidth)));
  const height = MARGIN + Math.ceil(groups / across) * panelHeight + (single ? GAP : 0);
  return { groups, down, right, single, size, panelWidth, panelHeight, across, height };
}

/**
 * Notes the worst of a cell's devices, and their host if they have one.
 * @param {MeshCell} cell @param {number[]} owners @param {number} rows @param {number} columns @param {any} slots
 */
function fill(cell, owners, rows, columns, slots) {
  let worst = ORDER.length;
  for (let panel = cell.panel; panel < cell.panel + cell.panels; panel += 1) {
    for (let row = cell.row; row < cell.row + cell.rows; row += 1) {
      const begin = (panel * rows + row) * columns + cell.column;
      const end = Math.min(begin + cell.columns, owners.length);
      for (let device = begin; device < end; device += 1) {
        const owner = owners[device];
        const condition = owner < 0 ? UNKNOWN : conditionOf(slots.conditions[owner]);
        const rank = owner < 0 ? ORDER.indexOf("CONNECTED") - 0.5 : ORDER.indexOf(condition);
        const host = owner < 0 ? -1 : slots.host[owner];
        cell.host = cell.count === 0 || cell.host === host ? host : MIXED;
        cell.count += 1;
        if (rank >= worst) continue;
        worst = rank;
        cell.shows = device;
        cell.condition = condition;
      }
    }
  }
}

/**
 * @param {SlotMap} map @param {Grid} grid @param {any} slots
 */
export function drawGrid(map, grid, slots) {
  const { axes, cells, owners, size } = grid;
  const grouped = cells.length < owners.length;
  map.canvas.setAttribute("aria-label", `${counted(owners.length, "device")} laid out by the axes ${axes.map((axis) => visible(axis.name, 40)).join(", ")}`);
  map.hint = grouped
    ? `Each cell stands for up to ${number(Math.max(...cells.map((cell) => cell.count)))} devices, and shows the worst of them. Point at one, or use the arrow keys; Enter opens the worst's member.`
    : "Numbers are ranks, lines part hosts. Point at a device, or use the arrow keys; Enter opens its member.";
  const labelOf = (/** @type {number} */ place) => (cells[place].count === 1 && owners[cells[place].shows] >= 0 ? String(taskAt(slots, owners[cells[place].shows]).index) : "");
  map.draw(grid.width, grid.height, size, cells, (place) => cells[place].condition, (context) => {
    drawAxes(context, axes);
    drawHostLines(context, grid);
  }, labelOf);
}

/** @param {CanvasRenderingContext2D} context @param {Axis[]} axes */
function drawAxes(context, axes) {
  context.fillStyle = colour("quiet");
  context.font = "11px system-ui, sans-serif";
  context.fillText(`${visible(axes[axes.length - 1]?.name ?? "", 24)} →`, MARGIN, 11);
  if (axes.length < 2) return;
  context.save();
  context.translate(11, MARGIN + 4);
  context.rotate(Math.PI / 2);
  context.fillText(`${visible(axes[axes.length - 2].name, 24)} →`, 0, 0);
  context.restore();
}

/** @param {CanvasRenderingContext2D} context @param {Grid} grid */
function drawHostLines(context, { cells, size, across }) {
  context.strokeStyle = colour("text");
  context.lineWidth = 1.5;
  context.beginPath();
  cells.forEach(({ x, y, host }, place) => {
    const [left, above] = [cells[place - 1], cells[place - across]];
    if (left && left.y === y && left.x === x - size && left.host !== host) {
      context.moveTo(x, y);
      context.lineTo(x, y + size);
    }
    if (above && above.x === x && above.y === y - size && above.host !== host) {
      context.moveTo(x, y);
      context.lineTo(x + size, y);
    }
  });
  context.stroke();
}

/**
 * Says where a cell lies along the axes: "batch 0-3, model 2".
 * @param {Grid} grid @param {MeshCell} cell
 */
export function describePlace({ axes, rows, columns, owners }, cell) {
  const first = (cell.panel * rows + cell.row) * columns + cell.column;
  const last = Math.min(owners.length - 1, ((cell.panel + cell.panels - 1) * rows + cell.row + cell.rows - 1) * columns + cell.column + cell.columns - 1);
  if (cell.panels > 1 && axes.length > 1) return `places ${number(first)} to ${number(last)}`; // no range along each axis
  const [from, to] = [coordinates(axes, first), coordinates(axes, last)];
  return axes.map((axis, n) => `${visible(axis.name, 40)} ${from[n] === to[n] ? from[n] : `${from[n]}-${to[n]}`}`).join(", ");
}

/** @param {Axis[]} axes @param {number} device */
function coordinates(axes, device) {
  let rest = device;
  const found = axes.map(() => 0);
  for (let n = axes.length - 1; n >= 0; n -= 1) {
    found[n] = rest % axes[n].size;
    rest = Math.floor(rest / axes[n].size);
  }
  return found;
}

/**
 * Devices beside one on each axis, as a ring: the one before and the one after it.
 * @param {Grid} grid @param {number} device
 * @returns {{axis: string, devices: number[]}[]}
 */
export function beside({ axes, owners }, device) {
  const at = coordinates(axes, device);
  let stride = owners.length;
  return axes
    .map((axis, n) => {
      stride /= axis.size;
      const places = [axis.size - 1, 1].map((step) => device + (((at[n] + step) % axis.size) - at[n]) * stride);
      return { axis: axis.name, devices: axis.size < 2 ? [] : [...new Set(places)] };
    })
    .filter(({ devices }) => devices.length);
}

/**
 * Names the ranks beside a device: "on batch: rank 0 and rank 4, on model: rank 2".
 * @param {Grid} grid @param {number} device @param {any} slots
 */
export function neighbours(grid, device, slots) {
  return beside(grid, device)
    .map(({ axis, devices }) => {
      const owners = [...new Set(devices.map((one) => grid.owners[one]))];
      return `on ${visible(axis, 24)}: ${owners.map((owner) => (owner < 0 ? "unknown" : `rank ${taskAt(slots, owner).index}`)).join(" and ")}`;
    })
    .join(", ");
}
