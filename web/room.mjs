// @ts-check
/** Where a new node fits into a graph. */

const GAP = 20;
/** How much higher than its size says Nodes 2.0 may draw a node, in pixels: 42 for Measure Precisions. */
export const HIGHER = 50;

/** @typedef {{left: number, top: number, right: number, bottom: number}} Box */

/** The place of a node with its title, as high as it is drawn or will be drawn at most. @param {any} node @returns {Box} */
export function boxOf({ id, pos: [x, y], size: [width, height], flags }) {
  const top = y - window.LiteGraph.NODE_TITLE_HEIGHT;
  const drawn = /** @type {HTMLElement | null} */ (document.querySelector(`.lg-node[data-node-id="${id}"]`));
  const undrawn = window.LiteGraph.vueNodesMode && !drawn ? HIGHER : 0;
  const bottom = flags?.collapsed ? y : y + height + undrawn;
  return { left: x, top, right: x + width, bottom: Math.max(bottom, top + (drawn?.offsetHeight ?? 0)) };
}

/** @param {any} group @returns {Box} */
function boxOfGroup({ pos: [x, y], size: [width, height] }) {
  return { left: x, top: y, right: x + width, bottom: y + height };
}

/** @param {Box} inner @param {Box} outer */
export function isIn(inner, outer) {
  return inner.left >= outer.left && inner.right <= outer.right && inner.top >= outer.top && inner.bottom <= outer.bottom;
}

/** @param {Box} a @param {Box} b @param {number} [gap] */
export function isApart(a, b, gap = GAP) {
  return a.right + gap <= b.left || b.right + gap <= a.left || a.bottom + gap <= b.top || b.bottom + gap <= a.top;
}

/**
 * The position at which a node lies free between two others, with the shortest way from one to the other: between them where there is room, else above or below what is there.
 * @param {any} node in the graph of both @param {any} from @param {any} to @returns {[number, number]}
 */
export function placeBetween(node, from, to) {
  const { nodes, groups = [], inputNode, outputNode } = node.graph;
  const [start, end] = [boxOf(from), boxOf(to)];
  const around = groups.map(boxOfGroup).filter((/** @type {Box} */ group) => !isIn(start, group) || !isIn(end, group));
  const others = [...nodes, inputNode, outputNode].filter((other) => other && other !== node);
  const taken = [...others.map(boxOf), ...around];
  const size = boxOf({ pos: [0, 0], size: node.size });
  const width = size.right;
  const height = size.bottom - size.top;
  const least = start.left;
  const most = Math.max(least, end.left - GAP - width);
  const lefts = [least, most, start.right + GAP];
  const tops = [start.top, end.top];
  for (const { left, top, right, bottom } of taken) {
    lefts.push(right + GAP, left - GAP - width);
    tops.push(bottom + GAP, top - GAP - height);
  }
  const across = (/** @type {number} */ left) => Math.abs(left - start.right) + Math.abs(end.left - left - width);
  const down = (/** @type {number} */ top) => Math.abs(top - start.top) + Math.abs(top - end.top);
  let best = { left: least, top: Infinity, way: Infinity }; // below all that is taken there is always room
  for (const left of lefts.filter((one) => one >= least && one <= most)) {
    for (const top of tops) {
      const way = across(left) + down(top);
      const box = { left, top, right: left + width, bottom: top + height };
      if (way < best.way && taken.every((other) => isApart(box, other))) best = { left, top, way };
    }
  }
  return [best.left, best.top - size.top];
}
