// @ts-check
/** The sidebar tab: what to do, what the last run and its guards said, the reports of this workflow in short, and what ComfyUI does here. */
import { el, firstOf, paint, verdictOf, verdictPill } from "./dom.mjs";
import { RUNS } from "./graph.mjs";
import { adviceLine, headOf } from "./panel.mjs";
import { culpritOf } from "./run.mjs";
import { saidIn } from "./toasts.mjs";
import { following, said, t, together } from "./words.mjs";

/**
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./run.mjs").GuardState} GuardState
 * @typedef {{id: string, title: string, report: Report, earlier: boolean}} NamedReport
 * @typedef {() => string | Promise<import("./measure.mjs").Told>} Action what it did, in words, or a question
 * @typedef {{what: string, here: string, switch: string}} Fact what ComfyUI does here, and the switch that changes it
 * @typedef {{titleOf: (id: string) => string, has: (id: string, result: import("./result.mjs").Result) => boolean, use: (id: string, use: import("./measure.mjs").Use) => Promise<string>, goTo: (id: string) => void}} Graph
 * @typedef {{device: string, gains: boolean, here: Fact[], took: string, showMe: Action, guard: Action, unguard: Action | null, measure: Action, unmeasure: Action | null, halve: Action, unhalve: Action | null, redraw: () => void, watching: string, watch: (value: string) => void, tab: object, nodes: any[], refused: import("./run.mjs").Refusal | null, isWaiting: boolean}} Greeting
 *   what this device can do, whether int8 is faster than 16 bits on it, what ComfyUI does here and how long that took, what to do first; the setting that guards every run and what changes it, the open tab and its
 *   workflow's nodes, why what was pressed does not start, and whether it has not started yet
 */
const GUARDS = ["HalfsafeNaNGuard", "HalfsafeGuardVAE", "HalfsafeGuardCLIP", "HalfsafeAutoPrecision"];
const REPORTING = ["HalfsafeReport", "HalfsafeAutoPrecision"];
/** A workflow with one of these is there to measure or to make a file: a guard is no part of that. */
const TOOLS = ["HalfsafeMeasurePrecisions", "HalfsafeAnalyzeLayers", "HalfsafeCalibrate", "HalfsafeSaveModel", "HalfsafeCompareImages"];
const states = () => ({ running: t("running"), done: t("finished"), failed: t("stopped") });

/** What has the focus, or is given it by a key. */
const FOCUSABLE = "button, select, summary";

/** The tab's parts stay in the page while it is open: what is read aloud, and what has the focus, is not taken away from under a user. */
export class Sidebar {
  /** What the last action did, and in which tab with which nodes that is true; "" once either has changed. @type {import("./measure.mjs").Told} */
  #told = "";
  #toldOf = "";

  constructor() {
    this.device = el("p", { class: "hs-sentence" });
    this.actions = el("div", { class: "hs-actions" });
    this.did = el("div", { class: "hs-hint hs-did", role: "status", tabindex: "-1" });
    this.watch = el("div");
    this.run = el("section");
    this.reports = el("section");
    this.here = el("section");
    const parts = [this.device, this.actions, this.did, this.watch, this.run, this.reports, this.here];
    this.element = el("div", { class: "halfsafe hs-sidebar" }, el("h2", { text: "Halfsafe" }), ...parts);
  }

  /** Say what was done, from the next drawing on. @param {import("./measure.mjs").Told} told */
  tell(told) {
    this.#told = told;
    this.#toldOf = "";
  }

