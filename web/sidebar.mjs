// @ts-check
/** The sidebar tab: what the guards of the last run said, and the reports of this workflow in short. */
import { el, firstOf, paint, verdictOf, verdictPill } from "./dom.mjs";
import { adviceLine, headOf } from "./panel.mjs";
import { saidText } from "./report.mjs";
import { said, t } from "./words.mjs";

/**
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./run.mjs").GuardState} GuardState
 * @typedef {{id: string, title: string, report: Report}} NamedReport
 * @typedef {() => string | Promise<string>} Action what it did, in words
 * @typedef {{device: string, did: HTMLElement, showMe: Action, guard: Action, measure: Action}} Greeting what this device can do, what to do first, and where it is said what that did
 */
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
  root.replaceChildren(
    ...(run ? [] : first),
    el("h3", {}, t("Last run"), " ", state),
    ...(run?.error ? [errorCard(run.error, graph)] : []),
    ...(guards.length ? guards.map(([id, guard]) => guardCard(id, guard, graph)) : [quiet(run)]),
    el("h3", { text: t("Reports") }),
    ...(reports.length ? reports.map((entry) => reportCard(entry, graph)) : [hint(t("Add a Precision Report node and run the workflow."))]),
    ...(run ? first : []),
  );
}

/** @param {Greeting} greeting */
function greet({ device, did, showMe, guard, measure }) {
  /** @param {string} title @param {string} text @param {Action} act */
  const action = (title, text, act) => el("button", { type: "button", class: "hs-button", onclick: async () => { did.textContent = await act(); } }, el("b", { text: title }), text);
  const showing = action(t("Show me"), t("Opens five nodes on a small model that is here already: a black picture, and the same one repaired. No download."), showMe);
  const guarding = action(t("Guard this workflow"), t("Puts the Halfsafe node between loaders and sampler. Ctrl+Z takes it back."), guard);
  const measuring = action(t("Measure my card"), t("Puts Measure Precisions beside the sampler: run it to see what is fastest here."), measure);
  return [el("p", { class: "hs-sentence", text: device || t("Looking at this device ...") }), el("div", { class: "hs-actions" }, showing, guarding, measuring), did];
}

/** @param {Run | null} run */
function quiet(run) {
  return hint(run ? t("No guard reported anything.") : t("Nothing was run since this page was opened."));
}

/** @param {string} id @param {GuardState} guard @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function guardCard(id, guard, graph) {
  const summary = guard.message ? el("p", {}, saidText({ ...guard, event: null }), guard.advice ? el("span", { class: "hs-dim", text: ` ${said(guard.advice)}` }) : null) : null;
  const events = el("div", { class: "hs-events" }, ...firstOf(guard.events.map((event) => adviceLine(event, guard.advice))));
  const pill = verdictPill(verdictOf(guard.verdict, guard.events.map((message) => message.event)));
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, pill), summary, events);
}

/** @param {import("./run.mjs").RunError} error @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function errorCard({ node, message, advice }, graph) {
  const title = cardTitle(node, graph.titleOf(node), graph, verdictPill("stopped"));
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
