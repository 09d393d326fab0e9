// @ts-check
/** *Measure my card*, its way back, and *Use this*, also of what the one node offers. */
import { api } from "../../scripts/api.js";
import { fileOf, lead, loadersOf, originOf, outputsOf, readFlow, samplingsOf, takesOf, typeOf, usesOf, wayOf } from "./flow.mjs";
import { allNodes, link, listOf, MEASURED, outputOf, putRules, RUNS, setWidget, showAmong, showNodes, undoable } from "./graph.mjs";
import { PUT_IN, titled, whereText } from "./guard.mjs";
import { bytesIn, canBeHalved, inOneStep, isHalved, loadInstead } from "./memory.mjs";
import { answered, resultIn } from "./result.mjs";
import { placeBeside } from "./room.mjs";
import { sizeText, t, together, whyUnchanged } from "./words.mjs";

const MEASURE = "HalfsafeMeasurePrecisions";
const BY_MEASURE = "measure";
/** The size at which the chart of Measure Precisions is read. */
const CHART = [560, 400];
const GAP = 40;
const OURS = ["HalfsafeLoadDiffusionModel", "HalfsafeLoadCheckpoint"];
const COMPUTE_DTYPE = "HalfsafeComputeDtype";
const ONE = "HalfsafeAutoPrecision";
const LAYER_RULES = "HalfsafeLayerRules";
/** The goals of the one node that compute as loaders do with compute `auto`. */
const AS_AUTO = ["balanced", "memory"];
/** The one node's `storage` where it quantizes nothing. */
const AS_LOADED = "as loaded";
/** Values of ComfyUI's `weight_dtype` -> the storage of ours that takes as much. @type {Record<string, string>} */
const CAST_TO = { fp8_e4m3fn: "fp8_e4m3fn", fp8_e4m3fn_fast: "fp8_e4m3fn", fp8_e5m2: "fp8_e5m2" };
/** Storages of fewer than 16 bits, as a loader's badge has them. */
const QUANTIZED = /^(fp8_e4m3fn|fp8_e5m2|int8|w6a8|w4a8|nvfp4|mxfp8)$/;
/** The factor over the present memory up to which a setting is put in without a question. */
const MORE = 1.03;
const MADE = ["LATENT", "IMAGE", "VIDEO", "AUDIO"];

/**
 * @typedef {import("./flow.mjs").Flow} Flow
 * @typedef {import("./flow.mjs").Step} Step
 * @typedef {import("./flow.mjs").Take} Take
 * @typedef {import("./flow.mjs").Sampling} Sampling
 * @typedef {{storage: string, compute: string, rules: string}} Use options of a loader, and settings of a rule that computes so; the one node offers a storage alone
 * @typedef {import("./result.mjs").Card} Card
 * @typedef {import("./result.mjs").Told} Told
 */

/** Whether *Take Measure out* takes a node out: Measure Precisions, and the chart that it is shown in. @param {any} node */
export function isMeasure(node) {
  return node.properties?.[PUT_IN] === BY_MEASURE && (node.comfyClass === MEASURE || node.getInputNode(0)?.comfyClass === MEASURE);
}

