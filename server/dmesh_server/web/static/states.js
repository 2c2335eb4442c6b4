// What a member can be: each has a word, a sign and a tone, so that nobody needs to tell colours apart.

import { el, say } from "./dom.js";

/** @typedef {"bad"|"warn"|"ok"|"idle"|"gone"} Tone */

/** @type {Record<string, {letter: string, sign: string, tone: Tone, says: string}>} */
export const CONDITIONS = {
  FAILED: { letter: "F", sign: "✖", tone: "bad", says: "it gave up, or was given up" },
  LOST: { letter: "X", sign: "✕", tone: "bad", says: "its process or its host is gone" },
  STUCK: { letter: "S", sign: "◆", tone: "warn", says: "others wait for it, and it gets nowhere" },
  BLOCKED: { letter: "B", sign: "▲", tone: "warn", says: "its connection answers, its program does not" },
  VACANT: { letter: "V", sign: "◌", tone: "idle", says: "nobody has taken the task slot yet" },
  REGISTERED: { letter: "R", sign: "○", tone: "idle", says: "registered, its session is not attached" },
  CONNECTED: { letter: "C", sign: "●", tone: "ok", says: "it is there" },
  LEFT: { letter: "L", sign: "–", tone: "gone", says: "it left in good order" },
};

/** Conditions, troubles first. */
export const ORDER = Object.keys(CONDITIONS);

/** @type {Record<string, string>} */
const BY_LETTER = Object.fromEntries(ORDER.map((one) => [CONDITIONS[one].letter, one]));

/** @param {string} letter */
export function conditionOf(letter) {
  return BY_LETTER[letter] ?? "REGISTERED";
}

/** @param {string} condition */
export function lookOf(condition) {
  return CONDITIONS[condition] ?? { letter: "?", sign: "?", tone: "idle", says: "" };
}

/**
 * A chip with sign and word.
 * @param {string} condition
 */
export function chip(condition) {
  const node = el("span", {}, el("span", { class: "sign", "aria-hidden": "true" }), el("span"));
  setChip(node, condition);
  return node;
}

/**
 * Brings a chip in line with a condition.
 * @param {HTMLElement} node
 * @param {string} condition
 * @param {string} [text]
 */
export function setChip(node, condition, text = condition) {
  const [sign, word] = node.children;
  if (node.dataset.condition !== condition) {
    const look = lookOf(condition);
    node.className = `chip tone-${look.tone}`;
    node.dataset.condition = condition;
    node.title = look.says;
    say(sign, look.sign);
  }
  say(word, text);
}
