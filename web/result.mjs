// @ts-check
/** What a node shows of its result: a sentence, a table, two pictures, the whole text. */
import { api } from "../../scripts/api.js";
import { el, nameOf } from "./dom.mjs";
import { said, t } from "./words.mjs";

/** @typedef {{sentence: string, values: Record<string, string | number>, tone: string, head: string[], rows: string[][], marked: number | null, text: string, toast: boolean, pictures: Record<string, string>[]}} Result */

/** What the heads of tables mean. @returns {Record<string, string>} */
const meanings = () => ({
  "s/step": t("Seconds a step of the sampler takes, and how far the timed steps lie apart."),
  memory: t("The weights, and what the device held beyond them at most."),
  "SNR dB": t("How close the last latent comes to fp32's: 20 dB is an error of 10 %, 40 dB of 1 %."),
  "weight dB": t("How close the layer's weights stay."),
  "output dB": t("How close the layer's output stays: 20 dB is an error of 10 %, 40 dB of 1 %."),
  "channel dB": t("The same as a mean over channels, which shows an error that larger channels hide."),
  outcome: t("chosen: may be in it. kept: better not. pinned: a first, last or embedding layer, which stays."),
});

/** The result in a node's output; null where there is none. @param {any} output @returns {Result | null} */
export function resultIn(output) {
  const text = output?.halfsafe_result?.[0];
  return text ? JSON.parse(text) : null;
}

/** @param {Result} result */
export function sentenceOf({ sentence, values }) {
  return t(sentence, Object.fromEntries(Object.entries(values).map(([name, value]) => [name, typeof value === "string" ? said(value) : value])));
}

/** What a node that was executed is told of in messages. @param {Result | null} result @param {string[]} [unmatched] rules that match no layer */
export function toastsOf(result, unmatched) {
  const severity = result?.tone === "good" ? "success" : "warn";
  const told = result?.toast ? [{ severity, summary: `Halfsafe: ${sentenceOf(result)}`, life: 6000 }] : [];
  return unmatched ? [...told, { severity: "warn", summary: `Halfsafe: ${t("rules that match no layer of this model")}`, detail: unmatched.join("\n"), life: 20000 }] : told;
}

export class ResultPanel {
  /** @param {number} height in pixels, the least */
  constructor(height) {
    this.body = el("div", { class: "hs-scroll hs-result", tabindex: "0", role: "region", "aria-label": t("Result") });
    this.element = el("section", { class: "halfsafe hs-panel", style: `min-height: ${height}px`, "data-capture-wheel": "true" }, this.body);
    this.show(null);
  }

  /** @param {Result | null} result */
  show(result) {
    this.body.replaceChildren(...(result ? partsOf(result) : [el("p", { class: "hs-hint", text: t("Run the workflow to see the result here.") })]));
  }
}

/** @param {Result} result */
function partsOf(result) {
  const { rows, pictures, text, tone } = result;
  const folds = rows.length > 0 || pictures.length > 0, whole = el("pre", { class: "hs-text", text: folds ? text : said(text) });
  const details = folds ? el("details", {}, el("summary", { text: t("Details") }), whole) : text.includes("\n") || tone === "bad" ? whole : "";
  return [el("p", { class: "hs-sentence", "data-tone": tone, text: sentenceOf(result) }), rows.length ? tableOf(result) : "", pictures.length ? sliderOf(pictures) : "", details];
}

/** @param {Result} result */
function tableOf({ head, rows, marked }) {
  const body = rows.map((row, place) => {
    const [name, ...cells] = row.slice(0, head.length);
    const words = name.split(" ").flatMap((word, number) => [number ? " " : "", nameOf(t(word))]);
    return el("tr", { "data-marked": String(place === marked), title: said(row[head.length] ?? "") || null }, el("td", {}, ...words), ...cells.map((text) => el("td", { text: said(text).replaceAll(" %", "\u00a0%") })));
  });
  const heads = head.map((text) => el("th", { scope: "col", title: meanings()[text], text: t(text) }));
  return el("table", { class: "hs-figures" }, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
}

/** The reference, and the candidate over it from where the slider stands. @param {Record<string, string>[]} pictures */
function sliderOf(pictures) {
  const [reference, candidate] = pictures.map((file) => el("img", { src: api.apiURL(`/view?${new URLSearchParams(file)}`), draggable: "false" }));
  const range = el("input", {
    type: "range", min: "0", max: "100", value: "50", "aria-label": t("Reference to the left, candidate to the right"), title: t("Reference to the left, candidate to the right"),
    oninput: () => box.style.setProperty("--hs-at", `${range.value}%`), onpointerdown: (/** @type {Event} */ event) => event.stopPropagation(),
  });
  const box = el("div", { class: "hs-pictures" }, reference, candidate, range);
  return box;
}