  /** @param {Run | null} run @param {NamedReport[]} reports @param {Greeting} greeting @param {Graph} graph */
  draw(run, reports, greeting, graph) {
    const state = run ? el("span", { class: "hs-dim", text: states()[run.state] }) : null;
    fill(this.device, greeting.device);
    fill(this.actions, ...actionsOf(this, greeting));
    fill(this.did, ...this.#answer(greeting));
    fill(this.watch, watchSwitch(greeting));
    fill(
      this.run, el("h3", {}, t("Last run"), " ", state), ...lastRun(this, run, greeting, graph),
      ...(run?.before ? [el("h3", { text: t("Earlier in this queue") }), ...guardCards(run.before, graph)] : []),
    );
    fill(this.reports, el("h3", { text: t("Reports") }), ...(reports.length ? reports.map((entry) => reportCard(entry, graph)) : [hint(whyNoReport(run, greeting))]));
    fill(this.here, el("h3", { text: t("What ComfyUI does here") }), factsOf(greeting));
  }

  /** What the last action said, with a button for each answer to a question. @param {Greeting} greeting */
  #answer(greeting) {
    const now = stateOf(greeting);
    this.#toldOf ||= now;
    if (this.#toldOf !== now) this.#told = "";
    if (typeof this.#told === "string") return [this.#told];
    const { text, choices } = this.#told;
    return [text, ...choices.map(({ name, act }) => this.button(greeting, act, name))];
  }

  /** A button that says what it did, and has the focus as before. @param {Pick<Greeting, "redraw">} greeting @param {Action} act @param {...(Node | string)} children */
  button({ redraw }, act, ...children) {
    const onclick = async () => {
      const part = made.closest(".hs-sidebar > *");
      const place = [...part.querySelectorAll(FOCUSABLE)].indexOf(made);
      this.tell(await act());
      redraw();
      const { activeElement: focused } = document;
      if (focused === document.body || focused instanceof HTMLCanvasElement) (part.querySelectorAll(FOCUSABLE)[place] ?? this.did).focus({ preventScroll: true });
    };
    const made = el("button", { type: "button", class: "hs-button", onclick }, ...children);
    return made;
  }
}

/** What an answer is true of. @type {WeakMap<object, number>} */
const numbers = new WeakMap();
let tabs = 0;

/** What an answer is true of: the tab, and its nodes. @param {Greeting} greeting */
function stateOf({ tab, nodes }) {
  if (!numbers.has(tab)) numbers.set(tab, (tabs += 1));
  return [numbers.get(tab), ...nodes.map(({ graph, id, type }) => `${graph.id} ${id} ${type}`)].join();
}

/** Put children into an element, unless it has the same: what has the focus or is unfolded stays so. @param {HTMLElement} element @param {...(Node | string | null)} children */
function fill(element, ...children) {
  const next = el("div", {}, ...children);
  const unfolded = [...element.querySelectorAll("details")].map(({ open }) => open);
  for (const [place, fold] of [...next.querySelectorAll("details")].entries()) fold.open ||= unfolded[place] ?? false;
  const same = next.childNodes.length === element.childNodes.length && [...next.childNodes].every((child, place) => child.isEqualNode(element.childNodes[place]));
  if (same) return;
  const focused = [...element.querySelectorAll(FOCUSABLE)].indexOf(/** @type {Element} */ (document.activeElement));
  element.replaceChildren(...next.childNodes);
  if (focused >= 0) /** @type {HTMLElement} */ (element.querySelectorAll(FOCUSABLE)[focused] ?? element).focus({ preventScroll: true });
}

/** @param {Sidebar} sidebar @param {Run | null} run @param {Greeting} greeting @param {Graph} graph */
function lastRun(sidebar, run, greeting, graph) {
  if (greeting.refused) return [refusedCard(greeting.refused)];
  if (!run) return quiet(sidebar, run, greeting);
  const error = run.error && !run.error.guard ? [errorCard(sidebar, run.error, greeting, graph)] : [];
  const results = [...run.results].filter(([id, result]) => graph.has(id, result)).map(([id, result]) => resultCard(sidebar, id, result, greeting, graph, run.cached.has(id)));
  const notices = [...run.notices].flatMap(([id, told]) => told.map((notice) => noticeCard(id, notice, graph)));
  return [...error, ...results, ...notices, ...(run.guards.size ? guardCards(run, graph) : quiet(sidebar, run, greeting))];
}

/** @param {Run} run @param {Graph} graph */
function guardCards({ guards, reached }, graph) {
  const names = [...reached].filter((id) => !guards.has(id)).map(graph.titleOf);
  const also = names.length ? t("This NaN also reached {names}.", { names: names.join(t(", ")) }) : "";
  return [...guards].map(([id, guard]) => guardCard(id, guard, guard.events.some(({ event }) => event && !event.recovered) ? also : "", graph));
}

/** @param {Run | null} run @param {Greeting} greeting */
function whyNoReport(run, { nodes }) {
  const withReport = nodes.some(({ comfyClass }) => REPORTING.includes(comfyClass));
  if (!withReport) return t("No report yet: Guard this workflow adds one.");
  return run?.state === "failed" ? t("The last run ended before its report.") : t("Run the workflow to see the storage and compute dtype of each layer, with the reason.");
}

/** What each fact is called. @returns {Record<string, string>} */
const facts = () => ({ kernels: t("8-bit kernels"), compiler: t("Comfy Compiler"), "dynamic VRAM": t("Dynamic VRAM"), attention: t("Attention"), loaded: t("Loaded") });

/** @param {Greeting} greeting */
function factsOf({ here, took }) {
  const lines = here.map((fact) => {
    const text = [said(fact.here), fact.what === "loaded" ? took : ""].filter(Boolean).join(t("; "));
    return [el("dt", { text: facts()[fact.what] ?? fact.what }), el("dd", {}, text, fact.switch ? el("div", { class: "hs-dim", text: t("To change it: {switch}", { switch: said(fact.switch) }) }) : null)];
  });
  return el("dl", { class: "hs-facts" }, ...lines.flat());
}

/** The values of the setting that guards every run, and what each does. @returns {[string, string][]} */
const watches = () => [["off", t("off")], ["report", t("report: show NaN and Inf")], ["retry_higher", t("retry_higher: repeat failed calls in a higher precision")]];

/** @param {Sidebar} sidebar @param {Greeting} greeting */
function actionsOf(sidebar, greeting) {
  const { gains, showMe, guard, unguard, measure, unmeasure, halve, unhalve } = greeting;
  /** @param {string} title @param {string} text @param {Action} act */
  const action = (title, text, act) => sidebar.button(greeting, act, el("b", { text: title }), text);
  const showing = action(t("Show me"), t("A black picture, and the same one in a format that does not overflow. Nothing to download."), showMe);
  const guarding = unguard ? action(t("Take the guard out"), t("Removes the Halfsafe node and restores the links."), unguard)
    : action(t("Guard this workflow"), t("Adds the Halfsafe node between loaders and sampler. Click again to remove it."), guard);
  const measuring = unmeasure ? action(t("Take Measure out"), t("Removes Measure Precisions and its chart."), unmeasure)
    : action(t("Measure my card"), t("Adds a node that measures this workflow's model: about 30 sampler steps, then it names the best setting for this card."), measure);
  const halving = unhalve ? action(t("Put ComfyUI's loaders back"), t("Restores each loader to its state before Halve the memory."), unhalve)
    : action(t("Halve the memory"), together([gains ? t("Half the memory, up to twice as fast.") : t("Half the memory."), t("Loads models and text encoders in 8 bits: replaces ComfyUI's loaders with Halfsafe's, with the same files and links. Click again to undo it.")]), halve);
  return [showing, guarding, halving, measuring];
}

/** @param {Greeting} greeting */
function watchSwitch({ watching, watch }) {
  const options = watches().map(([value, text]) => el("option", { value, text, selected: value === watching }));
  const select = el("select", { onchange: () => watch(select.value) }, ...options);
  return el("label", { class: "hs-watch" }, `${t("Guard every run")}${t(": ")}`, select);
}

/** What there is to say where no guard said anything. @param {Sidebar} sidebar @param {Run | null} run @param {Greeting} greeting */
function quiet(sidebar, run, greeting) {
  if (greeting.isWaiting) return [hint(t("Nothing has begun yet. If ComfyUI refused the run, its own message says why."))];
  if (!run) return [hint(t("This workflow has not run since this page was opened."))];
  if (run.state === "done" && !run.computed) return run.results.size ? [] : [hint(t("Nothing was computed: ComfyUI kept the results of an earlier run."))];
  const has = (/** @type {string[]} */ types) => greeting.nodes.some(({ comfyClass, mode }) => types.includes(comfyClass) && mode === RUNS);
  if (greeting.watching !== "off" || has(GUARDS)) return guardedText(run).map(hint);
  const samples = greeting.nodes.some(({ inputs }) => inputs?.some((/** @type {any} */ { type, link }) => type === "MODEL" && link !== null));
  if (run.state !== "done" || !samples || has(TOOLS)) return [];
  return [el("div", { class: "hs-title hs-card" }, t("This workflow has no guard."), sidebar.button(greeting, greeting.guard, t("Guard this workflow")))];
}

/** What guards looked at that found nothing; nothing is said of a run that ended before they did. @param {Run} run */
function guardedText({ state, calls: { model, encoder } }) {
  if (model) return [t("Guarded: {calls} calls of the model checked, no NaN.", { calls: model })];
  if (encoder) return [t("Guarded: {calls} calls of VAE and text encoder checked, no NaN.", { calls: encoder })];
  return state === "done" ? [t("Nothing was checked: no guarded model ran.")] : [];
}

/** @param {string} id @param {GuardState} guard @param {string} also where else its NaN came @param {Graph} graph */
function guardCard(id, guard, also, graph) {
  const [first] = guard.events;
  const advice = guard.advice || (first?.advice ?? "");
  const { culprit, cure } = culpritOf({ ...guard, advice, event: first?.event });
  const text = said(guard.brief);
  const summary = text ? el("p", {}, text, cure ? el("span", { class: "hs-dim", text: following(text, cure) }) : null) : null;
  const events = el("div", { class: "hs-events" }, ...firstOf(guard.events.map((event) => adviceLine(event, culprit || summary ? advice : ""))));
  const pill = verdictPill(verdictOf(guard.verdict, guard.events.map((message) => message.event)));
  const named = culprit ? [el("p", { class: "hs-sentence", "data-tone": "bad", text: culprit }), el("p", { text: cure })] : [summary];
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, pill), ...named, events, also ? el("p", { class: "hs-dim", text: also }) : null);
}

