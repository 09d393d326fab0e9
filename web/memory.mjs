// @ts-check
import { allNodes } from "./graph.mjs";
import { HIGHER } from "./room.mjs";
import { said, t, whyUnchanged } from "./words.mjs";
/** *Halve the memory*: ComfyUI's loaders become the pack's in their places, and back. The workflow is changed as saved, then opened as an undone one is. */

/**
 * @typedef {Record<string, string>} Names
 * @typedef {{ours: string, folder: string, names: Names, plain: Names, add: Names}} Exchange
 *   our node, the folder of its files, our names by ComfyUI's for the inputs that stay, what the others of ComfyUI's have to be, and what ours are given
 * @typedef {{graph: any, node: any, live: any}} Place a node as saved, the saved graph that it is in, and the node of the page
 * @typedef {{storage: string, clip_storage: string, why: string, files: Map<string, {reason: string, read: boolean}>}} Advice what the server says of the device and of each file
 */
const ENCODER = { ours: "HalfsafeLoadCLIP", folder: "text_encoders", add: {} };
const FOUR = { clip_name1: "clip_name1", clip_name2: "clip_name2", clip_name3: "clip_name3", clip_name4: "clip_name4" };
const THREE = { clip_name1: "clip_name1", clip_name2: "clip_name2", clip_name3: "clip_name3" };
const TWO = { clip_name1: "clip_name1", clip_name2: "clip_name2", type: "type" };
/** ComfyUI's loaders. Those of three and four files have no type: theirs is the default of ComfyUI's function. @type {Record<string, Exchange>} */
const EXCHANGES = {
  UNETLoader: { ours: "HalfsafeLoadDiffusionModel", folder: "diffusion_models", names: { unet_name: "model_name" }, plain: { weight_dtype: "default" }, add: {} },
  CheckpointLoaderSimple: { ours: "HalfsafeLoadCheckpoint", folder: "checkpoints", names: { ckpt_name: "ckpt_name" }, plain: {}, add: {} },
  ControlNetLoader: { ours: "HalfsafeLoadControlNet", folder: "controlnet", names: { control_net_name: "control_net_name" }, plain: {}, add: {} },
  CLIPLoader: { ...ENCODER, names: { clip_name: "clip_name1", type: "type" }, plain: { device: "default" } },
  DualCLIPLoader: { ...ENCODER, names: TWO, plain: { device: "default" } },
  TripleCLIPLoader: { ...ENCODER, names: THREE, plain: {}, add: { type: "stable_diffusion" } },
  QuadrupleCLIPLoader: { ...ENCODER, names: FOUR, plain: {}, add: { type: "stable_diffusion" } },
};
/** The property of our node that says what it was. */
const BEFORE = "halfsafe_before";
/** What is left free below a loader that grew, in pixels. */
const GAP = 24;
/** What the page notes of a node's pack: another pack's after the exchange. */
const OF_THE_PACK = ["cnr_id", "aux_id", "ver", "Node name for S&R"];

/** Whether a node is one of ComfyUI's loaders that can be exchanged. @param {any} node */
export function canBeHalved({ comfyClass }) {
  return comfyClass in EXCHANGES;
}

/** Whether a node is one of ours that stands where ComfyUI's loader was. @param {any} node */
export function isHalved({ properties }) {
  return Boolean(properties?.[BEFORE]);
}

/**
 * Exchange ComfyUI's loaders that run, or one of them, for ours.
 * @param {any} app @param {{fetchApi: (route: string, options: object) => Promise<Response>}} api @param {any} [only] this node @returns {Promise<string>} what was done, in words
 */
export function halveMemory(app, api, only = null) {
  return orUnchanged(() => halve(app, api, only));
}

/** Put ComfyUI's loaders back, or one of them. @param {any} app @param {any} [only] this node @returns {Promise<string>} what was done, in words */
export function putLoadersBack(app, only = null) {
  return orUnchanged(() => putBack(app, only));
}

/** Say what was done, or why nothing was: the graph is changed last, and by the page. @param {() => Promise<string>} act */
async function orUnchanged(act) {
  try {
    return await act();
  } catch (error) {
    return whyUnchanged(error);
  }
}

