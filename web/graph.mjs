// @ts-check
import { boxOf, isApart, isIn, placeBetween } from "./room.mjs";
import { t } from "./words.mjs";
/** Changes of the open workflow, each of them one step of the page's undo. */

const RULES = "HalfsafeLayerRules";
const ONE = "HalfsafeAutoPrecision";
const PLANNERS = [ONE, "HalfsafeComputeDtype"];
/** The mode of a node that is neither muted nor bypassed. */
export const RUNS = 0;
const MEASURE = "HalfsafeMeasurePrecisions";
const GAP = 40;
/** The workflows' columns are as wide, in pixels at scale 1. */
const WIDTH = 320;
/** Where the chart of Measure Precisions is read. */
const CHART = [520, 300];
/** The least scale at which the page writes words on a node: in 8 pixels of its 14. */
const READABLE = 8 / 14;
/** How high the page's bars are at the top of the canvas. */
const BARS = 92;
/** What is left free around nodes in a view, in pixels. */
const MARGIN = 12;
const OURS = "Halfsafe";
/** What the pack's own workflows ask for in their `extra`. */
const WHOLE = "whole";
/** The view that the last *Guard this workflow* left, and the one it made. @type {{left: {graph: any, view: View}, made: View} | null} */
let views = null;

/** @param {any} app @param {() => void} change */
export function undoable(app, change) {
  app.canvas.emitBeforeChange();
  change();
  app.graph.setDirtyCanvas(true, true);
  app.canvas.emitAfterChange();
}

/** @param {any} graph @param {string} type @param {[number, number]} pos */
export function addNode(graph, type, pos) {
  const node = window.LiteGraph.createNode(type);
  node.pos = pos;
  graph.add(node);
  return node;
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
  undoable(app, () => {
    const slot = node.inputs.findIndex((/** @type {any} */ input) => input.name === "rules");
    const present = node.getInputNode(slot);
    const holder = present?.comfyClass === RULES ? present : addNode(node.graph, RULES, [node.pos[0] - 440, node.pos[1]]);
    if (holder !== present) {
      holder.pos = [node.pos[0] - holder.size[0] - GAP, node.pos[1]];
      setWidget(holder, "preset", "none");
      link(holder, 0, node, slot);
    }
    setWidget(holder, "rules", rules);
  });
}

