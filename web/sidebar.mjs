// @ts-check
/** The sidebar tab: what to do, what the last run and its guards said, the reports of this workflow in short, and what ComfyUI does here. */
import { el, firstOf, paint, verdictOf, verdictPill } from "./dom.mjs";
import { RUNS } from "./graph.mjs";
import { adviceLine, headOf } from "./panel.mjs";
import { saidText } from "./report.mjs";
import { sentenceOf } from "./result.mjs";
import { culpritOf } from "./run.mjs";
import { saidIn } from "./toasts.mjs";
import { following, said, t } from "./words.mjs";

/**
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./run.mjs").GuardState} GuardState
 * @typedef {{id: string, title: string, report: Report}} NamedReport
 * @typedef {() => string | Promise<import("./measure.mjs").Told>} Action what it did, in words, or a question
 * @typedef {{what: string, here: string, switch: string}} Fact what ComfyUI does here, and the switch that changes it
 * @typedef {{device: string, here: Fact[], took: string, did: HTMLElement, showMe: Action, guard: Action, unguard: Action | null, measure: Action, unmeasure: Action | null, halve: Action, unhalve: Action | null, redraw: () => void, watching: string, watch: (value: string) => void, nodes: any[], elsewhere: boolean, refused: {message: string, advice: string} | null, isWaiting: boolean}} Greeting
 *   what this device can do, what ComfyUI does here and how long that took, what to do first, and where it is said what that did; the setting that guards every run and
 *   what changes it, the workflow's nodes, whether the last run was of another one, why what was pressed does not start, and whether it has not started yet
 */
const GUARDS = ["HalfsafeNaNGuard", "HalfsafeGuardVAE", "HalfsafeGuardCLIP", "HalfsafeAutoPrecision"];
const REPORTING = ["HalfsafeReport", "HalfsafeAutoPrecision"];
/** A workflow with one of these is there to measure or to make a file: a guard is no part of that. */
const TOOLS = ["HalfsafeMeasurePrecisions", "HalfsafeAnalyzeLayers", "HalfsafeCalibrate", "HalfsafeSaveModel", "HalfsafeCompareImages"];
const states = () => ({ running: t("running"), done: t("finished"), failed: t("stopped") });

/**
 * @param {HTMLElement} root
 * @param {Run | null} run
 * @param {NamedReport[]} reports
 * @param {Greeting} greeting
 * @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph
 */
export function drawSidebar(root, run, reports, greeting, graph) {
  const state = run ? el("span", { class: "hs-dim", text: states()[run.state] }) : null;
  root.replaceChildren(
    ...greet(greeting),
    el("h3", {}, t("Last run"), " ", state),
    ...lastRun(run, reports, greeting, graph),
    ...(run?.before ? [el("h3", { text: t("Earlier in this queue") }), ...guardCards(run.before, graph)] : []),
    el("h3", { text: t("Reports") }),
    ...(reports.length ? reports.map((entry) => reportCard(entry, graph)) : [hint(whyNoReport(run, greeting))]),
    el("h3", { text: t("What ComfyUI does here") }),
    factsOf(greeting),
  );
}

/** @param {Run | null} run @param {NamedReport[]} reports @param {Greeting} greeting @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function lastRun(run, reports, greeting, graph) {
  if (greeting.refused) return [refusedCard(greeting.refused)];
  if (!run) return quiet(run, reports, greeting);
  const error = run.error && !run.error.guard ? [errorCard(run.error, graph)] : [];
  const results = [...run.results].map(([id, result]) => resultCard(id, result, graph));
  const notices = [...run.notices].flatMap(([id, told]) => told.map((notice) => noticeCard(id, notice, graph)));
  return [...error, ...results, ...notices, ...(run.guards.size ? guardCards(run, graph) : quiet(run, reports, greeting))];
}

/** @param {Run} run @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function guardCards({ guards }, graph) {
  return [...guards].map(([id, guard]) => guardCard(id, guard, graph));
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
    return [el("dt", { text: facts()[fact.what] ?? fact.what }), el("dd", {}, text, el("code", { text: said(fact.switch) }))];
  });
  return el("dl", { class: "hs-facts" }, ...lines.flat());
}

/** The values of the setting that guards every run, and what each does. @returns {[string, string][]} */
const watches = () => [["off", t("off")], ["report", t("report NaN and Inf")], ["retry_higher", t("repeat failed calls in a higher precision")]];