/** @param {any} app @param {any} api @param {any} only @returns {Promise<string>} */
async function halve(app, api, only) {
  const workflow = saved(app);
  const loaders = (await runningLoaders(app, workflow)).filter(({ live }) => !only || live === only);
  if (!loaders.length) return t("No loader of ComfyUI runs in this workflow.");
  const advice = await advise(api, loaders);
  /** @type {string[]} */
  const leftOut = [];
  let count = 0;
  for (const loader of loaders) {
    const reason = whyLeftOut(loader, advice);
    if (reason) leftOut.push(`${loader.live.title} (${said(reason)})`);
    else {
      exchange(loader, ...oursFor(loader, advice));
      makeRoom(loader);
      count += 1;
    }
  }
  if (count) await open(app, workflow);
  return told(count, leftOut);
}

/** @param {any} app @param {any} only @returns {Promise<string>} */
async function putBack(app, only) {
  const workflow = saved(app);
  const places = placesIn(app, workflow).filter(({ live }) => isHalved(live) && (!only || live === only));
  if (!places.length) return t("There is no loader to put back.");
  /** @type {string[]} */
  const leftOut = [];
  let count = 0;
  for (const place of places.reverse()) { // what two loaders moved goes back in two steps, the last one first
    const before = place.node.properties[BEFORE];
    const { names } = EXCHANGES[before.type];
    const back = Object.fromEntries(Object.entries(names).map(([core, ours]) => [ours, core]));
    const reason = whyLinked(place, back);
    if (reason) leftOut.push(`${place.live.title} (${reason})`);
    else {
      exchange(place, before.type, back, { ...before.values, ...renamed(valuesOf(place.live), back) }, before);
      moveBack(place.graph, before.moved);
      count += 1;
    }
  }
  if (count) await open(app, workflow);
  const done = count === 1 ? t("ComfyUI's loader was restored.") : t("{count} of ComfyUI's loaders were restored.", { count });
  return leftOut.length ? `${done} ${t("Left out: {names}.", { names: leftOut.join(", ") })}` : done;
}

/** The workflow as the page would save it. @param {any} app */
function saved(app) {
  const root = app.graph.rootGraph ?? app.graph;
  return JSON.parse(JSON.stringify(root.serialize()));
}

/** Every node of a workflow as saved, beside the page's. @param {any} app @param {any} workflow @returns {Place[]} */
function placesIn(app, workflow) {
  const graphs = new Map((workflow.definitions?.subgraphs ?? []).map((/** @type {any} */ graph) => [graph.id, graph]));
  return allNodes(app).flatMap((live) => {
    const graph = live.graph.isRootGraph ? workflow : graphs.get(live.graph.id);
    const node = graph?.nodes.find((/** @type {any} */ { id }) => String(id) === String(live.id));
    return node ? [{ graph, node, live }] : [];
  });
}

/** ComfyUI's loaders that a run would execute, each with what it would be given: once for each place of its subgraph. @param {any} app @param {any} workflow */
async function runningLoaders(app, workflow) {
  const { output } = await app.graphToPrompt();
  const places = placesIn(app, workflow).filter(({ live }) => canBeHalved(live));
  return places.flatMap((place) => {
    const given = Object.entries(output).filter(([path]) => isAt(place, path, workflow)).map(([, { inputs }]) => inputs);
    return given.length ? [{ ...place, given }] : [];
  });
}

/** @typedef {Place & {given: Record<string, any>[]}} Loader */

/** Whether a node of the prompt, "12" or "57:12" in the subgraph node 57, is the one at a place. @param {Place} place @param {string} path @param {any} workflow */
function isAt({ graph, node }, path, workflow) {
  const ids = path.split(":");
  const last = ids.pop();
  let inside = workflow;
  for (const id of ids) {
    const host = inside?.nodes.find((/** @type {any} */ one) => String(one.id) === id);
    inside = workflow.definitions.subgraphs.find((/** @type {any} */ one) => one.id === host?.type);
  }
  return inside === graph && last === String(node.id);
}

/** Ask the server in which storage this device's loaders halve memory, and which files they would not halve. @param {any} api @param {Loader[]} loaders @returns {Promise<Advice>} */
async function advise(api, loaders) {
  const files = loaders.flatMap((loader) => filesOf(loader));
  const answer = await (await api.fetchApi("/halfsafe/halving", { method: "POST", body: JSON.stringify(files) })).json();
  return { ...answer, files: new Map(files.map((file, place) => [file.join("/"), answer.files[place]])) };
}

