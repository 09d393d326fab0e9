// @ts-check
import { boxOf, isApart, isIn } from "./room.mjs";
import { t, titlesOf } from "./words.mjs";
/** Changes of the open workflow, each of them one step of the page's undo. */

export const RULES = "HalfsafeLayerRules";
const ONE = "HalfsafeAutoPrecision";
const PLANNERS = [ONE, "HalfsafeComputeDtype"];
/** The end of a line that *Use this* put into the rules of the node Halfsafe. */
export const MEASURED = "  # measured";
/** The mode of a node that is neither muted nor bypassed. */
export const RUNS = 0;
const GAP = 40;
/** The least scale at which the page writes words on a node: in 8 pixels of its 14. */
const READABLE = 8 / 14;
/** How high the page's bars are at the top of the canvas. */
const BARS = 92;
/** What is left free around nodes in a view, in pixels. */
const MARGIN = 12;
/** The value of `extra.halfsafe` with which the pack's own workflows ask to be shown whole. */
const WHOLE = "whole";
/** What the page notes of a node's pack, as pyproject.toml has it: where the pack is absent, the page offers it by that. */
export const PACK = { cnr_id: "halfsafe", ver: "1.3.0" };
/** The widgets of our loaders that name their required file. */
const FILES = ["model_name", "ckpt_name", "clip_name1", "control_net_name", "vae_name"];

/**
 * Change the open workflow as one step of undo, or not at all: where a change fails midway, what it did is undone.
 * @param {any} app @param {() => void} change
 */
export async function undoable(app, change) {
  const { canvas } = app;
  const state = () => JSON.stringify(rootOf(app).serialize());
  canvas.emitBeforeChange(); // what was changed before is a step of its own
  canvas.emitAfterChange();
  const before = state();
  canvas.emitBeforeChange();
  try {
    change();
  } catch (error) {
    canvas.emitAfterChange();
    if (state() !== before) await app.extensionManager.command.execute("Comfy.Undo");
    throw error;
  }
  app.graph.setDirtyCanvas(true, true);
  canvas.emitAfterChange();
}

/** The outermost graph of the open workflow. @param {any} app */
export function rootOf(app) {
  return app.graph?.rootGraph ?? app.graph;
}

/** @param {any} graph @param {string} type @param {[number, number]} pos */
export function addNode(graph, type, pos) {
  const node = window.LiteGraph.createNode(type);
  node.pos = pos;
  graph.add(node);
  return node;
}

/**
 * Let a node of ours be known where the pack is absent: by the pack's id, and by its English title, which the page leaves out where it is the type's own; it is read again in
 * the page's language. A loader that is opened without a file's name, as that of the block is, takes the first file of its list.
 * @param {any} node
 */
export function introduce(node) {
  node.properties = { ...PACK, ...node.properties };
  after(node, "onSerialize", (saved) => {
    saved.title ??= titlesOf(node.comfyClass)[0] ?? node.constructor.title;
  });
  after(node, "onConfigure", (saved) => {
    if (titlesOf(node.comfyClass).includes(saved.title)) node.title = node.constructor.title;
    for (const widget of (node.widgets ?? []).filter((/** @type {any} */ { name, value }) => value === "" && FILES.includes(name))) [widget.value = ""] = listOf(widget);
  });
}

/** Act each time after the page called a method of a node. @param {any} node @param {string} method @param {(given: any) => void} act */
function after(node, method, act) {
  const before = node[method];
  node[method] = function (/** @type {any[]} */ ...given) {
    const result = before?.apply(this, given);
    act(given[0]);
    return result;
  };
}

/** What a node gave in its last run, as the page keeps it. @param {any} app @param {any} node @returns {any} */
export function outputOf(app, { id, graph }) {
  return app.nodeOutputs[graph.isRootGraph ? String(id) : `${graph.id}:${id}`];
}

/** What can be chosen in a widget, which may ask for it anew each time; empty for one that is no list. @param {any} widget @returns {any[]} */
export function listOf({ options }) {
  const listed = typeof options?.values === "function" ? options.values() : options?.values;
  return Array.isArray(listed) ? listed : [];
}

/** Give a widget a value. @param {any} node @param {string} name @param {any} value */
export function setWidget(node, name, value) {
  const widget = node.widgets.find((/** @type {any} */ one) => one.name === name);
  widget.value = value;
  widget.callback?.(value);
}

/** @param {any} from @param {number} output @param {any} to @param {number} input */
export function link(from, output, to, input) {
  from.connectSlots(from.outputs[output], to, to.inputs[input]);
}

/** Put rules into the Layer Rules node before a node, which is made where there is none. @param {any} app @param {any} node @param {string} rules */
export function keepRules(app, node, rules) {
  undoable(app, () => putRules(node, () => rules));
}

