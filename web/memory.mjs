// @ts-check
import { loadersOf, readFlow, samplingsOf } from "./flow.mjs";
import { allNodes, PACK, setWidget, undoable } from "./graph.mjs";
import { answered } from "./result.mjs";
import { HIGHER } from "./room.mjs";
import { answerIn, said, sentencesOf, sizeText, t, whyUnchanged } from "./words.mjs";
/** *Halve the memory*: ComfyUI's loaders become the pack's in their places, and back. The workflow is changed as saved, then opened as an undone one is. */

/**
 * @typedef {Record<string, string>} Names
 * @typedef {{ours: string, folder: string, names: Names, plain: Names, add: Names}} Exchange
 *   our node, the folder of its files, our names by ComfyUI's for the inputs that stay, what the others of ComfyUI's have to be, and what ours are given
 * @typedef {{graph: any, node: any, live: any}} Place a node as saved, the saved graph that it is in, and the node of the page
 * @typedef {Place & {key: string, given: Record<string, any>[]}} Loader with what it is known by, and what it would be given, once for each place of its subgraph
 * @typedef {{storage: string, bytes: number, needs: string}} Fewer a storage of fewer bits, its bytes, and the ComfyUI that runs it, empty where this one does
 * @typedef {Record<string, number>} Size width, height, length and batch_size
 * @typedef {{name: string, changes: Size, key: string, size: Size}} Smaller a size that takes less, what it is called, and the values of the node that sets it, by its key
 * @typedef {{reason: string, missing?: string[], storage?: string, clip_storage?: string, bytes?: number, sizes?: Record<string, number>, left?: Fewer[], activations?: number[]}} Answer
 *   why a loader stays, and what it would be loaded in; its bytes, those by storage, what is left for a model in 8 bits, and what ComfyUI estimates for its activations at its size and smaller ones
 * @typedef {{storage: string, clip_storage: string, why: string, reserved: string, slow: string, told: string, errors: Record<string, string>, of: Map<string, Answer>, smaller: Map<string, Smaller[]>}} Advice
 *   what the server says of the device, and of each loader by its key; the smaller sizes it was asked of
 * @typedef {import("./result.mjs").Told} Told
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
/** Other loaders of ComfyUI's -> the folder of their files. @type {Record<string, string>} */
const OTHERS = { VAELoader: "vae", HalfsafeLoadVAE: "vae", LoraLoader: "loras", LoraLoaderModelOnly: "loras", CLIPVisionLoader: "clip_vision" };
/** The property of our node that says what it was. */
const BEFORE = "halfsafe_before";
/** What is left free below a loader that grew, in pixels. */
const GAP = 24;
/** The axes of a position and a size. */
const RIGHT = 0, DOWN = 1;
/** What the page notes of a node's pack: another pack's after the exchange. */
const OF_THE_PACK = ["cnr_id", "aux_id", "ver", "Node name for S&R"];
/** ComfyUI's values of `weight_dtype` that hold weights in 8 bits. */
const IN_8_BITS = /^fp8/;
const STEPS = { width: null, height: null, length: 1, batch_size: 1 };

/** The folder of the files that a loader reads, ComfyUI's or ours; "" for other nodes. @param {any} node @returns {string} */
export function folderOf({ comfyClass }) {
  const exchange = EXCHANGES[comfyClass] ?? Object.values(EXCHANGES).find(({ ours }) => ours === comfyClass);
  return exchange?.folder ?? OTHERS[comfyClass] ?? "";
}

/** Whether a node is one of ComfyUI's loaders that can be exchanged. @param {any} node */
export function canBeHalved({ comfyClass }) {
  return comfyClass in EXCHANGES;
}

/** Whether a node is one of ours that stands where ComfyUI's loader was. @param {any} node */
export function isHalved({ properties }) {
  return Boolean(properties?.[BEFORE]);
}

/** Why the file of one of ComfyUI's loaders cannot be read, and what to do about it; null where it can. @param {any} api @param {any} node that failed @returns {Promise<{message: string[], advice: string[]} | null>} */
export async function whyUnread(api, { comfyClass, inputs, widgets = [] }) {
  const folder = folderOf({ comfyClass });
  const isLinked = (/** @type {string} */ widget) => inputs.some((/** @type {any} */ { name, link }) => name === widget && link != null);
  const names = widgets.filter((/** @type {any} */ { name }) => name.includes("_name") && !isLinked(name)).map((/** @type {any} */ { value }) => value);
  if (!folder || !names.length) return null;
  const response = await api.fetchApi("/halfsafe/halving", { method: "POST", body: JSON.stringify([{ folder, names }]) });
  const { loaders: [{ problem, advice }] } = await answerIn(response);
  return problem ? { message: sentencesOf(problem), advice: sentencesOf(advice) } : null;
}

