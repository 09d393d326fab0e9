// @ts-check
/** The sidebar tab: what the guards of the last run said, and the reports of this workflow in short. */
import { el, firstOf, paint, verdictOf, verdictPill } from "./dom.mjs";
import { adviceLine, headOf } from "./panel.mjs";
import { t } from "./words.mjs";

/**
 * @typedef {import("./report.mjs").Report} Report
 * @typedef {import("./run.mjs").Run} Run
 * @typedef {import("./run.mjs").GuardState} GuardState
 * @typedef {{id: string, title: string, report: Report}} NamedReport
 */
const states = () => ({ running: t("running"), done: t("finished"), failed: t("stopped") });

/**
 * @param {HTMLElement} root
 * @param {Run | null} run
 * @param {NamedReport[]} reports
 * @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph
 */
export function drawSidebar(root, run, reports, graph) {
  const guards = [...(run?.guards ?? [])];
  const state = run ? el("span", { class: "hs-dim", text: states()[run.state] }) : null;
  root.replaceChildren(
    el("h3", {}, t("Last run"), " ", state),
    ...(guards.length ? guards.map(([id, guard]) => guardCard(id, guard, graph)) : [quiet(run)]),
    el("h3", { text: t("Reports") }),
    ...(reports.length ? reports.map((entry) => reportCard(entry, graph)) : [hint(t("Add a Precision Report node and run the workflow."))]),
  );
}

/** @param {Run | null} run */
function quiet(run) {
  return hint(run ? t("No guard reported anything.") : t("Nothing was run since this page was opened."));
}

/** @param {string} id @param {GuardState} guard @param {{titleOf: (id: string) => string, goTo: (id: string) => void}} graph */
function guardCard(id, guard, graph) {
  const summary = guard.message ? el("p", {}, guard.message, guard.advice ? el("span", { class: "hs-dim", text: ` ${guard.advice}` }) : null) : null;
  const events = el("div", { class: "hs-events" }, ...firstOf(guard.events.map((event) => adviceLine(event, guard.advice))));
  const pill = verdictPill(verdictOf(guard.verdict, guard.events.map((message) => message.event)));
  return el("article", { class: "hs-card" }, cardTitle(id, graph.titleOf(id), graph, pill), summary, events);
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
