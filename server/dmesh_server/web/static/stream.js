// Follows the server's stream of events, and knows when it is lost.

const PAUSE = 2000;

export class Stream {
  /**
   * @param {{clusters: (told: any) => void, complete: () => void, happened: (event: any) => void, gap: () => void, state: (state: "live"|"lost") => void}} tell
   */
  constructor(tell) {
    this.tell = tell;
    this.cursor = "";
    /** @type {EventSource|null} */
    this.source = null;
    this.timer = 0;
  }

  /** @param {string} [cursor] of the last event that is known */
  open(cursor = this.cursor) {
    this.close();
    this.cursor = cursor;
    const source = new EventSource(`/api/v1/events/stream${cursor ? `?after=${encodeURIComponent(cursor)}` : ""}`);
    this.source = source;
    source.addEventListener("hello", () => this.tell.state("live"));
    source.addEventListener("clusters", (event) => this.tell.clusters(JSON.parse(event.data)));
    source.addEventListener("complete", () => this.tell.complete());
    source.addEventListener("happened", (event) => {
      this.cursor = event.lastEventId;
      this.tell.happened(JSON.parse(event.data));
    });
    source.addEventListener("gap", () => this.tell.gap());
    source.addEventListener("error", () => {
      this.tell.state("lost");
      // A browser comes back by itself after a connection that broke, not after an answer it did not expect.
      if (source.readyState === EventSource.CLOSED) this.again();
    });
  }

  again() {
    window.clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.open(), PAUSE);
  }

  close() {
    window.clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }
}

