// @ts-check
/** What a node shows of its result: a sentence, a table, the whole text. */
import { el, nameOf } from "./dom.mjs";
import { ourToast } from "./toasts.mjs";
import { keep, said, sentencesOf, t, together } from "./words.mjs";

/**
 * An answer is seen before it is read. An action returns a `Card` (or a text, which is its headline); a node's output carries a `Result`, of which the sidebar makes a card.
 * - `headline`: the answer in at most ten words, without a full stop where it is no sentence: "236 → 155 MiB". Large, never bold.
 * - `line`: one short line below it: what to do. `bar`: bytes before, and what is stored after, drawn as parts of it. `rows`: answers to choose from, each with figures as bars and a button.
 * - `choices`: buttons below it. `why`: sentences, folded behind *Why*: reasons, lists of files, what to know. Long sentences go here.
 * @typedef {{name: string, act: () => Promise<Told>}} Choice
 * @typedef {{before: number, stored: Record<string, number>}} Bar in bytes
 * @typedef {{text: string, share: number | null}} Figure `share`: of the longest bar of its column, 0 to 1; null where the figures of its column cannot be ranked
 * @typedef {{name: string, detail: string, figures: Figure[], act: () => Promise<Told>}} Row
 * @typedef {{headline: string, line?: string, tone?: string, bar?: Bar | null, rows?: Row[], choices?: Choice[], why?: (string | Node)[]}} Card
 * @typedef {string | Card} Told
 * @typedef {{goals: string[], name: string, seconds: number, bytes: number, error: number, use: import("./measure.mjs").Use}} Best what was measured best for goals: speed, memory, quality; `error`: a share of 1
 * @typedef {{sentence: string, tone: string, head: string[], rows: string[][], marked: number | null, text: string, toast: boolean, use: import("./measure.mjs").Use | null, copied: string, sizes?: [number, number] | null, stored?: Record<string, number>, speed?: string, best?: Best[]}} Result
 *   `sizes`: bytes of the weights before and after; `stored`: those after by storage; `speed`: that of int8 on such cards, in a line
 */

/** A told text as a card. @param {Told} told @returns {Card} */
export function cardOf(told) {
  return typeof told === "string" ? { headline: told } : told;
}

/** Sentences as a card: the first is the answer, the others are its line. @param {...string} sentences empty ones are left out @returns {Card} */
export function answered(...sentences) {
  const [headline, ...others] = sentences.filter(Boolean);
  return { headline, line: together(others) };
}

/** What stands in a table where there is no number. */
const NOTHING = "-";

/** What the heads of tables mean. @returns {Record<string, string>} */
const meanings = () => ({
  "s/step": t("Seconds per sampler step, and the spread of the timed steps."),
  memory: t("Weights plus the peak of all other memory on the device."),
  "SNR dB": t("SNR of the last latent against fp32: 20 dB is an error of 10 %, 40 dB of 1 %."),
  "weight dB": t("SNR of the layer's weights."),
  "output dB": t("SNR of the layer's output: 20 dB is an error of 10 %, 40 dB of 1 %."),
  "channel dB": t("Mean SNR over channels: shows errors of small channels that larger ones hide."),
  outcome: t("chosen: can use the candidate. kept: stays high. pinned: a first, last or embedding layer, which stays high."),
});

/** The result in a node's output; null where there is none. @param {any} output @returns {Result | null} */
export function resultIn(output) {
  const text = output?.halfsafe_result?.[0];
  const result = text ? JSON.parse(text) : null;
  keep(result?.messages);
  return result;
}

/** What a result that asks for a message says in one. @param {Result | null} result */
export function toastsOf(result) {
  return result?.toast ? [ourToast(result.tone === "good" ? "success" : "warn", sentencesOf(result.sentence)[0], "", 6000)] : [];
}

/** What a node's output tells beside its result: rules that match no layer, that kernels are missing, and that the model left the fp16 that it came in. @param {any} output */
export function noticesOf(output) {
  const { halfsafe_unmatched: unmatched, halfsafe_kernels: kernels = [], halfsafe_instead: instead = [] } = output ?? {};
  const told = unmatched ? [ourToast("warn", t("No layer of this model matches:"), unmatched.join("\n"), 20000)] : [];
  return [...told, ...kernels.map((/** @type {string} */ text) => noticeOf("warn", text, 20000)), ...instead.map((/** @type {string} */ text) => noticeOf("success", text, 8000))];
}

/** @param {"success" | "warn"} severity @param {string} text @param {number} life in milliseconds */
function noticeOf(severity, text, life) {
  const [summary, detail, more] = sentencesOf(text, 2);
  return ourToast(severity, summary, detail, life, more);
}

export class ResultPanel {
  #use;

  /** @param {number} height in pixels, the least @param {(use: import("./measure.mjs").Use) => void} use puts a result into the workflow */
  constructor(height, use) {
    this.#use = use;
    this.body = el("div", { class: "hs-scroll hs-result", tabindex: "0", role: "region", "aria-label": t("Result") });
    this.element = el("section", { class: "halfsafe hs-panel", style: `min-height: ${height}px`, "data-capture-wheel": "true" }, this.body);
    this.show(null);
  }

  /** @param {Result | null} result */
  show(result) {
    this.body.replaceChildren(...(result ? partsOf(result, this.#use) : [el("p", { class: "hs-hint", text: t("Run the workflow to see the result here.") })]));
  }
}

/** @param {Result} result @param {(use: import("./measure.mjs").Use) => void} act */
function partsOf(result, act) {
  const { rows, text, tone, use, copied } = result;
  const button = use ? el("button", { type: "button", class: "hs-button", text: t("Use this"), onclick: () => act(use) }) : "";
  const copy = copied ? el("button", { type: "button", class: "hs-button", text: t("Copy as a row"), title: t("For the table in docs/devices.md: paste it into an issue."), onclick: () => copyRow(copied, copy, whole) }) : "";
  const folds = rows.length > 0, words = said(text), whole = el("pre", { class: "hs-text", text: words });
  const details = folds ? el("details", {}, el("summary", { text: t("Details") }), whole) : words.includes("\n") || tone === "bad" ? whole : "";
  return [el("p", { class: "hs-sentence", "data-tone": tone, text: said(result.sentence) }), button, copy, folds ? tableOf(result) : "", details];
}

/** Copy a row, or show it to be copied by hand where the page may not. @param {string} row @param {any} button @param {HTMLElement} whole */
async function copyRow(row, button, whole) {
  try {
    await navigator.clipboard.writeText(row);
    button.textContent = t("Copied");
  } catch {
    whole.textContent = row;
    whole.closest("details")?.setAttribute("open", "");
  }
}

/** @param {Result} result */
function tableOf({ head, rows, marked }) {
  const body = rows.map((row, place) => {
    const [name, ...cells] = row.slice(0, head.length);
    const words = name.split(" ").flatMap((word, number) => [number ? " " : "", nameOf(t(word))]);
    const [why] = row.slice(head.length), left = cells[0] === NOTHING && cells.every((text) => text === NOTHING);
    const figures = left ? [el("td", { class: "hs-left-out", colspan: cells.length, text: said(why) })] : cells.map((text) => el("td", { text: said(text).replaceAll(" %", "\u00a0%") }));
    return el("tr", { "data-marked": String(place === marked), title: said(why ?? "") || null }, el("td", {}, ...words), ...figures);
  });
  const heads = head.map((text) => el("th", { scope: "col", title: meanings()[text], text: t(text) }));
  return el("table", { class: "hs-figures" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
}
