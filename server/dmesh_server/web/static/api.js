// Asks the REST interface.

export class LoggedOut extends Error {}

/**
 * Reads a resource.
 * @param {string} path below /api/v1/
 * @param {Record<string, string|number|string[]>} [query]
 * @returns {Promise<any>}
 */
export async function read(path, query = {}) {
  const url = new URL(`/api/v1/${path}`, location.origin);
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) url.searchParams.append(name, String(one));
  }
  const response = await fetch(url, { headers: { Accept: "application/json" }, cache: "no-store", redirect: "error" });
  if (response.status === 401) throw new LoggedOut();
  if (response.status === 404) return null;
  if (!response.ok) throw new Error(`${response.status}`);
  return response.json();
}

/**
 * Returns the path of something of a cluster.
 * @param {string} cluster
 * @param {...(string|number)} parts
 */
export function inCluster(cluster, ...parts) {
  return ["clusters", cluster, ...parts].map((part) => encodeURIComponent(part)).join("/");
}

/**
 * Changes something; the caller has confirmed it.
 * @param {string} method
 * @param {string} path below /api/v1/
 * @param {Record<string, string|number>} query
 * @param {string} token of an admin; empty if the server asks for none
 * @returns {Promise<any>} the answer
 */
export async function change(method, path, query, token) {
  const url = new URL(`/api/v1/${path}`, location.origin);
  for (const [name, value] of Object.entries(query)) if (value !== "") url.searchParams.append(name, String(value));
  /** @type {Record<string, string>} */
  const headers = token ? { Accept: "application/json", Authorization: `Bearer ${token}` } : { Accept: "application/json" };
  const response = await fetch(url, { method, headers, cache: "no-store", redirect: "error", credentials: "omit" });
  const answer = await response.json().catch(() => null);
  if (response.ok) return answer;
  throw new Error(answer?.status ?? `The server answered ${response.status}.`);
}
