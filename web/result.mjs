// @ts-check
/** What a node shows of its result: a sentence, a table, the whole text. */
import { el } from "./dom.mjs";
import { said, t } from "./words.mjs";

/** @typedef {{sentence: string, values: Record<string, string | number>, tone: string, head: string[], rows: string[][], marked: number | null, text: string, toast: boolean}} Result */

/** The result in a node's output; null where there is none. @param {any} output @returns {Result | null} */
export function resultIn(output) {
  const text = output?.halfsafe_result?.[0];
  return text ? JSON.parse(text) : null;
}

/** @param {Result} result */
export function sentenceOf({ sentence, values }) {
  return t(sentence, values);
}

export class ResultPanel {
  constructor() {
    this.body = el("div", { class: "hs-scroll hs-result", tabindex: "0", role: "region", "aria-label": t("Result") });
    this.element = el("section", { class: "halfsafe hs-panel hs-small", "data-capture-wheel": "true" }, this.body);
    this.show(null);
  }

  /** @param {Result | null} result */
  show(result) {
    this.body.replaceChildren(...(result ? partsOf(result) : [el("p", { class: "hs-hint", text: t("Run the workflow to see the result here.") })]));
  }
}

/** @param {Result} result */
function partsOf(result) {
  const whole = el("pre", { class: "hs-text", text: result.text });
  const details = result.rows.length ? el("details", {}, el("summary", { text: t("Details") }), whole) : whole;
  return [el("p", { class: "hs-sentence", "data-tone": result.tone, text: sentenceOf(result) }), result.rows.length ? tableOf(result) : "", details];
}

/** @param {Result} result */
function tableOf({ head, rows, marked }) {
  const body = rows.map((row, place) => el("tr", { "data-marked": String(place === marked) }, ...row.map((text) => el("td", { text: said(text) }))));
  return el("table", { class: "hs-figures" }, el("thead", {}, el("tr", {}, ...head.map((text) => el("th", { scope: "col", text: t(text) })))), el("tbody", {}, ...body));
}
