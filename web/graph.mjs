// @ts-check
import { placeBetween } from "./room.mjs";
import { t } from "./words.mjs";
/** Changes of the open workflow, each of them one step of the page's undo. */

const RULES = "HalfsafeLayerRules";
const ONE = "HalfsafeAutoPrecision";
const PLANNERS = [ONE, "HalfsafeComputeDtype"];
/** The mode of a node that is neither muted nor bypassed. */
const RUNS = 0;
const MEASURE = "HalfsafeMeasurePrecisions";
const GAP = 40;
/** The workflows' columns are as wide, in pixels at scale 1. */
const WIDTH = 320;
/** The least scale at which a node is read. */
const READABLE = 0.5;
const OURS = "Halfsafe";

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

/** Put the one node between what samplers, VAEs and prompts use and where that comes from. @param {any} app @param {HTMLElement | null} sidebar what covers the canvas at its left @returns {string} what was done, in words */
export function guardWorkflow(app, sidebar) {
  const nodes = allNodes(app);
  const models = bySource(usesOf(nodes, "MODEL").filter(({ source }) => source.comfyClass !== ONE));
  if (!models.length) return t("There is no model without a guard in this workflow.");
  /** @type {any[]} */
  const added = [];
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
  showNodes(app, added, sidebar);
  return added.length > 1 ? t("{count} nodes were added: run the workflow.", { count: added.length }) : t("1 node was added: run the workflow.");
}

/** Take the one node out again, wherever it is: links lead past it. @param {any} app @returns {string} what was done, in words */
export function unguardWorkflow(app) {
  const ones = allNodes(app).filter(({ comfyClass }) => comfyClass === ONE);
  undoable(app, () => {
    for (const one of ones) {
      one.connectInputToOutput();
      one.graph.remove(one);
    }
  });
  return t("The Halfsafe node was taken out.");
}

/** Lead uses through a node. @param {any} one @param {string} name of its input @param {number} output @param {Use[]} uses */
function put(one, name, output, uses) {
  link(uses[0].source, uses[0].output, one, one.inputs.findIndex((/** @type {any} */ input) => input.name === name));
  for (const { node, slot } of uses) link(one, output, node, slot);
}

/** Open five nodes on the pack's own small model in a workflow of their own. @param {any} app @param {HTMLElement | null} sidebar what covers the canvas at its left @returns {Promise<string>} what was done, in words */
export async function showMe(app, sidebar) {
  const graph = await (await fetch(new URL("./show_me.json", import.meta.url))).json();
  const ours = new Set(graph.definitions.subgraphs.map((/** @type {any} */ one) => one.id));
  for (const node of graph.nodes) {
    if (node.title) node.title = t(node.title);
    if (ours.has(node.type)) for (const slot of [...node.inputs, ...node.outputs]) slot.label = t(slot.name);
  }
  graph.extra = { ...graph.extra, ds: wholeBeside(app, graph.nodes, sidebar) };
  await app.loadGraphData(graph, true, true, t("Halfsafe, shown"));
  return t("Press Run: one picture as it is, black, and one where NaN Guard repeats the step that overflows.");
}

/** Select nodes and bring them into view: those of the first one's graph, as a page shows one graph. @param {any} app @param {any[]} all @param {HTMLElement | null} sidebar */
export function showNodes(app, all, sidebar) {
  const { canvas } = app;
  const nodes = all.filter(({ graph }) => graph === all[0].graph);
  if (canvas.graph !== all[0].graph) canvas.setGraph(all[0].graph);
  canvas.deselectAll();
  canvas.selectItems(nodes);
  if (areInSight(canvas, nodes, sidebar)) return;
  const { scale, offset } = wholeBeside(app, nodes, sidebar);
  canvas.ds.scale = scale;
  [canvas.ds.offset[0], canvas.ds.offset[1]] = offset;
  canvas.setDirty(true, true);
}

/** Whether nodes are seen whole, and large enough to be read. @param {any} canvas @param {any[]} nodes @param {HTMLElement | null} sidebar what covers the canvas at its left */
function areInSight({ canvas, ds }, nodes, sidebar) {
  const page = canvas.getBoundingClientRect();
  const least = Math.max(page.left, sidebar?.getBoundingClientRect().right ?? 0);
  return ds.scale >= READABLE && nodes.every(({ pos: [x, y], size: [width, height] }) => {
    const [left, right, top, bottom] = [x, x + width, y, y + height].map((at, place) => (at + ds.offset[place < 2 ? 0 : 1]) * ds.scale);
    return page.left + left >= least && page.left + right <= page.right && top >= GAP && page.top + bottom <= page.bottom;
  });
}

/**
 * The view that shows all nodes where the canvas can be seen, as workflows keep it: a page fits a view of its own to those without one.
 * @param {any} app @param {{pos: number[], size: number[]}[]} nodes @param {HTMLElement | null} sidebar what covers the canvas at its left
 */
function wholeBeside(app, nodes, sidebar) {
  const page = app.canvas.canvas.getBoundingClientRect();
  const [first, last] = [0, 1].map((end) => [0, 1].map((side) => Math[end ? "max" : "min"](...nodes.map(({ pos, size }) => pos[side] + end * size[side]))));
  const covered = Math.max((sidebar?.getBoundingClientRect().right ?? 0) - page.left, 0);
  const scale = Math.min(1, (page.width - covered - 2 * GAP) / (last[0] - first[0]), (page.height - 4 * GAP) / (last[1] - first[1]));
  return { scale, offset: [(covered + GAP) / scale - first[0], 3 * GAP / scale - first[1]] };
}

/** Put Measure Precisions beside the first sampler, on what that one is given. @param {any} app @param {HTMLElement | null} sidebar @returns {string} what was done, in words */
export function measureWorkflow(app, sidebar) {
  const wanted = ["model", "positive", "negative", "latent_image"];
  const linked = (/** @type {any} */ node, /** @type {string} */ name) => node.inputs?.findIndex((/** @type {any} */ input) => input.name === name && input.link !== null) ?? -1;
  const sampler = allNodes(app).find((node) => ["model", "positive", "latent_image"].every((name) => linked(node, name) >= 0) && node.comfyClass !== MEASURE);
  if (!sampler) return t("There is no sampler with a model, a prompt and a latent in this workflow.");
  /** @type {any} */
  let measure = null;
  undoable(app, () => {
    const below = Math.max(...sampler.graph.nodes.map((/** @type {any} */ other) => other.pos[1] + other.size[1]));
    measure = addNode(sampler.graph, MEASURE, [sampler.pos[0], below + GAP * 2]);
    for (const name of wanted) {
      const slot = linked(sampler, name);
      if (slot < 0) continue;
      link(sampler.getInputNode(slot), sampler.getInputLink(slot).origin_slot, measure, measure.inputs.findIndex((/** @type {any} */ input) => input.name === name));
    }
    const show = addNode(sampler.graph, "PreviewImage", [sampler.pos[0] + measure.size[0] + GAP, below + GAP * 2]);
    link(measure, 2, show, 0);
  });
  showNodes(app, [measure], sidebar);
  return t("{count} nodes were added: run the workflow.", { count: 2 });
}
