// @ts-check
/** *Guard this workflow*, and its way back. */
import { api } from "../../scripts/api.js";
import { filesOf, hasPassed, isFromOutside, joined, lead, loadersOf, nodeAt, originOf, outputsOf, readFlow, takesOf, usesOf, wayOf } from "./flow.mjs";
import { allNodes, enter, MEASURED, RULES, setView, showAmong, undoable, viewNow } from "./graph.mjs";
import { answered } from "./result.mjs";
import { placeAmong } from "./room.mjs";
import { t, whyUnchanged } from "./words.mjs";

const ONE = "HalfsafeAutoPrecision";
/** The width of the workflows' columns, in pixels at scale 1. */
const WIDTH = 320;
/** The property of a node that a button put in, and what this file's button writes there. */
export const PUT_IN = "halfsafe";
const BY_GUARD = "guard";
/** ComfyUI's loaders of models -> the folder of their files, and the input that names one. @type {Record<string, {folder: string, input: string}>} */
const LOADERS = {
  UNETLoader: { folder: "diffusion_models", input: "unet_name" },
  CheckpointLoaderSimple: { folder: "checkpoints", input: "ckpt_name" },
};
/** The inputs that set a dtype, by the names that packs give them. */
const DTYPE = /dtype|precision|^compute$/i;
/** The pack's name in the title of a node. */
const PACK = / ?[(\uff08]Halfsafe[)\uff09]/;

/**
 * @typedef {import("./flow.mjs").Flow} Flow
 * @typedef {import("./flow.mjs").Step} Step
 * @typedef {import("./flow.mjs").Take} Take
 * @typedef {import("./flow.mjs").Origin} Origin
 * @typedef {{type: string, name: string, guards: string[], alone: string}} Kind what is guarded: its type; the input of guards
 *   for it; the nodes that guard it; the one that guards nothing else
 * @typedef {{node: any, slot: number, hosts: any[], from: Map<string, string>, steps: Set<string>}} Place an input that a guard goes before; what it is
 *   given in each copy of its subgraph, and the steps that use that
 * @typedef {{kind: Kind, graph: any, places: Place[], sources: string[], steps: string[]}} Group places in one graph that are given the same
 * @typedef {{type: string, graph: any, groups: Group[]}} Plan a node to put in
 */

/** @type {Kind} */
const MODEL = { type: "MODEL", name: "model", guards: [ONE, "HalfsafeNaNGuard"], alone: ONE };
/** @type {Kind} */
const CLIP = { type: "CLIP", name: "clip", guards: [ONE, "HalfsafeGuardCLIP"], alone: "HalfsafeGuardCLIP" };
/** @type {Kind} */
const VAE = { type: "VAE", name: "vae", guards: [ONE, "HalfsafeGuardVAE"], alone: "HalfsafeGuardVAE" };

/** The view that the last guarding left, and the one it made. @type {{left: {graph: any, view: import("./graph.mjs").View}, made: import("./graph.mjs").View} | null} */
let views = null;

/** Whether *Take the guard out* takes a node out. @param {any} node */
export function isGuard({ comfyClass, properties }) {
  return comfyClass === ONE || properties?.[PUT_IN] === BY_GUARD;
}

/** Whether a step, or a node, guards the model that it is given. @param {{type: string}} step */
export function guardsModel({ type }) {
  return MODEL.guards.includes(type);
}

