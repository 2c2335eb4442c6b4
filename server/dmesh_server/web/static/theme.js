// Dark or light: as the system has it, or as somebody chose here.

import { el, say } from "./dom.js";

const NAMES = ["auto", "light", "dark"];
const KEY = "dmesh-theme";

/**
 * @param {HTMLElement} parent where the button goes
 * @param {() => void} changed
 */
export function startTheme(parent, changed) {
  let chosen = stored();
  const [sign, word] = [el("span", { "aria-hidden": "true" }), el("span", {})];
  const button = el("button", { class: "quiet", onclick: next }, sign, word);

  function next() {
    chosen = NAMES[(NAMES.indexOf(chosen) + 1) % NAMES.length];
    try {
      localStorage.setItem(KEY, chosen);
    } catch {
      // A browser that keeps nothing: it is chosen for this page.
    }
    apply();
  }

  function apply() {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    say(sign, { auto: "◐", light: "☀", dark: "☾" }[chosen] ?? "");
    say(word, ` Colours: ${chosen}`);
    changed();
  }

  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  parent.append(button);
  apply();
}

function stored() {
  try {
    const found = localStorage.getItem(KEY);
    return found && NAMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}
