// What an operator may change from here, each after a confirmation. The server asks for a token of an admin with every
// change, as of any program: a login (a cookie) is good for looking only, so that no other page can change anything.

import { change, inCluster } from "./api.js";
import { el, say, visible } from "./dom.js";

/** @typedef {import("./model.js").Model} Model */

/** The token that was typed last; this page alone has it, until it is closed. */
let token = "";

/** @param {Model} model @param {any} barrier */
export function cancelBarrier(model, barrier) {
  const { cluster } = model; // while the dialog is open, the page may go on to another one
  return ask({
    title: `Cancel barrier ${visible(barrier.name, 60)}?`,
    text: `It fails for all ${barrier.participants} participants; ${barrier.arrived} of them wait in it now.`,
    verb: "Cancel the barrier",
    run: () => change("DELETE", inCluster(cluster, "barriers"), { name: barrier.name, instance: barrier.instance }, token),
  });
}

/** @param {Model} model @param {any} member */
export function evictMember(model, member) {
  const { cluster } = model;
  return ask({
    title: `Evict ${visible(member.task, 80)}?`,
    text: `Its process (host ${visible(model.machineOf(member))}, pid ${member.pid}) is told to end, and may not act for its task any more. The others learn of it as of any failure.`,
    verb: "Evict the member",
    reason: true,
    run: (reason) => change("DELETE", inCluster(cluster, "members", member.job, member.index), { incarnation: member.incarnation, reason }, token),
  });
}

/** @param {Model} model @param {any} key */
export function deleteKey(model, key) {
  const { cluster } = model;
  return ask({
    title: `Delete key ${visible(key.key, 60)}?`,
    text: `Its value (revision ${key.revision}) is gone for good. If it has changed meanwhile, nothing happens.`,
    verb: "Delete the key",
    run: () => change("DELETE", inCluster(cluster, "keys"), { key: key.key, revision: key.revision }, token),
  });
}

/** @param {Model} model */
export function endCluster(model) {
  const { cluster, summary } = model;
  return ask({
    title: `End cluster ${visible(cluster, 60)}?`,
    text: "All its members are evicted: their processes are told to end. Programs that register afterwards form a new generation.",
    verb: "End the cluster",
    reason: true,
    run: (reason) => change("DELETE", inCluster(cluster), { incarnation: summary.incarnation, reason }, token),
  });
}

/** Makes a link that logs a wall screen in, once, to look only. */
export function wallLink() {
  return ask({
    title: "Link for a wall screen",
    text: "It logs one browser in, once, within 10 minutes; that browser can look, and change nothing, for 30 days.",
    verb: "Make the link",
    keep: "Close",
    run: async () => {
      const answer = await change("POST", "login-links", {}, token);
      return new URL(answer.path, location.origin).href;
    },
  });
}

/**
 * @param {{title: string, text: string, verb: string, reason?: boolean, keep?: string, run: (reason: string) => Promise<any>}} what
 *   `run` does it; if it returns a text, that is shown
 */
function ask({ title, text, verb, reason, keep = "Keep it", run }) {
  const secured = document.querySelector("form[action='/logout']") !== null;
  const why = /** @type {HTMLInputElement} */ (el("input", { name: "reason", maxLength: 1000, placeholder: "for all to read" }));
  const secret = /** @type {HTMLInputElement} */ (el("input", { type: "password", name: "token", autocomplete: "off", required: secured, value: token }));
  const problem = el("p", { class: "problem", role: "alert", hidden: true });
  const result = el("code", { hidden: true, class: "result" });
  const go = /** @type {HTMLButtonElement} */ (el("button", { class: "danger", type: "submit" }, verb));
  const form = /** @type {HTMLFormElement} */ (
    el(
      "form",
      { class: "ask" },
      el("h2", {}, title),
      el("p", {}, text),
      reason ? el("label", {}, "Reason", why) : null,
      secured ? el("label", {}, "Token of an admin", secret) : null,
      el("p", { class: "quiet" }, "The audit log keeps a line of it."),
      problem,
      result,
      el("p", { class: "buttons" }, el("button", { type: "button", onclick: () => dialog.close() }, keep), go),
    )
  );
  const dialog = /** @type {HTMLDialogElement} */ (el("dialog", { class: "sheet", "aria-label": title }, form));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    token = secret.value.trim().split(/\s+/)[0] ?? "";
    try {
      const done = await run(why.value);
      if (typeof done !== "string") return dialog.close();
      result.hidden = false;
      say(result, done);
      go.hidden = true;
      getSelection()?.selectAllChildren(result);
    } catch (error) {
      problem.hidden = false;
      say(problem, visible(error instanceof Error ? error.message : String(error), 400));
    } finally {
      go.disabled = false;
    }
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