/** Put guards between what samplers, VAEs and prompts use and where that comes from. @param {any} app @param {boolean} [wasBlack] whether the last picture was black, which the next one is not to be @returns {Promise<import("./result.mjs").Told>} what was done, in words */
export async function guardWorkflow(app, wasBlack = false) {
  /** @type {any[]} */
  const added = [];
  const left = { graph: app.canvas.graph, view: viewNow(app) };
  try {
    const flow = await readFlow(app);
    const { plans, without } = planOf(flow);
    if (!plans.length) return answered(whyNothing(flow), toldOfLeft(without));
    await undoable(app, () => added.push(...plans.map((plan) => put(flow, plan, plans))));
    await showAmong(app, added, added[0].graph.nodes);
    views = { left, made: viewNow(app) };
    const [{ graph }] = added;
    const where = graph.isRootGraph && graph === left.graph ? "" : whereText(graph);
    const dtypes = wasBlack ? [] : await toldOfDtypes(flow, plans);
    return { ...answered(toldOf(added), where, toldOfLeft(without), dtypes.length ? t("The picture will differ a little.") : ""), why: dtypes };
  } catch (error) {
    return whyUnchanged(error);
  }
}

/** @param {Flow} flow */
function whyNothing(flow) {
  const used = [MODEL, CLIP, VAE].some(({ type }) => usesOf(flow, type).length > 0);
  return used ? t("Every model here is guarded already.") : t("This workflow runs no model, VAE or text encoder.");
}

/** Which graph the page shows now: it enters a subgraph, and leaves one, without a word. @param {any} graph */
export function whereText(graph) {
  return graph.isRootGraph ? t("The page has left the subgraph.") : t("The page now shows the subgraph {name}.", { name: graph.name });
}

/** What was added, and inside of what. @param {any[]} added */
function toldOf(added) {
  const count = added.length;
  const inside = new Set(added.map((node) => node.graph).filter((one) => !one.isRootGraph));
  const isAlsoOutside = added.some((node) => node.graph.isRootGraph);
  const several = t("{count} nodes were added: run the workflow.", { count });
  return inside.size && isAlsoOutside ? t("{count} nodes were added, some of them inside of subgraphs: run the workflow.", { count })
    : inside.size > 1 ? t("{count} nodes were added in {subgraphs} subgraphs: run the workflow.", { count, subgraphs: inside.size })
    : count > 1 ? several : t("1 node was added: run the workflow.");
}

/** @param {Take[]} without */
function toldOfLeft(without) {
  const names = [...new Set(without.map(({ step, name }) => `${step.title} (${name})`))];
  return names.length ? t("Not guarded, because there is no link to put a guard into: {names}.", { names: names.join(", ") }) : "";
}

/** Which models compute in another dtype with ComfyUI alone, so that their pictures are others. @param {Flow} flow @param {Plan[]} plans @returns {Promise<string[]>} */
async function toldOfDtypes(flow, plans) {
  const models = plans.filter(({ type }) => type === ONE).flatMap(({ groups: [{ sources, kind }] }) => sources.filter((id) => !setsDtype(flow, id)).flatMap((id) => loadersOf(flow, id, kind.type)));
  const files = [...new Set(models)].map((id) => flow.get(id)).flatMap((step) => {
    const loader = LOADERS[step?.type ?? ""];
    return loader && (step?.given.weight_dtype ?? "default") === "default" ? [[loader.folder, step?.given[loader.input]]] : [];
  });
  if (!files.length) return [];
  const response = await api.fetchApi("/halfsafe/computing", { method: "POST", body: JSON.stringify(files) }).catch(() => null); // the guard is put in already
  /** @type {{file: string, guarded: string, alone: string}[]} */
  const differ = response?.ok ? (await response.json()).files : [];
  return differ.map((one) => t("{file} computes in {guarded} now, with ComfyUI alone in {alone}.", one));
}

/** Whether a step between a model's loader and its use may set what it computes in, as ModelComputeDtype does: a file says nothing of that. @param {Flow} flow @param {string} id */
function setsDtype(flow, id) {
  const loaders = loadersOf(flow, id, MODEL.type);
  return wayOf(flow, id, MODEL.type).some((step) => !loaders.includes(step.id) && Object.keys(step.given).some((name) => DTYPE.test(name)));
}

