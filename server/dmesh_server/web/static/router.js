// Addresses of what is shown: `#/VIEW/CLUSTER/KIND=VALUE`, so that a member, barrier, collective, event or moment has a link.

/** @typedef {{view: string, cluster: string, kind: string, value: string}} Place */

/**
 * @param {string} [hash]
 * @returns {Place}
 */
export function placeNow(hash = location.hash) {
  const [view = "", cluster = "", item = ""] = hash.replace(/^#\//, "").split("/").map(decoded);
  const equals = item.indexOf("=");
  return { view, cluster, kind: equals < 0 ? "" : item.slice(0, equals), value: equals < 0 ? "" : item.slice(equals + 1) };
}

/**
 * @param {string} view
 * @param {string} cluster
 * @param {string} [kind] of `member`, `barrier`, `collective`, `event`, `at`
 * @param {string|number} [value]
 */
export function linkTo(view, cluster, kind = "", value = "") {
  const parts = kind ? [view, cluster, `${kind}=${value}`] : cluster ? [view, cluster] : [view];
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

/**
 * Opens a member over the view that is open.
 * @param {string} cluster
 * @param {{job: string, index: number}} slot
 */
export function goToMember(cluster, slot) {
  location.hash = linkTo(placeNow().view || "overview", cluster, "member", `${slot.job}:${slot.index}`);
}

/**
 * Shows where a link leads to, once: the part of a view whose `data-item` it names.
 * @param {HTMLElement} root
 * @param {string} kind
 */
export function showLinked(root, kind) {
  const place = placeNow();
  const wanted = place.kind === kind ? place.value : "";
  for (const node of root.querySelectorAll(".linked")) if (/** @type {HTMLElement} */ (node).dataset.item !== wanted) node.classList.remove("linked");
  if (!wanted) return;
  for (const node of /** @type {NodeListOf<HTMLElement>} */ (root.querySelectorAll("[data-item]"))) {
    if (node.dataset.item !== wanted || node.classList.contains("linked")) continue;
    node.classList.add("linked");
    node.scrollIntoView({ block: "nearest" });
  }
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}
