// @ts-check
/** The sidebar tab: what the guards of the last run said, and the reports of this workflow in short. */
import { el, firstOf, paint, verdictOf, verdictPill } from "./dom.mjs";
import { RUNS } from "./graph.mjs";
import { adviceLine, headOf } from "./panel.mjs";
import { saidText } from "./report.mjs";
import { sentenceOf } from "./result.mjs";
import { following, said, t } from "./words.mjs";

/**
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./run.mjs").GuardState} GuardState
 * @typedef {{id: string, title: string, report: Report}} NamedReport
 * @typedef {() => string | Promise<import("./measure.mjs").Told>} Action what it did, in words, or a question
 * @typedef {{device: string, did: HTMLElement, showMe: Action, guard: Action, unguard: Action | null, measure: Action, unmeasure: Action | null, halve: Action, unhalve: Action | null, redraw: () => void, watching: string, nodes: any[], elsewhere: boolean}} Greeting
 *   what this device can do, what to do first, and where it is said what that did; the setting that guards every run, the workflow's nodes, and
 *   whether the last run was of another one
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
  const guards = [...(run?.guards ?? [])];
  const state = run ? el("span", { class: "hs-dim", text: states()[run.state] }) : null;
  const first = greet(greeting);
  const withReport = greeting.nodes.some(({ comfyClass }) => REPORTING.includes(comfyClass));
  root.replaceChildren(
    ...(run ? [] : first),
    el("h3", {}, t("Last run"), " ", state),
    ...(run?.error ? [errorCard(run.error, graph)] : []),
    ...[...(run?.results ?? [])].map(([id, result]) => resultCard(id, result, graph)),
    ...(guards.length ? guards.map(([id, guard]) => guardCard(id, guard, graph)) : quiet(run, greeting)),
    ...(run?.before ? [el("h3", { text: t("Earlier in this queue") }), ...[...run.before.guards].map(([id, guard]) => guardCard(id, guard, graph))] : []),
    el("h3", { text: t("Reports") }),
    ...(reports.length ? reports.map((entry) => reportCard(entry, graph)) : [hint(withReport ? t("Run the workflow to see what each layer is stored in and computed in, and why.") : t("Add a Precision Report node and run the workflow."))]),
    ...(run ? first : []),
  );
}

/** What the setting that guards every run does, by its value. @returns {Record<string, string>} */
const watches = () => ({
  report: t("Guard every run is on: it tells of NaN and Inf, and a black picture stays black."),
  retry_higher: t("Guard every run is on: what fails is repeated in a higher precision."),
});

/** @param {Greeting} greeting */
function greet(greeting) {
  const { device, did, showMe, guard, unguard, measure, unmeasure, halve, unhalve, watching } = greeting;
  /** @param {string} title @param {string} text @param {Action} act */
  const action = (title, text, act) => button(greeting, act, el("b", { text: title }), text);
  const showing = action(t("Show me"), t("Opens five nodes on a small built-in model that overflows in fp16: its black picture, and the same one, where NaN Guard repeats the step that overflowed. No download."), showMe);
  const guarding = unguard ? action(t("Take the guard out"), t("Takes the Halfsafe node out and links what was linked before."), unguard)
    : action(t("Guard this workflow"), t("Puts the Halfsafe node between loaders and sampler. Another click takes it out."), guard);
  const measuring = unmeasure ? action(t("Take Measure out"), t("Takes Measure Precisions and its chart out."), unmeasure)
    : action(t("Measure my card"), t("Puts Measure Precisions beside the sampler: a run takes as long as about 30 of its steps and says what is fastest here."), measure);
  const halving = unhalve ? action(t("Put ComfyUI's loaders back"), t("Each loader is as it was before Halve the memory."), unhalve)
    : action(t("Halve the memory"), t("Loads models and text encoders in 8 bits: ComfyUI's loaders become Halfsafe's, with the same files and links. Another click puts them back."), halve);
  const watched = watches()[watching] ? [el("p", { class: "hs-sentence", text: watches()[watching] })] : [];
  return [el("p", { class: "hs-sentence", text: device || t("Looking at this device ...") }), ...watched, el("div", { class: "hs-actions" }, showing, guarding, halving, measuring), did];
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

/** What there is to say where no guard said anything. @param {Run | null} run @param {Greeting} greeting */
function quiet(run, greeting) {
  if (greeting.elsewhere) return [hint(t("It was of another workflow."))];
  if (!run) return [hint(t("Nothing was run since this page was opened."))];
  if (run.state === "done" && !run.computed) return [hint(t("Nothing was computed: ComfyUI kept the results of an earlier run."))];
  const has = (/** @type {string[]} */ types) => greeting.nodes.some(({ comfyClass, mode }) => types.includes(comfyClass) && mode === RUNS);
  if (greeting.watching !== "off" || has(GUARDS)) return [hint(t("No guard reported anything."))];
  const samples = greeting.nodes.some(({ inputs }) => inputs?.some((/** @type {any} */ { type, link }) => type === "MODEL" && link !== null));
  if (run.state !== "done" || !samples || has(TOOLS)) return [];
  return [el("div", { class: "hs-title hs-card" }, t("This workflow has no guard."), button(greeting, greeting.guard, t("Guard this workflow")))];
}

/** @param {string} id @param {GuardState} guard @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function guardCard(id, guard, graph) {
  const text = guard.message && saidText({ ...guard, event: null });
  const summary = text ? el("p", {}, text, guard.advice ? el("span", { class: "hs-dim", text: following(text, said(guard.advice)) }) : null) : null;
  const events = el("div", { class: "hs-events" }, ...firstOf(guard.events.map((event) => adviceLine(event, guard.advice))));
  const pill = verdictPill(verdictOf(guard.verdict, guard.events.map((message) => message.event)));
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, pill), summary, events);
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
