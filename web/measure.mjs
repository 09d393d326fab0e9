// @ts-check
/** *Measure my card*, and its way back. */
import { fileOf, lead, loadersOf, originOf, outputsOf, readFlow, takesOf, typeOf } from "./flow.mjs";
import { allNodes, link, RUNS, showAmong, showNodes, undoable } from "./graph.mjs";
import { PUT_IN, titled, whereText } from "./guard.mjs";
import { placeBetween } from "./room.mjs";
import { t, together } from "./words.mjs";

const MEASURE = "HalfsafeMeasurePrecisions";
const BY_MEASURE = "measure";
/** The size at which the chart of Measure Precisions is read. */
const CHART = [520, 300];
const GAP = 40;
/** What Measure Precisions samples with where it is given a negative prompt. */
const CFG = 4;
const MADE = ["LATENT", "IMAGE", "VIDEO", "AUDIO"];

/**
 * @typedef {import("./flow.mjs").Flow} Flow
 * @typedef {import("./flow.mjs").Step} Step
 * @typedef {import("./flow.mjs").Take} Take
 * @typedef {{model: Take, positive: Take, negative: Take | null, latent_image: Take, left: Take[], cfg: any}} Sampling what a sampler is given; prompts of
 *   its guider that are left out
 * @typedef {{text: string, choices: {name: string, act: () => Promise<Told>}[]}} Question
 * @typedef {string | Question} Told
 */

/** Whether *Take Measure out* takes a node out. @param {any} node */
export function isMeasure({ properties }) {
  return properties?.[PUT_IN] === BY_MEASURE;
}

/**
 * Put Measure Precisions beside a sampler, on what that one is given.
 * @param {any} app @param {string} [chosen] the model to measure, by its name; asked for where several are sampled
 * @returns {Promise<Told>} what was done, in words
 */
export async function measureWorkflow(app, chosen) {
  try {
    const present = allNodes(app).filter(({ comfyClass, mode }) => comfyClass === MEASURE && mode === RUNS);
    if (present.length) {
      await showNodes(app, present);
      return t("Measure Precisions is in this workflow already: run the workflow.");
    }
    const flow = await readFlow(app);
    const models = samplingsByModel(flow);
    if (!models.size) return whyNone(flow);
    if (models.size > 1 && chosen === undefined) return questionOf(app, [...models.keys()]);
    const [first] = models.keys();
    const name = chosen ?? first;
    return await put(app, models.get(name) ?? models.get(first), models.size > 1 ? name : "");
  } catch (error) {
    return t("Nothing was changed: {why}", { why: String(/** @type {Error} */ (error).message) });
  }
}

/** What can be measured, by the name of the model: the first sampling of each. @param {Flow} flow @returns {Map<string, Sampling>} */
function samplingsByModel(flow) {
  const models = new Map();
  const all = [...flow.values()].flatMap((step) => samplingsOf(flow, step)).filter(isLinked);
  for (const sampling of all) {
    const copies = all.filter(({ model }) => model.step.node === sampling.model.step.node && model.slot === sampling.model.slot); // of its subgraph
    const name = [...new Set(copies.map(({ model }) => nameOf(flow, model)))].join(" + ");
    if (!models.has(name)) models.set(name, sampling);
  }
  return models;
}

/** What a step samples, once for each model it calls; nothing where it is no sampler that can be read. @param {Flow} flow @param {Step} step @returns {Sampling[]} */
function samplingsOf(flow, step) {
  if (step.type === MEASURE || !outputsOf(step).includes("LATENT")) return [];
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
  if (!second) return [{ model, positive, negative: cfg === 1 ? null : negative, latent_image: latent, left, cfg }];
  const alone = { latent_image: latent, left, cfg, negative: null }; // DualModelGuider: a prompt for each model
  return [{ ...alone, model, positive }, ...(negative ? [{ ...alone, model: second, positive: negative }] : [])];
}