/** What a message told that went away. @param {string} id @param {import("./toasts.mjs").Toast} notice @param {Graph} graph */
function noticeCard(id, notice, graph) {
  const tone = notice.severity === "success" ? "good" : "warn";
  const text = el("p", { class: "hs-sentence", "data-tone": tone, text: saidIn(notice) });
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, null), text, notice.detail ? el("p", { class: "hs-dim hs-lines", text: notice.detail }) : null);
}

/** @param {import("./run.mjs").Refusal} refused */
function refusedCard({ message, advice }) {
  return el("article", { class: "hs-card hs-error" }, el("div", { class: "hs-title" }, t("The run did not start."), verdictPill("stopped", t("refused"))), el("p", { text: message }), advice ? el("p", { class: "hs-dim", text: advice }) : null);
}

/** @param {Sidebar} sidebar @param {string} id @param {import("./result.mjs").Result} result @param {Greeting} greeting @param {Graph} graph @param {boolean} earlier whether ComfyUI kept it from an earlier run */
function resultCard(sidebar, id, result, greeting, graph, earlier) {
  const { use } = result;
  const when = earlier ? el("span", { class: "hs-dim", text: t("of an earlier run") }) : null;
  const using = use ? sidebar.button(greeting, () => graph.use(id, use), t("Use this")) : null;
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, when), el("p", { class: "hs-sentence", "data-tone": result.tone, text: said(result.sentence) }), using);
}