/** Every node of the workflow, those in subgraphs too. @param {any} app @returns {any[]} */
export function allNodes(app) {
  const root = app.graph?.rootGraph ?? app.graph;
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

/** Whether all that a node's model goes to plans its arithmetic anew. @param {any} node @returns {boolean} */
export function isPlannedAnew(node) {
  const next = (node.outputs ?? []).flatMap((/** @type {any} */ { type }, /** @type {number} */ slot) => (type === "MODEL" ? node.getOutputNodes(slot) ?? [] : []));
  return next.length > 0 && next.every((/** @type {any} */ one) => (PLANNERS.includes(one.comfyClass) && one.mode === RUNS) || isPlannedAnew(one));
}

/** The places where a node uses something up: inputs of a type in nodes that do not pass it on. @param {any[]} nodes @param {string} type */
function usesOf(nodes, type) {
  return nodes.flatMap((node) => {
    if (node.comfyClass?.startsWith(OURS) || (type !== "CLIP" && node.outputs?.some((/** @type {any} */ out) => out.type === type))) return [];
    return (node.inputs ?? []).flatMap((/** @type {any} */ input, /** @type {number} */ slot) => {
      const source = input.type === type && input.link !== null ? node.getInputNode(slot) : null;
      return source ? [{ node, slot, source, output: node.getInputLink(slot).origin_slot }] : [];
    });
  });
}

/** @typedef {ReturnType<typeof usesOf>[number]} Use */

/** Uses by what they come from. @param {Use[]} uses @returns {Use[][]} */
function bySource(uses) {
  const groups = new Map();
  for (const use of uses) {
    const key = `${use.source.graph.id} ${use.source.id} ${use.output}`;
    groups.set(key, [...(groups.get(key) ?? []), use]);
  }
  return [...groups.values()];
}

/** Put the one node between what samplers, VAEs and prompts use and where that comes from. @param {any} app @returns {Promise<string>} what was done, in words */
export async function guardWorkflow(app) {
  const nodes = allNodes(app);
  const models = bySource(usesOf(nodes, "MODEL").filter(({ source }) => source.comfyClass !== ONE));
  if (!models.length) return t("There is no model without a guard in this workflow.");
  /** @type {any[]} */
  const added = [];
  const left = { graph: app.canvas.graph, view: viewNow(app) };
  undoable(app, () => {
    for (const [place, uses] of models.entries()) {
      const { source } = uses[0];
      const one = addNode(source.graph, ONE, [source.pos[0], source.pos[1]]);
      const [next] = uses.map(({ node }) => node).sort((a, b) => a.pos[0] - b.pos[0]);
      one.setSize([WIDTH, one.size[1]]);
      one.pos = placeBetween(one, source, next);
      added.push(one);
      put(one, "model", 0, uses);
      if (place) continue;
      for (const [type, name, output] of /** @type {[string, string, number][]} */ ([["CLIP", "clip", 1], ["VAE", "vae", 2]])) {
        const [found] = bySource(usesOf(one.graph.nodes, type).filter((use) => use.source !== one));
        if (found) put(one, name, output, found);
      }
    }
  });
  await showAmong(app, added, added[0].graph.nodes);
  views = { left, made: viewNow(app) };
  return toldOf(added);
}

/** What was added, and inside what: the page enters a subgraph without a word. @param {any[]} added */
function toldOf(added) {
  const [{ graph }] = added;
  const done = added.length > 1 ? t("{count} nodes were added: run the workflow.", { count: added.length }) : t("1 node was added: run the workflow.");
  return graph.isRootGraph ? done : `${done} ${t("The page shows the inside of {name}.", { name: graph.name })}`;
}

/** Take the one node out again, wherever it is: links lead past it. The view before it is back, unless it was moved since. @param {any} app @returns {Promise<string>} what was done, in words */
export async function unguardWorkflow(app) {
  const ones = allNodes(app).filter(({ comfyClass }) => comfyClass === ONE);
  undoable(app, () => {
    for (const one of ones) {
      one.connectInputToOutput();
      one.graph.remove(one);
    }
  });
  if (views && JSON.stringify(views.made) === JSON.stringify(viewNow(app))) {
    await enter(app, views.left.graph);
    setView(app, views.left.view);
  }
  return t("The Halfsafe node was taken out.");
}

/** Lead uses through a node. @param {any} one @param {string} name of its input @param {number} output @param {Use[]} uses */
function put(one, name, output, uses) {
  link(uses[0].source, uses[0].output, one, one.inputs.findIndex((/** @type {any} */ input) => input.name === name));
  for (const { node, slot } of uses) link(one, output, node, slot);
}

/** Open five nodes on the pack's own small model in a workflow of their own. @param {any} app @returns {Promise<string>} what was done, in words */
export async function showMe(app) {
  const graph = await (await fetch(new URL("./show_me.json", import.meta.url))).json();
  const ours = new Set(graph.definitions.subgraphs.map((/** @type {any} */ one) => one.id));
  for (const node of graph.nodes) {
    if (node.title) node.title = t(node.title);
    if (ours.has(node.type)) for (const slot of [...node.inputs, ...node.outputs]) slot.label = t(slot.name);
  }
  await app.loadGraphData(graph, true, true, t("Halfsafe, shown"));
  await enter(app, app.graph);
  setView(app, viewAround(app, app.graph.nodes, 1.5));
  return t("Press Run: left black, right repaired.");
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
async function showAmong(app, all, wanted) {
  const [{ graph }] = all;
  const { canvas } = app;
  const nodes = all.filter((node) => node.graph === graph);
  const entered = enter(app, graph);
  canvas.deselectAll();
  canvas.selectItems(nodes);
  await entered;
  const view = viewNow(app);
  if (view.scale < READABLE || !areInSight(wanted, view, sightOf(app))) setView(app, viewAround(app, nodes));
}

/** Show a graph, once the page has fitted a view of its own to it: 1.47 does so in the next frame. @param {any} app @param {any} graph */
async function enter({ canvas }, graph) {
  if (canvas.graph !== graph) canvas.setGraph(graph);
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
}

/** @typedef {import("./room.mjs").Box} Box */
/** @typedef {{scale: number, offset: number[]}} View */

/** @param {any} app @returns {View} */
function viewNow({ canvas: { ds } }) {
  return { scale: ds.scale, offset: [...ds.offset] };
}

/** @param {any} app @param {View} view */
function setView({ canvas }, { scale, offset }) {
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

/** Whether nodes are seen whole in a view. @param {any[]} nodes @param {View} view @param {ReturnType<typeof sightOf>} sight */
function areInSight(nodes, { scale, offset: [x, y] }, { page, covers }) {
  return nodes.map(boxOf).every(({ left, top, right, bottom }) => {
    const seen = { left: (left + x) * scale, top: (top + y) * scale, right: (right + x) * scale, bottom: (bottom + y) * scale };
    return isIn(seen, page) && covers.every((cover) => isApart(seen, cover, 0));
  });
}

/** The view of nodes and of as many around them, the nearest first, as are read beside them. @param {any} app @param {any[]} nodes @param {number} [largest] scale */
function viewAround(app, nodes, largest = 1) {
  const sight = sightOf(app);
  const [x, y] = middleOf(boundsOf(nodes));
  const far = (/** @type {any} */ node) => Math.hypot(middleOf(boxOf(node))[0] - x, middleOf(boxOf(node))[1] - y);
  let [shown, view] = [nodes, largestView(nodes, sight, largest)];
  for (const other of [...nodes[0].graph.nodes].sort((a, b) => far(a) - far(b))) {
    const wider = largestView([...shown, other], sight, largest);
    if (wider.scale >= READABLE) [shown, view] = [[...shown, other], wider];
  }
  return view;
}

/** @param {any[]} nodes @returns {Box} */
function boundsOf(nodes) {
  const boxes = nodes.map(boxOf);
  const [left, top] = [Math.min(...boxes.map((box) => box.left)), Math.min(...boxes.map((box) => box.top))];
  return { left, top, right: Math.max(...boxes.map((box) => box.right)), bottom: Math.max(...boxes.map((box) => box.bottom)) };
}

/** @param {Box} box */
function middleOf({ left, top, right, bottom }) {
  return [(left + right) / 2, (top + bottom) / 2];
}

/** The largest view in which nodes are seen whole, in the middle or at the top of a part of the page. @param {any[]} nodes @param {ReturnType<typeof sightOf>} sight @param {number} largest @returns {View} */
function largestView(nodes, sight, largest) {
  const { page, covers } = sight;
  const bounds = boundsOf(nodes);
  const ends = (/** @type {"left" | "top" | "bottom"} */ side, /** @type {number} */ end) => [end, ...covers.map((cover) => cover[side])];
  const parts = ends("left", page.right).flatMap((right) => ends("bottom", page.top).flatMap((top) => ends("top", page.bottom).map((bottom) => ({ left: page.left, top, right, bottom }))));
  const [whole, ...others] = parts.flatMap((part) => {
    const [width, height] = [part.right - part.left - 2 * MARGIN, part.bottom - part.top - 2 * MARGIN];
    const scale = Math.min(largest, width / (bounds.right - bounds.left), height / (bounds.bottom - bounds.top));
    const [x, y] = middleOf(part).map((middle, axis) => middle / scale - middleOf(bounds)[axis]);
    return [y, (part.top + MARGIN) / scale - bounds.top].map((down) => ({ scale, offset: [x, down] }));
  });
  const [best] = [whole, ...others].filter((view) => view.scale > 0 && areInSight(nodes, view, sight)).sort((a, b) => b.scale - a.scale);
  return best ?? whole;
}

/** Put Measure Precisions beside the first sampler, on what that one is given. @param {any} app @returns {Promise<string>} what was done, in words */
export async function measureWorkflow(app) {
  const wanted = ["model", "positive", "negative", "latent_image"];
  const linked = (/** @type {any} */ node, /** @type {string} */ name) => node.inputs?.findIndex((/** @type {any} */ input) => input.name === name && input.link !== null) ?? -1;
  const sampler = allNodes(app).find((node) => ["model", "positive", "latent_image"].every((name) => linked(node, name) >= 0) && node.comfyClass !== MEASURE);
  if (!sampler) return t("There is no sampler with a model, a prompt and a latent in this workflow.");
  /** @type {any[]} */
  const added = [];
  undoable(app, () => {
    const [measure, show] = [MEASURE, "PreviewImage"].map((type) => window.LiteGraph.createNode(type));
    show.setSize(CHART);
    const size = [measure.size[0] + GAP + show.size[0], Math.max(measure.size[1], show.size[1])];
    measure.pos = placeBetween({ size, graph: sampler.graph }, sampler, sampler);
    show.pos = [measure.pos[0] + measure.size[0] + GAP, measure.pos[1]];
    for (const node of [measure, show]) sampler.graph.add(node);
    added.push(measure, show);
    for (const name of wanted) {
      const slot = linked(sampler, name);
      if (slot < 0) continue;
      link(sampler.getInputNode(slot), sampler.getInputLink(slot).origin_slot, measure, measure.inputs.findIndex((/** @type {any} */ input) => input.name === name));
    }
    link(measure, 2, show, 0);
  });
  await showAmong(app, added, sampler.graph.nodes);
  return toldOf(added);
}
