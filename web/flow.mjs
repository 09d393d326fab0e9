// @ts-check
/** The part of a workflow that runs: ComfyUI's prompt, with subgraphs expanded, without bypassed, muted and display-only nodes. */
import { rootOf } from "./graph.mjs";
import { t } from "./words.mjs";

const OURS = "Halfsafe";
/** Classes that write a model to a file: nothing is computed there. */
const SAVES = /Save$/;
/** Nodes of cg-use-everywhere that send their inputs to every node. */
const BROADCASTS = /Everywhere/;
const MODEL_FILE = /\.(safetensors|sft|gguf|ckpt|pt|pth|bin)$/i;

/**
 * @typedef {{id: string, type: string, title: string, given: Record<string, any>, node: any, hosts: any[]}} Step a node of the prompt: what it is
 *   given by name, its node on the page, and the nodes of the subgraphs that this one lies in, the outermost first
 * @typedef {Map<string, Step>} Flow by id, such as "12:3"
 * @typedef {{step: Step, name: string, slot: number, from: string, output: number}} Take an input of a step that another step gives
 * @typedef {{model: Take, positive: Take, negative: Take | null, latent_image: Take, left: Take[], cfg: any, cfgFrom?: Take}} Sampling what a sampler is given; prompts
 *   of its guider that are left out; its cfg, as the prompt has it, and the input of that
 * @typedef {{id: any, slot: number, after: any}} Origin where a link begins in its graph: a node's output or an input of the subgraph; the last
 *   reroute of the link
 */

/** @param {any} app @returns {Promise<Flow>} */
export async function readFlow(app) {
  const { output } = await app.graphToPrompt();
  /** @type {Step[]} */
  const steps = Object.entries(output).map(([id, { class_type: type, inputs, _meta: meta }]) => {
    const place = onPage(rootOf(app), id);
    const known = type ?? place.node?.type ?? ""; // a pack that is absent
    return { id, type: known, title: meta?.title ?? known, given: inputs, ...place };
  });
  const runs = idsThatRun(steps);
  return new Map(steps.filter(({ id }) => runs.has(id)).map((step) => [step.id, step]));
}

/** The ids of outputs, and of all that leads to them: ComfyUI runs nothing else. @param {Step[]} steps */
function idsThatRun(steps) {
  const byId = new Map(steps.map((step) => [step.id, step]));
  const open = steps.filter(isOutput).map(({ id }) => id);
  const runs = new Set(open);
  for (const id of open) {
    const step = byId.get(id);
    for (const { from } of step ? takesOf(step) : []) {
      if (runs.has(from)) continue;
      runs.add(from);
      open.push(from);
    }
  }
  return runs;
}

/** @param {Step} step @returns {boolean} */
function isOutput({ node, type }) {
  return BROADCASTS.test(type) || (node?.constructor.nodeData?.output_node ?? true);
}

/** The node of an id such as "12:3", null for one that the page makes for the prompt alone. @param {any} root @param {string} id */
function onPage(root, id) {
  const hosts = [];
  let graph = root;
  const path = id.split(":");
  const last = path.pop();
  for (const part of path) {
    const host = graph?.getNodeById(part);
    hosts.push(host);
    graph = host?.subgraph;
  }
  return { node: graph?.getNodeById(last) ?? null, hosts };
}

/** @param {Step} step @returns {Take[]} */
export function takesOf(step) {
  const linked = Object.entries(step.given).filter(([, value]) => Array.isArray(value));
  return linked.map(([name, [from, output]]) => {
    const slot = step.node?.inputs?.findIndex((/** @type {any} */ input) => input.name === name) ?? -1;
    return { step, name, slot, from: String(from), output };
  });
}

/** The type of what an input takes: its own, or that of what is given where it takes any. @param {Flow} flow @param {Take} take @returns {string} */
export function typeOf(flow, { step, slot, from, output }) {
  const type = step.node?.inputs?.[slot]?.type;
  if (type && type !== "*") return type;
  return flow.get(from)?.node?.outputs?.[output]?.type ?? "*";
}

/** Whether a step hands a value of a type on to others. @param {Step} step @param {string} type */
function passesOn(step, type) {
  return outputsOf(step).some((output) => output === type || output === "*");
}

/** Whether a step samples: some samplers hand their model and VAE on too. @param {Step} step */
function samples(step) {
  const inputs = (step.node?.inputs ?? []).map((/** @type {any} */ { type }) => type);
  return ["MODEL", "CONDITIONING", "LATENT"].every((type) => inputs.includes(type)) && outputsOf(step).includes("LATENT");
}

/** The types of a step's outputs. @param {Step} step @returns {string[]} */
export function outputsOf(step) {
  return (step.node?.outputs ?? []).map((/** @type {any} */ { type }) => type);
}

/** The places where a value of a type is used. @param {Flow} flow @param {string} type @returns {Take[]} */
export function usesOf(flow, type) {
  const uses = (/** @type {Step} */ step) => samples(step) || !passesOn(step, type);
  const steps = [...flow.values()].filter((step) => !step.type.startsWith(OURS) && !SAVES.test(step.type));
  return steps.filter(uses).flatMap(takesOf).filter((take) => {
    const own = take.step.node?.inputs?.[take.slot]?.type;
    return own === type || ((own === undefined || BROADCASTS.test(take.step.type)) && typeOf(flow, take) === type);
  });
}