/** Plan the nodes to put in, the one for the picture first. @param {Flow} flow @returns {{plans: Plan[], without: Take[]}} and what no node can guard */
function planOf(flow) {
  const [models, vaes, clips] = [MODEL, VAE, CLIP].map((kind) => groupsOf(flow, kind));
  /** @type {Plan[]} */
  const plans = models.groups.filter(isComputed(flow)).map((group) => ({ type: ONE, graph: group.graph, groups: [group] }));
  const needs = new Map([...flow].map(([id, step]) => [id, new Set(takesOf(step).map(({ from }) => from))]));
  vaes.groups.sort((a, b) => rankOf(flow, a) - rankOf(flow, b));
  for (const group of [...vaes.groups, ...clips.groups]) {
    const open = plans.filter((plan) => hasRoom(plan, group) && !isCircular(needs, [...plan.groups, group]));
    const plan = open.find((one) => sharesLoader(flow, one, group)) ?? open[0];
    if (plan) {
      plan.groups.push(group);
      makeWait(needs, plan.groups);
    } else {
      plans.push({ type: group.kind.alone, graph: group.graph, groups: [group] });
    }
  }
  return { plans, without: [...models.without, ...vaes.without, ...clips.without] };
}

/** Whether any step of a group calls the model: a scheduler only asks for its noise levels. @param {Flow} flow @returns {(group: Group) => boolean} */
function isComputed(flow) {
  const asks = (/** @type {Step} */ step) => outputsOf(step).length > 0 && outputsOf(step).every((type) => type === "SIGMAS");
  return ({ steps }) => steps.some((id) => !asks(/** @type {Step} */ (flow.get(id))));
}

/** The VAE that makes pictures comes first, the one that makes sound last. @param {Flow} flow @param {Group} group */
function rankOf(flow, { steps }) {
  const makes = steps.flatMap((id) => outputsOf(/** @type {Step} */ (flow.get(id))));
  if (makes.includes("IMAGE")) return 0;
  return makes.includes("AUDIO") ? 2 : 1;
}

/** @param {Plan} plan @param {Group} group */
function hasRoom({ type, graph, groups }, group) {
  return type === ONE && graph === group.graph && groups.every(({ kind }) => kind !== group.kind);
}

/** Whether a node that took all these groups would wait for itself. @param {Map<string, Set<string>>} needs @param {Group[]} groups */
function isCircular(needs, groups) {
  const steps = new Set(groups.flatMap((group) => group.steps));
  const open = groups.flatMap(({ sources }) => sources);
  const seen = new Set(open);
  for (const id of open) {
    if (steps.has(id)) return true;
    for (const before of needs.get(id) ?? []) {
      if (seen.has(before)) continue;
      seen.add(before);
      open.push(before);
    }
  }
  return false;
}

/** Let each use behind one node wait for all that goes into that node. @param {Map<string, Set<string>>} needs @param {Group[]} groups */
function makeWait(needs, groups) {
  const sources = groups.flatMap((group) => group.sources);
  for (const step of groups.flatMap(({ steps }) => steps)) {
    for (const source of sources) needs.get(step)?.add(source);
  }
}

/** @param {Flow} flow @param {Plan} plan @param {Group} group */
function sharesLoader(flow, plan, group) {
  const loaders = plan.groups.flatMap((one) => loadersOfGroup(flow, one));
  return loadersOfGroup(flow, group).some((id) => loaders.includes(id));
}

/** @param {Flow} flow @param {Group} group */
function loadersOfGroup(flow, { sources, kind }) {
  return sources.flatMap((id) => loadersOf(flow, id, kind.type));
}

