// A table of which only the rows in sight are there, however many it has.

import { el } from "./dom.js";

const BEYOND = 6;

/** @typedef {{node: HTMLElement, show: (item: any) => void}} Row */

export class Rows {
  /**
   * @param {{label: string, columns: {title: string, class: string}[], height: number, make: () => Row}} shape
   */
  constructor({ label, columns, height, make }) {
    this.height = height;
    this.make = make;
    this.columns = columns.length;
    /** @type {any[]} */
    this.items = [];
    /** @type {Row[]} */
    this.pool = [];
    this.inner = el("div", { class: "rows-inner", role: "rowgroup" });
    const heads = columns.map((column) => el("span", { role: "columnheader", class: column.class }, column.title));
    const head = el("div", { class: "rows-head row", role: "row", "aria-rowindex": 1 }, ...heads);
    this.scroller = el("div", { class: "rows-scroll", role: "table", "aria-label": label, "aria-colcount": columns.length, tabindex: 0 }, el("div", { class: "rows-top", role: "rowgroup" }, head), this.inner);
    this.node = el("div", { class: "rows" }, this.scroller);
    this.scroller.addEventListener("scroll", () => this.show(), { passive: true });
    this.scroller.style.setProperty("--row", `${height}px`);
  }

  /** @param {any[]} items */
  set(items) {
    this.items = items;
    this.scroller.setAttribute("aria-rowcount", String(items.length + 1));
    this.inner.style.height = `${items.length * this.height}px`;
    this.show();
  }

  show() {
    const seen = Math.ceil((this.scroller.clientHeight || 600) / this.height);
    const first = Math.max(0, Math.min(Math.floor(this.scroller.scrollTop / this.height) - BEYOND, this.items.length - seen - 2 * BEYOND));
    const count = Math.min(this.items.length - first, seen + 2 * BEYOND);
    while (this.pool.length < count) {
      const row = this.make();
      this.pool.push(row);
      this.inner.append(row.node);
    }
    for (const row of this.pool.splice(count)) row.node.remove();
    this.pool.forEach((row, number) => {
      row.node.style.transform = `translateY(${(first + number) * this.height}px)`;
      row.node.setAttribute("aria-rowindex", String(first + number + 2));
      row.show(this.items[first + number]);
    });
  }
}
