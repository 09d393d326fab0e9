// @ts-check
/** The pack's words on what a node is doing, which ComfyUI's page shows below its widgets and lets stand. */
import { said } from "./words.mjs";

/** What `show_progress` of page.py begins with. */
const OUR_PROGRESS = "Halfsafe: ";
const PROGRESS_TEXT = "$$node-text-preview";
/** The widget with our text of running work on a node. @param {any} node */
function progressOf(node) {
  return node.widgets?.find((/** @type {any} */ widget) => widget.name === PROGRESS_TEXT && widget.value?.startsWith(OUR_PROGRESS));
}

/** Put our text of running work, which ComfyUI's page has drawn as it was sent, into the page's language. @param {any[]} nodes */
export function sayProgress(nodes) {
  for (const widget of nodes.map(progressOf).filter(Boolean)) widget.value = OUR_PROGRESS + said(widget.value.slice(OUR_PROGRESS.length));
}

/** The room that our words take on nodes while they run. */
export class Progress {
  /** A node that runs -> its size before words on it made it grow. @type {WeakMap<any, [number, number]>} */
  #sizes = new WeakMap();

  /** Note the size of a node that begins to run. @param {any} node */
  begin(node) {
    if (node && !progressOf(node)) this.#sizes.set(node, [...node.size]);
  }

  /** Take the words away from nodes, and the room that they took. @param {any[]} nodes that are done */
  clear(nodes) {
    for (const node of nodes) {
      const text = progressOf(node), size = this.#sizes.get(node);
      if (!text) continue;
      node.removeWidget(text);
      if (size?.[0] === node.size[0]) node.setSize(size);
    }
  }
}