/**
 * Exchange ComfyUI's loaders that run, or one of them, for ours.
 * @param {any} app @param {{fetchApi: (route: string, options: object) => Promise<Response>}} api @param {any} [only] this node @returns {Promise<Told>} what was done, in words,
 *   with what is left where that is fewer bits
 */
export function halveMemory(app, api, only = null) {
  return orUnchanged(() => halve(app, api, only && keyOf(only)));
}

/** Put ComfyUI's loaders back, or one of them. @param {any} app @param {any} [only] this node @returns {Promise<Told>} what was done, in words */
export function putLoadersBack(app, only = null) {
  return orUnchanged(() => putBack(app, only));
}

/** Say what was done, or why nothing was: the graph is changed last, and by the page. @param {() => Promise<Told>} act */
async function orUnchanged(act) {
  try {
    return await act();
  } catch (error) {
    return whyUnchanged(error);
  }
}

/** @param {any} app @param {any} api @param {string | null} only the key of a loader @returns {Promise<Told>} */
async function halve(app, api, only) {
  const loaders = (await runningLoaders(app)).filter(({ key }) => !only || key === only);
  if (!loaders.length) return t("No loader of ComfyUI runs in this workflow.");
  const advice = await advise(app, api, loaders);
  const reasons = new Map(loaders.map((loader) => [loader, whyLeftOut(loader, advice)]));
  const chosen = loaders.filter((loader) => !reasons.get(loader));
  await exchangeAll(app, chosen, (loader) => valuesFor(loader, advice));
  const missing = [...new Set(loaders.flatMap((loader) => answerFor(loader, advice).missing ?? []))];
  const leftOut = loaders.filter((loader) => !chosen.includes(loader)).map((loader) => `${loader.live.title} (${said(reasons.get(loader) ?? "")})`);
  const stuck = loaders.filter((loader) => reasons.get(loader) && isIn8Bits(answerFor(loader, advice)));
  const speed = chosen.length && advice.told ? said(advice.told) : "";
  const measuring = speed ? [{ name: t("Measure my card"), act: async () => (await import("./measure.mjs")).measureWorkflow(app) }] : [];
  return {
    headline: chosen.length || !stuck.length ? toldOf(chosen.length) : t("Already in 8 bits"),
    line: missing.length ? missingText(missing) : stuck.length ? updateText(stuck, advice) : speed ? t("int8 is faster on cards like this one.") : "",
    choices: [...choicesFor(app, stuck, advice), ...measuring],
    why: [speed, ...missing.length ? [t("What a missing file will take is not known yet: files in 8 bits already save nothing.")] : [], leftOutText([...new Set(leftOut)]), ...new Set(stuck.map((loader) => fewerText(loader, advice))), ...(stuck.length ? otherwise(stuck, advice) : [])].filter(Boolean),
  };
}

/** Whether a loader stays because its model is in few bits: something is left for it, or for what it computes. @param {Answer} answer */
function isIn8Bits({ left = [], activations = [] }) {
  return left.length > 0 || activations.length > 0;
}

/** Exchange loaders for ours in one step of undo. @param {any} app @param {Loader[]} loaders @param {(loader: Loader) => Record<string, any>} values */
async function exchangeAll(app, loaders, values) {
  if (!loaders.length) return;
  await inOneStep(app, () => {}, (places) => {
    for (const loader of loaders) loadInstead(/** @type {Place} */ (places.find(({ live }) => live === loader.live)), values(loader));
  });
}

/** Load by one of ours, as it is saved, what one of ComfyUI's loads. @param {Place} place @param {Record<string, any>} values of ours */
export function loadInstead(place, values) {
  const linked = whyLinked(place, EXCHANGES[place.live.comfyClass].names);
  if (linked) throw new Error(`${place.live.title}: ${linked}`);
  exchange(place, ...oursFor(place, values));
  makeRoom(place);
}

