// @ts-check
/** The page's own words in the language of ComfyUI's page: locales/<language>/main.json, `halfsafe`, by the English text. */

/** @type {Record<string, string>} */
let words = {};

/**
 * Fetch the words of a language, as ComfyUI serves those of all packs; without any, the page stays English.
 * @param {{fetchApi: (route: string) => Promise<Response>}} api @param {string} language such as "zh"
 */
export async function loadWords(api, language) {
  const response = await api.fetchApi("/i18n");
  words = response.ok ? (await response.json())[language]?.halfsafe ?? {} : {};
}

/**
 * A text in the page's language, with `{name}` replaced by that value.
 * @param {string} text in English @param {Record<string, string | number>} [values]
 */
export function t(text, values = {}) {
  return (words[text] ?? text).replace(/\{(\w+)\}/g, (whole, name) => String(values[name] ?? whole));
}
