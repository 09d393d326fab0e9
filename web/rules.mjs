// @ts-check
/** What is wrong with the rules in a node's text, told while they are written, as the server reads them. */
import { el } from "./dom.mjs";
import { answerIn, following, said, t } from "./words.mjs";

/** @typedef {{line: number, mistake: string, advice: string}} Mistake @typedef {{count: number, mistakes: Mistake[]}} Reading */

const NAME = "rules";
const PAUSE_MS = 300;
const MARGIN = 10;
const LINE = 20;
const TALLEST = 140;
const MOST_KEPT = 100;

export class RulesNote {
  /** The text that was looked at; null where the server gave no answer. @type {string | null} */
  #text = "";
  #waiting = 0;
  #height = 0;

  /** @param {any} node whose text widget `rules` is read @param {import("./page.mjs").Page} page @param {() => void} redraw */
  constructor(node, { api, readings }, redraw) {
    this.node = node;
    this.api = api;
    this.readings = readings;
    this.redraw = redraw;
    this.widget = node.widgets.find((/** @type {any} */ widget) => widget.name === NAME);
    this.lines = el("div", { class: "hs-mistakes" });
    this.element = el("div", { class: "halfsafe hs-note", role: "status", "data-capture-wheel": "true" }, this.lines);
    const height = () => this.#height;
    const note = node.addDOMWidget("halfsafe_note", "halfsafe_note", this.element, { serialize: false, hideInPanel: true, margin: MARGIN, getMinHeight: height, getMaxHeight: height });
    note.serialize = false;
    for (const [holder, event] of /** @type {[any, string][]} */ ([[this.widget, "callback"], [node, "onConfigure"], [node, "onConnectionsChange"]])) this.#after(holder, event);
  }

  /** Look at the text each time something was called. @param {any} holder @param {string} event */
  #after(holder, event) {
    const before = holder[event];
    const look = () => this.#look();
    holder[event] = function (/** @type {any[]} */ ...given) {
      const result = before?.apply(this, given);
      look();
      return result;
    };
  }

  /** Ask about the text when it has rested. */
  #look() {
    const linked = this.node.inputs?.some((/** @type {any} */ input) => input.name === NAME && input.link !== null);
    const text = linked ? "" : String(this.widget.value ?? "");
    if (text === this.#text) return;
    this.#text = text;
    clearTimeout(this.#waiting);
    this.#waiting = window.setTimeout(() => this.#ask(text), this.readings.has(text) ? 0 : PAUSE_MS);
  }

  /** @param {string} text */
  async #ask(text) {
    const reading = text.trim() ? await this.#read(text) : null;
    if (text !== this.#text) return;
    if (text.trim() && !reading) this.#text = null;
    this.#show(reading);
  }

  /** @param {string} text @returns {Promise<Reading | null>} null where the server does not answer */
  async #read(text) {
    const known = this.readings;
    if (known.has(text)) return known.get(text) ?? null;
    try {
      const response = await this.api.fetchApi("/halfsafe/rules", { method: "POST", body: text });
      if (!response.ok) return null;
      if (known.size >= MOST_KEPT) known.clear();
      known.set(text, await answerIn(response));
    } catch {
      return null;
    }
    return known.get(text) ?? null;
  }

  /** @param {Reading | null} reading */
  #show(reading) {
    const { count = 0, mistakes = [] } = reading ?? {};
    const read = count === 1 ? t("1 rule is read.") : t("{count} rules are read.", { count });
    const lines = mistakes.map((mistake) => this.#line(mistake));
    this.lines.replaceChildren(...(lines.length || !count ? lines : [el("span", { class: "hs-dim", text: read })]));
    const tall = Math.min(this.lines.offsetHeight || (mistakes.length * 2 || Math.min(count, 1)) * LINE, TALLEST);
    this.#height = tall && tall + 2 * MARGIN;
    this.element.style.height = `${tall}px`;
    this.redraw();
  }

  /** @param {Mistake} mistake */
  #line({ line, mistake, advice }) {
    const mark = el("span", { class: "hs-mark", "aria-hidden": "true" });
    const where = el("b", { text: t("Line {line}", { line }) });
    const told = t("{mistake}.", { mistake: said(mistake) });
    const text = el("span", {}, where, ` ${told}`, advice ? el("span", { class: "hs-dim", text: following(told, said(advice)) }) : null);
    return el("button", { type: "button", class: "hs-mistake", title: t("Select this line"), onclick: () => this.#select(line) }, mark, text);
  }

  /** Select a line where it is written. @param {number} line from 1 */
  #select(line) {
    const area = this.element.closest(".lg-node")?.querySelector("textarea") ?? this.widget.element;
    const before = area.value.split("\n").slice(0, line - 1);
    const start = before.join("\n").length + Number(line > 1);
    area.focus();
    area.setSelectionRange(start, start + area.value.split("\n")[line - 1].length);
  }
}
