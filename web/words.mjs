// @ts-check
/** The page's own words in the language of ComfyUI's page: locales/<language>/main.json, `halfsafe`, by the English text. */

/** @type {Record<string, {halfsafe?: Record<string, string>}>} */
let languages = {};
/** @type {() => string} */
let language = () => "en";

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
  return (words[text] ?? text).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}