/** The files of a loader, [folder, name] each. @param {Loader} loader @returns {string[][]} */
function filesOf({ live, given }) {
  const { folder, names } = EXCHANGES[live.comfyClass];
  const inputs = Object.keys(names).filter((name) => name.includes("_name"));
  return given.flatMap((values) => inputs.map((name) => values[name]).filter((name) => typeof name === "string").map((name) => [folder, name]));
}

/** Why a loader is not exchanged, in English; empty where it is. @param {Loader} loader @param {Advice} advice @returns {string} */
function whyLeftOut(loader, advice) {
  const { names, plain } = EXCHANGES[loader.live.comfyClass];
  const linked = whyLinked(loader, names);
  if (linked) return linked;
  for (const [name, value] of Object.entries(plain)) {
    const own = valuesOf(loader.live)[name];
    if (own !== value) return t("its {name} is {value}", { name, value: own });
  }
  const isEncoder = EXCHANGES[loader.live.comfyClass].ours === ENCODER.ours;
  if (advice.storage === "as_file" && !isEncoder) return advice.why;
  const files = filesOf(loader).flatMap((file) => advice.files.get(file.join("/")) ?? []);
  const unread = files.find(({ read }) => !read);
  if (unread) return unread.reason;
  const allSmall = files.length > 0 && files.every(({ reason }) => reason);
  return allSmall ? files[0].reason : "";
}

/** What is linked to an input that the other loader does not have. @param {Place} place @param {Names} names @returns {string} */
function whyLinked({ node }, names) {
  const lost = (node.inputs ?? []).find((/** @type {any} */ { name, link }) => link != null && !(name in names));
  return lost ? t("its {name} is linked", { name: lost.name }) : "";
}

/** Our node for a loader: its type, the names of inputs that stay, its values, and what it keeps of the one before. @param {Loader} loader @param {Advice} advice @returns {[string, Names, Record<string, any>, any]} */
function oursFor({ node, live }, advice) {
  const { ours, names, add } = EXCHANGES[live.comfyClass];
  const storage = ours === ENCODER.ours ? advice.clip_storage : advice.storage;
  const values = { ...add, storage, clip_storage: advice.clip_storage, ...renamed(valuesOf(live), names) };
  const before = { type: live.comfyClass, title: ownTitle(node, live), size: node.size, properties: node.properties, values: valuesOf(live) };
  return [ours, names, values, { properties: { ...withoutPack(node.properties), [BEFORE]: before }, title: before.title, size: node.size }];
}

/** Make a node as saved one of another type, in its place: the same id, position and links. @param {Place} place @param {string} type @param {Names} names of the inputs that stay @param {Record<string, any>} values of its widgets @param {{properties: object, title?: string, size: number[]}} look */
function exchange({ graph, node }, type, names, values, { properties, title, size }) {
  const fresh = madeOf(type, values);
  const inputs = fresh.inputs.map((/** @type {any} */ input) => ({ ...input, link: null }));
  for (const old of node.inputs ?? []) {
    const slot = inputs.findIndex((/** @type {any} */ { name }) => name === names[old.name]);
    if (slot < 0 || old.link == null) continue;
    inputs[slot].link = old.link;
    setTarget(graph, old.link, slot);
  }
  const outputs = fresh.outputs.map((/** @type {any} */ output, /** @type {number} */ slot) => ({ ...output, links: node.outputs[slot].links }));
  Object.assign(node, { type, inputs, outputs, size, properties, widgets_values: fresh.widgets_values });
  delete node.title;
  if (title !== undefined) node.title = title;
}

/** Let one of our nodes be as high as it needs, and move down what it would cover, and what that would. Its record keeps where that was. @param {Loader} loader */
function makeRoom({ graph, node }) {
  const was = node.size[1];
  const [width, height] = window.LiteGraph.createNode(node.type).computeSize();
  node.size = [Math.max(node.size[0], width), Math.max(was, height)];
  /** @type {Record<string, {from: number, to: number}>} node id -> where its top was, and is */
  const moved = {};
  const free = window.LiteGraph.vueNodesMode ? GAP + HIGHER : GAP;
  const grown = [{ upper: node, bottomWas: node.pos[1] + was, free }];
  const topOf = (/** @type {any} */ one) => one.pos[1] - window.LiteGraph.NODE_TITLE_HEIGHT;
  const shareColumn = (/** @type {any} */ a, /** @type {any} */ b) => a.pos[0] < b.pos[0] + b.size[0] && b.pos[0] < a.pos[0] + a.size[0];
  for (const lower of [...graph.nodes].sort((a, b) => topOf(a) - topOf(b))) { // each is moved once, after all above it
    const over = grown.filter(({ upper, bottomWas }) => topOf(lower) >= bottomWas && shareColumn(upper, lower));
    const way = Math.max(0, ...over.map((above) => above.upper.pos[1] + above.upper.size[1] + above.free - topOf(lower)));
    if (way === 0) continue;
    grown.push({ upper: lower, bottomWas: lower.pos[1] + lower.size[1], free: GAP });
    moved[lower.id] = { from: lower.pos[1], to: lower.pos[1] + way };
    lower.pos[1] += way;
  }
  node.properties[BEFORE].moved = moved;
}