/** @param {Greeting} greeting */
function greet(greeting) {
  const { device, did, showMe, guard, unguard, measure, unmeasure, halve, unhalve } = greeting;
  /** @param {string} title @param {string} text @param {Action} act */
  const action = (title, text, act) => button(greeting, act, el("b", { text: title }), text);
  const showing = action(t("Show me"), t("A black picture, and the same one repaired. Nothing to download."), showMe);
  const guarding = unguard ? action(t("Take the guard out"), t("Removes the Halfsafe node and restores the links."), unguard)
    : action(t("Guard this workflow"), t("Adds the Halfsafe node between loaders and sampler. Click again to remove it."), guard);
  const measuring = unmeasure ? action(t("Take Measure out"), t("Removes Measure Precisions and its chart."), unmeasure)
    : action(t("Measure my card"), t("Adds a node that measures this workflow's model: about 30 sampler steps, then it names the best setting for this card."), measure);
  const halving = unhalve ? action(t("Put ComfyUI's loaders back"), t("Restores each loader to its state before Halve the memory."), unhalve)
    : action(t("Halve the memory"), t("Loads models and text encoders in 8 bits: replaces ComfyUI's loaders with Halfsafe's, with the same files and links. Click again to undo it."), halve);
  return [
    el("h2", { text: "Halfsafe" }),
    el("p", { class: "hs-sentence", text: device || t("Detecting the device ...") }),
    el("div", { class: "hs-actions" }, showing, guarding, halving, measuring),
    did,
    watchSwitch(greeting),
  ];
}

/** @param {Greeting} greeting */
function watchSwitch({ watching, watch }) {
  const options = watches().map(([value, text]) => el("option", { value, text, selected: value === watching }));
  const select = el("select", { onchange: () => watch(select.value) }, ...options);
  return el("label", { class: "hs-watch" }, t("Guard every run:"), select);
}

/** A button that says what it did. @param {Pick<Greeting, "did" | "redraw">} greeting @param {Action} act @param {...(Node | string)} children */
function button({ did, redraw }, act, ...children) {
  const onclick = async () => {
    did.replaceChildren(...answerOf(await act(), { did, redraw }));
    redraw();
  };
  return el("button", { type: "button", class: "hs-button", onclick }, ...children);
}

/** What an action said, with a button for each answer to a question. @param {import("./measure.mjs").Told} told @param {Pick<Greeting, "did" | "redraw">} greeting */
function answerOf(told, greeting) {
  return typeof told === "string" ? [told] : [told.text, ...told.choices.map(({ name, act }) => button(greeting, act, name))];
}

/** What there is to say where no guard said anything. @param {Run | null} run @param {NamedReport[]} reports @param {Greeting} greeting */
function quiet(run, reports, greeting) {
  if (greeting.elsewhere) return [hint(t("The last run was of another workflow."))];
  if (greeting.isWaiting) return [hint(t("Nothing has begun yet. If ComfyUI refused the run, its own message says why."))];
  if (!run) return [hint(t("Nothing has run since this page was opened."))];
  if (run.state === "done" && !run.computed) return [hint(t("Nothing was computed: ComfyUI kept the results of an earlier run."))];
  const has = (/** @type {string[]} */ types) => greeting.nodes.some(({ comfyClass, mode }) => types.includes(comfyClass) && mode === RUNS);
  if (greeting.watching !== "off" || has(GUARDS)) return [hint(guardedText(run, reports))];
  const samples = greeting.nodes.some(({ inputs }) => inputs?.some((/** @type {any} */ { type, link }) => type === "MODEL" && link !== null));
  if (run.state !== "done" || !samples || has(TOOLS)) return [];
  return [el("div", { class: "hs-title hs-card" }, t("This workflow has no guard."), button(greeting, greeting.guard, t("Guard this workflow")))];
}

