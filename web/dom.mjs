// @ts-check
import { sizeText, t } from "./words.mjs";

const FIRST_LINES = 5;
const MOST_LINES = 50;
/** The share of the bytes from which a storage is drawn by itself where several have less. */
const SHOWN = 0.03;

/**
 * @param {string} tag
 * @param {Record<string, any>} [attributes] `text` sets the text; a function named `on...` becomes a listener; null,
 *   undefined and false leave an attribute out
 * @param {...(Node | string | null | undefined)} children
 * @returns {any}
 */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = String(value);
    else if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Put the pack's styles into the page, which has no hook for that. Each of them names a class or a colour of the pack's own. */
export async function addStyles() {
  const sheet = new CSSStyleSheet(), response = await fetch(new URL("./halfsafe.css", import.meta.url));
  sheet.replaceSync(await response.text());
  document.adoptedStyleSheets.push(sheet);
}

/** Give an element the report's colours, for the swatches and bars in it. @param {HTMLElement} element @param {Pick<import("./report.mjs").Report, "storages" | "modes">} report */
export function paint(element, { storages, modes }) {
  for (const [dtype, { colour }] of Object.entries({ ...storages, ...modes })) element.style.setProperty(`--hs-dtype-${dtype}`, colour);
}

/** @param {string} dtype */
function background(dtype) {
  return `background: var(--hs-dtype-${dtype}, var(--hs-other))`;
}

/** A layer's name with line breaks allowed after its dots, except before a number or a star. @param {string} name */
export function nameOf(name) {
  const [first, ...rest] = name.split(/(?<=\.)(?=[^.]{2})/).map((text) => el("span", { class: "hs-whole", text }));
  return el("bdi", {}, first, ...rest.flatMap((part) => [el("wbr"), part]));
}

/** @param {string} dtype */
export function swatch(dtype) {
  return el("span", { class: "hs-swatch", style: background(dtype), "aria-hidden": "true" });
}

/**
 * What is decided by a verdict: its row in precision/guard/verdicts.py, sent along with it. No file of the page compares a verdict's name.
 * @typedef {{tone: string, repaired: boolean, unexplained: boolean, of_input: boolean, cause: string}} About
 * @typedef {{verdict: string, about?: Partial<About>}} Judged
 */

/** What came with a verdict; a report that was saved before anything did is shown in its verdict's words, without a colour. @param {Judged} judged @returns {About} */
export function aboutOf({ about }) {
  return { tone: "", repaired: false, unexplained: false, of_input: false, cause: "", ...about };
}

/** What a guard found, as people read it; nothing is NaN where a check only found a drift, and yet not all is well. @param {Judged} judged @param {({kind: string} | null)[]} events @param {number} [calls] that were checked: where there were none, nothing is well either @returns {About & {text: string}} */
export function verdictOf(judged, events, calls = 1) {
  const about = aboutOf(judged), drifts = events.filter((event) => event?.kind === "drift").length;
  const text = about.unexplained ? t("not cured") : judged.verdict === "off" ? t("no guard") : t(judged.verdict.replaceAll("_", " ")); // where a guard was to tell alone, nothing was stopped
  if (about.unexplained && drifts === events.length) return { ...about, unexplained: false, tone: "", cause: "", text: t("no result") };
  if (about.tone !== "good") return { ...about, text };
  if (drifts) return { ...about, tone: "warn", cause: t("A step is farther from fp32 than it should be"), text: t("drift") };
  return calls ? { ...about, text } : { ...about, tone: "", text: t("not run yet") };
}

/** @param {{text: string, tone: string}} verdict */
export function verdictPill({ text, tone }) {
  return el("span", { class: "hs-verdict", "data-tone": tone || null, text });
}

/** What a mode is called where nobody can choose it by its name. @param {string} mode */
export function modeText(mode) {
  const texts = { fp16_wide: t("fp16 with fp32 results"), fp16_scaled: t("scaled fp16 with fp32 results"), fp16_acc16: t("fp16 with fp16 sums") };
  return texts[/** @type {keyof typeof texts} */ (mode)] ?? mode;
}

