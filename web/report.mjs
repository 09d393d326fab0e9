// @ts-check
import { aboutOf, modeText } from "./dom.mjs";
import { said, t, together } from "./words.mjs";

/**
 * What the page derives from a report of version 1; no DOM here.
 * @typedef {{name: string, class: string, storage: string, mode: string, accumulation: string, stream: string, reason: string, kernel: string}} Layer
 * @typedef {{call: number, step: number, sigma: number | null, layer: string, op: string, kind: string, from: string, to: string, recovered: boolean, evidence: string, advice: string, ended?: boolean}} GuardEvent
 * @typedef {{step: number, sigma: number | null, arithmetic: string, snr_db: number | null, threshold_db: number | null, blocks: {name: string, snr_db: number | null}[], left_out: string}} Check
 * @typedef {{verdict: string, about?: import("./dom.mjs").About, calls: number, extra_calls: number, escalations: Record<string, string>, events: GuardEvent[], checks: Check[]}} Guard
 * @typedef {{node: string, kind: string, verdict: string, about?: import("./dom.mjs").About, messages: string[], advice: string, calls?: number}} Encoder
 * @typedef {{file: string, class: string, calls: number | null, layers: Layer[], notes: string[]}} Control
 * @typedef {{parameters: string, size: string, stored: {name: string, share: number, size: string}[], computed: {name: string, share: number, layers: number}[], rows: {name: string, layers: number[]}[]}} View
 * @typedef {{version: number, device: any, model: any, layers: Layer[], without_effect: {setting: string, reason: string}[], notes: string[], decisions?: Record<string, string>, file?: string, guard: Guard, encoders: Encoder[], control_nets: Control[], ran?: boolean, modes: Record<string, {label: string, colour: string}>, storages: Record<string, {colour: string}>, rules: string, view: View}} Report
 * @typedef {Layer & {members: Layer[]}} Row
 */

/**
 * The report in a text; null where there is none.
 * @param {string | undefined} text
 * @returns {Report | null}
 */
export function reportIn(text) {
  const report = text ? JSON.parse(text) : null;
  return report?.version === 1 ? report : null;
}

/**
 * The report's rows: layers that differ in their block number alone are one, where all of them are shown.
 * @param {Report} report @param {Layer[]} shown
 * @returns {Row[]}
 */
export function rowsOf({ layers, view }, shown) {
  const wanted = new Set(shown);
  return view.rows.flatMap(({ name, layers: places }) => {
    const members = places.map((place) => layers[place]).filter((layer) => wanted.has(layer));
    if (members.length === places.length) return [{ ...members[0], name, members }];
    return members.map((layer) => ({ ...layer, members: [layer] }));
  });
}

/**
 * Layers whose name, class, dtypes or reason hold every word of the text.
 * @param {Layer[]} layers @param {string} text
 */
export function filterLayers(layers, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  return layers.filter((layer) => {
    const held = Object.values(layer).map(said).join("\n").toLowerCase();
    return words.every((word) => held.includes(word));
  });
}

/**
 * Rows by one column, numbers in names by their value; without a column, as they come.
 * @param {Row[]} rows @param {{column: keyof Layer, descending: boolean} | null} order
 */
export function sortRows(rows, order) {
  if (!order) return rows;
  const sign = order.descending ? -1 : 1;
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  return [...rows].sort((a, b) => sign * compare(a[order.column], b[order.column]));
}

/** One line on a guard event. @param {GuardEvent} event */
export function eventText(event) {
  return atStep(event, whatIn(event));
}

/** One line on a guard event and what became of it. @param {GuardEvent} event */
export function outcomeText(event) {
  if (event.kind === "drift") return together([eventText(event) + t("."), said(event.evidence)]);
  const change = event.from && event.to ? `${modeText(event.from)} \u2192 ${modeText(event.to)}${t(", ")}` : "";
  return `${eventText(event)}${t(", ")}${change}${event.recovered ? t("recovered") : t("not recovered")}`;
}

/** One line on a call that was compared with fp32; an SNR of null is infinite. @param {Check} check */
export function checkText(check) {
  if (check.left_out) return atStep(check, t("not compared with fp32. {why}", { why: said(check.left_out) }));
  const blocks = check.blocks.map(({ name, snr_db }) => `${name} ${decibels(snr_db)}`).join(", ");
  const values = { snr: decibels(check.snr_db), arithmetic: check.arithmetic, expected: decibels(check.threshold_db) };
  const line = t("{snr} from fp32 ({arithmetic}, at least {expected} expected)", values);
  const lowest = blocks && t("lowest after: {blocks}", { blocks });
  return atStep(check, [line, lowest].filter(Boolean).join("; "));
}

/** One line on a ControlNet that ran beside the model. @param {Control} control */
export function controlText(control) {
  const ran = control.calls === null ? "" : t("{calls} calls", { calls: control.calls });
  const layers = control.layers.length ? t("{count} layers", { count: control.layers.length }) : "";
  return [[`${control.file}: ${control.class}`, ran, layers].filter(Boolean).join(", "), ...control.notes.map(said)].join(". ");
}

/** What a run was like in one sentence; empty before a run and without a guard. @param {Report} report */
export function happenedText({ guard, decisions }) {
  if (!guard.calls || guard.verdict === "off") return "";
  const { tone, repaired } = aboutOf(guard);
  const layer = guard.events.find((event) => event.recovered)?.layer;
  if (repaired) return layer ? t("Black image prevented: {layer} was repeated in a higher precision.", { layer }) : t("Black image prevented: a step was repeated in a higher precision.");
  return tone === "good" ? together([t("No NaN and no Inf in {calls} calls.", { calls: guard.calls }), said(decisions?.instead ?? "")]) : "";
}

/** @param {number | null} value */
function decibels(value) {
  return typeof value === "number" ? `${value.toFixed(1)} dB` : t("equal");
}

/** @param {{step: number, sigma: number | null}} place @param {string} what */
function atStep({ step, sigma }, what) {
  return typeof sigma === "number" ? t("step {step}: {what}", { step, what }) : what;
}

/** "overflow in blocks.0.ffn.2", "drift, step cache" @param {GuardEvent} event */
export function whatIn({ kind, layer, op }) {
  const what = kind === "unknown" ? t("NaN or Inf") : kind === "drift" && op ? `${t(kind)}, ${said(op)}` : t(kind);
  const where = kind === "input" ? said(layer) : layer;
  return layer ? t("{what} in {layer}", { what, layer: where }) : what;
}

/** "NVIDIA GeForce RTX 3090 (sm_86)" @param {Report} report */
export function deviceText(report) {
  const { name, profile, simulated } = report.device;
  return `${name} (${profile}${simulated ? `, ${t("simulated")}` : ""})`;
}
