// What is known of one member, over the page.

import { evictMember } from "./actions.js";
import { inCluster, read } from "./api.js";
import { el, name, visible } from "./dom.js";
import { span } from "./format.js";
import { chip, setChip } from "./states.js";

/**
 * Opens the details of a member; `over` is called when they are closed.
 * @param {import("./model.js").Model} model
 * @param {{task: string, job: string, index: number}} slot
 * @param {() => void} over
 */
export async function openMember(model, slot, over) {
  const cluster = model.cluster;
  const body = el("div", { class: "details" }, "Asking the server …");
  const shut = el("button", { class: "quiet", onclick: () => dialog.close() }, "Close");
  const dialog = /** @type {HTMLDialogElement} */ (
    el("dialog", { class: "sheet member", "aria-label": visible(slot.task) }, el("header", {}, el("h2", {}, name(slot.task)), shut), body)
  );
  dialog.addEventListener("close", () => {
    dialog.remove();
    over();
  });
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  try {
    const member = await read(inCluster(cluster, "members", slot.job, slot.index));
    body.replaceChildren(...(member ? describe(model, member) : ["There is no such task any more."]));
  } catch {
    body.replaceChildren("The server does not answer. Try again when the connection is back.");
  }
}

/** @param {import("./model.js").Model} model @param {any} member */
function describe(model, member) {
  const vacant = member.condition === "VACANT";
  const state = chip("CONNECTED");
  setChip(state, member.condition, model.blameOf(member.task));
  const facts = vacant
    ? []
    : [
        ["host", name(model.machineOf(member) || "unknown")],
        ["process", `pid ${member.pid}, incarnation ${member.incarnation}`],
        ["program", name(member.program || "unknown")],
        ["versions", name(`dmesh ${member.dmesh_version || "?"}, Python ${member.python_version || "?"}`)],
        ["last seen", `${span(member.last_seen_age)} ago`],
        ["registered", `${span(member.registered_age)} ago`],
        ["peers reach it at", name(member.peer_addresses.join(", ") || "–")],
      ];
  const list = el("dl", {}, ...facts.flatMap(([term, fact]) => [el("dt", {}, term), el("dd", {}, fact)]));
  /** @type {Node[]} */
  const parts = [el("p", {}, state)];
  if (member.reason) parts.push(el("p", { class: "reason" }, name(member.reason)));
  parts.push(list);
  if (member.device_list.length) {
    const devices = member.device_list.slice(0, 64).map((one) => el("li", {}, `${one.type}:${one.index} `, name(one.description)));
    if (member.device_list.length > 64) devices.push(el("li", {}, `and ${member.device_list.length - 64} more`));
    parts.push(el("h3", {}, "Devices"), el("ul", { class: "plain" }, ...devices));
  }
  const blamed = model.read.why?.culprits.find((/** @type {any} */ one) => one.task === member.task);
  if (blamed?.where && !member.activity) parts.push(el("h3", {}, "Where its main thread stands"), el("ol", { class: "stack" }, el("li", {}, name(blamed.where))));
  if (member.activity) {
    const where = member.activity.operation ? `In ${member.activity.operation}, ` : "";
    parts.push(el("h3", {}, "Where its main thread stands"), el("p", {}, visible(where), `no progress for ${span(member.activity.age)}`));
    parts.push(el("ol", { class: "stack" }, ...member.activity.stack.map((frame) => el("li", {}, name(frame)))));
  }
  if (!vacant && !["LEFT", "LOST", "FAILED"].includes(member.condition)) {
    parts.push(el("p", { class: "buttons" }, el("button", { class: "quiet", onclick: () => evictMember(model, member) }, "Evict this member …")));
  }
  return parts;
}
