// @ts-check
/** The page's own words in the language of ComfyUI's page: locales/<language>/main.json, `halfsafe`, by the English text. */

/** @type {Record<string, {halfsafe?: Record<string, string>}>} */
let languages = {};
/** @type {() => string} */
let language = () => "en";
const VALUES = /\{(\w+)\}/g;
/** A value in quotes is what something is called, not words. */
const QUOTED = /'\{(\w+)\}'/g;
/** A text of the server is known by the words around its values: fewer than these may stand in any text. */
const WORDS_AROUND = 3;
/** What joins the sentences, or parts of one, in a text of the server. */
const JOINTS = ["; ", ". ", ": "];
/** @typedef {{fits: RegExp, names: string[], quoted: Set<string>, text: string}} Pattern @type {Map<string, Pattern[]>} */
const patterns = new Map();

/**
 * Fetch the words of every language, as ComfyUI serves those of all packs; without any, the page stays English.
 * @param {{fetchApi: (route: string) => Promise<Response>}} api @param {() => string} pageLanguage such as "zh"; asked at each text
 */
export async function loadWords(api, pageLanguage) {
  const response = await api.fetchApi("/i18n");
  languages = response.ok ? await response.json() : {};
  language = pageLanguage;
}

/** Whether the page's language has words of its own. */
export function isTranslated() {
  return Boolean(languages[language()]?.halfsafe);
}

/**
 * A text in the page's language, with `{name}` replaced by that value.
 * @param {string} text in English @param {Record<string, string | number>} [values]
 */
export function t(text, values = {}) {
  const words = languages[language()]?.halfsafe ?? {};
  return fill(words[text] ?? text, values);
}

/**
 * A text that the server worded, in the page's language: known as it stands, or by what stands around its values, or part by part.
 * @param {string} text @returns {string}
 */
export function said(text) {
  if (!text || !isTranslated()) return text;
  return worded(text) ?? inParts(text) ?? text;
}

/** @param {string} text @returns {string | null} */
function worded(text) {
  const known = languages[language()].halfsafe?.[text];
  if (known) return known;
  for (const pattern of patternsOf(language())) {
    const found = pattern.fits.exec(text);
    if (found && found.slice(1).every(isWhole)) return fill(pattern.text, Object.fromEntries(pattern.names.map((name, place) => [name, pattern.quoted.has(name) ? found[place + 1] : said(found[place + 1])])));
  }
  return null;
}

/** Whether a value ends where a sentence ends, if it holds one. @param {string} value */
function isWhole(value) {
  return value.endsWith(".") || !value.includes(". ");
}

/** A text cut in two where one of both is known; null where none is. @param {string} text @returns {string | null} */
function inParts(text) {
  for (const joint of JOINTS) {
    for (let at = text.lastIndexOf(joint); at > 0; at = text.lastIndexOf(joint, at - 1)) {
      const end = joint === ". " ? at + 1 : at;
      const [first, rest] = [worded(text.slice(0, end)), text.slice(at + joint.length)];
      const second = first === null ? worded(rest) : said(rest);
      if (second !== null) return (first ?? said(text.slice(0, end))) + text.slice(end, at + joint.length) + second;
    }
  }
  return null;
}

/** The texts with values, those that say most before others: a value may be any text. @param {string} name of a language */
function patternsOf(name) {
  const present = patterns.get(name);
  if (present) return present;
  const around = (/** @type {string} */ english) => english.replace(VALUES, " ");
  const texts = Object.entries(languages[name].halfsafe ?? {}).filter(([english]) => english !== english.replace(VALUES, ""));
  const telling = texts.filter(([english]) => (around(english).match(/[A-Za-z]{2,}/g) ?? []).length >= WORDS_AROUND);
  telling.sort(([a], [b]) => around(b).length - around(a).length);
  const made = telling.map(([english, text]) => patternOf(english, text));
  patterns.set(name, made);
  return made;
}

/** @param {string} english @param {string} text @returns {Pattern} */
function patternOf(english, text) {
  const parts = english.split(/\{\w+\}/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return { fits: new RegExp(`^${parts.join("(.*?)")}$`, "s"), names: namesIn(english, VALUES), quoted: new Set(namesIn(english, QUOTED)), text };
}

/** @param {string} english @param {RegExp} values @returns {string[]} */
function namesIn(english, values) {
  return [...english.matchAll(values)].map(([, name]) => name);
}

/** @param {string} text @param {Record<string, string | number>} values */
function fill(text, values) {
  return text.replace(VALUES, (whole, name) => String(values[name] ?? whole));
}