/** Move up what *Halve the memory* moved down, unless it was moved since. @param {any} graph @param {Record<string, {from: number, to: number}>} moved */
function moveBack(graph, moved) {
  for (const node of graph.nodes) {
    const way = moved[node.id];
    if (way && node.pos[1] === way.to) node.pos[1] = way.from;
  }
}

/** A node of a type with values, as the page saves it. @param {string} type @param {Record<string, any>} values */
function madeOf(type, values) {
  const node = window.LiteGraph.createNode(type);
  for (const widget of node.widgets) {
    if (widget.name in values) widget.value = values[widget.name];
  }
  return JSON.parse(JSON.stringify(node.serialize()));
}

/** Lead a link to another input of its node. Links are lists in a workflow, and objects in its subgraphs. @param {any} graph @param {number} id @param {number} slot */
function setTarget(graph, id, slot) {
  const link = graph.links.find((/** @type {any} */ one) => (Array.isArray(one) ? one[0] : one.id) === id);
  if (Array.isArray(link)) link[4] = slot;
  else link.target_slot = slot;
}

/** What a node's widgets hold, by name. @param {any} live @returns {Record<string, any>} */
function valuesOf(live) {
  return Object.fromEntries((live.widgets ?? []).map((/** @type {any} */ { name, value }) => [name, value]));
}

/** @param {Record<string, any>} values @param {Names} names */
function renamed(values, names) {
  return Object.fromEntries(Object.entries(names).filter(([from]) => from in values).map(([from, to]) => [to, values[from]]));
}

/** @param {Record<string, any>} properties */
function withoutPack(properties) {
  return Object.fromEntries(Object.entries(properties ?? {}).filter(([name]) => !OF_THE_PACK.includes(name)));
}

/** The title that a user gave a node; undefined where it has its type's. @param {any} node @param {any} live */
function ownTitle(node, live) {
  return node.title === live.constructor.title ? undefined : node.title;
}

/** Open a changed workflow in its own tab, as the page's redo does: view and results stay, and one undo takes it back. @param {any} app @param {any} workflow */
async function open(app, workflow) {
  const before = saved(app);
  const { activeWorkflow } = app.extensionManager.workflow;
  const { changeTracker } = activeWorkflow;
  app.canvas.emitBeforeChange();
  app.canvas.emitAfterChange(); // what was changed before becomes a step of its own
  changeTracker.redoQueue.length = 0;
  changeTracker.redoQueue.push(workflow);
  await changeTracker.redo();
  if (isOpen(app, workflow)) return;
  await app.loadGraphData(before, false, false, activeWorkflow);
  throw new Error(t("The page could not open the changed workflow."));
}

/** Whether the page has every node of a workflow, each of its type. @param {any} app @param {any} workflow */
function isOpen(app, workflow) {
  const graphs = [workflow, ...(workflow.definitions?.subgraphs ?? [])];
  const wanted = graphs.flatMap((graph) => graph.nodes.map((/** @type {any} */ { id, type }) => `${id} ${type}`));
  const found = new Set(allNodes(app).map(({ id, type }) => `${id} ${type}`));
  return wanted.every((node) => found.has(node));
}

/** @param {number} count of loaders that are ours now @param {string[]} leftOut */
function told(count, leftOut) {
  const done = !count ? t("No loader was changed.") : count === 1 ? t("1 loader was replaced: run the workflow.") : t("{count} loaders were replaced: run the workflow.", { count });
  return leftOut.length ? `${done} ${t("Left out: {names}.", { names: leftOut.join(", ") })}` : done;
}