/** Change the rules in the Layer Rules node before a node, which is made where there is none. @param {any} node @param {(before: string) => string} change */
export function putRules(node, change) {
  const slot = node.inputs.findIndex((/** @type {any} */ input) => input.name === "rules");
  const present = node.getInputNode(slot);
  const holder = present?.comfyClass === RULES ? present : addNode(node.graph, RULES, [node.pos[0] - 440, node.pos[1]]);
  if (holder !== present) {
    holder.pos = [node.pos[0] - holder.size[0] - GAP, node.pos[1]];
    setWidget(holder, "preset", "none");
    link(holder, 0, node, slot);
  }
  setWidget(holder, "rules", change(present === holder ? holder.widgets.find((/** @type {any} */ { name }) => name === "rules").value : ""));
}

/** Every node of the workflow, those in subgraphs too. @param {any} app @returns {any[]} */
export function allNodes(app) {
  const root = rootOf(app);
  return !root ? [] : [root, ...(root.subgraphs?.values() ?? [])].flatMap((graph) => graph.nodes);
}

/** The ids of the nodes a node's inputs come from, itself included. @param {any} node */
export function upstream(node) {
  const found = new Set();
  const open = [node];
  while (open.length) {
    const next = open.pop();
    if (!next || found.has(String(next.id))) continue;
    found.add(String(next.id));
    for (const slot of (next.inputs ?? []).keys()) open.push(next.getInputNode(slot));
  }
  return found;
}

/** Whether every node that takes a node's model plans its arithmetic anew. @param {any} node @returns {boolean} */
export function isPlannedAnew(node) {
  const next = (node.outputs ?? []).flatMap((/** @type {any} */ { type }, /** @type {number} */ slot) => (type === "MODEL" ? node.getOutputNodes(slot) ?? [] : []));
  return next.length > 0 && next.every((/** @type {any} */ one) => (PLANNERS.includes(one.comfyClass) && one.mode === RUNS) || isPlannedAnew(one));
}

/** Open five nodes on the pack's own small model in a workflow of their own. @param {any} app @returns {Promise<string>} what was done, in words */
export async function showMe(app) {
  const graph = await (await fetch(new URL("./show_me.json", import.meta.url))).json();
  const ours = new Set(graph.definitions.subgraphs.map((/** @type {any} */ one) => one.id));
  for (const node of graph.nodes) {
    if (node.title) node.title = t(node.title);
    if (ours.has(node.type)) for (const slot of [...node.inputs, ...node.outputs]) slot.label = t(slot.name);
  }
  await app.loadGraphData(graph, true, true, t("Halfsafe demo"));
  await enter(app, app.graph);
  setView(app, viewAround(app, app.graph.nodes, 1.5));
  return t("Press Run: left black, right in a format that does not overflow.");
}

/** Show a workflow of the pack whole where it is opened as it came: the page's own view leaves parts behind its sidebar and map. @param {any} app */
export async function showWhole(app) {
  const { graph } = app;
  if (graph?.extra?.halfsafe !== WHOLE) return;
  delete graph.extra.halfsafe; // what is saved has a view of its own
  await enter(app, graph);
  if (app.canvas.graph === graph) setView(app, viewAround(app, graph.nodes));
}

/** Select nodes and bring them into view. @param {any} app @param {any[]} nodes */
export function showNodes(app, nodes) {
  return showAmong(app, nodes, nodes);
}

/**
 * Select nodes and bring them into view, unless all that is wanted is seen: those of the first one's graph, as a page shows one graph.
 * @param {any} app @param {any[]} all @param {any[]} wanted
 */
export async function showAmong(app, all, wanted) {
  const [{ graph }] = all;
  const { canvas } = app;
  const nodes = all.filter((node) => node.graph === graph);
  const entered = enter(app, graph);
  canvas.deselectAll();
  canvas.selectItems(nodes);
  await entered;
  const view = viewNow(app);
  if (view.scale < READABLE || !areInSight(wanted.map(boxOf), view, sightOf(app))) setView(app, viewAround(app, nodes));
}

/** Show a graph, once the page has fitted a view of its own to it: 1.47 does so in the next frame. @param {any} app @param {any} graph */
export async function enter({ canvas }, graph) {
  if (canvas.graph !== graph) canvas.setGraph(graph);
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
}

/** @typedef {import("./room.mjs").Box} Box */
/** @typedef {{scale: number, offset: number[]}} View */

/** @param {any} app @returns {View} */
export function viewNow({ canvas: { ds } }) {
  return { scale: ds.scale, offset: [...ds.offset] };
}

