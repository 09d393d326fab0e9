// @ts-check
/** Where a new node fits into a graph. */

const GAP = 20;
/** How much longer a wire counts for each pixel that it leads back. */
const BACK = 2;
/** How much more the wires of the model count than others. */
const FIRST = 3;
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

/** How long a wire is that begins at a box and ends at another, from title to title: on its way back it leads around both. @param {Box} from @param {Box} to */
function wayOf(from, to) {
  const across = to.left - from.right;
  return Math.abs(to.top - from.top) + (across < 0 ? -BACK * across : across);
}

/**
 * The position at which a node lies free with the shortest wires. Those of the first source and targets, its model's, count most.
 * @param {any} node in the graph of all @param {{from: any, to: any[]}[]} wires by what it is given: the node that gives it, and those that take it from here @returns {[number, number]}
 */
export function placeAmong(node, wires) {
  const boxes = wires.map(({ from, to }) => ({ from: boxOf(from), to: to.map(boxOf) }));
  const cost = (/** @type {Box} */ box) => boxes.reduce((sum, { from, to }, place) => {
    return sum + (place ? 1 : FIRST) * (wayOf(from, box) + to.reduce((ways, one) => ways + wayOf(box, one), 0) / to.length);
  }, 0);
  const [{ from, to }] = boxes;
  return placeFree(node, [from, ...to], cost, boxes.slice(1).flatMap((one) => [one.from, ...one.to]));
}

/** The position at which a node lies free above or below another one. @param {any} node in the graph of that @param {any} other @returns {[number, number]} */
export function placeBeside(node, other) {
  const { left, top } = boxOf(other);
  return placeFree(node, [boxOf(other)], (box) => (box.left === left ? Math.abs(top - box.top) : Infinity));
}

/**
 * The free position of a node that costs least: beside what is there, or in line with what it is wired to. It is in a group with all that is near alone.
 * @param {any} node @param {Box[]} near @param {(box: Box) => number} cost @param {Box[]} [wired] what else it is wired to @returns {[number, number]}
 */
function placeFree(node, near, cost, wired = []) {
  const { nodes, groups = [], inputNode, outputNode } = node.graph;
  const around = groups.map(boxOfGroup).filter((/** @type {Box} */ group) => !near.every((box) => isIn(box, group)));
  const others = [...nodes, inputNode, outputNode].filter((other) => other && other !== node);
  const taken = [...others.map(boxOf), ...around];
  const { right: width, bottom, top: above } = boxOf({ pos: [0, 0], size: node.size });
  const height = bottom - above;
  const lefts = [...near.map(({ left }) => left), ...[...near, ...wired, ...taken].flatMap(({ left, right }) => [right + GAP, left - GAP - width])];
  const tops = [...near.map(({ top }) => top), ...taken.flatMap(({ top, bottom: end }) => [end + GAP, top - GAP - height])];
  let best = { left: near[0].left, top: Math.max(...taken.map((box) => box.bottom)) + GAP, way: Infinity };
  for (const left of new Set(lefts)) {
    for (const top of new Set(tops)) {
      const box = { left, top, right: left + width, bottom: top + height };
      const way = cost(box);
      if (way < best.way && taken.every((other) => isApart(box, other))) best = { left, top, way };
    }
  }
  return [best.left, best.top - above];
}
