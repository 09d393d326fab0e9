// @ts-check
/** The pack's messages on the page, which go when a run starts: they are about the one before. */

export const TOASTS = "halfsafe.toasts";
/** @typedef {{severity: string, summary: string, detail?: string, life: number}} Toast */

export class Toasts {
  /** What takes away each message that is shown. @type {(() => void)[]} */
  #shown = [];

  /** @param {() => any} manager the page's, from its setup on */
  constructor(manager) {
    this.manager = manager;
  }

  /** @param {Toast} toast */
  show(toast) {
    const { setting, toast: page } = this.manager();
    if (!setting.get(TOASTS)) return;
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