/** @param {Sidebar} sidebar @param {import("./run.mjs").RunError} error @param {Greeting} greeting @param {Graph} graph */
function errorCard(sidebar, { node, message, advice, memory }, greeting, graph) {
  const title = cardTitle(node, graph.titleOf(node), graph, verdictPill("stopped", t("stopped")));
  const halving = memory && !greeting.unhalve ? sidebar.button(greeting, greeting.halve, t("Halve the memory")) : null;
  return el("article", { class: "hs-card hs-error" }, title, el("p", { text: message }), memory ? el("p", { text: memory }) : null, advice ? el("p", { class: "hs-dim hs-lines", text: advice }) : null, halving);
}

/** @param {NamedReport} entry @param {Graph} graph */
function reportCard({ id, title, report, earlier }, graph) {
  const when = earlier ? el("span", { class: "hs-dim", text: t("of an earlier run") }) : null;
  const card = el("article", { class: `hs-card hs-head${earlier ? " hs-earlier" : ""}` }, cardTitle(id, title, graph, when), ...headOf(report));
  paint(card, report);
  return card;
}

/** @param {string} id @param {string} title @param {Graph} graph @param {HTMLElement | null} pill */
function cardTitle(id, title, graph, pill) {
  const button = el("button", { type: "button", class: "hs-link", title: t("Show this node"), onclick: () => graph.goTo(id), text: title });
  return el("div", { class: "hs-title" }, button, pill);
}

/** @param {string} text */
function hint(text) {
  return el("p", { class: "hs-hint", text });
}
