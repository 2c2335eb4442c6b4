// What a member can be: each condition has a word, a sign and a tone, so that nobody needs to tell colours apart.
// A verdict comes before it: the culprit is red, its victims are amber, in every view.

import { el, say } from "./dom.js";

/** @typedef {"bad"|"warn"|"ok"|"idle"|"gone"} Tone */
/** @typedef {""|"culprit"|"late"|"victim"} Blame */
/** @typedef {{letter: string, sign: string, tone: Tone, says: string}} Look */

/** @type {Record<string, Look>} */
export const CONDITIONS = {
  FAILED: { letter: "F", sign: "✖", tone: "bad", says: "it gave up, or was given up" },
  LOST: { letter: "X", sign: "✕", tone: "bad", says: "its process or its host is gone" },
  STUCK: { letter: "S", sign: "◆", tone: "warn", says: "others wait for it, and it makes no progress" },
  BLOCKED: { letter: "B", sign: "▲", tone: "warn", says: "its connection answers, its program does not" },
  VACANT: { letter: "V", sign: "◌", tone: "idle", says: "no process has taken the task slot yet" },
  REGISTERED: { letter: "R", sign: "○", tone: "idle", says: "registered, its session is not attached" },
  CONNECTED: { letter: "C", sign: "●", tone: "ok", says: "it is connected" },
  LEFT: { letter: "L", sign: "–", tone: "gone", says: "it left in good order" },
};

/** @type {Record<string, {sign: string, tone: Tone, word: string, says: string}>} */
export const BLAMES = {
  culprit: { sign: "✖", tone: "bad", word: "culprit", says: "the trouble began with it" },
  late: { sign: "◆", tone: "warn", word: "late", says: "others wait for it" },
  victim: { sign: "▲", tone: "warn", word: "victim", says: "it stopped, or waits, because of the culprit" },
};

/** Conditions, problems first. */
export const ORDER = Object.keys(CONDITIONS);

/** @type {Record<string, string>} */
const BY_LETTER = Object.fromEntries(ORDER.map((one) => [CONDITIONS[one].letter, one]));

/** @param {string} letter */
export function conditionOf(letter) {
  return BY_LETTER[letter] ?? "REGISTERED";
}

/**
 * @param {string} condition
 * @param {Blame} [blame]
 * @returns {Look}
 */
export function lookOf(condition, blame = "") {
  const look = CONDITIONS[condition] ?? { letter: "?", sign: "?", tone: "idle", says: "" };
  return blame ? { ...look, ...BLAMES[blame] } : look;
}

/**
 * A chip with sign and word.
 * @param {string} condition
 */
export function chip(condition) {
  const node = el("span", {}, el("span", { class: "sign", "aria-hidden": "true" }), el("span", { class: "condition" }), el("span"));
  setChip(node, condition);
  return node;
}

/**
 * Brings a chip in line with a condition.
 * @param {HTMLElement} node
 * @param {string} condition
 * @param {Blame} [blame]
 */
export function setChip(node, condition, blame = "") {
  const key = `${condition}/${blame}`;
  if (node.dataset.look === key) return;
  const [sign, word, more] = node.children;
  const look = lookOf(condition, blame);
  node.className = `chip tone-${look.tone}`;
  node.dataset.look = key;
  node.dataset.blame = blame;
  node.title = look.says;
  say(sign, look.sign);
  say(word, blame ? `${condition} · ` : condition);
  say(more, blame ? BLAMES[blame].word : "");
}
