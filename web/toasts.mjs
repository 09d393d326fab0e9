// @ts-check
/** The pack's messages on the page, which go when Run is pressed and when a run starts: they are about the one before. */

/** @typedef {{severity: string, summary: string, detail: string, life: number, more?: string}} Toast `summary` and `detail` are short, because it lies over the graph; `more`: what the sidebar has besides */

/** What the pack's messages begin with. */
const OURS = "Halfsafe: ";

/** A message of the pack's. @param {string} severity @param {string} summary @param {string} detail @param {number} life in milliseconds @param {string} [more] @returns {Toast} */
export function ourToast(severity, summary, detail, life, more = "") {
  return { severity, summary: OURS + summary, detail, life, more };
}

/** What a message says without the pack's name. @param {Toast} toast */
export function saidIn({ summary }) {
  return summary.slice(OURS.length);
}

export class Toasts {
  /** A message that is shown -> what takes it away. @type {Map<string, () => void>} */
  #shown = new Map();

  /** @param {() => any} manager the page's, from its setup on @param {string} wanted the setting that lets them be shown */
  constructor(manager, wanted) {
    this.manager = manager;
    this.wanted = wanted;
  }

  /** Show a message, in the place of the same one where that is shown yet. @param {Toast} toast */
  show(toast) {
    const { setting, toast: page } = this.manager();
    if (!setting.get(this.wanted)) return;
    const { severity, summary, detail, life } = toast;
    const text = `${summary}\n${detail}`;
    this.#shown.get(text)?.();
    if (page.remove) {
      const shown = { severity, summary, detail, life };
      page.add(shown);
      this.#shown.set(text, () => page.remove(shown));
      return;
    }
    // The newest page's `add` gives no id, by which alone a message can be taken away.
    const id = page[severity === "warn" ? "warning" : severity](summary, { description: detail, duration: life });
    this.#shown.set(text, () => page.dismiss(id));
  }

  clear() {
    for (const take of this.#shown.values()) take();
    this.#shown.clear();
  }
}
