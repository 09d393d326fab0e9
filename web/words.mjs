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
/** Fewer are enough where a text begins with them. */
const WORDS_BEFORE = 2;
const LETTERS_AROUND = 5;
/** The file, layer or tensor that a text is about stands before it. */
const ABOUT = /^\S+: |^[^:]*\.\w+: |: tensor '/;
/** The end of a text whose last value is a sentence of its own. */
const SENTENCE_LAST = /\.\s*\{\w+\}$/;
/** What joins the sentences, or parts of one, in a text of the server, and what joins them in the page's language. @returns {[string, string][]} */
const joints = () => [["; ", t("; ")], [". ", " "], [": ", t(": ")], [", ", t(", ")]];
const STOP = ".";
/** @typedef {{fits: RegExp, names: string[], quoted: Set<string>, text: string, telling: boolean, begins: boolean}} Pattern @type {Map<string, Pattern[]>} */
const patterns = new Map();
/** What was worded in a language already: a table of layers asks for the same reasons at each drawing. @type {Map<string, Map<string, string>>} */
const kept = new Map();

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
  const words = kept.get(language()) ?? new Map();
  kept.set(language(), words);
  if (!words.has(text)) words.set(text, worded(text) ?? inLines(text) ?? inParts(text) ?? text);
  return words.get(text);
}

/** A sentence with the space that is due before it: none after a full-width stop. @param {string} before @param {string} sentence */
export function following(before, sentence) {
  return /[\u3002\uff01\uff1f]$/.test(before) ? sentence : ` ${sentence}`;
}

/** Sentences one after another. @param {string[]} sentences */
export function together(sentences) {
  return sentences.filter(Boolean).reduce((text, sentence) => (text ? text + following(text, sentence) : sentence), "");
}

/** Why a workflow is as it was. The page's `fetch` fails with a TypeError where nothing answers. @param {unknown} error */
export function whyUnchanged(error) {
  if (error instanceof TypeError && /fetch/i.test(error.message)) return t("ComfyUI does not answer. Nothing was changed.");
  return t("Nothing was changed: {why}", { why: error instanceof Error ? error.message : String(error) });
}

/** A problem and what to do about it: the first sentence of a text of the server, and the others. @param {string} text */
export function inTwo(text) {
  const message = firstSentence(text);
  return { message: said(message), advice: said(text.slice(message.length).trim()) };
}

/** @param {string} text */
export function firstSentence(text) {
  return /^[^]*?(?:[.!?](?=\s+[A-Z(]|\s*$)|[\u3002\uff01\uff1f])/.exec(text)?.[0] ?? text;
}

/** A text that is known, with or without the full stop at its end. @param {string} text @returns {string | null} */
function worded(text) {
  const words = languages[language()].halfsafe ?? {};
  const begun = text.charAt(0).toLowerCase() + text.slice(1); // a sentence may begin with what is known within one
  if (words[text] ?? words[begun]) return words[text] ?? words[begun];
  const open = text.endsWith(STOP) && words[text.slice(0, -STOP.length)];
  return open ? open + t(".") : byPattern(text);
}

/** @param {string} text @returns {string | null} */
function byPattern(text) {
  for (const pattern of patternsOf(language())) {
    const found = pattern.fits.exec(text);
    if (!found) continue;
    const [values, end] = [found.slice(1, -1), found.at(-1)];
    if (!values.every(pattern.telling ? isWhole : isOne) || (pattern.begins && ABOUT.test(values[0]))) continue;
    return fill(pattern.text, Object.fromEntries(pattern.names.map((name, place) => [name, pattern.quoted.has(name) ? values[place] : ofValue(values[place])]))) + (end ? t(".") : "");
  }
  return null;
}

/** A value in the page's language, but for a single word: an option, a key or a layer. @param {string} value */
function ofValue(value) {
  return /^[a-z_]+$/.test(value) ? value : said(value);
}

/** Whether a value ends where a sentence ends, if it holds one. @param {string} value */
function isWhole(value) {
  return value.endsWith(".") || !value.includes(". ");
}

/** Whether a value is a name or a number, and not of several parts. @param {string} value */
function isOne(value) {
  return !joints().some(([joint]) => joint !== ", " && value.includes(joint));
}

/** @param {string} text @returns {string | null} */
function inLines(text) {
  return text.includes("\n") ? text.split("\n").map(said).join("\n") : null;
}

/** A text cut in two where one of both is known; null where none is. @param {string} text @returns {string | null} */
function inParts(text) {
  const list = text.split("; ");
  const listed = list.map((part) => (list.length > 1 ? said(part) : part));
  if (listed.some((part, place) => part !== list[place])) return listed.join(t("; "));
  for (const [joint, joined] of joints()) {
    for (let at = text.lastIndexOf(joint); at > 0; at = text.lastIndexOf(joint, at - 1)) {
      const end = joint.startsWith(STOP) ? at + 1 : at;
      const [start, rest] = [text.slice(0, end), text.slice(at + joint.length)];
      const first = isListed(joint, start) ? null : worded(start);
      const second = first !== null ? said(rest) : isListed(joint, rest) ? null : worded(rest);
      if (second !== null) return joinedWith(joined, first ?? said(start), second);
    }
  }
  return null;
}

/** Whether a part is a word of a list, such as a key of rules, which is written as it is. @param {string} joint @param {string} part */
function isListed(joint, part) {
  return joint === ", " && !part.includes(" ");
}

/** Two parts with what stands between them, but no space after a stop of the page's language. @param {string} joint @param {string} first @param {string} second */
function joinedWith(joint, first, second) {
  return first + (joint === " " && !first.endsWith(STOP) ? "" : joint) + second;
}

/** The texts with values, those that say most before others: a value may be any text. @param {string} name of a language */
function patternsOf(name) {
  const present = patterns.get(name);
  if (present) return present;
  const around = (/** @type {string} */ english) => english.replace(VALUES, " ");
  const texts = Object.entries(languages[name].halfsafe ?? {}).filter(([english]) => english !== english.replace(VALUES, ""));
  texts.sort(([a], [b]) => around(b).length - around(a).length);
  const made = texts.filter(([english]) => around(english).replace(/[^A-Za-z]/g, "").length >= LETTERS_AROUND).map(([english, text]) => patternOf(english, text));
  patterns.set(name, made);
  return made;
}

/** What fits a text: a group for each value, and one for a full stop that the text itself has not. @param {string} english @param {string} text @returns {Pattern} */
function patternOf(english, text) {
  const parts = english.split(/\{\w+\}/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  const words = (english.replace(VALUES, " ").match(/[A-Za-z]{2,}/g) ?? []).length;
  const telling = words >= WORDS_AROUND || (words >= WORDS_BEFORE && /^[A-Za-z]{2,}/.test(english));
  const end = english.endsWith(STOP) || SENTENCE_LAST.test(english) ? "()" : "(\\.?)";
  return { fits: new RegExp(`^${parts.join("(.*?)")}${end}$`, "s"), names: namesIn(english, VALUES), quoted: new Set(namesIn(english, QUOTED)), text, telling, begins: parts[0] === "" };
}

/** @param {string} english @param {RegExp} values @returns {string[]} */
function namesIn(english, values) {
  return [...english.matchAll(values)].map(([, name]) => name);
}

/** @param {string} text @param {Record<string, string | number>} values */
function fill(text, values) {
  return text.replace(VALUES, (whole, name) => String(values[name] ?? whole));
}