/** The places where a kind is used without a guard, by what they are given. @param {Flow} flow @param {Kind} kind @returns {{groups: Group[], without: Take[]}} */
function groupsOf(flow, kind) {
  const all = usesOf(flow, kind.type);
  const users = new Set(all.map(({ step }) => step.id)); // what a sampler hands on is guarded before that sampler
  const uses = all.filter(({ from }) => !hasPassed(flow, from, kind.type, ({ id, type }) => kind.guards.includes(type) || users.has(id)));
  const [linked, without] = [uses.filter(hasLink), uses.filter((use) => !hasLink(use))];
  const used = new Set(linked.map(({ step, slot }) => keyOf(step.node, slot)));
  /** @type {Map<string, Place>} */
  const places = new Map();
  for (const { step, slot, from, output } of linked) {
    const place = outermost(step.node, slot, step.hosts, used);
    const key = keyOf(place.node, place.slot);
    const known = places.get(key) ?? { ...place, from: new Map(), steps: new Set() };
    known.from.set(place.hosts.map(({ id }) => id).join(":"), `${from} ${output}`);
    known.steps.add(step.id);
    places.set(key, known);
  }
  return { groups: grouped(kind, [...places.values()]), without };
}

/** @param {Take} use */
function hasLink({ step, slot }) {
  return originOf(step.node, slot) !== null;
}

/** @param {any} node @param {number} slot */
function keyOf(node, slot) {
  return `${node.graph.id} ${node.id} ${slot}`;
}

/**
 * The input farthest out that leads to uses alone: one guard there does for all that is inside of a subgraph.
 * @param {any} node @param {number} slot @param {any[]} hosts @param {Set<string>} used the keys of all uses
 */
function outermost(node, slot, hosts, used) {
  const place = { node, slot, hosts: [...hosts] };
  for (;;) {
    const { graph } = place.node;
    const origin = /** @type {Origin} */ (originOf(place.node, place.slot));
    if (!place.hosts.length || !isFromOutside(graph, origin)) return place;
    if (!graph.inputNode.slots[origin.slot].getLinks().every((/** @type {any} */ link) => endsInUses(graph, link, used))) return place;
    place.node = place.hosts.pop();
    place.slot = origin.slot;
  }
}

/** @param {any} graph @param {any} link @param {Set<string>} used @returns {boolean} */
function endsInUses(graph, link, used) {
  const node = graph.getNodeById(link.target_id);
  if (!node.subgraph) return used.has(keyOf(node, link.target_slot));
  return node.subgraph.inputNode.slots[link.target_slot].getLinks().every((/** @type {any} */ inner) => endsInUses(node.subgraph, inner, used));
}

/** @param {Kind} kind @param {Place[]} places @returns {Group[]} */
function grouped(kind, places) {
  /** @type {Map<string, Group>} */
  const groups = new Map();
  for (const place of places) {
    const { graph } = place.node;
    const given = [...place.from].sort(([a], [b]) => a.localeCompare(b));
    const key = JSON.stringify([graph.id, given]);
    const group = groups.get(key) ?? { kind, graph, places: [], sources: given.map(([, source]) => source.split(" ")[0]), steps: [] };
    group.places.push(place);
    group.steps.push(...place.steps);
    groups.set(key, group);
  }
  return [...groups.values()];
}

/** Put a planned node in. @param {Flow} flow @param {Plan} plan @param {Plan[]} plans all of them */
function put(flow, plan, plans) {
  const { type, graph, groups } = plan;
  const node = window.LiteGraph.createNode(type);
  node.properties[PUT_IN] = BY_GUARD;
  const name = nameOf(flow, plan, plans);
  if (name) node.title = titled(node, name);
  graph.add(node);
  node.setSize([Math.max(WIDTH, node.computeSize()[0]), node.size[1]]); // a title that is longer widens it when the workflow is opened
  const origins = groups.map(({ places: [{ node: next, slot }] }) => /** @type {Origin} */ (originOf(next, slot)));
  node.pos = placeAmong(node, groups.map(({ places }, place) => ({ from: nodeAt(graph, origins[place]), to: places.map((one) => one.node) })));
  for (const [index, { kind, places }] of groups.entries()) {
    const input = node.inputs.findIndex((/** @type {any} */ { name }) => name === kind.name);
    const output = node.outputs.findIndex((/** @type {any} */ one) => one.type === kind.type);
    lead(graph, origins[index], node, input);
    for (const place of places) {
      place.node.disconnectInput(place.slot);
      lead(graph, { id: node.id, slot: output, after: undefined }, place.node, place.slot);
    }
  }
  return node;
}