/** What takes less memory and can be pressed: fewer bits for models that are in 8 bits already, where this ComfyUI runs them, and smaller sizes. @param {any} app @param {Loader[]} stuck @param {Advice} advice */
function choicesFor(app, stuck, advice) {
  const left = stuck.flatMap((loader) => answerFor(loader, advice).left ?? []).filter(({ needs }) => !needs);
  const keys = stuck.map(({ key }) => key);
  const bits = [...new Set(left.map(({ storage }) => storage))].map((storage) => ({ name: t("{bits} bits ({storage}): {size}", { bits: bitsOf(storage), storage, size: changeText(storage, stuck, advice) }), act: () => orUnchanged(() => storeInFewer(app, keys, storage)) }));
  const sizes = largest(stuck, advice).map(({ smaller, saved }) => ({ name: `${smaller.name}: -${sizeText(saved)}`, act: () => orUnchanged(() => makeSmaller(app, smaller)) }));
  return [...bits, ...sizes];
}

/** What all models that would be stored in fewer bits take then, and by what share that is less: "3.0 MiB (-9 %)". @param {string} storage @param {Loader[]} stuck @param {Advice} advice */
function changeText(storage, stuck, advice) {
  const answers = stuck.map((loader) => answerFor(loader, advice)).filter(({ left = [] }) => left.some((one) => one.storage === storage));
  const before = answers.reduce((sum, { bytes = 0 }) => sum + bytes, 0);
  const after = answers.reduce((sum, { left = [] }) => sum + (left.find((one) => one.storage === storage)?.bytes ?? 0), 0);
  return `${sizeText(after)} (-${Math.round(100 * (1 - after / before))} %)`;
}

/** Which ComfyUI stores models in the fewest bits, where this one does not. @param {Loader[]} stuck @param {Advice} advice */
function updateText(stuck, advice) {
  const later = stuck.flatMap((loader) => answerFor(loader, advice).left ?? []).filter(({ needs }) => needs);
  const [fewest] = later.sort((a, b) => a.bytes - b.bytes);
  return fewest ? t("Update ComfyUI to {needs} for {bits} bits ({storage}): {size}.", { ...fewest, bits: bitsOf(fewest.storage), size: changeText(fewest.storage, stuck, advice) }) : "";
}

/** The bits of a value in a storage, as its name has them: 4 of w4a8 and nvfp4. @param {string} storage */
function bitsOf(storage) {
  return /\d/.exec(storage)?.[0] ?? "";
}

/** The smaller sizes of the model whose activations take most, with what each saves. @param {Loader[]} stuck @param {Advice} advice */
function largest(stuck, advice) {
  const [most] = stuck.filter((loader) => answerFor(loader, advice).activations?.length).sort((a, b) => activationsOf(b, advice)[0] - activationsOf(a, advice)[0]);
  if (!most) return [];
  const [now, ...less] = activationsOf(most, advice);
  return (advice.smaller.get(most.key) ?? []).map((smaller, place) => ({ smaller, saved: now - less[place] })).filter(({ saved }) => saved > 0);
}

/** @param {Loader} loader @param {Advice} advice @returns {number[]} */
function activationsOf(loader, advice) {
  return answerFor(loader, advice).activations ?? [];
}

/** Let the node that sets the size make a smaller one. @param {any} app @param {Smaller} smaller */
async function makeSmaller(app, { key, changes, name }) {
  const node = allNodes(app).find((one) => keyOf(one) === key);
  if (!node) return t("The node that sets the size is gone.");
  await undoable(app, () => {
    for (const [widget, value] of Object.entries(changes)) setWidget(node, widget, value);
  });
  return answered(t("{title} is set to {size}: run the workflow.", { title: node.title, size: name }), t("Ctrl+Z undoes this."));
}

/** @param {any} app @param {string[]} keys of the loaders @param {string} storage */
async function storeInFewer(app, keys, storage) {
  const loaders = (await runningLoaders(app)).filter(({ key }) => keys.includes(key));
  if (!loaders.length) return t("No loader of ComfyUI runs in this workflow.");
  await exchangeAll(app, loaders, () => ({ storage }));
  return toldOf(loaders.length);
}

/** @param {string[]} names of files */
function missingText(names) {
  return t("Missing: {names}.", { names: names.join(", ") });
}