/**
 * A stacked bar of shares with its legend.
 * @param {string} label
 * @param {{name: string, share: number, detail: string}[]} shares
 */
export function shareBar(label, shares) {
  const spoken = shares.map((part) => `${part.name} ${percent(part.share)}`).join(", ");
  const bar = el("div", { class: "hs-bar", role: "img", "aria-label": `${label}: ${spoken}` });
  const legend = el("div", { class: "hs-legend" });
  for (const part of shares) {
    const title = `${part.name}: ${percent(part.share)}, ${part.detail}`;
    bar.append(el("span", { style: `flex-grow: ${Math.max(part.share, 0.01)}; ${background(part.name)}`, title }));
    legend.append(el("span", { class: "hs-key", title }, swatch(part.name), modeText(part.name), el("b", { text: percent(part.share) })));
  }
  return el("div", { class: "hs-share" }, el("span", { class: "hs-label", text: label }), bar, legend);
}

/** A bar of the bytes stored, a named part for each dtype, as a share of the bytes before; the empty rest was saved. @param {import("./result.mjs").Bar} bar */
export function storageBar({ before, stored }) {
  const sizes = Object.entries(stored).filter(([, size]) => size > 0).sort(([, a], [, b]) => b - a);
  const after = sizes.reduce((sum, [, size]) => sum + size, 0), small = sizes.filter(([, size]) => size < SHOWN * after);
  const isMerged = small.length > 1; // one part for slivers that none could tell apart
  const titleOf = (/** @type {[string, number][]} */ held) => held.map(([name, size]) => `${name}: ${sizeText(size)}`).join(", ");
  const parts = (isMerged ? sizes.slice(0, -small.length) : sizes).map(([name, size]) => ({ dtype: name, name, size, title: titleOf([[name, size]]) }));
  if (isMerged) parts.push({ dtype: "other", name: t("other"), size: small.reduce((sum, [, size]) => sum + size, 0), title: titleOf(small) });
  const bar = el("div", { class: "hs-bar", role: "img", "aria-label": titleOf(sizes) });
  bar.append(...parts.map(({ dtype, size, title }) => el("span", { style: `flex: 0 0 ${(100 * size) / before}%; ${background(dtype)}`, title })));
  return el("div", { class: "hs-stored" }, bar, el("div", { class: "hs-legend" }, ...parts.map(({ dtype, name, title }) => el("span", { class: "hs-key", title }, swatch(dtype), name))));
}

/** The first lines of a long list, and the others folded away. @param {HTMLElement[]} lines @param {HTMLElement | null} [drawn] where the list stood before */
export function firstOf(lines, drawn = null) {
  if (lines.length <= FIRST_LINES) return lines;
  const [rest, left] = [lines.slice(FIRST_LINES, MOST_LINES), lines.length - MOST_LINES];
  const more = left > 0 ? el("div", { class: "hs-dim", text: t("and {count} more; the report's text has all of them", { count: left }) }) : null;
  const open = /** @type {HTMLDetailsElement | null | undefined} */ (drawn?.querySelector("details.hs-rest"))?.open ?? false;
  const folded = el("details", { class: "hs-rest", open }, el("summary", { text: t("{count} more", { count: lines.length - FIRST_LINES }) }), ...rest, more);
  return [...lines.slice(0, FIRST_LINES), folded];
}

/** Mark a panel as showing an earlier run, or remove the mark. @param {HTMLElement} body @param {boolean} earlier */
export function markEarlier(body, earlier) {
  const mark = body.querySelector(":scope > .hs-old");
  body.classList.toggle("hs-earlier", earlier);
  if (!earlier) mark?.remove();
  else if (!mark) body.prepend(el("p", { class: "hs-hint hs-old", text: t("of an earlier run") }));
}

/** @param {number} share */
function percent(share) {
  if (share > 0 && share < 0.01) return "<1%";
  if (share < 1 && share > 0.99) return ">99%";
  return `${Math.round(share * 100)}%`;
}
