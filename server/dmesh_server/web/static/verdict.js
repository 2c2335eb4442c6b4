// What is wrong, as the server judges it: its words, with a sign and a tone. Nothing is decided here.

import { countMembers } from "./model.js";

/** @typedef {{kind: string, tone: import("./states.js").Tone, sign: string, headline: string, consequence: string, reason: string, chips: {label: string, brief: string}[], facts: {label: string, text: string}[], culprits: any[]}} Verdict */

/** @type {Record<string, import("./states.js").Tone>} */
const TONES = { bad: "bad", warn: "warn", ok: "ok", idle: "idle" };
/** @type {Record<string, string>} */
const SIGNS = { bad: "✖", warn: "◆", ok: "●", idle: "○" };

/**
 * @param {import("./model.js").Model} model
 * @returns {Verdict}
 */
export function verdictOf(model) {
  const why = model.read.why;
  if (!model.summary) return plain(model.known ? "empty" : "asking", model.known ? "No cluster yet" : "Asking the server …");
  if (!why) {
    const there = Object.values(countMembers(model)).reduce((sum, many) => sum + many, 0);
    return plain("asking", `${there} task slots; asking the server how they are …`);
  }
  const ended = why.kind === "ended";
  return {
    kind: why.kind,
    tone: ended ? "gone" : TONES[why.severity] ?? "idle",
    sign: ended ? "–" : SIGNS[why.severity] ?? "○",
    headline: why.headline,
    consequence: why.consequence,
    reason: why.evidence.find((/** @type {any} */ one) => one.label === "reason")?.text ?? "",
    chips: why.evidence.filter((/** @type {any} */ one) => one.brief),
    facts: why.evidence,
    culprits: why.culprits,
  };
}

/**
 * @param {string} kind
 * @param {string} headline
 * @returns {Verdict}
 */
function plain(kind, headline) {
  return { kind, tone: "idle", sign: "○", headline, consequence: "", reason: "", chips: [], facts: [], culprits: [] };
}