/** @param {string[]} leftOut */
function leftOutText(leftOut) {
  return leftOut.length ? t("Left out: {names}.", { names: leftOut.join(", ") }) : "";
}

/** What a model that is in 8 bits already would take in fewer. @param {Loader} loader @param {Advice} advice */
function fewerText(loader, advice) {
  const { left = [], bytes: now = 0 } = answerFor(loader, advice);
  const sizes = left.map(({ storage, bytes, needs }) => (needs ? t("{storage} {bytes} (from ComfyUI {needs} on)", { storage, bytes: sizeText(bytes), needs }) : `${storage} ${sizeText(bytes)}`));
  return left.length ? t("Fewer bits for {name}, {size} now: {sizes}.", { name: titleOf(loader), size: sizeText(now), sizes: sizes.join(", ") }) : "";
}

/** What a loader is called, with its files: those of a template have one title. @param {Loader} loader */
function titleOf(loader) {
  return t("{title} of {file}", { title: loader.live.title, file: filesOf(loader).join(" + ") });
}

/** The files that a loader would read. @param {Loader} loader @returns {string[]} */
function filesOf({ live, given }) {
  const inputs = Object.keys(EXCHANGES[live.comfyClass].names).filter((name) => name.includes("_name"));
  return [...new Set(given.flatMap((values) => inputs.map((name) => values[name]).filter((name) => typeof name === "string")))];
}

/** What else makes room, with its bytes. @param {Loader[]} stuck @param {Advice} advice @returns {string[]} */
function otherwise(stuck, advice) {
  const answers = stuck.map((loader) => answerFor(loader, advice));
  const { w6a8 = "", w4a8 = "", int8 = "" } = advice.errors;
  const canRun = answers.some(({ left = [] }) => left.some(({ needs }) => !needs));
  const most = Math.max(...answers.map(({ activations = [0] }) => activations[0]));
  return [
    canRun ? t("A layer's error is about {w6a8} in w6a8 and {w4a8} in w4a8, {int8} in int8.", { w6a8, w4a8, int8 }) : "",
    canRun && advice.slow ? t("They are no faster here: {why}", { why: said(advice.slow) }) : "",
    most ? t("For values between layers ComfyUI estimates {size} at this size: half of the pixels or of the frames takes {half}.", { size: sizeText(most), half: sizeText(most / 2) }) : "",
    advice.reserved ? t("--reserve-vram keeps {size} of the GPU free: a smaller value leaves more for the model.", { size: advice.reserved }) : "",
  ];
}

/** @param {any} app @param {any} only @returns {Promise<Told>} */
async function putBack(app, only) {
  /** @type {string[]} */
  const leftOut = [];
  let count = 0;
  const wanted = allNodes(app).filter((node) => isHalved(node) && (!only || node === only));
  if (!wanted.length) return t("There is no loader to put back.");
  await inOneStep(app, () => {}, (places) => {
    for (const place of places.filter(({ live }) => wanted.includes(live)).reverse()) { // what two loaders moved goes back in two steps, the last one first
      const before = place.node.properties[BEFORE];
      const { names } = EXCHANGES[before.type];
      const back = Object.fromEntries(Object.entries(names).map(([core, ours]) => [ours, core]));
      const reason = whyLinked(place, back);
      if (reason) leftOut.push(`${place.live.title} (${reason})`);
      else {
        exchange(place, before.type, back, { ...before.values, ...renamed(valuesOf(place.live), back) }, before);
        moveBack(place.graph, before.moved_right ?? {}, RIGHT); // earlier versions moved nothing to the right
        moveBack(place.graph, before.moved, DOWN);
        count += 1;
      }
    }
    return count > 0;
  });
  const done = count === 1 ? t("ComfyUI's loader was restored.") : t("{count} of ComfyUI's loaders were restored.", { count });
  return { headline: done, why: [leftOutText(leftOut)].filter(Boolean) };
}