/** Whether a node is a chart whose Measure Precisions was deleted by hand. @param {any} node */
function isLeftChart(node) {
  return node.properties?.[PUT_IN] === BY_MEASURE && node.comfyClass !== MEASURE && !node.getInputNode(0);
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

/** @param {any} app @param {string[]} models @returns {Card} */
function questionOf(app, models) {
  const choices = models.map((name) => ({ name, act: () => measureWorkflow(app, name) }));
  return { headline: t("{count} models are sampled here. Which one should be measured?", { count: models.length }), choices };
}

/** @param {any} app @param {Sampling} sampling @param {string} name of the model, where there are several */
async function put(app, sampling, name) {
  const sampler = sampling.latent_image.step.node;
  const { graph } = sampler;
  const [measure, show] = [MEASURE, "PreviewImage"].map((type) => window.LiteGraph.createNode(type));
  await undoable(app, () => {
    for (const left of allNodes(app).filter(isLeftChart)) left.graph.remove(left);
    show.setSize(CHART);
    if (name) measure.title = titled(measure, name);
    show.title = t("Chart of Measure Precisions");
    measure.setSize([Math.max(measure.size[0], measure.computeSize()[0]), measure.size[1]]); // as wide as its title makes it when the workflow is opened
    const size = [measure.size[0] + GAP + show.size[0], Math.max(measure.size[1], show.size[1])];
    measure.pos = placeBeside({ size, graph }, sampler);
    show.pos = [measure.pos[0] + measure.size[0] + GAP, measure.pos[1]];
    for (const node of [measure, show]) {
      node.properties[PUT_IN] = BY_MEASURE;
      graph.add(node);
    }
    for (const [input, { step, slot }] of wantedOf(sampling)) {
      const origin = /** @type {import("./flow.mjs").Origin} */ (originOf(step.node, slot));
      lead(graph, origin, measure, measure.inputs.findIndex((/** @type {any} */ one) => one.name === input));
    }
    giveCfg(sampling, measure);
    link(measure, 2, show, 0);
  });
  await showAmong(app, [measure, show], graph.nodes);
  const where = graph.isRootGraph ? "" : whereText(graph);
  return answered(t("2 nodes were added: press the blue arrow above them."), where, ...notUsed(sampling, measure));
}

/** Sample with the sampler's own cfg, where Measure Precisions samples the negative prompt too. @param {Sampling} sampling @param {any} measure */
function giveCfg({ cfg, cfgFrom, latent_image }, measure) {
  const { graph } = latent_image.step.node;
  const origin = cfgFrom && cfgFrom.step.node?.graph === graph ? originOf(cfgFrom.step.node, cfgFrom.slot) : null;
  if (typeof cfg === "number") setWidget(measure, "cfg", cfg);
  else if (origin) lead(graph, origin, measure, measure.inputs.findIndex((/** @type {any} */ { name }) => name === "cfg"));
}

/** What is sampled with another value than in the workflow. @param {Sampling} sampling @param {any} measure */
function notUsed({ negative, cfg, left }, measure) {
  const told = [];
  const isLinkedTo = measure.inputs.some((/** @type {any} */ { name, link: id }) => name === "cfg" && id != null);
  const used = measure.widgets.find((/** @type {any} */ { name }) => name === "cfg").value;
  if (negative && typeof cfg !== "number" && !isLinkedTo) told.push(t("It measures with cfg {used}: this sampler's could not be read.", { used }));
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

/**
 * Put the best measured setting into the workflow, in one step of undo: onto the loaders of its file and the nodes that plan its arithmetic anew; the node Measure is removed. What the node Halfsafe
 * offers is set on that node. If the setting takes more memory than the workflow does now, the user is asked first.
 * @param {any} app @param {any} measure the node of the result @param {Use} use @param {boolean} [sure] that it may take more @returns {Promise<Told>} what was done, in words
 */
export async function useMeasured(app, measure, use, sure = false) {
  try {
    if (measure.comfyClass === ONE) return await storeIn(app, measure, use);
    const flow = await readFlow(app);
    const step = [...flow.values()].find(({ node }) => node === measure);
    const model = step && takesOf(step).find(({ name }) => name === "model");
    if (!model) return t("Nothing was changed: {why}", { why: t("Measure Precisions is given no model that runs.") });
    const uses = usesOfItsFile(flow, model);
    const ids = [...new Set(uses.flatMap((take) => loadersOf(flow, take.from, "MODEL")))];
    const loaders = nodesOf(ids, flow);
    const other = loaders.find((node) => !isOurs(node) && !canBeHalved(node));
    if (other) return t("Nothing was changed: {why}", { why: t("{loader} cannot be replaced. A loader of Halfsafe's takes storage {storage}, Compute Dtype behind it compute {compute}.", { loader: other.title, ...use }) });
    const ways = uses.map((take) => nodesOf(wayOf(flow, take.from, "MODEL").map(({ id }) => id), flow));
    const planners = [...new Set(ways.flat())].filter(({ comfyClass }) => [COMPUTE_DTYPE, ONE].includes(comfyClass));
    const quantizing = planners.find((node) => isQuantizing(node) && ways.every((way) => way.includes(node)));
    const steps = ids.flatMap((id) => flow.get(id) ?? []).filter(({ node }) => node);
    const question = sure ? null : await whatIsLost(app, measure, use, steps, quantizing);
    if (question) return question;
    return await putInto(app, quantizing && offers(quantizing, use.storage) ? [quantizing] : loaders, planners, use, isMeasure(measure));
  } catch (error) {
    return whyUnchanged(error);
  }
}

/** Whether a node is the one node, set to quantize the model that it is given. @param {any} node */
function isQuantizing(node) {
  return node.comfyClass === ONE && (valueOf(node, "storage") ?? AS_LOADED) !== AS_LOADED;
}

/** @param {any} node @param {string} storage */
function offers({ widgets }, storage) {
  return listOf(widgets.find((/** @type {any} */ { name }) => name === "storage")).includes(storage);
}

/** @param {any} node @param {string} name of a widget @returns {any} */
function valueOf({ widgets = [] }, name) {
  return widgets.find((/** @type {any} */ one) => one.name === name)?.value;
}

/**
 * The question whether a setting may take more than the workflow takes now: memory was saved because it had run out. Null where it takes no more.
 * @param {any} app @param {any} measure @param {Use} use @param {Step[]} steps of the loaders @param {any} quantizing the one node that quantizes behind them @returns {Promise<Card | null>}
 */
async function whatIsLost(app, measure, use, steps, quantizing) {
  const now = steps.map(({ node }) => (quantizing ? valueOf(quantizing, "storage") : storageNow(app, node)));
  if (now.every((storage) => !QUANTIZED.test(storage) || storage === use.storage)) return null;
  const sizes = await bytesIn(api, steps, [...new Set([...now, use.storage])]);
  const isKnown = sizes.every((size, place) => size[use.storage] !== undefined && size[now[place]] !== undefined);
  const [before, after] = [0, 0].map((_, of) => sizes.reduce((sum, size, place) => sum + (size[of ? use.storage : now[place]] ?? 0), 0));
  if (isKnown && after <= MORE * before) return null;
  const isUndone = Boolean(quantizing) || steps.some(({ node }) => isHalved(node));
  const takes = { after: sizeText(after), before: sizeText(before) };
  const smallest = smallestOf(app, measure);
  const act = (/** @type {Use} */ one) => () => useMeasured(app, measure, one, true);
  const lost = isUndone ? t("The halving would be undone.") : t("It was set to storage {storage}.", { storage: now.find((storage) => QUANTIZED.test(storage)) });
  return {
    ...(isKnown ? answered(t("This takes {after} instead of {before}.", takes), lost) : answered(lost)),
    tone: "warn",
    choices: [...(smallest && smallest.storage !== use.storage ? [{ name: t("Smallest: {storage}", smallest), act: act(smallest) }] : []), { name: t("Use it all the same"), act: act(use) }],
  };
}

/** The storage that a loader has: as it is set, or as it chose at its last run. @param {any} app @param {any} node @returns {string} */
function storageNow(app, node) {
  if (!isOurs(node)) return CAST_TO[valueOf(node, "weight_dtype")] ?? "as_file";
  const storage = valueOf(node, "storage");
  const [[stored = ""] = []] = outputOf(app, node)?.halfsafe_badge ?? [];
  return storage === "auto" ? stored.split(" + ").find((/** @type {string} */ word) => QUANTIZED.test(word)) ?? storage : storage;
}

/** The smallest setting that was measured; null where none is. @param {any} app @param {any} measure @returns {Use | null} */
function smallestOf(app, measure) {
  return resultIn(outputOf(app, measure))?.best?.find(({ goals }) => goals.includes("memory"))?.use ?? null;
}

/** Let the one node quantize the model that it is given. @param {any} app @param {any} node @param {Use} use */
async function storeIn(app, node, { storage }) {
  refuseLinked(node, ["storage"]);
  await undoable(app, () => setWidget(node, "storage", storage));
  return answered(t("{name} is set to storage {storage}: run the workflow.", { name: node.title, storage }), t("Ctrl+Z undoes this."));
}

/** Whether a node has what its result offers. @param {any} node @param {import("./result.mjs").Result | null} result */
export function isTaken({ comfyClass, widgets }, result) {
  return comfyClass === ONE && widgets.some((/** @type {any} */ { name, value }) => name === "storage" && value === result?.use?.storage);
}

/** @param {any} node */
function isOurs({ comfyClass }) {
  return OURS.includes(comfyClass);
}

/** Where the file of a measured model is sampled: template 5 loads it twice. @param {Flow} flow @param {Take} model @returns {Take[]} */
function usesOfItsFile(flow, model) {
  const fileFrom = (/** @type {Take} */ { from }) => fileOf(flow, loadersOf(flow, from, "MODEL")[0]);
  const uses = usesOf(flow, "MODEL").filter((take) => fileFrom(take) === fileFrom(model));
  return uses.length ? uses : [model];
}

/** The nodes of steps on the page, each once. @param {string[]} ids @param {Flow} flow @returns {any[]} */
function nodesOf(ids, flow) {
  return [...new Set(ids.map((id) => flow.get(id)?.node).filter(Boolean))];
}

/** @param {any} app @param {any[]} loaders or the one node, where that quantizes @param {any[]} planners @param {Use} use @param {boolean} isPutIn whether Measure was put in by the button */
async function putInto(app, loaders, planners, use, isPutIn) {
  const [ours, others] = [loaders.filter((node) => !canBeHalved(node)), loaders.filter(canBeHalved)];
  const { storage, compute } = use;
  const values = (/** @type {any} */ node) => (isOurs(node) ? { storage, compute } : { storage });
  for (const node of ours) refuseLinked(node, Object.keys(values(node)));
  const names = loaders.map(({ title }) => title).join(", ");
  const wasRuled = ours.some((node) => node.inputs.some((/** @type {any} */ { name, link: id }) => name === "rules" && id != null && node.getInputNode(node.findInputSlot(name))?.comfyClass !== MEASURE));
  /** @type {string[]} */
  let planned = [];
  await inOneStep(app, () => {
    for (const node of ours) setValues(node, values(node));
    planned = planners.map((node) => planAs(node, use, loaders.includes(node)));
    if (isPutIn) for (const node of allNodes(app).filter(isMeasure)) node.graph.remove(node);
  }, (places) => {
    for (const place of places.filter(({ live }) => others.includes(live))) loadInstead(place, { storage, compute });
  });
  const removed = isPutIn ? t("Measure Precisions was removed.") : "";
  const ruled = wasRuled && ours.some(isOurs) ? t("Its rules stay: they were not measured.") : "";
  const set = ours.length && !ours.some(isOurs) ? t("{name} is set to storage {storage}: run the workflow.", { name: names, storage }) : t("{names} is set to storage {storage}, compute {compute}.", { names, storage, compute });
  return answered(set, ...planned, ruled, removed, t("Ctrl+Z undoes this."));
}

/** @param {any} node @param {Record<string, string>} values */
function setValues(node, values) {
  for (const [name, value] of Object.entries(values)) setWidget(node, name, value);
}

/** @param {any} node @param {string[]} names of widgets that get a value */
function refuseLinked(node, names) {
  const linked = node.inputs.find((/** @type {any} */ { name, link: id }) => names.includes(name) && id != null);
  if (linked) throw new Error(`${node.title}: ${t("its {name} is linked", { name: linked.name })}`);
}

/** Let a node that plans the arithmetic anew compute as measured. @param {any} node @param {Use} use @param {boolean} stores whether it holds the storage too @returns {string} what it is set to */
function planAs(node, { compute, rules }, stores) {
  if (node.comfyClass === COMPUTE_DTYPE) {
    refuseLinked(node, ["compute"]);
    setWidget(node, "compute", compute);
    return t("{name} is set to compute {compute}.", { name: node.title, compute });
  }
  refuseLinked(node, ["goal"]);
  const isFreed = !stores && isQuantizing(node);
  if (isFreed) {
    refuseLinked(node, ["storage"]);
    setWidget(node, "storage", AS_LOADED);
  }
  const goal = valueOf(node, "goal");
  if (!AS_AUTO.includes(goal)) setWidget(node, "goal", "balanced");
  const holder = node.getInputNode(node.findInputSlot("rules"));
  if (holder && holder.comfyClass !== LAYER_RULES) refuseLinked(node, ["rules"]);
  const withoutOurs = (/** @type {string} */ text) => text.split("\n").filter((line) => !line.endsWith(MEASURED));
  if (rules || holder) putRules(node, (before) => [...withoutOurs(before), ...(rules ? [`* ${rules}${MEASURED}`] : [])].join("\n").trim());
  const planned = rules ? t("{name} has a rule for it: {rules}.", { name: node.title, rules }) : AS_AUTO.includes(goal) ? "" : t("{name} is set to goal {goal}.", { name: node.title, goal: "balanced" });
  return together([isFreed ? t("{name} is set to storage {storage}.", { name: node.title, storage: AS_LOADED }) : "", planned]);
}