/** @param {any} app @param {View} view */
export function setView({ canvas }, { scale, offset }) {
  canvas.ds.scale = scale;
  [canvas.ds.offset[0], canvas.ds.offset[1]] = offset;
  canvas.setDirty(true, true);
}

/** Where the canvas is seen, in its pixels: between the page's bars, and what lies over that. @param {any} app @returns {{page: Box, covers: Box[]}} */
function sightOf({ canvas: { canvas } }) {
  const origin = canvas.getBoundingClientRect();
  const boxOn = (/** @type {Element} */ element) => {
    const { left, top, right, bottom } = element.getBoundingClientRect();
    return { left: left - origin.left, top: top - origin.top, right: right - origin.left, bottom: bottom - origin.top };
  };
  const covers = [...document.querySelectorAll(".minimap-main-container, [data-testid=error-overlay]")].map(boxOn);
  return { page: { ...boxOn(document.querySelector(".graph-canvas-panel") ?? canvas), top: BARS }, covers };
}

/** Whether boxes are seen whole in a view. @param {Box[]} boxes @param {View} view @param {ReturnType<typeof sightOf>} sight */
function areInSight(boxes, { scale, offset: [x, y] }, { page, covers }) {
  return boxes.every(({ left, top, right, bottom }) => {
    const seen = { left: (left + x) * scale, top: (top + y) * scale, right: (right + x) * scale, bottom: (bottom + y) * scale };
    return isIn(seen, page) && covers.every((cover) => isApart(seen, cover, 0));
  });
}

/** The view that shows nodes, and as many of the nearest others as stay readable beside them. @param {any} app @param {any[]} nodes @param {number} [largest] scale */
function viewAround(app, nodes, largest = 1) {
  const sight = sightOf(app);
  let shown = nodes.map(boxOf);
  let view = largestView(shown, sight, largest);
  if (view.scale < READABLE && nodes.length > 1) return viewAround(app, nodes.slice(0, 1), largest); // with names that can be read
  const [x, y] = middleOf(boundsOf(shown));
  const far = (/** @type {Box} */ box) => Math.hypot(middleOf(box)[0] - x, middleOf(box)[1] - y);
  const others = nodes[0].graph.nodes.map(boxOf).sort((/** @type {Box} */ a, /** @type {Box} */ b) => far(a) - far(b));
  for (const other of others) {
    const wider = largestView([...shown, other], sight, largest);
    if (wider.scale < READABLE) continue;
    shown = [...shown, other];
    view = wider;
  }
  return view;
}

/** @param {Box[]} boxes @returns {Box} */
function boundsOf(boxes) {
  const [left, top] = [Math.min(...boxes.map((box) => box.left)), Math.min(...boxes.map((box) => box.top))];
  return { left, top, right: Math.max(...boxes.map((box) => box.right)), bottom: Math.max(...boxes.map((box) => box.bottom)) };
}

/** @param {Box} box */
function middleOf({ left, top, right, bottom }) {
  return [(left + right) / 2, (top + bottom) / 2];
}

/** The largest view in which boxes are seen whole, in the middle or at the top of a part of the page. @param {Box[]} boxes @param {ReturnType<typeof sightOf>} sight @param {number} largest @returns {View} */
function largestView(boxes, sight, largest) {
  const bounds = boundsOf(boxes);
  const [x, y] = middleOf(bounds);
  const [whole, ...others] = partsOf(sight).flatMap((part) => {
    const width = part.right - part.left - 2 * MARGIN;
    const height = part.bottom - part.top - 2 * MARGIN;
    const scale = Math.min(largest, width / (bounds.right - bounds.left), height / (bounds.bottom - bounds.top));
    const [across, down] = middleOf(part).map((middle) => middle / scale);
    const inMiddle = { scale, offset: [across - x, down - y] };
    const atTop = { scale, offset: [across - x, (part.top + MARGIN) / scale - bounds.top] };
    return [inMiddle, atTop];
  });
  const [best] = [whole, ...others].filter((view) => view.scale > 0 && areInSight(boxes, view, sight)).sort((a, b) => b.scale - a.scale);
  return best ?? whole;
}

/** The whole page, and parts of it that end where something lies over it. @param {ReturnType<typeof sightOf>} sight @returns {Box[]} */
function partsOf({ page, covers }) {
  const rights = [page.right, ...covers.map((cover) => cover.left)];
  const tops = [page.top, ...covers.map((cover) => cover.bottom)];
  const bottoms = [page.bottom, ...covers.map((cover) => cover.top)];
  return rights.flatMap((right) => tops.flatMap((top) => bottoms.map((bottom) => ({ left: page.left, top, right, bottom }))));
}