/** What a loader is known by, also once the page has made its node anew. @param {any} live */
function keyOf(live) {
  return `${live.graph.isRootGraph ? "" : live.graph.id} ${live.id}`; // a new graph gets an id when it is opened anew
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

/** ComfyUI's loaders that a run would execute. @param {any} app @returns {Promise<Loader[]>} */
async function runningLoaders(app) {
  const workflow = saved(app);
  const { output } = await app.graphToPrompt();
  const places = placesIn(app, workflow).filter(({ live }) => canBeHalved(live));
  return places.flatMap((place) => {
    const given = Object.entries(output).filter(([path]) => isAt(place, path, workflow)).map(([, { inputs }]) => inputs);
    return given.length ? [{ ...place, key: keyOf(place.live), given }] : [];
  });
}

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

/** Ask the server in which storage this device's loaders halve memory, and which of them it would not. @param {any} app @param {any} api @param {Loader[]} loaders @returns {Promise<Advice>} */
async function advise(app, api, loaders) {
  const sizes = await sizesOf(app);
  const smaller = new Map(loaders.map(({ key, live }) => [key, smallerThan(sizes.get(live))]));
  const asked = loaders.map((loader) => {
    const { live, key } = loader;
    const size = sizes.get(live)?.size ?? null;
    return { folder: EXCHANGES[live.comfyClass].folder, names: filesOf(loader), in_8_bits: IN_8_BITS.test(valuesOf(live).weight_dtype), size, smaller: (smaller.get(key) ?? []).map((one) => one.size) };
  });
  const answer = await answersOf(api, asked);
  return { ...answer, smaller, of: new Map(loaders.map(({ key }, place) => [key, answer.loaders[place]])) };
}

/** What the server answers of loaders. @param {any} api @param {object[]} loaders @returns {Promise<any>} */
async function answersOf(api, loaders) {
  return answerIn(await api.fetchApi("/halfsafe/halving", { method: "POST", body: JSON.stringify(loaders) }));
}

/** The bytes of what loaders read, ComfyUI's or ours, in storages. @param {any} api @param {import("./flow.mjs").Step[]} steps @param {string[]} storages @returns {Promise<Record<string, number>[]>} by loader and storage; empty where a file cannot be read */
export async function bytesIn(api, steps, storages) {
  const byOurs = Object.fromEntries(Object.values(EXCHANGES).map((one) => [one.ours, one]));
  const asked = steps.map(({ type, given }) => {
    const { folder, names } = EXCHANGES[type] ?? byOurs[type];
    const inputs = type in EXCHANGES ? Object.keys(names) : Object.values(names);
    return { folder, names: inputs.filter((name) => name.includes("_name")).map((name) => given[name]), size: null, storages };
  });
  return (await answersOf(api, asked)).loaders.map(({ sizes = {} }) => sizes);
}

/** The size at which the model of each loader is sampled, where a node says it in numbers, and that node. @param {any} app @returns {Promise<Map<any, {size: Size, step: import("./flow.mjs").Step}>>} by loader */
async function sizesOf(app) {
  const flow = await readFlow(app);
  const sizes = new Map();
  for (const { model, latent_image: latent } of [...flow.values()].flatMap((step) => samplingsOf(flow, step))) {
    const step = flow.get(latent.from);
    const given = step?.given ?? {};
    const size = Object.fromEntries(Object.entries(STEPS).map(([name, otherwise]) => [name, given[name] ?? otherwise]));
    if (!Object.values(size).every((value) => typeof value === "number")) continue;
    for (const id of loadersOf(flow, model.from, "MODEL")) sizes.set(flow.get(id)?.node, { size, step });
  }
  return sizes;
}

/** The sizes that take about half: fewer frames, fewer images, fewer pixels, where a widget on the page sets that. @param {{size: Size, step: import("./flow.mjs").Step} | undefined} sampled @returns {Smaller[]} */
function smallerThan(sampled) {
  if (!sampled) return [];
  const { size, step } = sampled;
  const widgets = Object.fromEntries(Object.keys(STEPS).map((name) => [name, settingOf(step, name)]));
  const at = (/** @type {string} */ name, /** @type {number} */ share) => onGrid(widgets[name]?.widget, size[name] * share);
  const [width, height] = ["width", "height"].map((name) => at(name, Math.SQRT1_2));
  const wanted = [
    size.length > 1 ? { name: t("{count} frames", { count: at("length", 0.5) }), changes: { length: at("length", 0.5) } } : null,
    size.batch_size > 1 ? { name: t("{count} in a batch", { count: at("batch_size", 0.5) }), changes: { batch_size: at("batch_size", 0.5) } } : null,
    { name: `${width} x ${height}`, changes: { width, height } },
  ];
  return wanted.flatMap((one) => {
    const names = Object.keys(one?.changes ?? {});
    const [node] = names.map((name) => widgets[name]?.node);
    const fits = one && node && names.every((name) => widgets[name]?.node === node);
    const changes = Object.fromEntries(names.map((name) => [widgets[name]?.widget.name ?? name, /** @type {any} */ (one?.changes)[name]]));
    return fits ? [{ name: one.name, changes, key: keyOf(node), size: { ...size, ...one.changes } }] : [];
  });
}

/** The widget that sets an input of a step: its own, or that of the subgraph node on whose face the input is. @param {import("./flow.mjs").Step} step @param {string} name @returns {{node: any, widget: any} | null} */
function settingOf({ node, hosts }, name) {
  let [at, slot] = [node, name];
  for (const host of [null, ...[...hosts].reverse()]) {
    if (host) [at, slot] = [host, nameOutside(at, slot)];
    const input = at?.inputs?.find((/** @type {any} */ one) => one.name === slot);
    if (input?.link == null) {
      const widget = at?.widgets?.find((/** @type {any} */ one) => one.name === slot);
      return widget && typeof widget.value === "number" ? { node: at, widget } : null;
    }
  }
  return null;
}

/** What an input that comes from outside of its subgraph is called there; "" where it comes from a node. @param {any} node @param {string} name @returns {string} */
function nameOutside({ graph, inputs }, name) {
  const link = graph.getLink(inputs.find((/** @type {any} */ one) => one.name === name)?.link);
  return link && link.origin_id === graph.inputNode?.id ? graph.inputNode.slots[link.origin_slot].name : "";
}

/** The value of a widget nearest to a number, by its steps. @param {any} widget @param {number} wanted */
function onGrid(widget, wanted) {
  const { min = 0, step2: step = 1 } = widget?.options ?? {};
  return Math.max(min, min + step * Math.round((wanted - min) / step));
}

/** @param {Loader} loader @param {Advice} advice @returns {Answer} */
function answerFor({ key }, advice) {
  return /** @type {Answer} */ (advice.of.get(key));
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
  return advice.storage === "as_file" && !isEncoder ? advice.why : answerFor(loader, advice).reason;
}

/** What is linked to an input that the other loader does not have. @param {Place} place @param {Names} names @returns {string} */
function whyLinked({ node }, names) {
  const lost = (node.inputs ?? []).find((/** @type {any} */ { name, link }) => link != null && !(name in names));
  return lost ? t("its {name} is linked", { name: lost.name }) : "";
}

/** What our node of a loader is given: an encoder's storage is that of text encoders. @param {Loader} loader @param {Advice} advice @returns {Record<string, any>} */
function valuesFor(loader, advice) {
  const { storage, clip_storage } = { ...advice, ...answerFor(loader, advice) };
  const isEncoder = EXCHANGES[loader.live.comfyClass].ours === ENCODER.ours;
  return { storage: isEncoder ? clip_storage : storage, clip_storage };
}

/** Our node for a loader: its type, the names of inputs that stay, its values, and what it keeps of the one before. @param {Place} place @param {Record<string, any>} more values of ours @returns {[string, Names, Record<string, any>, any]} */
function oursFor({ node, live }, more) {
  const { ours, names, add } = EXCHANGES[live.comfyClass];
  const values = { ...add, ...more, ...renamed(valuesOf(live), names) };
  const before = { type: live.comfyClass, title: ownTitle(node, live), size: node.size, properties: node.properties, values: valuesOf(live) };
  return [ours, names, values, { properties: { ...withoutPack(node.properties), ...PACK, [BEFORE]: before }, title: before.title, size: node.size }];
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

/** Let one of our nodes be as high and as wide as the page makes it, and move down or to the right what it would cover, and what that would. Its record keeps where that was. @param {Place} place */
function makeRoom({ graph, node }) {
  const [wide, high] = node.size;
  const like = window.LiteGraph.createNode(node.type);
  like.title = node.title ?? like.title;
  const [width, height] = like.computeSize();
  node.size = [Math.max(wide, width), Math.max(high, height)];
  const before = node.properties[BEFORE];
  before.moved = moveApart(graph, node, DOWN, high, window.LiteGraph.vueNodesMode ? GAP + HIGHER : GAP);
  before.moved_right = moveApart(graph, node, RIGHT, wide, GAP);
}

/** @param {any} node @param {number} axis */
function startOf(node, axis) {
  return node.pos[axis] - (axis === DOWN ? window.LiteGraph.NODE_TITLE_HEIGHT : 0);
}

/** @param {any} node @param {number} axis */
function endOf(node, axis) {
  return node.pos[axis] + node.size[axis];
}

/**
 * Move the nodes that a grown node would cover along an axis, and those that these would.
 * @param {any} graph @param {any} node @param {number} axis @param {number} was its size along it @param {number} free between it and the next
 * @returns {Record<string, {from: number, to: number}>} node id -> where it was on the axis, and is
 */
function moveApart(graph, node, axis, was, free) {
  /** @type {Record<string, {from: number, to: number}>} */
  const moved = {};
  if (node.size[axis] === was) return moved;
  const grown = [{ before: node, endWas: node.pos[axis] + was, free, by: 0 }];
  const across = DOWN - axis;
  const meet = (/** @type {any} */ a, /** @type {any} */ b) => startOf(a, across) < endOf(b, across) && startOf(b, across) < endOf(a, across);
  for (const next of [...graph.nodes].sort((a, b) => startOf(a, axis) - startOf(b, axis))) { // each is moved once, after all before it
    const wayFrom = (/** @type {typeof grown[0]} */ one) => { // what lay on it already, by more than a title, lies on it as before
      return next.pos[axis] < one.endWas ? one.by : endOf(one.before, axis) + one.free - startOf(next, axis);
    };
    const way = Math.max(0, ...grown.filter(({ before }) => meet(before, next)).map(wayFrom));
    if (way === 0) continue;
    grown.push({ before: next, endWas: endOf(next, axis), free: GAP, by: way });
    moved[next.id] = { from: next.pos[axis], to: next.pos[axis] + way };
    next.pos[axis] += way;
  }
  return moved;
}

/** Move back what *Halve the memory* moved along an axis, unless it was moved since. @param {any} graph @param {Record<string, {from: number, to: number}>} moved @param {number} axis */
function moveBack(graph, moved, axis) {
  for (const node of graph.nodes) {
    const way = moved[node.id];
    if (way && node.pos[axis] === way.to) node.pos[axis] = way.from;
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

/**
 * Change the open workflow as one step of undo: on the page, then as it is saved, which is opened in its own tab as the page's redo does: view and results stay.
 * @param {any} app @param {() => void} change on the page @param {(places: Place[]) => boolean | void} exchangeIn a change of the workflow as saved, false where there is none
 */
export async function inOneStep(app, change, exchangeIn) {
  const { canvas } = app;
  canvas.emitBeforeChange();
  canvas.emitAfterChange(); // what was changed before becomes a step of its own
  const before = saved(app);
  const { activeWorkflow } = app.extensionManager.workflow;
  canvas.emitBeforeChange(); // no step until the end
  try {
    change();
    const workflow = saved(app);
    if (exchangeIn(placesIn(app, workflow)) !== false) await open(app, activeWorkflow, workflow);
  } catch (error) {
    if (JSON.stringify(saved(app)) !== JSON.stringify(before)) await app.loadGraphData(before, false, false, activeWorkflow);
    throw error;
  } finally {
    canvas.emitAfterChange();
  }
}

/** @param {any} app @param {any} activeWorkflow @param {any} workflow as saved */
async function open(app, { changeTracker }, workflow) {
  changeTracker.redoQueue.length = 0;
  changeTracker.redoQueue.push(workflow);
  await changeTracker.redo();
  if (!isOpen(app, workflow)) throw new Error(t("The page could not open the changed workflow."));
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
  changeTracker.activeState = saved(app); // what the page adds to new nodes, such as `Node name for S&R`, is no step of its own
}

/** Whether the page has every node of a workflow, each of its type. @param {any} app @param {any} workflow */
function isOpen(app, workflow) {
  const graphs = [workflow, ...(workflow.definitions?.subgraphs ?? [])];
  const wanted = graphs.flatMap((graph) => graph.nodes.map((/** @type {any} */ { id, type }) => `${id} ${type}`));
  const found = new Set(allNodes(app).map(({ id, type }) => `${id} ${type}`));
  return wanted.every((node) => found.has(node));
}

/** @param {number} count of loaders that are ours now */
function toldOf(count) {
  return !count ? t("No loader was changed.") : count === 1 ? t("1 loader was replaced: run the workflow.") : t("{count} loaders were replaced: run the workflow.", { count });
}