/** What a step samples, once for each model it calls; nothing where it is no sampler that can be read. @param {Flow} flow @param {Step} step @returns {Sampling[]} */
export function samplingsOf(flow, step) {
  if (step.type.startsWith(OURS) || !outputsOf(step).includes("LATENT")) return [];
  const of = (/** @type {Step} */ one, /** @type {string} */ type) => takesOf(one).filter((take) => typeOf(flow, take) === type);
  const [latent] = of(step, "LATENT");
  const [guider] = of(step, "GUIDER");
  const holder = guider ? flow.get(guider.from) : step;
  if (!latent || !holder) return [];
  const prompts = of(holder, "CONDITIONING");
  const negative = prompts.find(({ name }) => name === "negative") ?? null;
  const [positive, ...left] = prompts.filter((prompt) => prompt !== negative);
  const [model, second] = of(holder, "MODEL");
  if (!model || !positive) return [];
  const cfg = holder.given.cfg ?? holder.given.cfg_conds;
  const cfgFrom = takesOf(holder).find(({ name }) => name === "cfg");
  if (!second) return [{ model, positive, negative: cfg === 1 ? null : negative, latent_image: latent, left, cfg, cfgFrom }];
  const alone = { latent_image: latent, left, cfg, negative: null }; // DualModelGuider: a prompt for each model
  return [{ ...alone, model, positive }, ...(negative ? [{ ...alone, model: second, positive: negative }] : [])];
}

/** What a step makes a value of a type from. @param {Flow} flow @param {string} id @param {string} type @returns {string[]} ids */
function madeFrom(flow, id, type) {
  const step = flow.get(id);
  if (!step) return [];
  return takesOf(step).filter((take) => typeOf(flow, take) === type).map(({ from }) => from);
}

/** The steps that a value of a type began at: loaders. @param {Flow} flow @param {string} id @param {string} type @returns {string[]} ids */
export function loadersOf(flow, id, type) {
  const before = madeFrom(flow, id, type);
  if (!before.length) return [id];
  return [...new Set(before.flatMap((from) => loadersOf(flow, from, type)))];
}

/** The steps that a value of a type came through, the one that gives it first. @param {Flow} flow @param {string} id @param {string} type @returns {Step[]} */
export function wayOf(flow, id, type) {
  const step = flow.get(id);
  return step ? [step, ...madeFrom(flow, id, type).flatMap((from) => wayOf(flow, from, type))] : [];
}

/** Whether a value passed a wanted step, on every way that leads to it. @param {Flow} flow @param {string} id @param {string} type @param {(step: Step) => boolean} wanted @returns {boolean} */
export function hasPassed(flow, id, type, wanted) {
  const step = flow.get(id);
  if (step && wanted(step)) return true;
  const before = madeFrom(flow, id, type);
  return before.length > 0 && before.every((from) => hasPassed(flow, from, type, wanted));
}

/** The name of the file that a loader reads, without folder and ending; "" where none is named. @param {Flow} flow @param {string} id */
export function fileOf(flow, id) {
  const file = Object.values(flow.get(id)?.given ?? {}).find((value) => typeof value === "string" && MODEL_FILE.test(value)) ?? "";
  return file.split(/[\\/]/).at(-1).replace(MODEL_FILE, "");
}

/** The files that a value of a type was made from: that of its loader, and of LoRAs on the way. @param {Flow} flow @param {string} id @param {string} type @returns {string[]} */
export function filesOf(flow, id, type) {
  const files = [...madeFrom(flow, id, type).flatMap((from) => filesOf(flow, from, type)), fileOf(flow, id)];
  return [...new Set(files)].filter(Boolean);
}

/** Where the link of a node's input begins, null where the page has no link for it. @param {any} node @param {number} slot @returns {Origin | null} */
export function originOf(node, slot) {
  const link = node?.graph?.getLink(node.inputs[slot]?.link);
  return link ? { id: link.origin_id, slot: link.origin_slot, after: link.parentId } : null;
}

/** Whether an origin is an input of the subgraph. @param {any} graph @param {Origin} origin */
export function isFromOutside(graph, origin) {
  return graph.inputNode !== undefined && origin.id === graph.inputNode.id;
}

/** The node that a link begins at, which may be the one of the subgraph's inputs. @param {any} graph @param {Origin} origin */
export function nodeAt(graph, origin) {
  return isFromOutside(graph, origin) ? graph.inputNode : graph.getNodeById(origin.id);
}

/** Link an origin to an input of a node in its graph. @param {any} graph @param {Origin} origin @param {any} node @param {number} slot */
export function lead(graph, origin, node, slot) {
  const from = nodeAt(graph, origin);
  const input = node.inputs[slot];
  const made = isFromOutside(graph, origin) ? joined(from.slots[origin.slot], input, node, origin.after) : from.connectSlots(from.outputs[origin.slot], node, input, origin.after);
  if (!made) throw new Error(t("{node} accepts no link at {input}.", { node: node.title, input: input.name }));
}

/** Link a slot of a subgraph's border. @param {any} border @param {...any} given */
export function joined(border, ...given) {
  return border.connect.apply(border, given); // the registry takes a plain call of it for a socket's
}
