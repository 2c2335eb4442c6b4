// How silent each member was at the last looks: its heartbeat strip.

export const LOOKS = 40;
/** Stands for a look at which the member was not there. */
export const ABSENT = 255;

export class Heartbeats {
  constructor() {
    this.total = 0;
    this.at = 0;
    this.looks = 0;
    this.silence = new Uint8Array(0);
  }

  /**
   * Notes how silent each member is: in hundredths of the lease, up to 254.
   * @param {any} slots
   */
  note(slots) {
    if (slots.total !== this.total) {
      this.total = slots.total;
      this.at = this.looks = 0;
      this.silence = new Uint8Array(this.total * LOOKS).fill(ABSENT);
    }
    const column = this.at;
    for (let place = 0; place < slots.conditions.length; place += 1) {
      const there = "CSBR".includes(slots.conditions[place]);
      const part = Math.min(254, Math.round((slots.silence[place] / slots.lease) * 100));
      this.silence[place * LOOKS + column] = there ? part : ABSENT;
    }
    this.at = (column + 1) % LOOKS;
    this.looks = Math.min(LOOKS, this.looks + 1);
  }

  /**
   * Returns a member's silences, the oldest first.
   * @param {number} place
   * @returns {number[]}
   */
  of(place) {
    const found = [];
    for (let back = this.looks; back > 0; back -= 1) {
      found.push(this.silence[place * LOOKS + ((this.at - back + LOOKS) % LOOKS)]);
    }
    return found;
  }
}
