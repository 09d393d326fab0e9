// @ts-check
import { aboutOf, modeText, verdictOf } from "./dom.mjs";
import { whatIn } from "./report.mjs";
import { ourToast } from "./toasts.mjs";
import { inTwo, partsOf, said, sentencesOf, t, together } from "./words.mjs";

/**
 * What the guards said in the last run of each tab, and in the last one before it of which they told something, if that was queued before it ended.
 * @typedef {import("./report.mjs").GuardEvent} GuardEvent
 * @typedef {{node_id: string | null, prompt_id: string, workflow?: string, kind: "event" | "verdict" | "calls", verdict: string, about: import("./dom.mjs").About, message: string, brief: string, advice: string, line?: string, event: GuardEvent | null, of?: string, calls?: number}} GuardMessage ``brief``: the message in fewer words; ``line``: the advice in a line
 * @typedef {{verdict: string, about?: import("./dom.mjs").About, brief: string, advice: string, line?: string, events: GuardMessage[]}} GuardState
 * @typedef {Refusal & {node: string, told: boolean, guard?: string, memory?: string[]}} RunError an error that a guard raised, whose id is ``guard``, is told on the guard's card; ``memory``: what ran out, its headline first
 * @typedef {{message: string[], advice: string[]}} Refusal why a run does not start, and what to do: each the first sentence, and the rest
 * @typedef {import("./toasts.mjs").Toast} Toast
 * @typedef {{promptId: string, tab: object | null, before: Run | null, computed: boolean, held: Set<string>, cached: Set<string>, toasts: Toast[], error: RunError | null, causes: Set<string>, state: "running" | "done" | "failed", guards: Map<string, GuardState>, reached: Set<string>, calls: {model: number, encoder: number}, events: GuardMessage[], results: Map<string, import("./result.mjs").Result>, notices: Map<string, Toast[]>, pictures: Map<string, any>, isBlack: boolean, contrast: import("./pictures.mjs").Pair | null}} Run
 *   ``tab``: null where it is not known; ``held``: the nodes whose results are those of this run, executed or ``cached``; ``reached``: the guards that were given the NaN of a model that no
 *   repeat cured; ``calls``: those that guards checked; ``pictures``: what nodes showed before it; ``isBlack``: all that it drew is black; ``contrast``:
 *   what it drew with the same model, black without a guard and not with it
 */

