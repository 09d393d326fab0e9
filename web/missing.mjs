// @ts-check
/** Files that a workflow names and this ComfyUI does not have: told before a run, as ComfyUI's own message names none. */
import { listOf, RUNS } from "./graph.mjs";
import { folderOf } from "./memory.mjs";
import { t } from "./words.mjs";

/** A value of a list that names a file. */
const FILE = /\.[a-z0-9]{2,11}$/i;
/** What ComfyUI calls a value that its list does not have. */
const NOT_LISTED = "value_not_in_list";
/** How many files are named at once. */
const MOST = 3;
/** How long an answer of the server holds, in milliseconds: a file may be put there at any time, and the page keeps the lists that it was opened with. */
export const HOLDS = 5000;
/**
 * @typedef {{file: string, node: any, reader: any, input: string}} Named a file that is not in the page's list: the node that it is set on, and the one whose input takes it
 * @typedef {Map<string, {at: number, lists: Record<string, string[]>}>} Lists a class of nodes -> what its inputs list, as the server said, and when
 * @typedef {{file: string, node: any, folder: string, url: string}} Missing a file, the node that names it, and where it belongs and comes from, if its template says so
 */

/**
 * The files that nodes which run name in a list of the server that does not have them, each once.
 * @param {Lists} lists @param {any[]} nodes @param {Named[]} [refused] those that the server refused a run for: the page's list may be older than the loss of a file @returns {Missing[]}
 */
export function missingFiles(lists, nodes, refused = []) {
  const known = new Map(nodes.flatMap(({ properties }) => (properties?.models ?? []).map((/** @type {any} */ model) => [model.name, model])));
  const missing = [...notListed(nodes).filter(({ file, reader, input }) => lists.get(reader.comfyClass)?.lists[input]?.includes(file) === false), ...refused];
  return [...new Map(missing.map(({ file, node, reader }) => [file, { file, node, folder: known.get(file)?.directory ?? folderOf(reader), url: known.get(file)?.url ?? "" }])).values()];
}

/** The files that the server refused a run for, and that the workflow names yet. @param {any} errors of nodes by their ids, as ComfyUI's page keeps them @param {any[]} nodes @param {(id: string) => any} nodeById @returns {Named[]} */
export function refusedFiles(errors, nodes, nodeById) {
  const isNamed = (/** @type {string} */ file) => nodes.some(({ widgets = [] }) => widgets.some((/** @type {any} */ { value }) => value === file));
  return Object.entries(errors ?? {}).flatMap(([id, told]) => {
    const node = nodeById(id);
    const files = node ? told.errors.filter((/** @type {any} */ { type, extra_info: info }) => type === NOT_LISTED && FILE.test(info?.received_value) && isNamed(info.received_value)) : [];
    return files.map((/** @type {any} */ { extra_info: info }) => ({ file: info.received_value, node, reader: node, input: info.input_name }));
  });
}

/** Ask the server for the lists that lack a file on the page. @param {any} api @param {Lists} lists what it answered before, and answers now @param {any[]} nodes @returns {Promise<boolean>} whether it says something new */
export async function askForMissing(api, lists, nodes) {
  const before = JSON.stringify(missingFiles(lists, nodes).map(({ file }) => file));
  const classes = new Set(notListed(nodes).map(({ reader }) => reader.comfyClass).filter((name) => Date.now() - (lists.get(name)?.at ?? 0) >= HOLDS));
  await Promise.all([...classes].map(async (name) => {
    lists.set(name, { at: Date.now(), lists: lists.get(name)?.lists ?? {} });
    const response = await api.fetchApi(`/object_info/${encodeURIComponent(name)}`).catch(() => null);
    const { input } = response?.ok ? (await response.json())[name] ?? {} : {};
    const inputs = Object.entries({ ...input?.required, ...input?.optional });
    lists.set(name, { at: Date.now(), lists: Object.fromEntries(inputs.flatMap(([key, [type, more]]) => (Array.isArray(type) ? [[key, type]] : Array.isArray(more?.options) ? [[key, more.options]] : []))) });
  }));
  return before !== JSON.stringify(missingFiles(lists, nodes).map(({ file }) => file));
}

/** @param {any[]} nodes @returns {Named[]} */
function notListed(nodes) {
  return nodes.filter(({ mode }) => mode === RUNS).flatMap((node) => {
    const isLinked = (/** @type {string} */ widget) => (node.inputs ?? []).some((/** @type {any} */ { name, link }) => name === widget && link != null);
    return (node.widgets ?? []).flatMap((/** @type {any} */ widget) => {
      const { name, value } = widget, listed = listOf(widget);
      if (typeof value !== "string" || !FILE.test(value) || !widget.options?.values || listed.includes(value) || isLinked(name)) return [];
      const [reader, input] = readerOf(node, name);
      return reader?.mode === RUNS ? [{ file: value, node, reader, input }] : [];
    });
  });
}

/** The node inside that a widget on the face of a subgraph sets, and its input; of other nodes they themselves. @param {any} node @param {string} name @returns {[any, string]} */
function readerOf(node, name) {
  if (!node.subgraph) return [node, name];
  const [link] = node.subgraph.inputNode.slots.find((/** @type {any} */ slot) => slot.name === name)?.getLinks() ?? [];
  const inner = link && node.subgraph.getNodeById(link.target_id);
  return inner ? readerOf(inner, inner.inputs[link.target_slot].name) : [null, name];
}

/** What to say of missing files; null where none is. @param {Missing[]} missing @returns {import("./result.mjs").Card | null} */
export function missingCard(missing) {
  if (!missing.length) return null;
  const [{ file, node, folder }] = missing;
  const one = missing.length === 1;
  return {
    headline: one ? t("{file} is missing", { file }) : t("{count} files are missing", { count: missing.length }),
    line: !one ? namesOf(missing) : folder ? t("{title} looks for it in models/{folder}.", { title: node.title, folder }) : t("{title} needs it.", { title: node.title }),
    tone: "bad",
    why: missing.flatMap((each) => [...(one ? [] : [neededText(each)]), ...(each.url ? [t("This workflow means the one at {url}", each)] : [])]),
  };
}

/** The first files by name, without the folders below that of their kind. @param {Missing[]} missing */
function namesOf(missing) {
  const names = missing.slice(0, MOST).map(({ file }) => file.split(/[\\/]/).at(-1));
  return [...names, ...(missing.length > MOST ? ["..."] : [])].join(t(", "));
}

/** @param {Missing} missing */
function neededText({ file, node, folder }) {
  return folder ? t("{title}: {file}, in models/{folder}.", { title: node.title, file, folder }) : t("{title}: {file}.", { title: node.title, file });
}
