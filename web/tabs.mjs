// @ts-check
/** The page's tabs. A tab is known by the page's own object of it: workflows share the ids of their graphs. */

export class Tabs {
  /** Prompt id -> the tab that it was queued from. @type {Map<string, WeakRef<object>>} */
  #queued = new Map();
  /** The tab in which Run was pressed last: its run may start before the page has noted the prompt. @type {object | null} */
  #asking = null;
  /** Prompt id -> the settings that it was queued with. @type {Map<string, string>} */
  #asked = new Map();
  /** The settings when Run was pressed last. */
  #pressed = "";

  /** @param {any} app */
  constructor(app) {
    this.app = app;
  }

  /** The tab that is open. @returns {object} */
  get open() {
    return this.app.extensionManager.workflow.activeWorkflow ?? this;
  }

  /** The tab in which Run was pressed last. @returns {object} */
  get asking() {
    return this.#asking ?? this.open;
  }

  /** Note that Run is pressed. @param {string} settings of the open workflow */
  press(settings) {
    this.#asking = this.open;
    this.#pressed = settings;
  }

  /** Note that the server has answered what was pressed. */
  settle() {
    this.#asking = null;
  }

  /** The tab that a prompt was queued from; null for a prompt of before this page was opened. @param {string} promptId @returns {object | null} */
  of(promptId) {
    return this.#queued.get(promptId)?.deref() ?? this.#asking;
  }

  /** The settings that a prompt was queued with, unless another page queued it. @param {string} promptId */
  settingsOf(promptId) {
    return this.#asked.get(promptId);
  }

  /**
   * Follow the page's stores: that of workflows opens tabs; that of runs notes the tab of each prompt, which no event names and no public API of the page tells.
   * Where a page has no such store, a run belongs to the tab in which Run was pressed, else to the open one.
   * @param {() => void} onOpen
   */
  watch(onOpen) {
    const { workflow, _p: pinia } = this.app.extensionManager;
    workflow.$onAction((/** @type {any} */ { name, after }) => {
      if (name === "openWorkflow") after(onOpen);
    });
    pinia?._s?.get("execution")?.$onAction((/** @type {any} */ { args: [job] }) => {
      if (!job?.id || !job.workflow) return;
      this.#queued.set(job.id, new WeakRef(job.workflow));
      this.#asked.set(job.id, this.#pressed);
    });
  }
}
