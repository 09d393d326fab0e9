// @ts-check
/** The page's tabs. A tab is known by the page's own object of it: workflows share the ids of their graphs. */

export class Tabs {
  /** Prompt id -> the tab that it was queued from. @type {Map<string, WeakRef<object>>} */
  #queued = new Map();
  /** The tab in which Run was pressed last: its run may start before the page has noted the prompt. @type {object | null} */
  #asking = null;

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

  /** Note that Run is pressed. */
  press() {
    this.#asking = this.open;
  }

  /** Note that the server has answered what was pressed. */
  settle() {
    this.#asking = null;
  }

  /** The tab that a prompt was queued from; null for a prompt of before this page was opened. @param {string} promptId @returns {object | null} */
  of(promptId) {
    return this.#queued.get(promptId)?.deref() ?? this.#asking;
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
      if (job?.id && job.workflow) this.#queued.set(job.id, new WeakRef(job.workflow));
    });
  }
}
