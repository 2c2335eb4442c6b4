// Time series as the page has them, kept up to date.

/** Columns that the page has of a series; it asks the server for later ones only. */
export class Columns {
  constructor() {
    this.start = "";
    /** @type {any[]} oldest first */
    this.columns = [];
  }

  get last() {
    return this.columns.length ? this.columns[this.columns.length - 1].n : 0;
  }

  /** @param {any} answer */
  add(answer) {
    if (answer.server_incarnation !== this.start) {
      this.start = answer.server_incarnation;
      this.columns = [];
    }
    const last = this.last;
    this.columns = [...this.columns, ...answer.columns.filter((/** @type {any} */ one) => one.n > last)].slice(-answer.kept);
  }
}