/** A node's title with what it is for in the place of the pack's name. @param {any} node @param {string} name */
export function titled({ title }, name) {
  return `${title.replace(PACK, "")} (${name})`;
}

/** What tells a planned node from others of its type: the model's file, else its LoRAs too, else the subgraph. @param {Flow} flow @param {Plan} plan @param {Plan[]} plans */
function nameOf(flow, plan, plans) {
  const others = plans.filter((other) => other !== plan && other.type === plan.type);
  if (!others.length) return "";
  const file = (/** @type {Plan} */ one) => filesOfPlan(flow, one)[0] ?? "";
  const files = (/** @type {Plan} */ one) => filesOfPlan(flow, one).join(" + ");
  const place = (/** @type {Plan} */ one) => [file(one), one.graph.name].filter(Boolean).join(", ");
  const telling = [file, files, place].find((name) => others.every((other) => name(other) !== name(plan)));
  return (telling ?? file)(plan);
}

/** @param {Flow} flow @param {Plan} plan */
function filesOfPlan(flow, { groups: [{ sources, kind }] }) {
  return [...new Set(sources.flatMap((id) => filesOf(flow, id, kind.type)))];
}

/** Take the guards out again, wherever they are: links lead past them. The view before is back, unless it was moved since. @param {any} app @returns {Promise<string>} what was done, in words */
export async function unguardWorkflow(app) {
  const guards = allNodes(app).filter(isGuard);
  if (!guards.length) return t("There is no guard here.");
  try {
    await undoable(app, () => guards.forEach(takeOut));
  } catch (error) {
    return whyUnchanged(error);
  }
  if (views && JSON.stringify(views.made) === JSON.stringify(viewNow(app))) {
    await enter(app, views.left.graph);
    setView(app, views.left.view);
  }
  return guards.length > 1 ? t("{count} nodes were removed.", { count: guards.length }) : t("The Halfsafe node was removed.");
}

/** @param {any} node */
function takeOut(node) {
  const { graph } = node;
  for (const { type, name } of [MODEL, CLIP, VAE]) {
    const input = node.inputs.findIndex((/** @type {any} */ one) => one.name === name);
    const output = node.outputs.find((/** @type {any} */ one) => one.type === type);
    const origin = input < 0 ? null : originOf(node, input);
    if (!origin) continue;
    for (const id of [...(output.links ?? [])]) leadPast(graph, origin, graph.getLink(id));
  }
  const slot = node.findInputSlot("rules");
  const rules = slot < 0 ? null : node.getInputNode(slot);
  graph.remove(node);
  if (rules && isLeftByUse(rules)) graph.remove(rules);
}

/** Whether a node holds rules of *Use this* alone, and nothing takes them now. @param {any} node */
function isLeftByUse({ comfyClass, widgets, outputs }) {
  const [preset, rules] = ["preset", "rules"].map((wanted) => widgets?.find((/** @type {any} */ { name }) => name === wanted)?.value);
  return comfyClass === RULES && preset === "none" && rules.split("\n").filter(Boolean).every((/** @type {string} */ line) => line.endsWith(MEASURED)) && !outputs.some((/** @type {any} */ { links }) => links?.length);
}

/** @param {any} graph @param {Origin} origin @param {any} link that began at a guard */
function leadPast(graph, origin, link) {
  const next = graph.getNodeById(link.target_id);
  if (next) {
    next.disconnectInput(link.target_slot);
    lead(graph, origin, next, link.target_slot);
    return;
  }
  const from = nodeAt(graph, origin); // to the outputs of the subgraph
  joined(graph.outputNode.slots[link.target_slot], from.outputs[origin.slot], from);
}