/** The inputs of a sampling that Measure Precisions has too. @param {Sampling} sampling */
function wantedOf({ model, positive, negative, latent_image }) {
  return Object.entries({ model, positive, latent_image, ...(negative ? { negative } : {}) });
}

/** Whether all that is wanted has a link, in one graph. @param {Sampling} sampling */
function isLinked(sampling) {
  const { graph } = sampling.latent_image.step.node;
  return wantedOf(sampling).every(([, { step, slot }]) => step.node.graph === graph && originOf(step.node, slot));
}

/** @param {Flow} flow */
function whyNone(flow) {
  const steps = [...flow.values()];
  const unlinked = steps.find((step) => samplingsOf(flow, step).length);
  if (unlinked) return t("Measure cannot read {sampler}: its model, prompt or latent is not linked in the same graph.", { sampler: unlinked.type });
  const calls = (/** @type {Step} */ step) => takesOf(step).some((take) => ["MODEL", "GUIDER"].includes(typeOf(flow, take)));
  const sampler = steps.find((step) => calls(step) && outputsOf(step).some((type) => MADE.includes(type)));
  return sampler ? t("Measure does not support {sampler}, the sampler of this workflow.", { sampler: sampler.type }) : t("This workflow has no sampler with a model.");
}

/** The files that a model was loaded from. @param {Flow} flow @param {Take} model */
function nameOf(flow, { from }) {
  return loadersOf(flow, from, "MODEL").map((id) => fileOf(flow, id) || flow.get(id)?.title).join(" + ");
}

/** @param {any} app @param {string[]} models @returns {Question} */
function questionOf(app, models) {
  const choices = models.map((name) => ({ name, act: () => measureWorkflow(app, name) }));
  return { text: t("{count} models are sampled here. Which one should be measured?", { count: models.length }), choices };
}

/** @param {any} app @param {Sampling} sampling @param {string} name of the model, where there are several */
async function put(app, sampling, name) {
  const sampler = sampling.latent_image.step.node;
  const { graph } = sampler;
  const [measure, show] = [MEASURE, "PreviewImage"].map((type) => window.LiteGraph.createNode(type));
  await undoable(app, () => {
    show.setSize(CHART);
    const size = [measure.size[0] + GAP + show.size[0], Math.max(measure.size[1], show.size[1])];
    measure.pos = placeBetween({ size, graph }, sampler, sampler);
    show.pos = [measure.pos[0] + measure.size[0] + GAP, measure.pos[1]];
    if (name) measure.title = titled(measure, name);
    for (const node of [measure, show]) {
      node.properties[PUT_IN] = BY_MEASURE;
      graph.add(node);
    }
    for (const [input, { step, slot }] of wantedOf(sampling)) {
      const origin = /** @type {import("./flow.mjs").Origin} */ (originOf(step.node, slot));
      lead(graph, origin, measure, measure.inputs.findIndex((/** @type {any} */ one) => one.name === input));
    }
    link(measure, 2, show, 0);
  });
  await showAmong(app, [measure, show], graph.nodes);
  const where = graph.isRootGraph ? "" : whereText(graph);
  return together([t("2 nodes were added: press the blue arrow above them."), where, ...notUsed(sampling)]);
}

/** What is sampled with another value than in the workflow. @param {Sampling} sampling */
function notUsed({ negative, cfg, left }) {
  const told = [];
  if (negative && typeof cfg === "number" && cfg !== CFG) told.push(t("It measures with cfg {used}, not with this sampler's {cfg}.", { used: CFG, cfg }));
  if (left.length) told.push(t("It does not include {names}.", { names: left.map(({ name }) => name).join(", ") }));
  return told;
}

/** Take out what *Measure my card* put in. @param {any} app @returns {Promise<string>} what was done, in words */
export async function unmeasureWorkflow(app) {
  await undoable(app, () => {
    for (const node of allNodes(app).filter(isMeasure)) node.graph.remove(node);
  });
  return t("Measure Precisions was removed.");
}