/** What guards looked at that found nothing. @param {Run} run @param {NamedReport[]} reports */
function guardedText({ state }, reports) {
  const calls = reports.reduce((sum, { report }) => sum + (report.guard.verdict === "clean" ? report.guard.calls : 0), 0);
  if (state === "running") return t("Guarded: no NaN so far.");
  return calls ? t("Guarded: {calls} calls of the model checked, no NaN.", { calls }) : t("Guarded: no NaN.");
}

/** @param {string} id @param {GuardState} guard @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function guardCard(id, guard, graph) {
  const [first] = guard.events;
  const advice = guard.advice || (first?.advice ?? "");
  const { culprit, cure } = culpritOf({ ...guard, advice, event: first?.event });
  const text = guard.message && saidText({ ...guard, event: null });
  const summary = text ? el("p", {}, text, cure ? el("span", { class: "hs-dim", text: following(text, cure) }) : null) : null;
  const events = el("div", { class: "hs-events" }, ...firstOf(guard.events.map((event) => adviceLine(event, culprit || summary ? advice : ""))));
  const pill = verdictPill(verdictOf(guard.verdict, guard.events.map((message) => message.event)));
  const named = culprit ? [el("p", { class: "hs-sentence", "data-tone": "bad", text: culprit }), el("p", { text: cure })] : [summary];
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, pill), ...named, events);
}

/** What a message told that went away. @param {string} id @param {import("./toasts.mjs").Toast} notice @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function noticeCard(id, notice, graph) {
  const tone = notice.severity === "success" ? "good" : "warn";
  const text = el("p", { class: "hs-sentence", "data-tone": tone, text: saidIn(notice) });
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, null), text, notice.detail ? el("p", { class: "hs-dim hs-lines", text: notice.detail }) : null);
}

/** @param {{message: string, advice: string}} refused */
function refusedCard({ message, advice }) {
  return el("article", { class: "hs-card hs-error" }, el("div", { class: "hs-title" }, t("The run did not start."), verdictPill("stopped", t("refused"))), el("p", { text: message }), advice ? el("p", { class: "hs-dim", text: advice }) : null);
}

/** @param {string} id @param {import("./result.mjs").Result} result @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function resultCard(id, result, graph) {
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, null), el("p", { class: "hs-sentence", "data-tone": result.tone, text: sentenceOf(result) }));
}

/** @param {import("./run.mjs").RunError} error @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function errorCard({ node, message, advice }, graph) {
  const title = cardTitle(node, graph.titleOf(node), graph, verdictPill("stopped", t("stopped")));
  return el("article", { class: "hs-card hs-error" }, title, el("p", { text: message }), advice ? el("p", { class: "hs-dim", text: advice }) : null);
}

/** @param {NamedReport} entry @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function reportCard({ id, title, report }, graph) {
  const card = el("article", { class: "hs-card hs-head" }, cardTitle(id, title, graph, null), ...headOf(report));
  paint(card, report);
  return card;
}

/** @param {string} id @param {string} title @param {{goTo: (id: string) => void}} graph @param {HTMLElement | null} pill */
function cardTitle(id, title, graph, pill) {
  const button = el("button", { type: "button", class: "hs-link", title: t("Show this node"), onclick: () => graph.goTo(id), text: title });
  return el("div", { class: "hs-title" }, button, pill);
}

/** @param {string} text */
function hint(text) {
  return el("p", { class: "hs-hint", text });
}