const OURS = "halfsafe.";
/** The class of the error with which a guard ends a run. */
const OF_GUARD = "halfsafe.NonFinite";
/** The classes of torch's errors for too little memory on a GPU, and what Python and torch say where the host's is used up. */
const OUT_OF_MEMORY = /OutOfMemory/;
const OUT_OF_HOST_MEMORY = /^MemoryError|DefaultCPUAllocator/;
/** What ComfyUI's dynamic VRAM says if a weight cannot be read into pinned memory (Comfy-Org/ComfyUI#15255, #14250: gone with this switch). */
const OUT_OF_PINNED_MEMORY = /HostBuffer\.read_file_slice failed/;
/** What torch's CPU says that it could not allocate, in bytes (#16246: far more than any weight). */
const ASKED_AT_ONCE = /you tried to allocate (\d+) bytes/;
/** What torch says of fp8 weights on a Mac (#9263, #6859, #4212). */
const NO_FP8_ON_MPS = /Trying to convert Float8_\w+ to the MPS backend|Undefined type Float8_/;
/** The functions of ComfyUI that bring weights to the GPU, and those that compute with them, as a traceback names them. */
const BRINGS_WEIGHTS = /, in (load_models_gpu|partially_load|patch_weight_to_device|cast_bias_weight|cast_modules_with_vbar|cast_to)\s/;
const COMPUTES = /, in (apply_model|_apply_model|decode|decode_tiled|encode|encode_token_weights)\s/;
/** How long a rescue is told beside the picture that it saved, in milliseconds. */
const BESIDE_THE_PICTURE = 8000;
/** The lines of an error of ComfyUI's that are shown beside its first: some list every tensor of a model. */
const MOST_LINES = 4;
/** Where the first sentence of a text ends that another program wrote: it has no fields. */
const SENTENCE = /^[^]*?(?:[.!?](?=\s+[A-Z\d(]|\s*$)|[\u3002\uff01\uff1f])/;

export class RunLog {
  /** The run that started last. @type {Run | null} */
  run = null;
  /** A tab -> its last run. @type {WeakMap<object, Run>} */
  #runs = new WeakMap();
  #onChange;
  /** The tab in which Run was pressed after the last run ended, so that the next run was not queued behind that. @type {object | null} */
  #pressed = null;
  /** Why what was pressed last does not start, and in which tab. @type {{tab: object, why: Refusal} | null} */
  #refused = null;

  /** @param {() => void} onChange called on every change */
  constructor(onChange) {
    this.#onChange = onChange;
  }

  /** The last run of a tab. @param {object} tab @returns {Run | null} */
  of(tab) {
    const run = this.#runs.get(tab);
    return run?.tab === tab ? run : null;
  }

  /** Whether Run was pressed in a tab, and nothing has begun yet. @param {object} tab */
  isWaiting(tab) {
    return this.#pressed === tab;
  }

  /** Why what was pressed last in a tab does not start. @param {object} tab @returns {Refusal | null} */
  refused(tab) {
    return this.#refused?.tab === tab ? this.#refused.why : null;
  }

  /** Note that Run was pressed. @param {object} tab @returns {boolean} whether nothing runs, so that what was told is of the past */
  press(tab) {
    this.#pressed = this.run?.state === "running" ? null : tab;
    if (this.#pressed) this.run = null;
    this.#refused = null;
    this.#onChange();
    return this.#pressed !== null;
  }

  /** Note why what was pressed does not start. @param {object} tab @param {string} text @returns {Toast} the message */
  refuse(tab, text) {
    const why = inTwo(text);
    this.#refused = { tab, why };
    this.#onChange();
    return toastOf(why);
  }

  /** @param {string} promptId @param {object | null} tab that it was queued from @returns {Toast[]} what to tell yet of the run that this one was queued behind */
  start(promptId, tab) {
    const last = this.#pressed || this.run?.tab !== tab ? null : this.run;
    const before = last?.events.length ? { ...last, before: null } : last?.before ?? null;
    this.#pressed = null;
    this.run = {
      promptId, tab, before, computed: false, held: new Set(), cached: new Set(), toasts: [], error: null, causes: new Set(), state: "running", guards: new Map(), reached: new Set(),
      calls: { model: 0, encoder: 0 }, events: [], results: new Map(), notices: new Map(), pictures: new Map(), isBlack: false, contrast: null,
    };
    if (tab) this.#runs.set(tab, this.run);
    this.#refused = null;
    this.#onChange();
    return (last?.toasts ?? []).map((toast) => ({ ...toast, detail: t("Previous run: {what}", { what: toast.detail ?? "" }), life: BESIDE_THE_PICTURE }));
  }

  /** @param {string} promptId @param {"done" | "failed"} state @param {RunError | null} [error] @returns {Toast[]} the rescues, to tell once more beside the picture */
  end(promptId, state, error = null) {
    if (this.run?.promptId !== promptId) return [];
    Object.assign(this.run, { state, error });
    this.#onChange();
    const rescues = this.run.toasts.filter(({ severity }) => state === "done" && severity === "success");
    return rescues.map((toast) => ({ ...toast, life: BESIDE_THE_PICTURE }));
  }

  /** Add a message. @param {GuardMessage} message @param {object | null} tab of its prompt @returns {boolean} whether it is the first of its cause in this run */
  add(message, tab) {
    if (this.run?.promptId !== message.prompt_id) this.start(message.prompt_id, tab);
    const run = /** @type {Run} */ (this.run);
    if (tab === null) run.tab = null;
    const first = message.kind === "calls" ? count(run, message) : note(run, message);
    this.#onChange();
    return first;
  }
}

/** Count calls that a guard checked. @param {Run} run @param {GuardMessage} message @returns {boolean} that there is nothing to tell */
function count({ calls }, { of, calls: checked = 0 }) {
  calls[of ? "encoder" : "model"] += checked;
  return false;
}

/** Note what a guard said: NaN that another guard could not cure is told there alone. @param {Run} run @param {GuardMessage} message @returns {boolean} whether it is the first of its cause */
function note(run, message) {
  const id = String(message.node_id ?? "");
  const follows = aboutOf(message).of_input && run.events.some(({ event }) => event && !event.recovered && event.kind !== "drift");
  if (message.kind === "event") run.events.push(message);
  if (follows) {
    run.reached.add(id);
    return false;
  }
  const guard = run.guards.get(id) ?? { verdict: "", brief: "", advice: "", events: [] };
  run.guards.set(id, guard);
  Object.assign(guard, { verdict: message.verdict, about: message.about });
  if (message.kind === "event") guard.events.push(message);
  else Object.assign(guard, { brief: message.brief, advice: message.advice, line: message.line });
  const cause = message.event?.kind === "drift" ? "drift" : message.verdict;
  const first = !run.causes.has(cause);
  run.causes.add(cause);
  return first;
}

/** The toast for a guard's message, one for each cause in a run; null for what was told. @param {GuardMessage} message @param {boolean} first */
export function toastFor(message, first) {
  if (!first || aboutOf(message).tone === "good" && !message.event) return null;
  const { event } = message, { cause: found, repaired } = aboutOf(message);
  const drift = event?.kind === "drift";
  const cause = drift ? t("A step is farther from fp32 than it should be") : found ? t(found) : verdictOf(message, [event]).text;
  if (repaired && event && !drift) return ourToast("success", cause, curedText(event), 5000);
  const { culprit, cure: [cure] } = culpritOf(message);
  if (culprit) return ourToast("error", culprit, cure, 20000);
  return ourToast(drift ? "warn" : "error", cause, drift && event ? together([whatIn(event), cure]) : sentencesOf(message.brief)[0], 20000);
}

/** What is at fault, and what to do about it: the first sentence and the rest, and in a line. @param {import("./dom.mjs").Judged & {advice: string, line?: string, event?: GuardEvent | null}} message */
export function culpritOf({ advice, line, event, ...judged }) {
  const { culprit, cure } = partsOf(advice);
  const [first, rest] = sentencesOf(String(culprit ? cure : advice));
  if (culprit) return { culprit: said(String(culprit)), cure: [capital(first), rest], line: capital(first) };
  return { culprit: aboutOf(judged).of_input && event?.layer ? t("NaN or Inf in the {input}", { input: said(event.layer) }) : "", cure: [first, rest], line: said(line) };
}

/** @param {string} text */
function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** "Step 3 was repeated in fp32: blocks.0.ffn.2 overflowed in fp16." @param {GuardEvent} event */
function curedText(event) {
  const values = { step: event.step, layer: event.layer || t("the model"), from: event.from, to: modeText(event.to) };
  return t("Step {step} was repeated in {to}: {layer} overflowed in {from}.", values);
}

/** Whether a guard's message says that parts of its model run wider from here on. @param {any} message @returns {boolean} */
export function isWider({ kind, event, of, ...judged }) {
  return !of && kind !== "calls" && (event ? event.recovered && event.kind !== "drift" : aboutOf(judged).tone === "good");
}

/** What an error says, and whether it was told before: by a guard, or by ComfyUI where it is not of the pack. @param {any} detail of an `execution_error` event @param {Run | null} run @returns {RunError} */
export function errorOf({ node_id: id, exception_type: type, exception_message: text, traceback = [] }, run) {
  const node = String(id);
  if (!String(type).startsWith(OURS)) return { node, ...ofComfyUI(text), told: true, memory: ranOut(`${type}: ${text}`, traceback.join("")) };
  const guards = type === OF_GUARD ? run?.events.find(({ event }) => event?.ended) : undefined;
  if (guards) return { node, message: sentencesOf(guards.brief), advice: sentencesOf(guards.advice), told: true, guard: String(guards.node_id ?? "") };
  return { node, ...inTwo(text.trim()), told: false }; // ComfyUI adds the end of a line
}

/** What a known error of a device's memory means, as a headline and what helps; nothing for other errors. @param {string} error its class and text @param {string} traceback @returns {string[] | undefined} */
function ranOut(error, traceback) {
  if (NO_FP8_ON_MPS.test(error)) return [t("torch does not cast fp8 on a Mac."), t("Halfsafe's loaders unpack fp8 weights by a table, and so does the node Halfsafe behind another loader.")];
  if (OUT_OF_PINNED_MEMORY.test(error)) return [t("Dynamic VRAM could not read a weight into pinned host memory."), t("Start ComfyUI with --disable-pinned-memory, or with --disable-dynamic-vram: copies of weights are slower then.")];
  const [, asked] = ASKED_AT_ONCE.exec(error) ?? [];
  if (asked) return [t("Host memory (RAM) ran out: {size} GiB were asked for at once.", { size: (Number(asked) / 2 ** 30).toPrecision(2) }), t("If dynamic VRAM is on, start ComfyUI with --disable-dynamic-vram: models are moved whole then, which is slower if they do not fit.")];
  if (OUT_OF_HOST_MEMORY.test(error)) return [t("Host memory (RAM) ran out.")];
  if (!OUT_OF_MEMORY.test(error)) return undefined;
  if (BRINGS_WEIGHTS.test(traceback)) return [t("GPU memory ran out for weights.")];
  return COMPUTES.test(traceback) ? ["", t("GPU memory ran out for activations: fewer pixels, frames or images in a batch need less.")] : [t("GPU memory ran out.")];
}

/** What ComfyUI or another pack says: the line that helps may be the last. @param {string} text @returns {Refusal} */
function ofComfyUI(text) {
  const [message = "", ...rest] = text.split("\n").map((line) => line.trim()).filter(Boolean);
  return { message: cut(message), advice: cut(rest.slice(0, MOST_LINES).join("\n")) };
}

/** A text of another program as its first sentence and the rest. @param {string} text @returns {string[]} */
function cut(text) {
  const [first] = SENTENCE.exec(text) ?? [text];
  return [first, text.slice(first.length).trim()];
}

/** @param {Refusal} error @returns {Toast} */
export function toastOf({ message: [message, more], advice: [advice] }) {
  return ourToast("error", message, more ? "" : advice, 20000);
}
