// @ts-check
/** The pack's messages on the page, which go when a run starts: they are about the one before. */
/** @typedef {{severity: string, summary: string, detail?: string, life: number}} Toast */

export class Toasts {
  /** What takes away each message that is shown. @type {(() => void)[]} */
  #shown = [];

  /** @param {() => any} manager the page's, from its setup on @param {string} wanted the setting that lets them be shown */
  constructor(manager, wanted) {
    this.manager = manager;
    this.wanted = wanted;
  }

  /** @param {Toast} toast */
  show(toast) {
    const { setting, toast: page } = this.manager();
    if (!setting.get(this.wanted)) return;
    if (page.remove) {
      page.add(toast);
      this.#shown.push(() => page.remove(toast));
      return;
    }
    // The newest page's `add` gives no id, by which alone a message can be taken away.
    const { severity, summary, detail, life } = toast;
    const id = page[severity === "warn" ? "warning" : severity](summary, { description: detail, duration: life });
    this.#shown.push(() => page.dismiss(id));
  }

  clear() {
    for (const take of this.#shown.splice(0)) take();
  }
}
