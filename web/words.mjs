// @ts-check
/** The page's own words in the language of ComfyUI's page: locales/<language>/main.json, `halfsafe`, by the English text. */

/** @type {Record<string, {halfsafe?: Record<string, string>, nodeDefs?: Record<string, {display_name?: string}>}>} */
let languages = {};
/** @type {() => string} */
let language = () => "en";
const VALUES = /\{(\w+)\}/g;
/** A value that is an option, a key or a layer, not words. */
const NAME = /^[a-z_]+$/;
/** A space that English has after a mark, where the page's language has the mark alone. */
const AFTER_FULL_WIDTH = /([\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f]) /g;
/** How many messages of the server are remembered. */
const MOST_KEPT = 10_000;
/** @typedef {{template: string, values: Record<string, string | number>, sentences?: string[]}} Message an English template, and what is filled in: words too, which may be messages; `sentences`: those that the server joined */
/** A text that the server worded -> what it is made of. @type {Map<string, Message>} */
const messages = new Map();

/**
 * Fetch the words of every language, as ComfyUI serves those of all packs; without any, the page stays English.
 * @param {{fetchApi: (route: string) => Promise<Response>}} api @param {() => string} pageLanguage such as "zh"; asked at each text
 */
export async function loadWords(api, pageLanguage) {
  const response = await api.fetchApi("/i18n");
  languages = response.ok ? await response.json() : {};
  language = pageLanguage;
}

/**
 * A text in the page's language, with `{name}` replaced by that value.
 * @param {string} text in English @param {Record<string, string | number>} [values]
 */
export function t(text, values = {}) {
  const words = languages[language()]?.halfsafe ?? {};
  return fill(words[text] ?? text, values);
}

/** What a type of node is called in each language, English first. @param {string} type @returns {string[]} */
export function titlesOf(type) {
  const { en, ...others } = languages;
  return [en, ...Object.values(others)].flatMap((one) => one?.nodeDefs?.[type]?.display_name ?? []);
}

/** Keep the messages that the server sent along with texts. @param {Record<string, Message>} [sent] by their text */
export function keep(sent = {}) {
  if (messages.size > MOST_KEPT) messages.clear();
  for (const [text, message] of Object.entries(sent)) messages.set(text, message);
}

/** What the server answers, with its messages kept. @param {Response} response @returns {Promise<any>} */
export async function answerIn(response) {
  const answer = await response.json();
  keep(answer.messages);
  return answer;
}

/** A text that the server worded, in the page's language. @param {string} [text] @returns {string} */
export function said(text = "") {
  const message = messages.get(text);
  return message ? worded(message) : t(text);
}

/** @param {Message} message */
function worded({ template, values: given }) {
  const values = Object.fromEntries(Object.entries(given).map(([name, value]) => [name, isWords(value) ? said(value) : value]));
  return t(template, values).replace(AFTER_FULL_WIDTH, "$1").trim();
}

/** The first sentences of a text that the server worded, as many as asked for, and the rest of it: the server says where they end. @param {string} text @param {number} [count] @returns {string[]} each empty where there is none */
export function sentencesOf(text, count = 1) {
  const { sentences = [text] } = messages.get(text) ?? {};
  const first = Array.from({ length: count }, (_, place) => said(sentences[place]));
  return [...first, said(text).slice(together(first).length).trim()];
}

/** The named values of a text of the server that its template has: a culprit and its cure, the setting to switch. @param {string} text @returns {Message["values"]} */
export function partsOf(text) {
  const { template = "", values = {} } = messages.get(text) ?? {};
  return Object.fromEntries(Object.entries(values).filter(([name]) => template.includes(`{${name}}`)));
}

/** @param {string | number} value @returns {value is string} */
function isWords(value) {
  return typeof value === "string" && !NAME.test(value);
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

/** The problem that the text of an error of the pack tells, its file without folders, and what to do about it. @param {string} text @returns {{message: string[], advice: string[]}} each the first sentence, and the rest */
export function inTwo(text) {
  const { problem = text, advice = "" } = partsOf(text);
  const message = messages.get(String(problem)), { file } = partsOf(String(problem));
  const short = message && file ? [worded({ ...message, values: { ...message.values, file: withoutFolders(String(file)) } }), ""] : sentencesOf(String(problem));
  return { message: short, advice: sentencesOf(String(advice)) };
}

/** @param {string} paths one, or several with commas between them */
function withoutFolders(paths) {
  return paths.split(", ").map((path) => path.split(/[\\/]/).at(-1)).join(", ");
}

/** Bytes as people say them: two figures below ten, whole numbers above. @param {number} bytes */
export function sizeText(bytes) {
  const [unit, size] = /** @type {[string, number][]} */ ([["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]).find(([, one]) => bytes >= one) ?? ["B", 1];
  const count = bytes / size;
  return `${count < 9.95 ? count.toFixed(1) : count.toFixed(0)}\u00a0${unit}`;
}

/** @param {string} text @param {Record<string, string | number>} values */
function fill(text, values) {
  return text.replace(VALUES, (whole, name) => String(values[name] ?? whole));
}
